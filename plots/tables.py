"""The report's tables, from comparisons to cells of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import numpy as np

from configs.schema import ALGORITHMS
from plots.comparison import (
    Ablation,
    Comparison,
    balanced_busy,
    delay_ratio,
    last_known,
    own_times,
)
from plots.estimates import Ratio, Spread, loss_text, percent_text, ratio_text, seconds_text
from plots.grouping import BASELINE, Variant, count
from plots.page import Cell, table
from plots.records import column, provenance, setting
from plots.reference import Authors, Pair, Predictions, Shared, Times
from plots.summary import epoch_seconds, spread
from reader import Run

HERE, HERE_SIMULATED = "here", "simulator, from here"
PAPER, PAPER_SIMULATED = "authors", "simulator, from authors"
# More workers than this are shown as a range.
_MOST_WORKERS = 4

_TIMES = (
    "algorithm", "source", "runs", "epochs", "training per epoch (s)", "training alone (s)",
    "run with evaluation (s)", "balanced busy time per worker (ms)", "T* (ms)",
    "speed-up of training [95\u00a0%]", "speed-up with evaluation [95\u00a0%]",
)  # fmt: skip
_ACCURACY = (
    "algorithm", "runs", "epochs", "test samples", "final test top-1 (%)",
    "best epoch’s test top-1 (%)", "final training loss",
)  # fmt: skip
_ABLATION = (
    "variant", "delay", "runs", "epochs", "training per epoch (s)",
    "balanced busy time per worker (ms)", "T* (ms)", "imbalance",
    "base’s time over this [95\u00a0%]", "speed-up over sync-sgd [95\u00a0%]",
)  # fmt: skip
_ABLATION_ACCURACY = ("variant", "delay", *_ACCURACY[1:])
_OVERVIEW = (
    "experiment", "source", "delay over undelayed busy time", "dp-sgd, training",
    "edp-sgd, training", "dp-sgd, with evaluation", "edp-sgd, with evaluation",
)  # fmt: skip
_PAIRS = (
    "model", "source", "algorithm", "part of busy time that grows with the batch",
    "batch size per worker", "busy time per worker (ms)", "step (ms)", "T* (ms)",
    "speed-up over equal shares",
)  # fmt: skip
_RUNS = ("run", "seed", "epochs", "started", "commit", "torch", "devices", "threads")


@dataclass(frozen=True)
class Told:
    """What stands beside own runs; predicted: from own sync-sgd runs, by experiment's slug."""

    authors: Authors
    predictions: Predictions
    predicted: Mapping[str, Mapping[str, Times]]


def title(comparison: Comparison) -> str:
    if comparison.own is not None:
        return comparison.own.title
    key = comparison.paper
    return f"{key.model} on cifar10, 2 workers, {key.delay_seconds:g} s on worker 1"


def overview_table(comparisons: Sequence[Comparison], told: Told) -> Element:
    """Speed-ups over sync-sgd of all experiments and sources."""
    rows = []
    for comparison in comparisons:
        sources = _sources(comparison, told)
        for number, (name, times) in enumerate(sources.items()):
            head = [Cell(title(comparison), heading=True, rows=len(sources))] * (number == 0)
            ups = [
                _ratio(times[algorithm] and getattr(times[algorithm], field))
                for field in ("train_speed_up", "total_speed_up")
                for algorithm in ALGORITHMS
                if algorithm != BASELINE
            ]
            delay = Cell(_relative_delay(comparison, name, times[BASELINE]))
            rows.append([*head, Cell(name, words=True), delay, *map(Cell, ups)])
    caption = "Speed-ups over sync-sgd [95\u00a0%]"
    return table(caption, "all experiments", _OVERVIEW, rows, "table-overview")


def times_table(comparison: Comparison, told: Told, name: str) -> Element:
    """Times of every algorithm from every source, one under the other."""
    sources = _sources(comparison, told)
    rows = []
    for algorithm in ALGORITHMS:
        for number, (source, times) in enumerate(sources.items()):
            head = [Cell(algorithm, heading=True, rows=len(sources))] * (number == 0)
            cells = _times_cells(times[algorithm], algorithm)
            rows.append([*head, Cell(source, words=True), *map(Cell, cells)])
    return table("Times", title(comparison), _TIMES, rows, f"table-times-{name}")


def accuracy_table(comparison: Comparison, authors: Authors, name: str) -> Element:
    """Accuracies and losses of every algorithm; the authors' loss where they ran it."""
    headings = [*_ACCURACY, *["authors’ final training loss"] * (comparison.paper is not None)]
    rows = []
    for algorithm in ALGORITHMS:
        variant = comparison.base(algorithm)
        cells = [""] * (len(_ACCURACY) - 1)
        if variant is not None:
            about = [str(len(variant.runs)), _epochs(variant), _test_samples(variant.runs[0])]
            cells = [*about, *_learned(variant)]
        if comparison.paper is not None:
            row = authors[comparison.paper].get(algorithm)
            cells.append("" if row is None else f"{row.final_train_loss:.4f}")
        rows.append([Cell(algorithm, heading=True), *map(Cell, cells)])
    return table("Accuracy and loss", title(comparison), headings, rows, f"table-accuracy-{name}")


def ablation_tables(about: str, lines: Sequence[Ablation], name: str) -> list[Element]:
    """Times, then accuracies, of variants under the base run that they are compared with."""
    heads = [
        [
            Cell(f"{line.variant.label} – base" if line.is_base else line.variant.label, True),
            Cell(line.experiment.delay, words=True),
            Cell(str(len(line.variant.runs))),
            Cell(_epochs(line.variant)),
        ]
        for line in lines
    ]
    times, accuracies = [], []
    for head, line in zip(heads, lines):
        times.append([*head, *map(Cell, _ablation_times(line))])
        samples = _test_samples(line.variant.runs[0])
        accuracies.append([*head, *map(Cell, (samples, *_learned(line.variant)))])
    anchor = f"table-ablations-{name}"
    return [
        table("Times of ablations", about, _ABLATION, times, anchor),
        table(
            "Accuracy and loss of ablations", about, _ABLATION_ACCURACY, accuracies,
            f"{anchor}-accuracy",
        ),
    ]  # fmt: skip


def _ablation_times(line: Ablation) -> list[str]:
    variant = line.variant
    imbalance = last_known(variant, "imbalance")
    return [
        seconds_text(spread(variant, epoch_seconds)),
        _busy(balanced_busy(variant)),
        _milliseconds(last_known(variant, "optimum")),
        "" if imbalance is None else f"{imbalance:.3f}",
        "reference" if line.is_base else _ratio(line.over_base, len(variant.runs)),
        _ratio(line.over_sync, len(variant.runs)),
    ]


def pairs_table(pairs: Sequence[Pair]) -> Element:
    """Unequal instances: equal shares as measured, and dp-sgd as predicted."""
    rows = []
    for pair in pairs:
        lines = [(PAPER, BASELINE, pair.equal)]
        lines += [(PAPER_SIMULATED, "dp-sgd", one) for one in pair.predicted or (None,)]
        for number, (source, algorithm, shared) in enumerate(lines):
            head = [Cell(pair.model, heading=True, rows=len(lines))] * (number == 0)
            words = [Cell(source, words=True), Cell(algorithm, words=True)]
            rows.append([*head, *words, *map(Cell, _shared_cells(shared, source == PAPER))])
    instances = " / ".join(name.upper() for name in pairs[0].instances) if pairs else ""
    caption = f"Two unequal instances ({instances})"
    return table(caption, "equal shares and dp-sgd", _PAIRS, rows, "table-pairs")


def runs_table(variants: Sequence[Variant]) -> Element:
    """Where every run comes from."""
    rows = []
    for variant in variants:
        for run in variant.runs:
            devices = list(map(str, provenance(run, "devices", list)))
            commit = run.provenance.get("git_commit")
            changed = " (changed)" if run.provenance.get("git_dirty") else ""
            cells = [
                str(setting(run, "seed")),
                _epochs(variant),
                str(run.provenance.get("started") or ""),
                f"{commit[:10]}{changed}" if isinstance(commit, str) else "",
                str(provenance(run, "versions", dict).get("torch") or ""),
                "; ".join(f"{devices.count(one)} × {one}" for one in dict.fromkeys(devices)),
                str(run.provenance.get("threads") or ""),
            ]
            path = Cell(str(run.path), heading=True)
            rows.append([path, *(Cell(text, words=True) for text in cells)])
    return table("Runs", "where each comes from", _RUNS, rows, "table-runs")


# --- cells ------------------------------------------------------------------------------------


def _sources(comparison: Comparison, told: Told) -> dict[str, dict[str, Times | None]]:
    """Times by source and algorithm: own always; the others' for what they say something about."""
    own, key = comparison.own, comparison.paper
    found = {HERE: {name: own and own_times(own, name) for name in ALGORITHMS}}
    if own is not None:
        found[HERE_SIMULATED] = _of_all(told.predicted.get(own.slug, {}))
    if key is not None:
        found[PAPER] = _of_all({name: row.times for name, row in told.authors[key].items()})
        found[PAPER_SIMULATED] = _of_all(told.predictions.get(key, {}))
    return found


def _of_all(times: Mapping[str, Times]) -> dict[str, Times | None]:
    return {name: times.get(name) for name in ALGORITHMS}


def _times_cells(times: Times | None, algorithm: str) -> list[str]:
    if times is None:
        return [""] * (len(_TIMES) - 2)
    reference = algorithm == BASELINE
    return [
        "" if times.runs is None else str(times.runs),
        _of(times.epochs, times.epochs_planned),
        _seconds(times.epoch_seconds),
        _seconds(times.train_seconds),
        _seconds(times.total_seconds),
        "" if times.busy_seconds is None else _busy(times.busy_seconds),
        _milliseconds(times.optimum),
        "reference" if reference else _ratio(times.train_speed_up, times.runs),
        "reference" if reference else _ratio(times.total_speed_up, times.runs),
    ]


def _shared_cells(shared: Shared | None, reference: bool) -> list[str]:
    if shared is None:
        return [""] * (len(_PAIRS) - 3)
    return [
        "" if shared.grows is None else f"{shared.grows:.0%}",
        " / ".join(map(str, shared.batch_sizes)),
        _busy(shared.busy_seconds),
        _milliseconds(shared.step_seconds),
        _milliseconds(shared.optimum),
        "reference" if reference else f"{shared.speed_up:.2f}×",
    ]


def _relative_delay(comparison: Comparison, source: str, sync: Times | None) -> str:
    """The delay over the delayed worker's own busy time, from the source's sync-sgd runs."""
    found = None
    if source == HERE and comparison.own is not None:
        found = delay_ratio(comparison.own)
    elif source == PAPER and sync is not None and comparison.paper is not None:
        delay = comparison.paper.delay_seconds
        found = delay / (sync.busy_seconds[1] - delay)
    return "" if found is None else f"{found:.2f}"


def _learned(variant: Variant) -> list[str]:
    """Final and best top-1 and the final training loss, mean ± sd (n)."""
    values: tuple[tuple[Callable[[Spread], str], Callable[[Run], float]], ...] = (
        (percent_text, lambda run: float(column(run, "test_top1")[-1])),
        (percent_text, lambda run: float(np.max(column(run, "test_top1")))),
        (loss_text, lambda run: float(column(run, "train_loss")[-1])),
    )
    n = len(variant.runs)
    return [f"{text(spread(variant, value))} (n = {n})" for text, value in values]


def _test_samples(run: Run) -> str:
    samples = column(run, "test_samples")[-1]
    part = "whole set" if setting(run, "data", "test_subset") is None else "part of the set"
    return f"{samples:,.0f} ({part})"


def _epochs(variant: Variant) -> str:
    return _of(variant.epochs, setting(variant.runs[0], "epochs"))


def _of(done: int | None, planned: int | None) -> str:
    if done is None:
        return ""
    return str(done) if planned in (None, done) else f"{done} of {planned}"


def _seconds(found: Spread | None) -> str:
    return "" if found is None else seconds_text(found)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _busy(seconds: Sequence[float]) -> str:
    if len(seconds) <= _MOST_WORKERS:
        return " / ".join(map(_milliseconds, seconds))
    low, high = _milliseconds(min(seconds)), _milliseconds(max(seconds))
    return f"{low} to {high} ({count(len(seconds), 'worker')})"


def _ratio(found: Ratio | None, runs: int | None = None) -> str:
    """The ratio; with n where that is not the number of `runs` in the same row."""
    if found is None:
        return ""
    return ratio_text(found) + (f" (n = {found.n})" if found.n not in (0, runs) else "")


def unpaired(comparisons: Sequence[Comparison]) -> list[str]:
    """Titles of experiments whose speed-ups compare runs of different seeds."""
    found = []
    for comparison in comparisons:
        own: Mapping[str, Times | None] = {
            name: comparison.own and own_times(comparison.own, name) for name in ALGORITHMS
        }
        ratios = [times.train_speed_up for times in own.values() if times is not None]
        if any(ratio is not None and not ratio.paired for ratio in ratios):
            found.append(title(comparison))
    return found
