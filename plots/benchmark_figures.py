"""Figures of the benchmarks' and the simulator's results.

    python -m plots.benchmark_figures results/balance.json --out figures
    python -m plots.benchmark_figures results/scale/scale.json --out results/scale

writes the record's figure as SVG and PNG. Needs its JSON file alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs.errors import UserError
from configs.files import read_json
from plots import style
from terminal import say

COLUMNS = 2
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.0
# A policy's curve looks in every figure as in the one of benchmarks/balance.py, by these labels.
POLICY_LABELS = {
    "equal": "equal",
    "proportional": "proportional, every epoch",
    "affine": "affine, every epoch",
}
OTHER_LABELS = ("affine, every 20 steps",)
# Whose epochs are shown: beyond, the ring hides what balance does.
SHOWN_WORKERS = 1024
PERFECT = {"color": style.DARK, "linestyle": ":", "linewidth": 1.2}


def balance(results: Mapping[str, Any]) -> Figure:
    """The imbalance over steps of each policy, a panel per scenario."""
    scenarios = results["scenarios"]
    labels = list(dict.fromkeys(run["label"] for one in scenarios for run in one["runs"]))
    cues = style.variant_cues(labels)
    rows = -(-len(scenarios) // COLUMNS)
    figure = style.figure(COLUMNS * PANEL_WIDTH, rows * PANEL_HEIGHT + 1.0)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, scenario in zip(axes, scenarios):
        _imbalance(axis, scenario, labels, cues, results["within"])
    for axis in axes[len(scenarios) :]:
        axis.remove()
    handles: dict[str, Any] = {}
    for axis in axes[: len(scenarios)]:
        handles |= {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}
    style.title(figure, "Imbalance: longest step of any worker over the best possible one")
    style.legend(figure, [handles[label] for label in labels])
    return figure


def _imbalance(
    axis: Axes,
    scenario: Mapping[str, Any],
    labels: Sequence[str],
    cues: Mapping[str, style.Cue],
    within: float,
) -> None:
    """Every policy's curve, from step 1 on; the dotted line marks what counts as balanced."""
    axis.axhline(within, color=style.DARK, linestyle=":", linewidth=0.8)
    longest = max(len(run["imbalance"]) for run in scenario["runs"])
    for run in scenario["runs"]:
        cue, line = cues[run["label"]], labels.index(run["label"])
        curve = np.array(run["imbalance"])
        if run["policy"] == "equal":
            # A plan that never changes is not worth measuring to the end.
            curve = np.pad(curve, (0, longest - len(curve)), mode="edge")
        axis.plot(
            np.arange(1, len(curve) + 1), curve, color=cue.color, linestyle=cue.linestyle,
            marker=cue.marker, markevery=style.markers_at(len(curve), line), label=run["label"],
            drawstyle="steps-mid",
        )  # fmt: skip
    for phase in scenario["phases"][1:]:
        axis.axvline(phase["first_step"] + 0.5, color=style.DARK, linewidth=0.8)
    axis.set_title(scenario["name"])
    axis.set_xlim(left=1)
    axis.set_ylim(bottom=1 - 0.05 * (axis.get_ylim()[1] - 1))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axis.set_xlabel("step")
    axis.set_ylabel("imbalance")


def scale(results: Mapping[str, Any]) -> Figure:
    """Efficiency over the number of workers, and over the epochs at SHOWN_WORKERS."""
    sizes = results["sizes"]
    all_cues = style.variant_cues([*POLICY_LABELS.values(), *OTHER_LABELS])
    cues = {policy: all_cues[label] for policy, label in POLICY_LABELS.items()}
    figure = style.figure(2 * PANEL_WIDTH, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    handles = _over_workers(left, sizes, cues)
    _over_epochs(right, next(x for x in sizes if x["workers"] == SHOWN_WORKERS), cues)
    left.set_ylabel("efficiency: T* / step time (%)")
    left.set_ylim(0, 100)
    style.title(figure, "Simulated: GPUs of four generations, 128 samples per worker and step")
    style.legend(figure, handles)
    return figure


def _over_workers(
    axis: Axes, sizes: Sequence[Mapping[str, Any]], cues: Mapping[str, style.Cue]
) -> list[Artist]:
    """The last epoch's efficiencies; shaded between the least and the most of clusters drawn."""
    workers = [size["workers"] for size in sizes]
    handles: list[Artist] = []
    for number, runs in enumerate(zip(*(size["runs"] for size in sizes))):
        policy = runs[0]["policy"]
        bounds = (
            [100 * run[key] for run in runs] for key in ("least_efficiency", "most_efficiency")
        )
        axis.fill_between(workers, *bounds, color=cues[policy].color, alpha=0.15, linewidth=0)
        handles += axis.plot(
            workers, [100 * run["efficiency"][-1] for run in runs], label=POLICY_LABELS[policy],
            markevery=(number % 2, 2), **_looks(cues[policy]),
        )  # fmt: skip
    perfect = [100 * size["perfect_efficiency"] for size in sizes]
    handles += axis.plot(workers, perfect, label="perfect balance, no jitter", **PERFECT)
    axis.set_xscale("log", base=2)
    axis.set_xticks(workers[1::2], [f"{count:,}" for count in workers[1::2]])
    axis.set_xlabel("workers")
    axis.set_title("last epoch (shaded: all clusters drawn)")
    return handles


def _over_epochs(axis: Axes, size: Mapping[str, Any], cues: Mapping[str, style.Cue]) -> None:
    """Every policy's efficiency in each epoch."""
    axis.axhline(100 * size["perfect_efficiency"], **PERFECT)
    for number, run in enumerate(size["runs"]):
        curve = 100 * np.array(run["efficiency"])
        marks = style.markers_at(len(curve), number)
        axis.plot(curve, markevery=marks, **_looks(cues[run["policy"]]))
    style.epoch_axis(axis, 0, len(curve) - 1, "epoch (first is 0)")
    axis.set_title(f"{size['workers']:,} workers")


def _looks(cue: style.Cue) -> dict[str, Any]:
    return {"color": cue.color, "linestyle": cue.linestyle, "marker": cue.marker}


FIGURES: dict[str, Callable[[Mapping[str, Any]], Figure]] = {"balance": balance, "scale": scale}


def write_figure(path: Path, folder: Path) -> list[Path]:
    """Draws the results in `path` into `folder`; both files' paths.

    Raises UserError where the file holds no results of a benchmark that has a figure.
    """
    document = read_json(path)
    name = document.get("benchmark") if isinstance(document, dict) else None
    if name not in FIGURES:
        known = ", ".join(FIGURES)
        raise UserError(f"{path}: no results of a benchmark that has a figure: {known}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot make the folder ({error.strerror})") from error
    with matplotlib.rc_context(style.RC):
        try:
            figure = FIGURES[name](document["results"])
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            raise UserError(f"{path}: its results are damaged: measure again") from error
    return style.save(figure, folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m plots.benchmark_figures", description="The figure of a benchmark's results."
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="what a benchmark wrote (JSON)")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of figures")
    options = parser.parse_args(arguments)
    try:
        files = write_figure(options.results, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
