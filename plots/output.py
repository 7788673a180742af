"""All figures and the comparison summary of a set of runs, drawn, or written into one folder."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from configs.errors import UserError
from plots import figures, style, summary, worker_figures
from plots.grouping import Experiment, Variant, Workload, read_experiments, workloads
from plots.style import Cue

_Draw = Callable[[Experiment, Mapping[str, Cue]], Figure]
_Needs = Callable[[Experiment], Sequence[Variant]]


def _all_variants(experiment: Experiment) -> Sequence[Variant]:
    return experiment.variants


# End of the file name, the figure, the variants it can show, and what is missing without any.
_FIGURES: tuple[tuple[str, _Draw, _Needs, str], ...] = (
    ("loss-accuracy-epochs", figures.loss_accuracy_epochs, _all_variants, ""),
    ("loss-accuracy-time", figures.loss_accuracy_time, _all_variants, ""),
    (
        "busy-time-histograms",
        worker_figures.busy_histograms,
        worker_figures.measured_variants,
        "no step after the warm-up steps",
    ),
    (
        "step-time-densities",
        worker_figures.step_densities,
        worker_figures.measured_variants,
        "no step after the warm-up steps",
    ),
    ("phases", worker_figures.phases, _all_variants, ""),
    (
        "shares-busy-epochs",
        worker_figures.shares_busy_epochs,
        worker_figures.dynamic_variants,
        "no algorithm with dynamic partitioning",
    ),
)


@dataclass(frozen=True)
class Output:
    """What was written: files, the tables as plain text, and notes on what is not shown."""

    files: tuple[Path, ...]
    text: str
    notes: tuple[str, ...]


def write_output(paths: Sequence[Path], out: Path) -> Output:
    """Read all runs beneath `paths`, write figures (SVG, PNG), summary.md and summary.csv to `out`.

    Raises UserError when there are no runs, a record is damaged, or `out` cannot be written.
    """
    experiments, notes = read_experiments(paths)
    tables = workloads(experiments)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot make this folder ({error.strerror})") from error
    cues = all_cues(experiments)
    files = []
    for experiment in experiments:
        notes += missing_figures(experiment)
        for name, figure in experiment_figures(experiment, cues):
            files += style.save(figure, out / f"{experiment.slug}_{name}")
    for workload in tables:
        figure = workload_figure(workload, cues)
        files += style.save(figure, out / f"{workload.slug}_time-per-epoch")
    text, summary_files = _write_summary(tables, notes, out)
    return Output((*files, *summary_files), text, tuple(notes))


def all_cues(experiments: Iterable[Experiment]) -> dict[str, Cue]:
    """One look per label of any variant, so that a colour means the same in all figures."""
    return style.variant_cues(v.label for experiment in experiments for v in experiment.variants)


def experiment_figures(
    experiment: Experiment, cues: Mapping[str, Cue]
) -> Iterator[tuple[str, Figure]]:
    """Name and figure, one by one, of all that the experiment's records allow."""
    for name, draw, shown, _ in _FIGURES:
        if shown(experiment):
            with matplotlib.rc_context(style.RC):
                figure = draw(experiment, cues)
            yield name, figure


def missing_figures(experiment: Experiment) -> list[str]:
    """A note for each figure that the experiment's records do not allow."""
    return [
        f"{experiment.slug}: no figure '{name}' ({reason})"
        for name, _, shown, reason in _FIGURES
        if not shown(experiment)
    ]


def workload_figure(workload: Workload, cues: Mapping[str, Cue]) -> Figure:
    """The figure that compares all experiments of a workload."""
    with matplotlib.rc_context(style.RC):
        return figures.time_per_epoch(workload, cues)


def _write_summary(
    tables: Iterable[Workload], notes: Sequence[str], out: Path
) -> tuple[str, list[Path]]:
    """summary.md and summary.csv; the same tables as plain text for the terminal."""
    computed = [(workload, summary.rows(workload)) for workload in tables]
    footnotes = summary.notes(row for _, table in computed for row in table)
    text = [f"{workload.title}\n{summary.to_text(table)}" for workload, table in computed]
    markdown = ["# Comparison"]
    for workload, table in computed:
        markdown += [f"## {workload.title}", summary.to_markdown(table)]
    markdown += ["\n".join(f"- {line}" for line in _escaped([*footnotes, *notes]))]
    contents = {
        out / "summary.md": "\n\n".join(markdown) + "\n",
        out / "summary.csv": summary.to_csv(computed),
    }
    for path, content in contents.items():
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot write this file ({error.strerror})") from error
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ") for line in footnotes]
    return "\n\n".join([*text, "\n".join(wrapped)]), list(contents)


def _escaped(lines: Iterable[str]) -> list[str]:
    return [line.replace("*", "\\*") for line in lines]
