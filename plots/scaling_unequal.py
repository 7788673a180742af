"""Figures of what single workers do: throughput where they are unequal, and how busy they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style
from plots.scaling_axes import (
    band,
    caption,
    handle,
    kind_handles,
    log_axis,
    points,
    shade_shared,
    sharing,
)
from plots.scaling_figures import Line, lines_by_worker
from plots.scaling_predictions import Costs, Network, predicted
from plots.scaling_records import Family, busy_share
from plots.scaling_seeds import spread
from reader import Run

# The policy that is simulated for an algorithm as it is; others are drawn without a prediction.
_POLICIES = {"sync-sgd": "equal", "dp-sgd": "proportional", "edp-sgd": "proportional"}


@dataclass(frozen=True)
class _Mix:
    """Clusters of any size whose workers are unequal in the same way.

    lines: by batch per worker (the smallest and the largest) and algorithm; factors: how many times
    slower each worker is, by the number of workers, None where that is unknown.
    """

    text: str
    lines: dict[int, dict[str, Line]]
    factors: dict[int, tuple[float, ...] | None]


def mixed(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput of unequal workers with and without balancing, a row of panels for each mix."""
    mixes = _mixes(family)
    if not mixes:
        return None
    columns, most = max(len(mix.lines) for mix in mixes), max(max(mix.factors) for mix in mixes)
    figure = style.figure(1.6 + 3.7 * columns, 1.0 + 3.4 * len(mixes))
    axes = figure.subplots(len(mixes), columns, squeeze=False)
    names = [name for mix in mixes for lines in mix.lines.values() for name in lines]
    cues = {name: cue for name, cue in style.variant_cues(names).items() if name in names}
    for row, mix in zip(axes, mixes):
        for axis, size in zip_longest(row, mix.lines):
            axis.set_visible(size is not None)
            if size is not None:
                _panel(axis, mix, size, costs, network, cues)
                shade_shared(axis, family.cores, max(mix.factors))
        row[0].set_ylabel("throughput (samples/s)")
    style.title(figure, f"{family.title}: workers of unequal speed", "mean ± 1 sd over seeds",
          caption(costs, network, family.cores, most))  # fmt: skip
    handles = [handle(cue.color, name, cue.marker) for name, cue in cues.items()]
    kinds = kind_handles(True, "sum of all speeds") if costs is not None else []
    style.legend(figure, [*handles, *kinds])
    return figure


def _mixes(family: Family) -> list[_Mix]:
    keys = [point.setting for point in family.points]
    keys = [key for key in keys if key.cluster == "mixed" and key.exchange == "ddp"]
    mixes = []
    for mix in dict.fromkeys(key.mix for key in keys):
        own = [key for key in keys if key.mix == mix]
        found: dict[int, dict[str, Line]] = {}
        for name in dict.fromkeys(key.algorithm for key in own):
            speeds = family.speeds(mix=mix, exchange="ddp", algorithm=name)
            for size, line in lines_by_worker(speeds).items():
                found.setdefault(size, {})[name] = line
        if found:
            factors = {key.workers: key.factors for key in own}
            mixes.append(_Mix(mix, _small_and_large(found), dict(sorted(factors.items()))))
    return mixes


def _small_and_large(found: Mapping[int, dict[str, Line]]) -> dict[int, dict[str, Line]]:
    """Of the batches per worker that most numbers of workers have, the smallest and the largest."""
    numbers = {
        size: len({n for line in lines.values() for n in line}) for size, lines in found.items()
    }
    sizes = sorted(size for size in found if numbers[size] == max(numbers.values()))
    return {size: found[size] for size in (sizes[0], sizes[-1])}


def _panel(
    axis: Axes, mix: _Mix, size: int, costs: Costs | None, network: Network | None,
    cues: Mapping[str, style.Cue],
) -> None:  # fmt: skip
    known = {n: factors for n, factors in mix.factors.items() if factors is not None}
    for name, line in mix.lines[size].items():
        points(axis, {n: spread(seeds) for n, seeds in line.items()}, cues[name])
        if costs is not None and name in _POLICIES:
            told = {n: predicted(costs, size * n, factors, _POLICIES[name], network)
                    for n, factors in known.items()}  # fmt: skip
            band(axis, told, cues[name])
    if costs is not None:
        # Each with its part of an equal split, without waiting and exchange.
        alone = size / (costs.a * size + costs.d)
        together = [alone * sum(1 / np.array(factors)) for factors in known.values()]
        axis.plot(list(known), together, ":", color=style.DARK, linewidth=1)
    log_axis(axis.xaxis, list(mix.factors), "workers")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_title(f"{mix.text}: {size:,} samples per worker", loc="left")


# --- how much they wait -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Bar:
    """shares: [n] part of a settled step in which each worker does not wait."""

    mix: str
    workers: int
    size: float
    algorithm: str
    shares: np.ndarray


def busy_shares(family: Family) -> Figure | None:
    """Part of a settled step in which each worker does not wait, for small and large batches."""
    shown = _bars(family)
    if not shown:
        return None
    figure = style.figure(max(6.0, 1.6 + 0.62 * len(shown)), 4.6)
    axis = figure.subplots()
    cues = style.variant_cues(bar.algorithm for bar in shown)
    mixes = list(dict.fromkeys(bar.mix for bar in shown if bar.mix != "equal"))
    short = {mix: "mixed" + (f" {place}" if len(mixes) > 1 else "")
             for place, mix in enumerate(mixes, 1)}  # fmt: skip
    for x, bar in enumerate(shown):
        cue, shares = cues[bar.algorithm], 100 * bar.shares
        axis.bar(x, shares.mean(), 0.7, color=(*cue.color, 0.45), edgecolor=cue.color)
        places = x + np.linspace(-0.22, 0.22, len(shares)) * (len(shares) > 1)
        axis.plot(places, shares, cue.marker, color=cue.color, markeredgecolor=style.DARK,
                  markeredgewidth=0.5)  # fmt: skip
    labels = [f"{bar.workers} × {bar.size:g}\n{short.get(bar.mix, '')}".strip() for bar in shown]
    axis.set_xticks(range(len(shown)), labels)
    axis.set_ylim(0, 105)
    axis.grid(False, axis="x")
    axis.set_xlabel("workers × mean samples per worker")
    axis.set_ylabel("working or artificially delayed (% of a step)")
    shared = sharing(family.cores, max(bar.workers for bar in shown))
    style.title(
        figure, f"{family.title}: working or artificially delayed, not waiting",
        "markers: each worker, in order of rank; bars: their mean; a slowdown's sleep is busy time",
        "; ".join(f"{name}: {mix}" for mix, name in short.items()),
        f"{shared}, which counts as busy" if shared else "",
    )  # fmt: skip
    names = [name for name in cues if any(bar.algorithm == name for bar in shown)]
    style.legend(figure, [handle(cues[name].color, name, cues[name].marker) for name in names])
    return figure


def _bars(family: Family) -> list[_Bar]:
    """Of each mix, for the smallest and the largest batch per worker that all its sizes have.

    Clusters that differ by which of their ranks are slow have bars of their own.
    """
    found: dict[tuple, list[Run]] = {}
    for point in family.points:
        key = point.setting
        if key.exchange == "ddp" and key.cluster != "other" and point.busy_share is not None:
            place = key.mix, key.workers, key.batch_per_worker, key.algorithm
            found.setdefault((*place, key.kinds, key.slowed), []).extend(point.runs)
    order = list(style.variant_cues(algorithm for _, _, _, algorithm, *_ in found))
    bars = []
    for mix in sorted({mix for mix, *_ in found}, key=lambda mix: (mix != "equal", mix)):
        own = {place: runs for place, runs in found.items() if place[0] == mix}
        sizes: dict[int, set[float]] = {}
        for _, workers, size, *_ in own:
            sizes.setdefault(workers, set()).add(size)
        common = sorted(set.intersection(*sizes.values()))
        for place in sorted(own, key=lambda key: (*key[1:3], order.index(key[3]), *key[4:])):
            if place[2] in (*common[:1], *common[-1:]):
                bars.append(_Bar(*place[:4], busy_share(own[place])))
    return bars
