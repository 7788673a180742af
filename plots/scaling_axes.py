"""What the scaling figures share: axes, measured points, predicted bands, captions, legend entries.

Measured values are markers on solid lines (± 1 standard deviation over seeds where there are
several), ideal ones dotted, predicted ones dashed with a band from the least to the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from plots import style
from plots.estimates import Spread
from plots.scaling_predictions import NO_COSTS, Costs, Network

_MARKERS = ("o", "s", "D", "v", "P", "X", "<", ">")
BY_WORKER, BY_GLOBAL, GREY = "#7B4FA3", "#8C510A", "#777777"


def line_cue(color: str, place: int, count: int, first: int = 0) -> style.Cue:
    """The look of line `place` of `count` that share a colour; first: place of the first marker."""
    cue = style.worker_cue(color, place, count)
    return replace(cue, marker=_MARKERS[(first + place) % len(_MARKERS)])


def points(
    axis: Axes, line: Mapping[float, Spread], cue: style.Cue, linestyle: style.LineStyle = "-"
) -> None:
    if not line:
        return
    spreads = list(line.values())
    axis.errorbar(
        list(line), [s.mean for s in spreads], [s.sd or 0.0 for s in spreads], color=cue.color,
        marker=cue.marker, linestyle=linestyle, capsize=3, elinewidth=1, zorder=3,
    )  # fmt: skip


def hollow(axis: Axes, x: float, y: float, cue: style.Cue) -> None:
    """Over a point's marker: not all of its seeds stand behind it."""
    axis.plot(x, y, cue.marker, color=cue.color, zorder=4, markerfacecolor="white")


def cross(axis: Axes, x: float, height: float, cue: style.Cue) -> None:
    """A × where a point has no value; height: from the axis' lower edge, 0, to its upper one, 1."""
    axis.plot(
        x, height, "x", color=cue.color, markersize=7, markeredgewidth=1.8,
        transform=axis.get_xaxis_transform(),
    )  # fmt: skip


def band(axis: Axes, told: Mapping[int, tuple[float, float]], cue: style.Cue) -> None:
    """Predicted values from the least to the most, by x."""
    if not told:
        return
    x = sorted(told)
    low, high = np.array([told[n] for n in x]).T
    axis.fill_between(x, low, high, color=cue.color, alpha=0.12, linewidth=0)
    for edge in (low, high):
        axis.plot(x, edge, "--", color=cue.color, linewidth=0.9)


def log_axis(axis: Axis, numbers: Sequence[int], label: str) -> None:
    """A logarithmic x axis with a tick at each of `numbers`."""
    axis.axes.set_xscale("log", base=2)
    axis.set_major_locator(FixedLocator(list(numbers)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.0f}")
    axis.axes.set_xlim(min(numbers) / 1.15, max(numbers) * 1.15)
    axis.set_label_text(label)


def log_values(axis: Axis, formatter: str) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5 times powers of ten."""
    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(formatter)


def sharing(cores: float | None, most: int) -> str:
    """What is to be said where up to `most` workers were run on cores for `cores`, else ""."""
    if cores is None or most <= cores:
        return ""
    return f"more than {cores:g} workers share one machine's cores"


def shade_shared(axis: Axes, cores: float | None, most: int) -> None:
    """Greys the numbers of workers, up to the largest measured, that share too few cores."""
    if not sharing(cores, most):
        return
    limits = axis.get_xlim()
    axis.axvspan(1.2 * cores, 1.12 * most, color="#E8E8E8", zorder=0, linewidth=0)
    axis.set_xlim(limits)


def caption(costs: Costs | None, network: Network | None, cores: float | None, most: int) -> str:
    """What the predictions rest on, and where measured workers shared cores."""
    shared = sharing(cores, most)
    if costs is None:
        return f"no predictions: {NO_COSTS}" + (f"; grey: {shared}" if shared else "")
    text = "predicted by the simulator from one worker's costs and "
    if network is None:
        text += f"the all-reduce of {costs.exchanged} workers: bandwidth alone to latency alone"
    else:
        text += f"{network.bandwidth / 1e9:g} GB/s, {1e6 * network.latency:g} µs"
    return text + (f"; grey: {shared}, predicted ones do not" if shared else "")


def handle(color: style.Color | str, label: str, marker: str, linestyle: str = "-") -> Line2D:
    return Line2D([], [], color=color, marker=marker, linestyle=linestyle, label=label)


def kind_handles(predictions: bool, ideal: str) -> list[Line2D | Patch]:
    """Legend entries of ideal and predicted values."""
    found: list[Line2D | Patch] = [
        Line2D([], [], color=GREY, linestyle=":", linewidth=1, label=ideal)
    ]
    if predictions:
        face = (*style.to_rgb(GREY), 0.15)
        found.append(Patch(fc=face, ec=GREY, linestyle="--", label="predicted"))
    return found
