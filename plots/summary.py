"""The comparison of algorithms and delay levels, in numbers: plain text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.errors import UserError
from plots.estimates import UNKNOWN, Ratio, Spread, percent_text, ratio, seconds_text
from plots.grouping import BASELINE, Experiment, Variant, Workload
from plots.records import column, last_half, setting
from reader import EPOCHS, Run

_NOTE_SPREAD = "± is one standard deviation (n − 1) over the seeds."
_NOTE_COLUMNS = (
    "Training time per epoch is the whole training time divided by the epochs, without evaluation; "
    "the balanced epoch time is the median of the last half of the epochs; run time includes "
    "evaluation. Speed-ups are over sync-sgd at the same delay level: geometric means of the "
    "ratios of runs with the same seed. "
    "Imbalance is the slowest worker's busy time over T* in the last epoch. "
    "Accuracies are of the whole test set."
)
_NOTE_UNFINISHED = (
    "* unfinished: fewer epochs are recorded than configured. Seeds written as “+ 1*” are left "
    "out, as others have finished; where none has, the row holds the epochs that all of them have."
)


@dataclass(frozen=True)
class Row:
    """One variant of one experiment. Times in seconds, accuracies as fractions 0..1."""

    experiment: str
    delay: str
    label: str
    workers: int
    seeds: int
    left_out: int
    finished: bool
    epochs: int
    epochs_planned: int
    epoch_seconds: Spread
    speed_up: Ratio | None
    balanced_seconds: Spread
    balanced_speed_up: Ratio | None
    imbalance: float | None
    final_top1: Spread
    best_top1: Spread
    run_seconds: Spread


def rows(workload: Workload) -> list[Row]:
    """The rows of one comparison table, by delay level and algorithm."""
    return [
        row
        for experiment, delay in zip(workload.experiments, workload.delay_labels())
        for row in _experiment_rows(experiment, delay)
    ]


def epoch_seconds(run: Run) -> float:
    """Training time per epoch: the training clock at the end over the epochs recorded."""
    return float(column(run, "train_seconds")[-1]) / len(run.epochs)


def balanced_seconds(run: Run) -> float:
    """Median training time of the last half of the epochs, when shares have settled."""
    return float(np.median(last_half(column(run, "epoch_seconds"))))


def total_seconds(run: Run) -> float:
    """Run time with evaluation."""
    return float(column(run, "total_seconds")[-1])


def spread(variant: Variant, value: Callable[[Run], float]) -> Spread:
    """`value` over the variant's seeds."""
    return Spread.of([value(run) for run in variant.runs])


def speed_up(variant: Variant, base: Variant, seconds: Callable[[Run], float]) -> Ratio:
    """How many times less `seconds` the variant needs than the base, paired by seed."""
    over, under = (
        {setting(run, "seed"): _positive(run, seconds(run)) for run in one.runs}
        for one in (base, variant)
    )
    return ratio(over, under)


def _positive(run: Run, seconds: float) -> float:
    if not 0 < seconds < np.inf:
        raise UserError(f"{run.path / EPOCHS}: no time that a run could take: run this seed again")
    return seconds


def _experiment_rows(experiment: Experiment, delay: str) -> list[Row]:
    baseline = next((v for v in experiment.variants if v.label == BASELINE), None)
    return [_row(experiment, delay, variant, baseline) for variant in experiment.variants]


def _row(experiment: Experiment, delay: str, variant: Variant, baseline: Variant | None) -> Row:
    def over(seconds: Callable[[Run], float]) -> Ratio | None:
        return speed_up(variant, baseline, seconds) if baseline else None

    top1 = [column(run, "test_top1") for run in variant.runs]
    imbalance = [column(run, "imbalance")[-1] for run in variant.runs]
    known = [value for value in imbalance if np.isfinite(value)]
    return Row(
        experiment=experiment.slug,
        delay=delay,
        label=variant.label,
        workers=experiment.workers,
        seeds=len(variant.runs),
        left_out=variant.left_out,
        finished=variant.finished,
        epochs=variant.epochs,
        epochs_planned=setting(variant.runs[0], "epochs"),
        epoch_seconds=spread(variant, epoch_seconds),
        speed_up=over(epoch_seconds),
        balanced_seconds=spread(variant, balanced_seconds),
        balanced_speed_up=over(balanced_seconds),
        imbalance=float(np.mean(known)) if known else None,
        final_top1=Spread.of([values[-1] for values in top1]),
        best_top1=Spread.of([np.max(values) for values in top1]),
        run_seconds=spread(variant, total_seconds),
    )


# Header (lines joined by a space in Markdown) and cell text.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("algorithm", lambda row: row.label + ("" if row.finished else "*")),
    ("workers", lambda row: str(row.workers)),
    ("seeds", lambda row: f"{row.seeds} + {row.left_out}*" if row.left_out else str(row.seeds)),
    ("epochs", lambda row: _epochs(row)),
    ("train s\nper epoch", lambda row: seconds_text(row.epoch_seconds)),
    ("speed-up", lambda row: _times(row.speed_up)),
    ("balanced\nepoch s", lambda row: seconds_text(row.balanced_seconds)),
    ("balanced\nspeed-up", lambda row: _times(row.balanced_speed_up)),
    ("imbalance", lambda row: _imbalance(row)),
    ("final test\ntop-1 %", lambda row: percent_text(row.final_top1)),
    ("best test\ntop-1 %", lambda row: percent_text(row.best_top1)),
    ("run s with\nevaluation", lambda row: seconds_text(row.run_seconds)),
)


def _epochs(row: Row) -> str:
    return str(row.epochs) if row.finished else f"{row.epochs}/{row.epochs_planned}*"


def _times(found: Ratio | None) -> str:
    return UNKNOWN if found is None else f"{found.value:.2f}×"


def _imbalance(row: Row) -> str:
    return UNKNOWN if row.imbalance is None else f"{row.imbalance:.3f}"


def notes(table: Iterable[Row]) -> list[str]:
    """Footnotes that the rows call for."""
    table = list(table)
    found = [_NOTE_COLUMNS]
    if any(row.seeds > 1 for row in table):
        found.append(_NOTE_SPREAD)
    if any(row.left_out or not row.finished for row in table):
        found.append(_NOTE_UNFINISHED)
    return found


def to_text(table: Sequence[Row]) -> str:
    """Aligned plain text for a terminal, with a line above the rows of each delay level."""
    headers = [header.split("\n") for header, _ in _COLUMNS]
    head = [[(["", *lines] if len(lines) == 1 else lines)[i] for lines in headers] for i in (0, 1)]
    body = [[cell(row) for _, cell in _COLUMNS] for row in table]
    widths = [max(map(len, cells)) for cells in zip(*head, *body)]
    lines = [_aligned(cells, widths) for cells in head]
    lines.append("-" * len(lines[0]))
    previous = None
    for row, cells in zip(table, body):
        if row.delay != previous:
            lines.append(f"{row.delay}:")
        previous = row.delay
        lines.append(_aligned(cells, widths))
    return "\n".join(lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))])


def to_markdown(table: Sequence[Row]) -> str:
    """One Markdown table."""
    lines = [["delay", *(header.replace("\n", " ") for header, _ in _COLUMNS)]]
    lines.append([":---", ":---", *["---:"] * (len(_COLUMNS) - 1)])
    for row in table:
        cells = [row.delay, *(cell(row) for _, cell in _COLUMNS)]
        lines.append([cell.replace("*", "\\*").replace("|", "\\|") for cell in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_csv(tables: Iterable[tuple[Workload, Sequence[Row]]]) -> str:
    """All rows with unrounded numbers: seconds, and accuracies as fractions; unknown is empty."""
    buffer = io.StringIO()
    writer = None
    for workload, table in tables:
        for row in table:
            record = {"workload": workload.title, **_flat(row)}
            if writer is None:
                writer = csv.DictWriter(buffer, list(record), lineterminator="\n")
                writer.writeheader()
            writer.writerow(record)
    return buffer.getvalue()


def _flat(row: Row) -> dict[str, object]:
    """The row's fields; a Spread becomes NAME_mean and NAME_sd, a Ratio NAME, NAME_low, _high."""
    record: dict[str, object] = {}
    for name, value in vars(row).items():
        if isinstance(value, Spread):
            record[f"{name}_mean"], record[f"{name}_sd"] = value.mean, value.sd
        elif name.endswith("speed_up"):
            low, high = (value and value.interval) or (None, None)
            record[name] = value and value.value
            record[f"{name}_low"], record[f"{name}_high"] = low, high
        else:
            record["algorithm" if name == "label" else name] = value
    return record
