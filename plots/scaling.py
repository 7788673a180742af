"""Figures and numbers of a scaling study, from run folders alone.

    python -m plots.scaling runs/scaling-cpu --out figures
    python -m plots.scaling runs/scaling --out figures --bandwidth 12.5e9 --latency 5e-6

writes per model, as SVG and PNG: throughput and efficiency (weak and strong scaling), workers of
unequal speed, ways to exchange gradients, busy shares, time to an accuracy, and accuracy against
the global batch. scaling.md and scaling.json hold the numbers behind them, and the simulator's
predictions beside what was measured. What the records do not allow is left out and said.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from configs.errors import UserError
from partitioner import PlanError
from plots import scaling_accuracy as accuracies
from plots import scaling_exchanges, scaling_figures, scaling_tables, scaling_unequal, style
from plots.records import diverged_in, read_runs
from plots.scaling_predictions import NO_COSTS, Costs, Network, measured_costs
from plots.scaling_records import Family, families, points
from plots.scaling_seeds import spread
from terminal import say

# Without --accuracy: so many points below the best final accuracy, rounded down to whole percent.
_BELOW_BEST = 5


def write_study(
    paths: Sequence[Path], out: Path, network: Network | None = None, accuracy: float | None = None
) -> list[str]:
    """Writes all figures and tables of the runs beneath `paths` into `out`; notes on what lacks.

    network: for predictions, None takes the measured exchange; accuracy: 0..1, that times are taken
    to. Raises UserError when there are no runs, a record is damaged, or `out` cannot be written,
    and PlanError for a batch that cannot be simulated.
    """
    runs, notes = read_runs(paths, diverged=True)
    document, text = [], ["# Scaling out"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for family in families(points(runs)):
            costs = measured_costs(family)
            goal = _goal(family) if accuracy is None else accuracy
            own = _notes(family, costs)
            for name, draw in _figures(family, costs, network, goal):
                with matplotlib.rc_context(style.RC):
                    figure = draw()
                if figure is None:
                    own.append(f"no figure '{name}', its runs are missing")
                else:
                    style.save(figure, out / f"{family.slug}_{name}")
            notes += [f"{family.slug}: {note}" for note in own] + accuracies.notes(family)
            record = scaling_tables.record(family, costs, network, goal)
            document.append(record)
            text += scaling_tables.markdown(record)
        if notes:
            text += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        (out / "scaling.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        (out / "scaling.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    return notes


def _figures(
    family: Family, costs: Costs | None, network: Network | None, goal: float | None
) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    yield "throughput-efficiency", partial(scaling_figures.scaling, family, costs, network)
    yield "mixed-workers", partial(scaling_unequal.mixed, family, costs, network)
    yield "exchange", partial(scaling_exchanges.exchanges, family)
    yield "busy-shares", partial(scaling_unequal.busy_shares, family)
    yield "time-to-accuracy", partial(accuracies.time_to_accuracy, family, goal)
    yield "accuracy-batch", partial(accuracies.accuracy_by_batch, family)


def _goal(family: Family) -> float | None:
    """The accuracy, 0..1, that times are taken to: a little below the best final one."""
    finals = [point.top1 for point in accuracies.trained_points(family) if point.top1]
    if not finals:
        return None
    best = max(spread(seeds).mean for seeds in finals)
    return max(1, math.floor(100 * best) - _BELOW_BEST) / 100


def _notes(family: Family, costs: Costs | None) -> list[str]:
    """The runs that diverged, and what a family's figures leave out."""
    ends = [(run.path, diverged_in(run)) for point in family.points for run in point.runs]
    return [
        *(f"{path} diverged in epoch {n} (from 0)" for path, n in ends if n is not None),
        *([f"no predictions: {NO_COSTS}"] if costs is None else []),
        *scaling_figures.notes(family),
        *scaling_exchanges.notes(family),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m plots.scaling",
        description="Figures and numbers of a scaling study from run folders.",
        epilog="example: python -m plots.scaling runs/scaling-cpu --out figures",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that hold runs")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder for figures and tables"
    )
    parser.add_argument(
        "--accuracy", type=float, metavar="PERCENT", help="test top-1 that times are taken to"
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="BYTES/S", help="of each worker, for predictions"
    )
    parser.add_argument("--latency", type=float, metavar="S", help="of a message, for predictions")
    options = parser.parse_args(arguments)
    try:
        network, goal = _network(options), _accuracy(options.accuracy)
        notes = write_study(options.runs, options.out, network, goal)
    except (UserError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say((options.out / "scaling.md").read_text(encoding="utf-8"))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _network(options: argparse.Namespace) -> Network | None:
    bandwidth, latency = options.bandwidth, options.latency
    if bandwidth is None and latency is None:
        return None
    if bandwidth is None or latency is None:
        raise UserError("--bandwidth and --latency go together: give both")
    if not 0 < bandwidth < math.inf:
        raise UserError(f"--bandwidth must be a number of bytes/s above 0, not {bandwidth:g}")
    if not 0 <= latency < math.inf:
        raise UserError(f"--latency must be a number of seconds, 0 or more, not {latency:g}")
    return Network(bandwidth, latency)


def _accuracy(percent: float | None) -> float | None:
    """As a fraction. One of up to 1 % is taken for a mistake: a fraction was given."""
    if percent is None:
        return None
    if not 1 < percent < 100:
        raise UserError(f"--accuracy is in percent, above 1 and below 100, not {percent:g}")
    return percent / 100


if __name__ == "__main__":
    sys.exit(main())
