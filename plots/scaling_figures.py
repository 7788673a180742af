"""The figure of equal workers' speed: throughput, speed-up and efficiency by their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style
from plots.scaling_axes import (
    BY_GLOBAL,
    BY_WORKER,
    GREY,
    band,
    caption,
    handle,
    kind_handles,
    line_cue,
    log_axis,
    log_values,
    points,
    shade_shared,
)
from plots.scaling_predictions import Costs, Network, predicted
from plots.scaling_records import Family
from plots.scaling_seeds import Seeds, quotient, scaled, spread

_MOST_PREDICTED = 32
_MOST_LINES = 6
# Published efficiencies: workers, efficiency in %, marker, whose.
_ANCHORS = (
    (256, 90, "*", "ResNet-50 from 8 GPUs on (Goyal et al. 2017), 90 %"),
    (512, 90, "p", "ResNet-101 (Horovod's documentation), 90 %"),
    (512, 68, "h", "VGG-16 (Horovod's documentation), 68 %"),
)

# Samples/s by workers and seed.
Line = dict[int, Seeds]


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


def lines_by_worker(speeds: Mapping[tuple[int, int], Seeds]) -> dict[int, Line]:
    """By batch per worker, where it is a whole number, then by workers."""
    found: dict[int, Line] = {}
    for (workers, batch), seeds in speeds.items():
        if batch % workers == 0:
            found.setdefault(batch // workers, {})[workers] = seeds
    return found


def lines_by_batch(speeds: Mapping[tuple[int, int], Seeds]) -> dict[int, Line]:
    """By global batch, then by workers."""
    found: dict[int, Line] = {}
    for (workers, batch), seeds in speeds.items():
        found.setdefault(batch, {})[workers] = seeds
    return found


def drawn(lines: Mapping[int, Line]) -> dict[int, Line]:
    """The lines of several points, by size; of more than can be told apart the longest."""
    sizes = [size for size, line in lines.items() if len(line) > 1]
    longest = sorted(sizes, key=lambda size: (-len(lines[size]), size))[:_MOST_LINES]
    return {size: lines[size] for size in sorted(longest)}


def notes(family: Family) -> list[str]:
    """The lines that `scaling` leaves out for their number."""
    found = []
    for text, lines in (("per worker", lines_by_worker(family.plain)),
                        ("in all", lines_by_batch(family.plain))):  # fmt: skip
        several = {size for size, line in lines.items() if len(line) > 1}
        if left := sorted(several - drawn(lines).keys()):
            sizes = ", ".join(f"{size:,}" for size in left)
            found.append(
                f"figure 'throughput-efficiency' shows {_MOST_LINES} lines, not those of {sizes} "
                f"samples {text}"
            )
    return found


def scaling(family: Family, costs: Costs | None, network: Network | None) -> Figure | None:
    """Throughput (weak scaling), speed-up (strong scaling) and their efficiency, equal workers."""
    weak, strong = drawn(lines_by_worker(family.plain)), drawn(lines_by_batch(family.plain))
    measured = sorted({n for lines in (weak, strong) for line in lines.values() for n in line})
    if not measured:
        return None
    numbers = _numbers(measured) if costs is not None else measured
    figure = style.figure(9.6, 7.6)
    axes = figure.subplots(2, 2)
    predictor = _Predictor(costs, network)
    for place, (size, line) in enumerate(weak.items()):
        ends = place in (0, len(weak) - 1)
        told = predictor.equal({n: size * n for n in numbers}) if ends else {}
        cue = line_cue(BY_WORKER, place, len(weak))
        _draw(axes[0], line, told, numbers, cue, relative=False)
    for place, (size, line) in enumerate(strong.items()):
        told = predictor.equal(dict.fromkeys(numbers, size))
        cue = line_cue(BY_GLOBAL, place, len(strong))
        _draw(axes[1], line, told, numbers, cue, relative=True)
    _scaling_axes(axes, numbers)
    for axis in axes.flat:
        shade_shared(axis, family.cores, max(measured))
    style.title(
        figure, f"{family.title}: scaling out on equal workers",
        "mean ± 1 sd over seeds; speed-up and efficiency: over each line's least number of workers",
        caption(costs, network, family.cores, max(measured)),
    )  # fmt: skip
    style.legend(figure, _scaling_handles(weak, strong, costs is not None))
    return figure


# --- drawing ----------------------------------------------------------------------------------


def _draw(
    axes: Sequence[Axes], line: Line, told: dict[int, tuple[float, float]],
    numbers: Sequence[int], cue: style.Cue, relative: bool,
) -> None:  # fmt: skip
    """Left throughput, or speed-up if `relative`; right efficiency in %, against the ideal.

    Measured and predicted values are each against their own at the least number of workers.
    """
    first = min(line)
    each = spread(line[first]).mean / first
    start = each if first not in told else float(np.mean(told[first])) / first
    ratios = {n: quotient(seeds, line[first]) for n, seeds in line.items()}
    if relative:
        shown = {n: scaled(ratio, first) for n, ratio in ratios.items()}
    else:
        shown = {n: spread(seeds) for n, seeds in line.items()}
    unit, told_unit = (each, start) if relative else (1.0, 1.0)
    points(axes[0], shown, cue)
    band(axes[0], {n: (low / told_unit, high / told_unit) for n, (low, high) in told.items()}, cue)
    axes[0].plot(numbers, [n * each / unit for n in numbers], ":", color=cue.color, linewidth=1)
    points(axes[1], {n: scaled(ratio, 100 * first / n) for n, ratio in ratios.items()}, cue)
    percent = {n: tuple(100 * end / n / start for end in ends) for n, ends in told.items()}
    band(axes[1], percent, cue)


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
            cue = line_cue(color, place, len(lines))
            handles.append(handle(cue.color, f"{size:,} samples {text}", cue.marker))
    handles += kind_handles(predictions, "ideal")
    return handles + [handle(GREY, text, marker, "") for *_, marker, text in _ANCHORS]


def _numbers(measured: Sequence[int]) -> list[int]:
    """Numbers of workers to predict: the measured ones, and powers of two beyond them."""
    last = max(_MOST_PREDICTED, *measured)
    return sorted({*measured, *(2**k for k in range(last.bit_length()) if 2**k <= last)})
