"""Figures that look inside a step: each worker's busy times, phases and shares.

Up to 8 workers are drawn one by one. Beyond that, lines would hide each other, so the minimum, the
median and the maximum over the workers are drawn instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from plots import style
from plots.grouping import Experiment, Variant
from plots.records import column, last_half, per_worker, warm_steps
from plots.style import Cue

Handle = Line2D | Patch

MOST_WORKERS = 8
# Policies whose shares follow measured times.
DYNAMIC = ("proportional", "affine")
# Histograms of more workers hide each other: they become rows of one picture.
_MOST_HISTOGRAMS = 3
_FEWEST_BINS, _MOST_BINS = 40, 80
_GREY, _LIGHT = "#888888", "#cccccc"
_EXTREMES = ("min over workers", "median over workers", "max over workers")
_PHASE_TEXTS = ("data", "forward", "backward", "injected delay", "optimizer", "wait, all-reduce")


def dynamic_variants(experiment: Experiment) -> tuple[Variant, ...]:
    return tuple(variant for variant in experiment.variants if variant.policy in DYNAMIC)


def measured_variants(experiment: Experiment) -> tuple[Variant, ...]:
    """Those with at least one step after warm-up in their steps.npz."""
    return tuple(v for v in experiment.variants if len(warm_steps(v.runs, "busy")))


def busy_histograms(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Histograms of the busy time per step and worker, one panel per algorithm.

    More than 3 workers have a row each, darker where more steps are.
    """
    variants = measured_variants(experiment)
    steps = [warm_steps(variant.runs, "busy") for variant in variants]
    figure, axes = _panels(len(variants), max(1.5, 0.06 * experiment.workers))
    low, high = _robust_range([line for busy in steps for line in busy.T], 2.5)
    factor, unit = style.time_unit(high)
    bins = np.clip(4 * max(map(len, steps)) ** (1 / 3), _FEWEST_BINS, _MOST_BINS)
    edges = np.linspace(low, high, int(bins) + 1)
    rows = experiment.workers > _MOST_HISTOGRAMS
    for axis, variant, busy in zip(axes, variants, steps):
        counts = np.stack([np.histogram(values, edges)[0] for values in busy.T])
        draw = _histogram_rows if rows else _histograms
        draw(axis, 100 * counts / len(busy), factor * edges, cues[variant.label].color)
        optimum = _last_optimum(variant)
        if np.isfinite(optimum):
            axis.axvline(factor * optimum, color=style.DARK, linestyle="--", linewidth=1)
        axis.set_xlim(factor * low, factor * high)
        _panel_title(axis, variant, busy, low, high)
    axes[-1].set_xlabel(f"busy time per step ({unit})")
    handles = [] if rows else _worker_handles(experiment.workers, filled=True)
    if any(np.isfinite(_last_optimum(variant)) for variant in variants):
        handles.append(_optimum_handle("T* of the last epoch"))
    text = "busy time per step, warm-up steps left out"
    _finish(figure, experiment, text + ("; darker: more steps" if rows else ""), handles)
    return figure


def step_densities(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Densities of the busy time per worker and of the whole step, one panel per algorithm.

    The whole step is busy time + wait, the same on all workers up to the clock's grain.
    """
    variants = measured_variants(experiment)
    steps = [warm_steps(variant.runs, "busy") for variant in variants]
    wholes = [
        np.mean(busy + warm_steps(variant.runs, "wait"), axis=1)
        for variant, busy in zip(variants, steps)
    ]
    figure, axes = _panels(len(variants), 1.5)
    # A spike of any worker is one of the whole step: with more workers, more is left out.
    shown = [*wholes, *(line for busy in steps for line in _per_worker(busy))]
    low, high = _robust_range(shown, min(4 + experiment.workers / 4, 20))
    factor, unit = style.time_unit(high)
    grid = np.linspace(low, high, 600)
    for axis, variant, busy, whole in zip(axes, variants, steps, wholes):
        axis.fill_between(factor * grid, density(whole, grid) / factor, color=_LIGHT)
        lines = _per_worker(busy)
        for i, values in enumerate(lines):
            cue = style.worker_cue(cues[variant.label].color, i, len(lines))
            curve = density(values, grid) / factor
            curve[curve < 1e-3 * curve.max()] = np.nan
            axis.plot(factor * grid, curve, color=cue.color, linestyle=cue.linestyle)
        axis.set_ylabel(f"density (1/{unit})")
        axis.set_ylim(bottom=0)
        axis.set_xlim(factor * low, factor * high)
        _panel_title(axis, variant, np.stack([*lines, whole]), low, high)
    axes[-1].set_xlabel(f"time per step ({unit})")
    handles = _worker_handles(experiment.workers, filled=False)
    handles = [*handles, Patch(color=_LIGHT, label="whole step")]
    text = "busy time per worker and whole step (busy + wait), warm-up steps left out"
    _finish(figure, experiment, text, handles)
    return figure


def phases(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Stacked bars: mean seconds per step of each phase, per worker, one panel per algorithm."""
    variants = experiment.variants
    times = [_phase_times(variant) for variant in variants]
    shown = [_shown_workers(part) for part in times]
    figure, axes = _panels(len(variants), 0.45 + 0.26 * len(shown[0]))
    factor, unit = style.time_unit(max(sum(part.values()).max() for part in times))
    for axis, variant, part, chosen in zip(axes, variants, times, shown):
        left = np.zeros(len(chosen))
        for phase, cue in style.PHASES.items():
            widths = factor * part[phase][list(chosen)]
            axis.barh(
                range(len(chosen)), widths, 0.72, left, color=cue.color, hatch=cue.hatch,
                edgecolor=style.DARK, linewidth=0.4,
            )  # fmt: skip
            left += widths
        axis.set_yticks(range(len(chosen)), list(chosen.values()))
        axis.invert_yaxis()
        axis.grid(False, axis="y")
        axis.set_title(variant.caption, loc="left")
    axes[-1].set_xlabel(f"mean time per step ({unit})")
    handles = [
        Patch(facecolor=cue.color, hatch=cue.hatch, edgecolor=style.DARK, linewidth=0.4, label=text)
        for text, cue in zip(_PHASE_TEXTS, style.PHASES.values())
    ]
    _finish(figure, experiment, "phases of a step, mean of the last half of the epochs", handles)
    return figure


def shares_busy_epochs(experiment: Experiment, cues: Mapping[str, Cue]) -> Figure:
    """Shares and median busy times per worker over epochs, with T*, per dynamic algorithm."""
    variants = dynamic_variants(experiment)
    figure = style.figure(max(5.2, 1.0 + 3.8 * len(variants)), 5.4)
    axes = figure.subplots(2, len(variants), sharex=True, sharey="row", squeeze=False)
    busy = [_over_seeds(variant, per_worker, "busy", "median") for variant in variants]
    factor, unit = style.time_unit(max(np.nanmax(part) for part in busy))
    handles = _worker_handles(experiment.workers, filled=False)
    for column_axes, variant, part in zip(axes.T, variants, busy):
        color = cues[variant.label].color
        _epoch_lines(column_axes[0], 100 * _over_seeds(variant, per_worker, "shares"), color)
        _epoch_lines(column_axes[1], factor * part, color)
        optimum = factor * _over_seeds(variant, column, "optimum")
        known = np.isfinite(optimum).sum()
        if known:
            # A line through one point alone would not be seen.
            marker = "_" if known == 1 else ""
            column_axes[1].plot(optimum, "--", color=style.DARK, linewidth=1, marker=marker)
            handles = [h for h in handles if h.get_label() != "T*"] + [_optimum_handle("T*")]
        column_axes[0].set_title(variant.caption, loc="left")
    axes[0, 0].set_ylabel("share (%)")
    last = max(variant.epochs for variant in variants) - 1
    for axis in axes[1]:
        style.epoch_axis(axis, 0, last, "epoch (first is 0)")
    text = "shares of the global batch and median busy times per step"
    if any(len(variant.runs) > 1 for variant in variants):
        text += ", mean over n seeds"
    axes[1, 0].set_ylabel(f"busy time ({unit})")
    _finish(figure, experiment, text, handles)
    return figure


def density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Gaussian kernel density of `values` at an evenly spaced `grid`, per unit of `values`.

    Bandwidth: Silverman 1986, 0.9·min(sd, IQR/1.34)·n^(−1/5), at least one grid spacing. Values are
    first counted into the grid's cells, which keeps the cost independent of their number; those
    more than a few bandwidths beyond the grid do not matter to it.
    """
    spacing = grid[1] - grid[0]
    quartiles = np.percentile(values, [25, 75])
    spread = min(np.std(values), (quartiles[1] - quartiles[0]) / 1.34)
    bandwidth = max(0.9 * spread * len(values) ** -0.2, spacing)
    margin = min(int(np.ceil(4 * bandwidth / spacing)), len(grid))
    centres = grid[0] + spacing * np.arange(-margin, len(grid) + margin)
    edges = np.append(centres, centres[-1] + spacing) - spacing / 2
    counts = np.histogram(values, edges)[0]
    offsets = spacing * np.arange(-margin, margin + 1)
    kernel = np.exp(-0.5 * (offsets / bandwidth) ** 2)
    kernel /= kernel.sum() * spacing * len(values)
    return np.convolve(counts, kernel, mode="valid")


def _per_worker(values: np.ndarray) -> list[np.ndarray]:
    """Columns of [P, n]; for many workers the least, median and greatest of each row."""
    if values.shape[1] <= MOST_WORKERS:
        return list(values.T)
    return [np.min(values, axis=1), np.median(values, axis=1), np.max(values, axis=1)]


def _over_seeds(variant: Variant, read: Callable[..., np.ndarray], *keys: str) -> np.ndarray:
    """[E, ...] mean over seeds of an epoch record's entry; seeds without a value are left out.

    read: `column` or `per_worker`.
    """
    values = np.stack([read(run, *keys) for run in variant.runs])
    known = np.isfinite(values)
    total, count = np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _last_optimum(variant: Variant) -> float:
    return float(_over_seeds(variant, column, "optimum")[-1])


def _phase_times(variant: Variant) -> dict[str, np.ndarray]:
    """[n] mean seconds per step of each phase, over the last half of the epochs and all seeds."""
    return {
        phase: np.mean(
            [last_half(per_worker(run, "phases", phase)).mean(axis=0) for run in variant.runs],
            axis=0,
        )
        for phase in style.PHASES
    }


def _shown_workers(times: Mapping[str, np.ndarray]) -> dict[int, str]:
    """Workers to draw and their labels: all, or those of least, median and greatest busy time."""
    busy = sum(values for phase, values in times.items() if phase != "wait")
    count = len(busy)
    if count <= MOST_WORKERS:
        return {worker: f"worker {worker}" for worker in range(count)}
    order = np.argsort(busy, kind="stable")
    places = {"fastest": order[0], "median": order[count // 2], "slowest": order[-1]}
    return {int(worker): f"{text}: worker {worker}" for text, worker in places.items()}


def _robust_range(lines: Sequence[np.ndarray], percent: float) -> tuple[float, float]:
    """A range with all lines' values but the outermost `percent` at either end, and a margin."""
    low = min(np.percentile(line, percent) for line in lines)
    high = max(np.percentile(line, 100 - percent) for line in lines)
    margin = 0.25 * (high - low) or 0.1 * high
    return max(0.0, low - margin), high + margin


def _panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """`count` panels one above the other, each `height` inches, with a shared x axis."""
    figure = style.figure(7.2, 1.5 + count * (height + 0.3))
    return figure, figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]


def _panel_title(axis: Axes, variant: Variant, values: np.ndarray, low: float, high: float) -> None:
    """The algorithm; at the right, how many of `values` lie outside the range that is drawn."""
    axis.set_title(variant.caption, loc="left")
    outside = 100 * np.mean((values < low) | (values > high))
    if outside >= 0.05:
        axis.set_title(f"{outside:.1f} % of steps beyond the axis", loc="right", fontsize=8)


def _histograms(axis: Axes, heights: np.ndarray, edges: np.ndarray, color: style.Color) -> None:
    """Overlaid histograms of heights [n, bins]."""
    for i, line in enumerate(heights):
        cue = style.worker_cue(color, i, len(heights))
        axis.stairs(
            line, edges, fill=True, facecolor=(*cue.color, 0.55), hatch=cue.hatch,
            edgecolor=cue.color, linewidth=1,
        )  # fmt: skip
    axis.set_ylabel("steps (%)")


def _histogram_rows(axis: Axes, heights: np.ndarray, edges: np.ndarray, color: style.Color) -> None:
    """One row per worker of heights [n, bins], shaded from white (no step)."""
    extent = (edges[0], edges[-1], len(heights) - 0.5, -0.5)
    axis.imshow(heights, aspect="auto", interpolation="nearest", extent=extent, vmin=0.0,
                cmap=style.ramp(color))  # fmt: skip
    axis.set_ylabel("worker")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axis.grid(False)


def _epoch_lines(axis: Axes, values: np.ndarray, color: style.Color) -> None:
    """One line per worker (or extreme) of values [E, n]."""
    lines = _per_worker(values)
    for i, line in enumerate(lines):
        cue = style.worker_cue(color, i, len(lines))
        marker = "o" if len(line) <= 30 else ""
        axis.plot(line, color=cue.color, linestyle=cue.linestyle, marker=marker, markersize=3)


def _worker_handles(workers: int, filled: bool) -> list[Handle]:
    """Legend entries in grey, as each panel shows the same cues in its algorithm's colour."""
    labels = [f"worker {i}" for i in range(workers)] if workers <= MOST_WORKERS else _EXTREMES
    handles: list[Handle] = []
    for i, label in enumerate(labels):
        cue = style.worker_cue(_GREY, i, len(labels))
        if filled:
            face = (*cue.color, 0.55)
            handles.append(Patch(fc=face, ec=cue.color, hatch=cue.hatch, label=label))
        else:
            handles.append(Line2D([], [], color=cue.color, linestyle=cue.linestyle, label=label))
    return handles


def _optimum_handle(label: str) -> Line2D:
    return Line2D([], [], color=style.DARK, linestyle="--", linewidth=1, label=label)


def _finish(figure: Figure, experiment: Experiment, text: str, handles: Sequence[Handle]) -> None:
    style.title(figure, experiment.title, text)
    if handles:
        style.legend(figure, handles)
