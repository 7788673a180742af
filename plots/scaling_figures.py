"""Figures of speed: throughput, speed-up and efficiency by workers, and how busy they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style
from plots.estimates import Spread
from plots.scaling_axes import (
    BY_GLOBAL,
    BY_WORKER,
    GREY,
    MARKERS,
    band,
    caption,
    handle,
    kind_handles,
    log_axis,
    log_values,
    points,
    shade_shared,
)
from plots.scaling_predictions import Costs, Network, predicted
from plots.scaling_records import Family

_MOST_PREDICTED = 32
# Published efficiencies: workers, efficiency in %, marker, whose.
_ANCHORS = (
    (256, 90, "*", "ResNet-50 from 8 GPUs on (Goyal et al. 2017), 90 %"),
    (512, 90, "p", "ResNet-101 (Horovod's documentation), 90 %"),
    (512, 68, "h", "VGG-16 (Horovod's documentation), 68 %"),
)
_EXCHANGE_CUES = {
    "ddp": style.Cue(style.to_rgb("#332288"), "-"),
    "flat": style.Cue(style.to_rgb("#AA4466"), "-", hatch="//"),
    "horovod": style.Cue(style.to_rgb("#999933"), "-", hatch=".."),
}

Line = dict[int, Spread]


@dataclass(frozen=True)
class _Predictor:
    """Predicted samples/s by workers."""

    costs: Costs | None
    network: Network | None

    def equal(self, batches: dict[int, int]) -> dict[int, tuple[float, float]]:
        """Of equal workers, by their number, with these global batches."""
        if self.costs is None:
            return {}
        return {
            n: predicted(self.costs, batch, [1.0] * n, network=self.network)
            for n, batch in batches.items()
            if batch >= n
        }


def lines_by_worker(speeds: dict[tuple[int, int], Spread]) -> dict[int, Line]:
    """By batch per worker, then by workers: those that most numbers of workers have."""
    found: dict[int, Line] = {}
    for (workers, batch), speed in speeds.items():
        if batch % workers == 0:
            found.setdefault(batch // workers, {})[workers] = speed
    return _fullest(found)


def lines_by_batch(speeds: dict[tuple[int, int], Spread]) -> dict[int, Line]:
    """By global batch, then by workers: those that most numbers of workers have."""
    found: dict[int, Line] = {}
    for (workers, batch), speed in speeds.items():
        found.setdefault(batch, {})[workers] = speed
    return _fullest(found)


def scaling(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput (weak scaling), speed-up (strong scaling) and their efficiency, equal workers."""
    speeds = family.speeds("equal", exchange="ddp", algorithm="sync-sgd")
    weak, strong = lines_by_worker(speeds), lines_by_batch(speeds)
    measured = sorted({n for line in weak.values() for n in line})
    if len(measured) < 2:
        return None
    numbers = _numbers(measured) if costs is not None else measured
    figure = style.figure(9.6, 7.6)
    axes = figure.subplots(2, 2)
    predictor = _Predictor(costs, network)
    for place, (size, line) in enumerate(weak.items()):
        ends = place in (0, len(weak) - 1)
        told = predictor.equal({n: size * n for n in numbers}) if ends else {}
        cue = style.worker_cue(BY_WORKER, place, len(weak))
        _draw(axes[0], line, told, numbers, cue, MARKERS[place], relative=False)
    for place, (size, line) in enumerate(strong.items()):
        told = predictor.equal(dict.fromkeys(numbers, size))
        cue = style.worker_cue(BY_GLOBAL, place, len(strong))
        _draw(axes[1], line, told, numbers, cue, MARKERS[place], relative=True)
    _scaling_axes(axes, numbers)
    for axis in axes.flat:
        shade_shared(axis, costs, max(measured))
    style.title(figure, f"{family.title}: scaling out on equal workers",
                caption(costs, network, max(measured)))  # fmt: skip
    style.legend(figure, _scaling_handles(weak, strong, costs is not None))
    return figure


def mixed(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput of unequal workers with and without balancing, by batch per worker."""
    lines = {
        algorithm: lines_by_worker(family.speeds("mixed", algorithm=algorithm))
        for algorithm in style.variant_cues(())
    }
    sizes = sorted({size for found in lines.values() for size in found})
    sizes = list(dict.fromkeys((sizes[0], sizes[-1]))) if sizes else []
    if not sizes:
        return None
    made = [p.setting for p in family.points if p.setting.cluster == "mixed"]
    factors = dict(sorted((key.workers, key.factors) for key in made))
    figure = style.figure(1.6 + 3.7 * len(sizes), 4.4)
    axes = figure.subplots(1, len(sizes), squeeze=False)[0]
    cues, shown = style.variant_cues(()), [name for name, found in lines.items() if found]
    for axis, size in zip(axes, sizes):
        for name in shown:
            policy = "equal" if name == "sync-sgd" else "proportional"
            points(axis, lines[name].get(size, {}), cues[name], cues[name].marker)
            if costs is not None:
                told = {n: predicted(costs, size * n, f, policy, network)
                        for n, f in factors.items()}  # fmt: skip
                band(axis, told, cues[name])
        if costs is not None:
            # What all workers could do together without fixed costs and exchange.
            best = [sum(1 / np.array(f)) / costs.a for f in factors.values()]
            axis.plot(list(factors), best, ":", color=style.DARK, linewidth=1)
        log_axis(axis.xaxis, list(factors), "workers")
        shade_shared(axis, costs, max(factors))
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(f"{size} samples per worker", loc="left")
    axes[0].set_ylabel("throughput (samples/s)")
    ways = ", ".join(dict.fromkeys(map(_slow_text, factors.values())))
    style.title(figure, f"{family.title}: workers of unequal speed ({ways})",
                caption(costs, network, max(factors)))  # fmt: skip
    handles = [handle(cues[name].color, name, cues[name].marker) for name in shown]
    kinds = kind_handles(True, "sum of all speeds") if costs is not None else []
    style.legend(figure, [*handles, *kinds])
    return figure


def exchanges(family: Family) -> Figure | None:
    """Throughput by way of exchange, beside one worker alone."""
    by_size: dict[int, dict[str, Line]] = {}
    for name in _EXCHANGE_CUES:
        for (n, batch), s in family.speeds("equal", exchange=name, algorithm="sync-sgd").items():
            if batch % n == 0:
                by_size.setdefault(batch // n, {}).setdefault(name, {})[n] = s
    compared = {size: lines for size, lines in by_size.items() if len(lines) > 1}
    if not compared:
        return None
    size, lines = max(compared.items(), key=lambda item: sum(map(len, item[1].values())))
    numbers = sorted({n for line in lines.values() for n in line})
    figure = style.figure(6.6, 4.2)
    axis = figure.subplots()
    for x, n in enumerate(numbers):
        shown = [name for name, line in lines.items() if n in line]
        for place, name in enumerate(shown):
            s, cue = lines[name][n], _EXCHANGE_CUES[name]
            axis.bar(
                x + 0.27 * (place - (len(shown) - 1) / 2), s.mean, 0.25, yerr=s.sd or 0.0,
                capsize=3, color=cue.color if n > 1 else GREY, hatch=cue.hatch if n > 1 else "",
                edgecolor="white", error_kw={"elinewidth": 1},
            )  # fmt: skip
    for name in lines:
        cue = _EXCHANGE_CUES[name]
        axis.bar(0, 0, color=cue.color, hatch=cue.hatch, edgecolor="white", label=name)
    axis.set_xticks(range(len(numbers)), [str(n) for n in numbers])
    axis.grid(False, axis="x")
    axis.set_xlabel("workers (one exchanges nothing)")
    axis.set_ylabel("throughput (samples/s)")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    style.title(figure, f"{family.title}: ways to exchange gradients",
                f"{size} samples per worker; mean ± 1 sd over runs")  # fmt: skip
    style.legend(figure, axis.get_legend_handles_labels()[0])
    return figure


def busy_shares(family: Family) -> Figure | None:
    """Part of a settled step in which each worker works, for small and large batches."""
    shown = _busy_groups(family)
    if not shown:
        return None
    figure = style.figure(max(6.0, 1.6 + 0.62 * len(shown)), 4.4)
    axis = figure.subplots()
    cues = style.variant_cues(())
    for x, (*_, algorithm, shares) in enumerate(shown):
        cue = cues[algorithm]
        axis.bar(x, 100 * shares.mean(), 0.7, color=(*cue.color, 0.45), edgecolor=cue.color)
        places = x + np.linspace(-0.22, 0.22, len(shares)) * (len(shares) > 1)
        axis.plot(places, 100 * shares, cue.marker, color=cue.color, markeredgecolor=style.DARK,
                  markeredgewidth=0.5)  # fmt: skip
    labels = [f"{n} × {size:g}" + ("\nmixed" if c == "mixed" else "") for c, n, size, *_ in shown]
    axis.set_xticks(range(len(shown)), labels)
    axis.set_ylim(0, 105)
    axis.grid(False, axis="x")
    axis.set_xlabel("workers × mean samples per worker")
    axis.set_ylabel("busy part of a step (%)")
    style.title(figure, f"{family.title}: how busy the workers are",
                "markers: each worker, in order of rank; bars: their mean")  # fmt: skip
    names = dict.fromkeys(algorithm for *_, algorithm, _ in shown)
    style.legend(figure, [handle(cues[name].color, name, cues[name].marker) for name in names])
    return figure


def _busy_groups(family: Family) -> list[tuple[str, int, float, str, np.ndarray]]:
    """(cluster, workers, batch per worker, algorithm, busy shares [n]).

    Of the batches per worker that all numbers of workers have: the smallest and the largest.
    """
    found: dict[tuple[str, int, float, str], list[np.ndarray]] = {}
    for point in family.points:
        key = point.setting
        if key.exchange == "ddp" and point.busy_share is not None and key.cluster != "other":
            place = key.cluster, key.workers, key.batch_per_worker, key.algorithm
            found.setdefault(place, []).append(point.busy_share)
    shown = []
    for cluster in ("equal", "mixed"):
        numbers = {n for c, n, *_ in found if c == cluster}
        sizes = [{s for c, n, s, _ in found if (c, n) == (cluster, m)} for m in numbers]
        common = sorted(set.intersection(*sizes)) if sizes else []
        ends = dict.fromkeys((*common[:1], *common[-1:]))
        order = list(style.variant_cues(()))
        shown += sorted(
            (key for key in found if key[0] == cluster and key[2] in ends),
            key=lambda key: (key[1], key[2], order.index(key[3])),
        )
    return [(*key, np.mean(found[key], axis=0)) for key in shown]


# --- drawing ----------------------------------------------------------------------------------


def _draw(
    axes: Sequence[Axes], line: Line, told: dict[int, tuple[float, float]],
    numbers: Sequence[int], cue: style.Cue, marker: str, relative: bool,
) -> None:  # fmt: skip
    """Left throughput, or speed-up if `relative`; right efficiency in %, against the ideal.

    Measured and predicted values are each against their own at the least number of workers.
    """
    first = min(line)
    each = line[first].mean / first
    start = each if first not in told else float(np.mean(told[first])) / first
    unit, told_unit = (each, start) if relative else (1.0, 1.0)
    points(axes[0], {n: _over(s, unit) for n, s in line.items()}, cue, marker)
    band(axes[0], {n: (low / told_unit, high / told_unit) for n, (low, high) in told.items()}, cue)
    axes[0].plot(numbers, [n * each / unit for n in numbers], ":", color=cue.color, linewidth=1)
    points(axes[1], {n: _over(s, n * each / 100) for n, s in line.items()}, cue, marker)
    percent = {n: tuple(100 * end / n / start for end in ends) for n, ends in told.items()}
    band(axes[1], percent, cue)


def _over(spread: Spread, unit: float) -> Spread:
    return Spread(spread.mean / unit, None if spread.sd is None else spread.sd / unit)


def _scaling_axes(axes: np.ndarray, numbers: Sequence[int]) -> None:
    for axis in axes.flat:
        log_axis(axis.xaxis, numbers, "workers")
    texts = (("weak scaling: same batch per worker", "throughput (samples/s)"),
             ("strong scaling: same global batch", "speed-up"))  # fmt: skip
    for (left, right), (text, label) in zip(axes, texts):
        log_values(left.yaxis, "{x:,g}")
        left.set_title(text, loc="left")
        left.set_ylabel(label)
        right.axhline(100, linestyle=":", color=style.DARK, linewidth=1)
        right.set_ylim(0, 125)
        right.set_ylabel("scaling efficiency (%)")
    far = axes[0, 1]
    anchors = sorted({workers for workers, *_ in _ANCHORS})
    log_axis(far.xaxis, [*numbers, *(n for n in anchors if n > max(numbers))], "workers")
    for workers, percent, marker, _ in _ANCHORS:
        far.plot(workers, percent, marker, color=GREY, markersize=8)


def _scaling_handles(weak: dict[int, Line], strong: dict[int, Line], predictions: bool) -> list:
    handles = []
    for lines, text, color in ((weak, "per worker", BY_WORKER), (strong, "in all", BY_GLOBAL)):
        for place, size in enumerate(lines):
            cue = style.worker_cue(color, place, len(lines))
            handles.append(handle(cue.color, f"{size:,} samples {text}", MARKERS[place]))
    handles += kind_handles(predictions, "ideal")
    return handles + [handle(GREY, text, marker, "") for *_, marker, text in _ANCHORS]


def _numbers(measured: Sequence[int]) -> list[int]:
    """Numbers of workers to predict: the measured ones, and powers of two beyond them."""
    last = max(_MOST_PREDICTED, *measured)
    return sorted({*measured, *(2**k for k in range(last.bit_length()) if 2**k <= last)})


def _fullest(lines: dict[int, Line]) -> dict[int, Line]:
    most = max(map(len, lines.values()), default=0)
    return {key: line for key, line in sorted(lines.items()) if len(line) == most}


def _slow_text(factors: Sequence[float]) -> str:
    slow = [factor for factor in factors if factor > 1]
    return f"{len(slow)} of {len(factors)} slowed {max(slow):g} times"
