"""Ways to exchange gradients, compared between runs that differ by nothing else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from plots import style
from plots.estimates import ratio
from plots.records import setting, workers
from plots.scaling_axes import GREY, sharing
from plots.scaling_records import Family, throughput_of
from plots.scaling_seeds import Seeds, by_seed, spread
from reader import Run

_CUES = {
    "alone": style.Cue(style.to_rgb(GREY), "-"),
    "ddp": style.Cue(style.to_rgb("#332288"), "-"),
    "flat": style.Cue(style.to_rgb("#AA4466"), "-", hatch="//"),
    "horovod": style.Cue(style.to_rgb("#999933"), "-", hatch=".."),
}
_WAYS = ("ddp", "flat", "horovod")


@dataclass(frozen=True)
class Comparison:
    """Runs of one grid on equal workers with sync-sgd, each with as many samples.

    speeds: settled samples/s by number of workers, way of exchange (of two or more) and seed.
    """

    batch_per_worker: float
    speeds: dict[int, dict[str, Seeds]]


def comparisons(family: Family) -> list[Comparison]:
    """By batch per worker. Runs under ddp that other grids have are not mixed in."""
    found: dict[tuple, dict[tuple[int, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for point in family.points:
        key = point.setting
        if not key.plain or key.workers == 1:
            continue
        alike = replace(key, exchange="", batch=0, kinds=(), slowed=())
        for run in point.runs:
            grid = key.batch_per_worker, _grid(run), alike
            found[grid][key.workers, key.exchange].append(run)
    made = (Comparison(grid[0], _compared(found[grid])) for grid in sorted(found))
    return [comparison for comparison in made if comparison.speeds]


def rows(family: Family) -> list[dict[str, Any]]:
    """Each way's samples/s over those of the first, with the ratio's 95 % interval."""
    made = []
    for comparison in comparisons(family):
        for n, ways in comparison.speeds.items():
            (base, under), *others = ways.items()
            for way, over in others:
                found = ratio(over, under)
                made.append(
                    {
                        "workers": n, "batch": round(n * comparison.batch_per_worker),
                        "exchange": way, "samples_per_second": spread(over).mean, "over": base,
                        "samples_per_second_of_that": spread(under).mean, "ratio": found.value,
                        "interval": found.interval, "n": found.n, "paired": found.paired,
                    }
                )  # fmt: skip
    return made


def notes(family: Family) -> list[str]:
    """The ways that are missing beside others."""
    ways = {way for one in comparisons(family) for ways in one.speeds.values() for way in ways}
    return [f"no run with exchange {way} to compare" for way in _WAYS if ways and way not in ways]


def exchanges(family: Family) -> Figure | None:
    """Throughput by way of exchange, beside one worker alone: the comparison of the most bars."""
    found = comparisons(family)
    if not found:
        return None
    shown = max(found, key=lambda one: sum(map(len, one.speeds.values())))
    alone = family.plain.get((1, shown.batch_per_worker))
    bars = ({1: {"alone": alone}} if alone else {}) | shown.speeds
    figure = style.figure(6.6, 4.2)
    axis = figure.subplots()
    for x, ways in enumerate(bars.values()):
        for place, (way, seeds) in enumerate(ways.items()):
            speed, cue = spread(seeds), _CUES[way]
            axis.bar(
                x + 0.27 * (place - (len(ways) - 1) / 2), speed.mean, 0.25, yerr=speed.sd or 0.0,
                capsize=3, color=cue.color, hatch=cue.hatch, edgecolor="white",
                error_kw={"elinewidth": 1},
            )  # fmt: skip
    for way, cue in _CUES.items():
        if any(way in ways for ways in bars.values()):
            axis.bar(0, 0, color=cue.color, hatch=cue.hatch, edgecolor="white", label=way)
    axis.set_xticks(range(len(bars)), [str(n) for n in bars])
    axis.grid(False, axis="x")
    axis.set_xlabel("workers (one exchanges nothing)")
    axis.set_ylabel("throughput (samples/s)")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    style.title(
        figure, f"{family.title}: ways to exchange gradients",
        f"{shown.batch_per_worker:g} samples per worker; mean ± 1 sd over seeds",
        sharing(family.cores, max(bars)),
    )  # fmt: skip
    style.legend(figure, axis.get_legend_handles_labels()[0])
    return figure


def _compared(runs: dict[tuple[int, str], list[Run]]) -> dict[int, dict[str, Seeds]]:
    """Of the numbers of workers that were run in several ways."""
    found: dict[int, dict[str, Seeds]] = {}
    for n in sorted({n for n, _ in runs}):
        speeds = {way: _speeds(runs.get((n, way), ())) for way in _WAYS}
        ways = {way: seeds for way, seeds in speeds.items() if seeds}
        if len(ways) > 1:
            found[n] = ways
    return found


def _speeds(runs: Iterable[Run]) -> Seeds:
    return by_seed(runs, throughput_of)


def _grid(run: Run) -> str:
    """The run's name without the number of workers that experiments/grid.py may have added."""
    return re.sub(rf"-{workers(run)}w$", "", setting(run, "name"))
