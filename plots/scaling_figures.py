"""Figures of how a training scales with its workers, and with its global batch.

Measured values are markers on solid lines (± 1 standard deviation over seeds where there are
several), ideal ones dotted, predicted ones dashed with a band from the least to the most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from plots import style
from plots.estimates import Spread
from plots.scaling_predictions import Costs, Network, predicted
from plots.scaling_records import RULES, Family, Point, sd, seconds_to

_BY_WORKER, _BY_GLOBAL, _GREY = "#7B4FA3", "#8C510A", "#777777"
_MARKERS = ("o", "s", "D", "v", "P", "X", "<", ">")
_MOST_PREDICTED = 32
# Published efficiencies: workers, efficiency in %, whose.
ANCHORS = (
    (256, 90, "Goyal et al. 2017: ResNet-50, from 8 GPUs"),
    (512, 90, "Horovod's documentation: ResNet-101"),
    (512, 68, "Horovod's documentation: VGG-16"),
)
_RULE_COLORS = dict(zip(RULES, ("#CC79A7", "#D55E00", "#56B4E9")))
_EXCHANGE_COLORS = {"ddp": "#332288", "flat": "#AA4466", "horovod": "#999933"}

Speeds = dict[tuple[int, int], Spread]


def lines_by_worker(speeds: Speeds) -> dict[int, dict[int, Spread]]:
    """By batch per worker, then by workers: those with more than one number of workers."""
    found: dict[int, dict[int, Spread]] = {}
    for (workers, batch), speed in speeds.items():
        if batch % workers == 0:
            found.setdefault(batch // workers, {})[workers] = speed
    return {size: line for size, line in sorted(found.items()) if len(line) > 1}


def lines_by_batch(speeds: Speeds) -> dict[int, dict[int, Spread]]:
    """By global batch, then by workers: those that most numbers of workers have."""
    found: dict[int, dict[int, Spread]] = {}
    for (workers, batch), speed in speeds.items():
        found.setdefault(batch, {})[workers] = speed
    most = max(map(len, found.values()), default=0)
    return {batch: line for batch, line in sorted(found.items()) if len(line) == most > 1}


def scaling(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput, speed-up and efficiency of equal workers, weak scaling above, strong below."""
    speeds = family.speeds("equal", exchange="ddp", algorithm="sync-sgd")
    weak, strong = lines_by_worker(speeds), lines_by_batch(speeds)
    if not weak:
        return None
    figure = style.figure(9.6, 7.6)
    axes = figure.subplots(2, 2)
    for row, lines, color in ((axes[0], weak, _BY_WORKER), (axes[1], strong, _BY_GLOBAL)):
        for place, (size, line) in enumerate(lines.items()):
            cue = style.worker_cue(color, place, len(lines))
            batches = {n: size * n if lines is weak else size for n in _numbers(line)}
            told = {
                n: predicted(costs, batch, [1.0] * n, network=network)
                for n, batch in batches.items()
                if costs is not None and batch >= n
            }
            _throughput(row[0], line, told, cue, _MARKERS[place])
            _efficiency(row[1], line, told, cue, _MARKERS[place])
    _finish_scaling(axes, costs, weak)
    style.title(figure, f"{family.title}: scaling out on equal workers", _caption(costs, network))
    handles = _line_handles(weak, "per worker", _BY_WORKER)
    handles += _line_handles(strong, "in all", _BY_GLOBAL)
    style.legend(figure, [*handles, *_kind_handles(costs is not None)])
    return figure


def mixed(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput of unequal workers with and without balancing, by batch per worker."""
    by_algorithm = {
        algorithm: lines
        for algorithm in style.variant_cues(())
        if (lines := _lines_of_any(family.speeds("mixed", algorithm=algorithm)))
    }
    sizes = sorted({size for lines in by_algorithm.values() for size in lines})
    if not by_algorithm:
        return None
    figure = style.figure(1.6 + 3.6 * len(sizes), 4.4)
    axes = figure.subplots(1, len(sizes), squeeze=False)[0]
    factors = {p.setting.workers: p.setting.factors for p in family.points
               if p.setting.cluster == "mixed"}  # fmt: skip
    cues = style.variant_cues(by_algorithm)
    for axis, size in zip(axes, sizes):
        for algorithm, lines in by_algorithm.items():
            line = lines.get(size, {})
            policy = "equal" if algorithm == "sync-sgd" else "proportional"
            told = {
                n: predicted(costs, size * n, factors[n], policy, network)
                for n in line
                if costs is not None
            }
            # Whole clusters that were made: nothing is known of how others would be mixed.
            _points(axis, line, cues[algorithm], cues[algorithm].marker)
            _band(axis, told, cues[algorithm])
        if costs is not None:
            best = {n: sum(1 / np.array(f)) / costs.a for n, f in sorted(factors.items())}
            axis.plot(list(best), list(best.values()), ":", color=style.DARK, linewidth=1)
        _workers_axis(axis, sorted(factors))
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(f"{size} samples per worker", loc="left")
        _shade_shared(axis, costs)
    axes[0].set_ylabel("throughput (samples/s)")
    ways = ", ".join(sorted({_slow_text(f) for f in factors.values()}))
    style.title(figure, f"{family.title}: workers of unequal speed ({ways})",
                _caption(costs, network))  # fmt: skip
    handles = [_handle(cues[name].color, name, cues[name].marker) for name in by_algorithm]
    style.legend(figure, [*handles, *_kind_handles(costs is not None, "sum of all speeds")])
    return figure


def exchanges(family: Family) -> Figure | None:
    """Throughput by way of exchange, beside one worker alone."""
    names = [name for name in _EXCHANGE_COLORS if family.speeds("equal", exchange=name)]
    lines = {n: lines_by_worker(family.speeds("equal", exchange=n, algorithm="sync-sgd"))
             for n in names}  # fmt: skip
    sizes = [size for size in lines.get("ddp", {}) if sum(size in v for v in lines.values()) > 1]
    if not sizes:
        return None
    size = sizes[0]
    numbers = sorted({n for name in names for n in lines[name].get(size, {})})
    figure = style.figure(6.6, 4.2)
    axis = figure.subplots()
    shown = [name for name in names if size in lines[name]]
    for place, name in enumerate(shown):
        line = lines[name][size]
        x = [numbers.index(n) + (place - (len(shown) - 1) / 2) * 0.8 / len(shown) for n in line]
        spreads = list(line.values())
        axis.bar(
            x, [s.mean for s in spreads], 0.74 / len(shown), yerr=sd(spreads), capsize=3,
            color=_EXCHANGE_COLORS[name], hatch=("", "//", "..")[place % 3], edgecolor="white",
            label=name, error_kw={"elinewidth": 1},
        )  # fmt: skip
    axis.set_xticks(range(len(numbers)), [str(n) for n in numbers])
    axis.grid(False, axis="x")
    axis.set_xlabel("workers")
    axis.set_ylabel("throughput (samples/s)")
    style.title(figure, f"{family.title}: ways to exchange gradients, {size} samples per worker",
                "mean ± 1 sd over runs; one worker exchanges nothing")  # fmt: skip
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
    for x, (_, _, _, algorithm, shares) in enumerate(shown):
        cue = cues[algorithm]
        axis.bar(x, 100 * shares.mean(), 0.7, color=(*cue.color, 0.45), edgecolor=cue.color)
        places = x + np.linspace(-0.22, 0.22, len(shares)) * (len(shares) > 1)
        axis.plot(places, 100 * shares, cue.marker, color=cue.color, markeredgecolor=style.DARK,
                  markeredgewidth=0.5)  # fmt: skip
    labels = [f"{n} × {size:g}" + ("\nmixed" if c == "mixed" else "") for c, n, size, _, _ in shown]
    axis.set_xticks(range(len(shown)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axis.set_ylim(0, 105)
    axis.grid(False, axis="x")
    axis.set_xlabel("workers × mean samples per worker")
    axis.set_ylabel("busy part of a step (%)")
    style.title(figure, f"{family.title}: how busy the workers are",
                "markers: each worker, in order of rank; bars: their mean")  # fmt: skip
    names = dict.fromkeys(algorithm for _, _, _, algorithm, _ in shown)
    style.legend(figure, [_handle(cues[name].color, name, cues[name].marker) for name in names])
    return figure


def time_to_accuracy(family: Family, accuracy: float) -> Figure | None:
    """Seconds of training until `accuracy` (0..1) on the test set, by workers and global batch."""
    trained = trained_points(family)
    by_workers = _trained_by_workers(trained)
    if not trained:
        return None
    figure = style.figure(9.6, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    highest = max((s for p in trained for s in _times(p, accuracy) if s is not None), default=1.0)
    factor, unit = style.time_unit(highest)
    for place, (size, line) in enumerate(by_workers.items()):
        cue = style.worker_cue(_BY_WORKER, place, len(by_workers))
        _times_line(left, line, accuracy, factor, cue, _MARKERS[place])
        left.plot([], [], color=cue.color, linestyle=cue.linestyle, marker=_MARKERS[place],
                  label=f"{size:g} samples per worker")  # fmt: skip
    _workers_axis(left, sorted({n for line in by_workers.values() for n in line}) or [1])
    for place, (rule, line) in enumerate(by_rule(trained, "equal", "sync-sgd").items()):
        cue = style.Cue(style.to_rgb(_RULE_COLORS[rule]), "-")
        _times_line(right, line, accuracy, factor, cue, _MARKERS[place])
        right.plot([], [], color=cue.color, marker=_MARKERS[place], label=f"learning rate: {rule}")
    _batch_axis(right, trained)
    left.set_ylabel(f"training time ({unit})")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    style.title(
        figure, f"{family.title}: training time to {100 * accuracy:g} % of the test set",
        "mean over the seeds that reach it; × at the upper edge: no seed does",
    )  # fmt: skip
    handles = [h for axis in (left, right) for h in axis.get_legend_handles_labels()[0]]
    if handles:
        style.legend(figure, handles)
    return figure


def accuracy_by_batch(family: Family) -> Figure | None:
    """Final test accuracy against the global batch, by rule; and for mixed workers by algorithm."""
    trained = trained_points(family)
    rules, panels = by_rule(trained, "equal", "sync-sgd"), 1
    if not any(len(line) > 1 for line in rules.values()):
        return None
    algorithms = {
        name: line
        for name in style.variant_cues(())
        for line in by_rule(trained, "mixed", name).values()
        if len(line) > 1
    }
    panels += bool(algorithms)
    figure = style.figure(1.4 + 4.1 * panels, 4.4)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for place, (rule, line) in enumerate(rules.items()):
        cue = style.Cue(style.to_rgb(_RULE_COLORS[rule]), style._LINESTYLES[place])
        _accuracies(axes[0], line, cue, _MARKERS[place])
    axes[0].set_title("equal workers, sync-sgd", loc="left")
    cues = style.variant_cues(algorithms)
    for name, line in algorithms.items():
        _accuracies(axes[-1], line, cues[name], cues[name].marker)
    if algorithms:
        axes[-1].set_title("mixed workers, linear, warm-up", loc="left")
    for axis in axes:
        _batch_axis(axis, trained)
    axes[0].set_ylabel("final test top-1 (%)")
    style.title(
        figure, f"{family.title}: accuracy and global batch",
        "mean ± 1 sd over seeds; hollow: a seed did not finish. Published: ResNet-50 on ImageNet, "
        "top-1 error 23.60 % at 256 and 23.74 % at 8,192 (Goyal et al. 2017)",
    )  # fmt: skip
    handles = [
        _handle(style.to_rgb(_RULE_COLORS[rule]), f"learning rate: {rule}", _MARKERS[place])
        for place, rule in enumerate(rules)
    ]
    handles += [_handle(cues[name].color, name, cues[name].marker) for name in algorithms]
    style.legend(figure, handles)
    return figure


# --- what the records are asked ---------------------------------------------------------------


def trained_points(family: Family) -> list[Point]:
    """Points of runs that are made to be trained to the end, under ddp: those of most epochs."""
    epochs = max(point.setting.epochs for point in family.points)
    return [
        point
        for point in family.points
        if point.setting.exchange == "ddp" and 2 * point.setting.epochs > epochs
    ]


def by_rule(trained: Sequence[Point], cluster: str, algorithm: str) -> dict[str, dict[int, Point]]:
    """By rule and global batch: points on the number of workers that has most of them."""
    wanted = [
        point
        for point in trained
        if (point.setting.cluster, point.setting.algorithm) == (cluster, algorithm)
    ]
    numbers = [point.setting.workers for point in wanted]
    most = max(sorted(set(numbers)), key=numbers.count, default=None)
    found: dict[str, dict[int, Point]] = {}
    for rule in RULES:
        line = {p.setting.batch: p for p in wanted
                if p.setting.rule == rule and p.setting.workers == most}  # fmt: skip
        if line:
            found[rule] = dict(sorted(line.items()))
    return found


def _trained_by_workers(trained: Sequence[Point]) -> dict[float, dict[int, Point]]:
    """By batch per worker and workers: equal workers' trainings on several numbers of workers."""
    found: dict[tuple[float, int, str], dict[int, Point]] = {}
    for point in trained:
        key = point.setting
        if (key.cluster, key.algorithm) == ("equal", "sync-sgd"):
            line = found.setdefault((key.batch_per_worker, key.epochs, key.rest), {})
            line[key.workers] = point
    return {size: line for (size, *_), line in sorted(found.items()) if len(line) > 1}


def _times(point: Point, accuracy: float) -> list[float | None]:
    return [seconds_to(run, accuracy) for run in point.runs]


def _busy_groups(family: Family) -> list[tuple[str, int, float, str, np.ndarray]]:
    """(cluster, workers, batch per worker, algorithm, busy shares): least and largest batches."""
    found: dict[tuple[str, int, float, str], list[np.ndarray]] = {}
    for point in family.points:
        key = point.setting
        if key.exchange == "ddp" and point.busy_share is not None and key.cluster != "other":
            place = key.cluster, key.workers, key.batch_per_worker, key.algorithm
            found.setdefault(place, []).append(point.busy_share)
    alike = [
        (*place, np.mean(shares, axis=0)) for place, shares in sorted(found.items())
    ]
    sizes: dict[tuple[str, int, str], list[float]] = {}
    for cluster, workers, size, algorithm, _ in alike:
        sizes.setdefault((cluster, workers, algorithm), []).append(size)
    ends = {key: {min(values), max(values)} for key, values in sizes.items()}
    return [one for one in alike if one[2] in ends[one[0], one[1], one[3]]]


def _lines_of_any(speeds: Speeds) -> dict[int, dict[int, Spread]]:
    """As `lines_by_worker`, also where there is one number of workers alone."""
    found: dict[int, dict[int, Spread]] = {}
    for (workers, batch), speed in speeds.items():
        if batch % workers == 0:
            found.setdefault(batch // workers, {})[workers] = speed
    most = max(map(len, found.values()), default=0)
    return {size: line for size, line in sorted(found.items()) if len(line) == most}


def _numbers(line: dict[int, Spread]) -> list[int]:
    """Numbers of workers to predict: the measured ones, and powers of two beyond them."""
    last = max(_MOST_PREDICTED, max(line))
    return sorted({*line, *(2**k for k in range(last.bit_length()) if 2**k <= last)})


# --- drawing ----------------------------------------------------------------------------------


def _throughput(
    axis: Axes, line: dict[int, Spread], told: dict, cue: style.Cue, marker: str
) -> None:
    first = min(line)
    ideal = {n: line[first].mean / first * n for n in {*line, *told} if n >= first}
    axis.plot(*zip(*sorted(ideal.items())), ":", color=cue.color, linewidth=1)
    _points(axis, line, cue, marker)
    _band(axis, told, cue)


def _efficiency(
    axis: Axes, line: dict[int, Spread], told: dict, cue: style.Cue, marker: str
) -> None:
    """In %: throughput over the least number of workers' times the ratio of the numbers."""
    first = min(line)
    each = line[first].mean / first
    _points(
        axis,
        {n: Spread(100 * s.mean / (n * each), None if s.sd is None else 100 * s.sd / (n * each))
         for n, s in line.items()},
        cue, marker,
    )  # fmt: skip
    if told:
        start = np.mean(told[first]) / first
        _band(
            axis,
            {n: tuple(100 * value / (n * start) for value in ends) for n, ends in told.items()},
            cue,
        )


def _points(axis: Axes, line: dict[int, Spread], cue: style.Cue, marker: str) -> None:
    spreads = list(line.values())
    axis.errorbar(
        list(line), [s.mean for s in spreads], sd(spreads), color=cue.color, marker=marker,
        linestyle="-", capsize=3, elinewidth=1, zorder=3,
    )  # fmt: skip


def _band(axis: Axes, told: dict[int, tuple[float, float]], cue: style.Cue) -> None:
    if not told:
        return
    x = sorted(told)
    low, high = np.array([told[n] for n in x]).T
    axis.fill_between(x, low, high, color=cue.color, alpha=0.12, linewidth=0)
    for edge in (low, high):
        axis.plot(x, edge, "--", color=cue.color, linewidth=0.9)


def _times_line(
    axis: Axes, line: dict[int, Point], accuracy: float, factor: float, cue: style.Cue, marker: str
) -> None:
    reached: dict[int, Spread] = {}
    for x, point in line.items():
        times = [factor * s for s in _times(point, accuracy) if s is not None]
        if times:
            reached[x] = Spread.of(times)
        else:
            axis.plot(x, 0.97, "x", color=cue.color, markersize=7, clip_on=False,
                      transform=axis.get_xaxis_transform())  # fmt: skip
    _points(axis, reached, cue, marker)


def _accuracies(axis: Axes, line: dict[int, Point], cue: style.Cue, marker: str) -> None:
    tops = [point.top1 for point in line.values()]
    means = [100 * top.mean for top in tops]
    axis.errorbar(
        list(line), means, [100 * value for value in sd(tops)], color=cue.color, marker=marker,
        linestyle=cue.linestyle, capsize=3, elinewidth=1,
    )  # fmt: skip
    for x, mean, point in zip(line, means, line.values()):
        if point.diverged:
            axis.plot(x, mean, marker, color=cue.color, markerfacecolor="white", zorder=4)


def _workers_axis(axis: Axes, numbers: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(numbers)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(min(numbers) / 1.15, max(numbers) * 1.15)
    axis.set_xlabel("workers")


def _batch_axis(axis: Axes, trained: Sequence[Point]) -> None:
    batches = sorted({b for c in ("equal", "mixed") for a in style.variant_cues(())
                      for line in by_rule(trained, c, a).values() for b in line})  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(batches))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("global batch (samples)")


def _finish_scaling(axes: np.ndarray, costs: Costs | None, weak: dict) -> None:
    numbers = _numbers({n: s for line in weak.values() for n, s in line.items()})
    shown = numbers if costs is not None else sorted({n for line in weak.values() for n in line})
    for axis in axes.flat:
        _workers_axis(axis, shown)
        _shade_shared(axis, costs)
    for axis, text in ((axes[0, 0], "weak scaling: same batch per worker"),
                       (axes[1, 0], "strong scaling: same global batch")):  # fmt: skip
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(text, loc="left")
        axis.set_ylabel("throughput (samples/s)")
    for axis in axes[:, 1]:
        axis.axhline(100, linestyle=":", color=style.DARK, linewidth=1)
        axis.set_ylim(0, 125)
        axis.set_ylabel("scaling efficiency (%)")
        axis.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=""))
    _anchors(axes[0, 1], shown)


def _anchors(axis: Axes, numbers: Sequence[int]) -> None:
    """Published efficiencies, far to the right of what was measured."""
    axis.set_xlim(right=1024)
    axis.xaxis.set_major_locator(FixedLocator([*numbers[::2], *sorted({a[0] for a in ANCHORS})]))
    for place, (workers, percent, _) in enumerate(ANCHORS):
        axis.plot(workers, percent, ("*", "p", "h")[place], color=_GREY, markersize=8)


def _shade_shared(axis: Axes, costs: Costs | None) -> None:
    """Greys the numbers of workers that the machine has too few cores for."""
    if costs is None or costs.cores is None:
        return
    low, high = axis.get_xlim()
    if costs.cores < high:
        axis.axvspan(costs.cores * 1.15, high, color="#EEEEEE", zorder=0, linewidth=0)
        axis.set_xlim(low, high)


def _slow_text(factors: Sequence[float]) -> str:
    slow = [factor for factor in factors if factor > 1]
    return f"{len(slow)} of {len(factors)} slowed {max(slow):g} times"


def _caption(costs: Costs | None, network: Network | None) -> str:
    if costs is None:
        return "no prediction: runs of one worker, and of several, are needed for it"
    text = "band: predicted by the simulator from one worker's costs and "
    text += (
        f"the exchange of {costs.exchanged} workers, between bandwidth and latency alone"
        if network is None
        else f"{network.bandwidth / 1e9:g} GB/s and {1e6 * network.latency:g} µs"
    )
    shared = "" if costs.cores is None else "; grey: workers share cores"
    return text + shared


def _line_handles(lines: dict[int, dict], text: str, color: str) -> list[Line2D]:
    return [
        _handle(style.worker_cue(color, place, len(lines)).color, f"{size:,} {text}",
                _MARKERS[place])
        for place, size in enumerate(lines)
    ]  # fmt: skip


def _handle(color: style.Color, label: str, marker: str) -> Line2D:
    return Line2D([], [], color=color, marker=marker, label=label)


def _kind_handles(predictions: bool, ideal: str = "ideal") -> list[Line2D | Patch]:
    found: list[Line2D | Patch] = [
        Line2D([], [], color=_GREY, linestyle=":", linewidth=1, label=ideal)
    ]
    if predictions:
        found.append(
            Patch(fc=(*style.to_rgb(_GREY), 0.15), ec=_GREY, linestyle="--", label="predicted")
        )
    if ideal == "ideal":
        found += [
            Line2D([], [], color=_GREY, linestyle="", marker=("*", "p", "h")[place], markersize=8,
                   label=f"{text}, {percent} %")
            for place, (_, percent, text) in enumerate(ANCHORS)
        ]  # fmt: skip
    return found
