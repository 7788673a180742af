"""Figures that compare algorithms: learning curves over epochs and time, and time per epoch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from plots import style
from plots.grouping import BASELINE, Experiment, Workload
from plots.records import column
from plots.style import Cue
from plots.summary import Row, rows
from reader import Run

# Inches; beyond, a page shows a figure too small to be read.
_WIDEST = 20.0
# A loss axis that spans more than this factor is logarithmic.
_LOG_SPAN = 50.0
_METRICS = {"loss": "loss", "top1": "top-1 (%)", "top5": "top-5 (%)"}

# x, mean, sd: [P] each.
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]


def loss_accuracy_epochs(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Training and test loss, top-1 and top-5 against epochs; mean and ±1 sd over seeds."""
    figure = style.figure(10.2, 5.8)
    axes = figure.subplots(2, 3, sharex=True, sharey="col")
    for line, part in zip(axes, ("train", "test")):
        for axis, (metric, text) in zip(line, _METRICS.items()):
            axis.set_ylabel(f"{part} {text}")
            axis.tick_params(labelleft=True)
            for i, variant in enumerate(experiment.variants):
                curves = over_epochs([_metric(run, part, metric) for run in variant.runs])
                _draw(axis, curves, cues[variant.label], variant.caption, i)
    last = max(variant.epochs for variant in experiment.variants)
    for axis in axes[1]:
        style.epoch_axis(axis, 1, last, "epochs trained")
    _scale_loss(axes[0, 0], experiment, ("train", "test"))
    _finish(figure, experiment, axes[0, 0])
    return figure


def loss_accuracy_time(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Test loss and top-1 against the training clock; mean and ±1 sd over seeds."""
    figure = style.figure(8.6, 4.0)
    axes = figure.subplots(1, 2, sharex=True)
    runs = [run for variant in experiment.variants for run in variant.runs]
    factor, unit = style.time_unit(max(column(run, "train_seconds")[-1] for run in runs))
    for axis, metric in zip(axes, ("loss", "top1")):
        axis.set_ylabel(f"test {_METRICS[metric]}")
        axis.set_xlabel(f"training time without evaluation ({unit})")
        for i, variant in enumerate(experiment.variants):
            times = [factor * column(run, "train_seconds") for run in variant.runs]
            curves = over_time(times, [_metric(run, "test", metric) for run in variant.runs])
            _draw(axis, curves, cues[variant.label], variant.caption, i)
        axis.set_xlim(left=0)
    _scale_loss(axes[0], experiment, ("test",))
    _finish(figure, experiment, axes[0])
    return figure


def time_per_epoch(workload: Workload, cues: Mapping[str, Cue]) -> Figure:
    """Bars of the training time per epoch, by delay level and algorithm, with speed-ups."""
    table = {(row.experiment, row.label): row for row in rows(workload)}
    labels = [label for label in cues if any(row.label == label for row in table.values())]
    levels = len(workload.experiments)
    figure = style.figure(min(max(5.0, 1.2 + 0.75 * len(labels) * levels), _WIDEST), 4.0)
    axis = figure.subplots()
    width = 0.84 / len(labels)
    factor, unit = style.time_unit(max(row.epoch_seconds.mean for row in table.values()))
    for i, label in enumerate(labels):
        for x, experiment in enumerate(workload.experiments):
            row = table.get((experiment.slug, label))
            if row:
                place = x + (i - (len(labels) - 1) / 2) * width
                _bar(axis, place, width, row, factor, cues[label])
        axis.bar(0, 0, color=cues[label].color, label=label)
    room = style.letters(0.85 * style.POINTS_PER_INCH * figure.get_figwidth() / levels, 9.0)
    names = [textwrap.fill(text, room) for text in workload.delay_labels()]
    axis.set_xticks(range(levels), names)
    axis.set_xlim(-0.6, levels - 0.4)
    axis.margins(y=0.12)
    axis.grid(False, axis="x")
    axis.set_ylabel(f"training time per epoch ({unit})")
    text = f"speed-up over {BASELINE} above the bars"
    if any(row.seeds > 1 for row in table.values()):
        text += "; mean ± 1 sd over seeds"
    if not all(row.finished for row in table.values()):
        text += "; * unfinished"
    style.title(figure, workload.title, text)
    style.legend(figure, axis.get_legend_handles_labels()[0])
    return figure


def over_epochs(curves: Sequence[np.ndarray]) -> Curves:
    """Epochs trained (from 1), mean and sd over seeds' curves [E]; sd is NaN for one seed."""
    return (np.arange(1, len(curves[0]) + 1), *_spread(curves))


def over_time(times: Sequence[np.ndarray], curves: Sequence[np.ndarray]) -> Curves:
    """Time, mean and sd, [P] each, over seeds' curves [E] at times [E], linear between epochs.

    The grid holds every seed's own points in the span that all seeds cover, so one seed's curve is
    drawn through exactly its points. Where no such span exists (one epoch each), the first epochs
    are averaged, times and values.
    """
    start, stop = max(time[0] for time in times), min(time[-1] for time in times)
    if start > stop or len(times[0]) == 1:
        mean, sd = _spread([curve[:1] for curve in curves])
        return np.array([np.mean([time[0] for time in times])]), mean, sd
    grid = np.unique(np.concatenate(times))
    grid = grid[(grid >= start) & (grid <= stop)]
    return (grid, *_spread([np.interp(grid, *pair) for pair in zip(times, curves)]))


def _spread(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    mean = np.mean(curves, axis=0)
    sd = np.std(curves, axis=0, ddof=1) if len(curves) > 1 else np.full_like(mean, np.nan)
    return mean, sd


def _metric(run: Run, part: str, metric: str) -> np.ndarray:
    """[E] the metric's curve; accuracies in %."""
    return column(run, f"{part}_{metric}") * (1.0 if metric == "loss" else 100.0)


def _draw(axis: Axes, curves: Curves, cue: Cue, caption: str, line: int) -> None:
    x, mean, sd = curves
    axis.plot(
        x, mean, color=cue.color, linestyle=cue.linestyle, marker=cue.marker, label=caption,
        markevery=style.markers_at(len(x), line),
    )  # fmt: skip
    if np.isfinite(sd).any():
        axis.fill_between(x, mean - sd, mean + sd, color=cue.color, alpha=0.2, linewidth=0)


def _scale_loss(axis: Axes, experiment: Experiment, parts: Sequence[str]) -> None:
    """A logarithmic axis where losses span orders of magnitude."""
    losses = np.concatenate(
        [
            column(run, f"{part}_loss")
            for variant in experiment.variants
            for run in variant.runs
            for part in parts
        ]
    )
    losses = losses[np.isfinite(losses) & (losses > 0)]
    if len(losses) and losses.max() > _LOG_SPAN * losses.min():
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")  # the default one's 10^n are formulas: see style.RC
        axis.yaxis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, experiment: Experiment, axis: Axes) -> None:
    several = any(len(variant.runs) > 1 for variant in experiment.variants)
    style.title(figure, experiment.title, *["mean over n seeds, band: ±1 sd"] * several)
    style.legend(figure, axis.get_legend_handles_labels()[0])


def _bar(axis: Axes, place: float, width: float, row: Row, factor: float, cue: Cue) -> None:
    spread = row.epoch_seconds
    height, sd = factor * spread.mean, factor * (spread.sd or 0.0)
    axis.bar(place, height, 0.92 * width, color=cue.color)
    if spread.sd is not None:
        axis.errorbar(place, height, sd, color=style.DARK, capsize=3, linewidth=1)
    compared = row.label != BASELINE and row.speed_up is not None
    text = (f"{row.speed_up.value:.2f}×" if compared else "") + ("" if row.finished else "*")
    if text:
        axis.annotate(
            text, (place, height + sd), xytext=(0, 3),
            textcoords="offset points", ha="center", va="bottom", fontsize=8.5,
        )  # fmt: skip
