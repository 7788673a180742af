"""One self-contained HTML page: own runs beside the authors' numbers and the simulator's.

    python -m plots.report runs/paper --out report.html --predictions results/authors/authors.json

reads all runs beneath the folders, and data/reference/ for what the paper's authors measured. The
page needs no network and no script: its figures are inside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree.ElementTree import Element

import yaml

from configs.errors import UserError
from partitioner import PlanError
from plots import output, style, tables
from plots.comparison import Ablation, Comparison, comparisons, plain, split
from plots.grouping import Experiment, count, read_experiments, workloads
from plots.page import document, figure, node, notes
from plots.predicted import predict
from plots.reference import Pair, Times, read_authors, read_pairs, read_predictions
from plots.style import Cue
from plots.tables import Told
from terminal import say

_TITLE = "Heterogeneous SGD: own runs beside the paper’s"

# Caption of each figure, by the name that plots/output.py gives it; also its text for the blind.
_CAPTIONS = {
    "loss-accuracy-epochs": "Loss, top-1 and top-5 accuracy in training and on the test set over "
    "the epochs.",
    "loss-accuracy-time": "Test loss and top-1 accuracy over training time; the clock stands still "
    "during evaluation.",
    "busy-time-histograms": "How often each busy time per step occurs, by worker.",
    "step-time-densities": "Densities of the busy time per worker and of the whole step.",
    "phases": "Where each worker’s time in a step goes.",
    "shares-busy-epochs": "Shares of the global batch, and busy times with T*, over the epochs.",
}
_NO_PREDICTIONS = "“simulator, from authors” is empty: no --predictions were given."
_PAIRS_TITLE = "The authors’ unequal instances"
_TIMES_CAPTION = "Training time per epoch by delay level and algorithm."

_READING = (
    "A grey, empty cell was not run here, not recorded, or does not apply; nothing is left out for "
    "being unknown. Sources: runs made here, the paper’s authors, and the simulator. It "
    "starts from the sync-sgd runs of either and predicts the others, so its cells of sync-sgd are "
    "empty.",
    "± is one standard deviation (n − 1) over n seeds; with n = 1 there is none.",
    "Speed-ups are over sync-sgd of the same source, geometric means of the ratios of runs with "
    "the same seed. Brackets hold the 95 % interval of Student’s t on the logarithms of these "
    "ratios, paired by seed (n − 1 degrees of freedom); with n = 1 there is no interval.",
    "The authors’ interval is Welch’s, unpaired, from mean and standard deviation of their five "
    "runs; a prediction has none. Predicted speed-ups are over sync-sgd as it is simulated with "
    "the same times.",
    "Training alone leaves evaluation and checkpoints out. The authors’ is their steps per epoch "
    "times the seconds per batch of the slower worker in the last of their five runs; their run "
    "time, mean and deviation as they give them, is of all five and includes evaluation.",
    "Balanced busy times are by worker, in order of rank: medians of steps, averaged over the last "
    "half of the epochs. The authors’ are means of the last 50 epochs and of forward, backward and "
    "delay alone.",
    "T* is the least step time that any split of the global batch could reach; it is known once "
    "every worker has been seen at two batch sizes, so not for sync-sgd. The simulator takes all "
    "of an undelayed busy time for growing with the batch; where some does not, its T* is off.",
)
_PAIRS_READING = (
    "The authors ran two unequal AWS instances with equal shares alone, so the rows of dp-sgd are "
    "predictions for what nobody has measured.",
    "Busy times at one batch size do not tell how much of them grows with the batch: all of it is "
    "one end, 80 % a cautious guess. Jitter is that of the measured percentiles.",
)
_ACCURACY_READING = (
    "Accuracies are top-1 on the test set, each sample once. The best epoch is picked by the same "
    "test set, which flatters it: the final epoch’s number is the result.",
)
_PAPER_READING = (
    "The authors report the accuracy of the last test batch only (multiples of 1/128), which is no "
    "accuracy of the test set and so not shown. Published ones for these architectures on "
    "CIFAR-10: ResNet50 93.6 to 95.7 %, VGG16 92.6 to 94.3 %.",
    "Their replicas start from different weights and their edp-sgd divides the gradient by n once "
    "more: times are not affected, losses are.",
)
_SLOW_STATE = (
    "The authors’ sync-sgd run at 0.1 s on ResNet50 was made on a slower machine state (its "
    "undelayed worker took 0.279 s a step, about 0.22 s in all other runs): their speed-up of 1.3 "
    "is overstated, about 1.15 is left."
)


@dataclass(frozen=True)
class _Content:
    """All that the page is made of."""

    experiments: list[Experiment]
    compared: list[Comparison]
    ablations: dict[str, list[Ablation]]
    told: Told
    pairs: list[Pair]
    cues: Mapping[str, Cue]
    notes: list[str]
    missing: Sequence[str]


def make_page(
    paths: Sequence[Path], predictions: Path | None = None, missing: Sequence[str] = ()
) -> str:
    """The page on all runs beneath `paths` as HTML text, the same for the same records.

    predictions: the record of `simulator.py authors --out`; missing: names of planned runs that are
    not finished. Raises UserError when there are no runs, or a record or file is damaged.
    """
    authors, pairs = read_authors(), read_pairs(predictions)
    theirs = {} if predictions is None else read_predictions(predictions, authors)
    experiments, remarks = read_experiments(paths)
    main, ablations = split(experiments)
    for experiment in experiments:
        remarks += output.missing_figures(experiment)
        remarks += [
            f"{experiment.title}, {variant.label}: {variant.left_out} unfinished left out"
            for variant in experiment.variants
            if variant.left_out
        ]
    compared = comparisons(main, list(authors))
    predicted, unpredicted = _predicted(main)
    remarks += unpredicted
    remarks += [
        f"{title}: no seed is shared, speed-ups are unpaired with Welch’s interval"
        for title in tables.unpaired(compared)
    ]
    told, cues = Told(authors, theirs, predicted), output.all_cues(experiments)
    content = _Content(experiments, compared, ablations, told, pairs, cues, remarks, missing)
    return document(_TITLE, _sections(content))


def _predicted(main: Sequence[Experiment]) -> tuple[dict[str, dict[str, Times]], list[str]]:
    """Predictions by experiment's slug, and a note for each experiment that allows none."""
    found, remarks = {}, []
    for experiment in main:
        try:
            found[experiment.slug] = predict(experiment)
        except (UserError, PlanError) as error:
            remarks.append(f"{experiment.title}: nothing is predicted ({error})")
    return found, remarks


def _sections(content: _Content) -> Iterator[Element]:
    yield node("h1", _TITLE)
    yield node("p", _summary(content))
    yield node("nav", _contents(content), aria_label="Contents")
    yield node("h2", "Speed-ups at a glance", id="overview")
    yield tables.overview_table(content.compared, content.told)
    main = [plain(one.own) for one in content.compared if one.own is not None]
    for workload in workloads(main):
        drawn = output.workload_figure(workload, content.cues)
        text = f"{workload.title}. {_TIMES_CAPTION}"
        yield figure(style.svg_bytes(drawn), text, f"figure-{workload.slug}-time-per-epoch")
    yield node("h2", "How to read the tables", id="reading")
    yield notes(_READING)
    for comparison in content.compared:
        yield from _comparison(comparison, content)
    for experiment in content.experiments:
        if experiment.slug in content.ablations:
            yield from _ablations(experiment, content)
    yield node("h2", _PAIRS_TITLE, id="pairs")
    yield tables.pairs_table(content.pairs)
    given = any(pair.predicted for pair in content.pairs)
    yield notes([*_PAIRS_READING, *([] if given else [_NO_PREDICTIONS])])
    yield from _provenance(content)


def _summary(content: _Content) -> str:
    runs = sum(len(v.runs) for e in content.experiments for v in e.variants)
    missing = [tables.title(one) for one in content.compared if one.own is None]
    text = f"{count(runs, 'run')} of {count(len(content.experiments), 'experiment')}, beside "
    text += "what the paper’s authors measured (arXiv 2110.08941)"
    text += " and what the simulator predicts. "
    if missing:
        text += f"Not run here, so with empty cells: {'; '.join(missing)}. "
    if content.missing:
        text += f"{count(len(content.missing), 'planned run')} not finished: named further down."
    return text.rstrip()


def _contents(content: _Content) -> Element:
    entries = [("overview", "Speed-ups at a glance"), ("reading", "How to read the tables")]
    entries += [(_anchor(one), tables.title(one)) for one in content.compared]
    entries += [
        (f"ablations-{e.slug}", f"Ablations: {e.title}")
        for e in content.experiments
        if e.slug in content.ablations
    ]
    entries.append(("pairs", _PAIRS_TITLE))
    entries.append(("runs", "Runs and their configuration"))
    return node("ul", *(node("li", node("a", text, href=f"#{name}")) for name, text in entries))


def _comparison(comparison: Comparison, content: _Content) -> Iterator[Element]:
    name = _anchor(comparison)
    yield node("h2", tables.title(comparison), id=name)
    yield tables.times_table(comparison, content.told, name)
    yield tables.accuracy_table(comparison, content.told.authors, name)
    lines = [*_ACCURACY_READING] if comparison.own is not None else []
    key = comparison.paper
    if key is not None:
        lines += _PAPER_READING
        if (key.model, key.delay_seconds) == ("resnet50", 0.1):
            lines.append(_SLOW_STATE)
        if not content.told.predictions:
            lines.append(_NO_PREDICTIONS)
    yield notes(lines)
    if comparison.own is not None:
        shown = plain(comparison.own)
        yield from _figures(shown, f"figure-{shown.slug}", content)


def _ablations(experiment: Experiment, content: _Content) -> Iterator[Element]:
    lines = content.ablations[experiment.slug]
    yield node("h2", f"Ablations: {experiment.title}", id=f"ablations-{experiment.slug}")
    yield from tables.ablation_tables(experiment.title, lines, experiment.slug)
    yield notes(
        [
            "Each algorithm’s base run is followed by what differs from it; above 1, a variant’s "
            "training takes less time than the base’s. Speed-ups over sync-sgd are under the same "
            "delay, empty where sync-sgd was not run under it.",
        ]
    )
    for other in content.experiments:
        own = [line for line in lines if line.experiment is other]
        if not all(line.is_base for line in own):
            shown = replace(other, variants=tuple(line.variant for line in own))
            yield node("h3", f"Figures of the ablations: {other.title}")
            yield from _figures(shown, f"figure-ablations-{other.slug}", content)


def _figures(experiment: Experiment, name: str, content: _Content) -> Iterator[Element]:
    """Figures whose anchors begin with `name`."""
    for kind, drawn in output.experiment_figures(experiment, content.cues):
        text = f"{experiment.title}. {_CAPTIONS[kind]}"
        yield figure(style.svg_bytes(drawn), text, f"{name}-{kind}")


def _provenance(content: _Content) -> Iterator[Element]:
    yield node("h2", "Runs and their configuration", id="runs")
    if content.missing:
        yield notes(f"Planned, but not finished: {name}" for name in content.missing)
    if content.notes:
        yield notes(content.notes)
    yield tables.runs_table([v for e in content.experiments for v in e.variants])
    for experiment in content.experiments:
        run = experiment.variants[0].runs[0]
        command = str(run.provenance.get("command") or "")
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        yield node(
            "details",
            node("summary", f"Configuration of {run.path}"),
            node("pre", f"# {command}\n{text}"),
        )


def _anchor(comparison: Comparison) -> str:
    if comparison.own is not None:
        return f"experiment-{comparison.own.slug}"
    return f"not-run-{comparison.paper.model}-{comparison.paper.delay_seconds:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m plots.report",
        description="One self-contained HTML page: own runs beside the paper's and predictions.",
        epilog="example: python -m plots.report runs/paper --out report.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that hold runs")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="page to write")
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="what simulator.py authors --out wrote"
    )
    parser.add_argument(
        "--missing", action="append", default=[], metavar="NAME",
        help="a planned run that is not finished, to be named on the page; may be repeated",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        page = make_page(options.runs, options.predictions, options.missing)
        write_page(page, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(str(options.out))
    return 0


def write_page(text: str, path: Path) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror})") from error


if __name__ == "__main__":
    sys.exit(main())
