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
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from configs.errors import UserError
from plots import scaling_accuracy as accuracies
from plots import scaling_figures as figures
from plots import style
from plots.estimates import Spread, percent_text
from plots.records import read_runs
from plots.scaling_predictions import Costs, Network, measured_costs, predicted
from plots.scaling_records import Family, Point, families, points, seconds_to
from terminal import say

# Without --accuracy: so many points below the best final accuracy, rounded down to whole percent.
_BELOW_BEST = 5
_UNKNOWN = "–"


def write_study(
    paths: Sequence[Path], out: Path, network: Network | None = None, accuracy: float | None = None
) -> list[str]:
    """Writes all figures and tables of the runs beneath `paths` into `out`; notes on what lacks.

    network: for predictions, None takes the measured exchange; accuracy: 0..1, that times are taken
    to. Raises UserError when there are no runs, a record is damaged, or `out` cannot be written.
    """
    runs, notes = read_runs(paths)
    found = families(points(runs))
    document, text = [], ["# Scaling out"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for family in found:
            costs, goal = measured_costs(family), accuracy or _goal(family)
            for name, draw in _figures(family, costs, network, goal):
                with matplotlib.rc_context(style.RC):
                    figure = draw()
                if figure is None:
                    notes.append(f"{family.slug}: no figure '{name}', its runs are missing")
                else:
                    style.save(figure, out / f"{family.slug}_{name}")
            record = _record(family, costs, network, goal)
            document.append(record)
            text += _markdown(record)
        (out / "scaling.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        (out / "scaling.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    return notes


def _figures(
    family: Family, costs: Costs | None, network: Network | None, goal: float | None
) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    yield "throughput-efficiency", partial(figures.scaling, family, costs, network)
    yield "mixed-workers", partial(figures.mixed, family, costs, network)
    yield "exchange", partial(figures.exchanges, family)
    yield "busy-shares", partial(figures.busy_shares, family)
    yield "time-to-accuracy", partial(accuracies.time_to_accuracy, family, goal)
    yield "accuracy-batch", partial(accuracies.accuracy_by_batch, family)


def _goal(family: Family) -> float | None:
    """The accuracy, 0..1, that times are taken to: a little below the best final one."""
    trained = accuracies.trained_points(family)
    if not trained:
        return None
    best = max(point.top1.mean for point in trained)
    return max(1, math.floor(100 * best) - _BELOW_BEST) / 100


# --- numbers ----------------------------------------------------------------------------------


def _record(
    family: Family, costs: Costs | None, network: Network | None, goal: float | None
) -> dict[str, Any]:
    """All numbers behind a family's figures: seconds, samples/s, fractions."""
    return {
        "title": family.title,
        "costs": None if costs is None else vars(costs),
        "network": None if network is None else vars(network),
        "throughput": _throughputs(family),
        "predictions": [] if costs is None else _checks(family, costs, network),
        "accuracy_goal": goal,
        "trained": [_point(point, goal) for point in accuracies.trained_points(family)],
    }


def _throughputs(family: Family) -> list[dict[str, Any]]:
    """Settled samples/s, and the efficiency against the least number of workers as large each."""
    rows = []
    kinds = dict.fromkeys(
        (p.setting.cluster, p.setting.exchange, p.setting.algorithm) for p in family.points
    )
    alone = family.speeds("equal", exchange="ddp", algorithm="sync-sgd")
    for cluster, exchange, algorithm in kinds:
        speeds = family.speeds(cluster, exchange=exchange, algorithm=algorithm)
        for (workers, batch), speed in speeds.items():
            base = alone.get((1, batch // workers)) if batch % workers == 0 else None
            rows.append(
                {
                    "cluster": cluster, "exchange": exchange, "algorithm": algorithm,
                    "workers": workers, "batch": batch, "samples_per_second": speed.mean,
                    "sd": speed.sd,
                    "efficiency": None if base is None else speed.mean / (workers * base.mean),
                }
            )  # fmt: skip
    return rows


def _checks(family: Family, costs: Costs, network: Network | None) -> list[dict[str, Any]]:
    """What the simulator predicts for numbers of workers that were measured, and its error."""
    rows = []
    measured = family.speeds("equal", exchange="ddp", algorithm="sync-sgd")
    for (workers, batch), speed in measured.items():
        if workers == 1:
            continue
        own = predicted(costs, batch, [1.0] * workers, network=network)
        row = {
            "workers": workers, "batch": batch, "measured": speed.mean, "predicted": own,
            "error": _error(own, speed.mean),
        }  # fmt: skip
        if costs.cores is not None and workers > costs.cores:
            shared = predicted(costs, batch, [1.0] * workers, network=network, share_cores=True)
            row |= {"predicted_on_shared_cores": shared,
                    "error_on_shared_cores": _error(shared, speed.mean)}  # fmt: skip
        rows.append(row)
    return rows


def _error(ends: tuple[float, float], measured: float) -> float:
    """Predicted over measured less 1, of the middle of the band."""
    return sum(ends) / 2 / measured - 1


def _point(point: Point, goal: float | None) -> dict[str, Any]:
    key, top1 = point.setting, point.top1
    times = [None if goal is None else seconds_to(run, goal) for run in point.runs]
    return {
        "workers": key.workers, "batch": key.batch, "rule": key.rule, "algorithm": key.algorithm,
        "exchange": key.exchange, "cluster": key.cluster, "epochs": key.epochs,
        "seeds": len(point.runs), "unfinished": point.diverged, "top1": top1.mean,
        "top1_sd": top1.sd, "seconds_to_goal": times,
        "busy_share": None if point.busy_share is None else point.busy_share.tolist(),
    }  # fmt: skip


# --- tables -----------------------------------------------------------------------------------


def _markdown(record: dict[str, Any]) -> list[str]:
    parts = [f"## {record['title']}", "Settled throughput; efficiency is against one worker with "
             "as many samples."]  # fmt: skip
    parts.append(
        _table(
            ["cluster", "exchange", "algorithm", "workers", "global batch", "samples/s",
             "efficiency"],
            [
                [r["cluster"], r["exchange"], r["algorithm"], f"{r['workers']}", f"{r['batch']:,}",
                 f"{r['samples_per_second']:,.0f}" + (f" ± {r['sd']:,.0f}" if r["sd"] else ""),
                 _percent(r["efficiency"])]
                for r in record["throughput"]
            ],
        )
    )  # fmt: skip
    if record["predictions"]:
        parts.append("Predicted by the simulator from one worker's costs, beside the measurement; "
                     "in brackets as if the workers shared this machine's cores.")  # fmt: skip
        parts.append(
            _table(
                ["workers", "global batch", "measured samples/s", "predicted", "off"],
                [
                    [f"{r['workers']}", f"{r['batch']:,}", f"{r['measured']:,.0f}",
                     _band(r, "predicted"), _off(r)]
                    for r in record["predictions"]
                ],
            )
        )  # fmt: skip
    goal = record["accuracy_goal"]
    if goal is None:
        return parts
    parts.append(f"Whole runs; seconds of training to {100 * goal:g} % test top-1, by seed.")
    parts.append(
        _table(
            ["cluster", "algorithm", "exchange", "workers", "global batch", "learning rate",
             "epochs", "seeds", "top-1 %", "seconds"],
            [
                [r["cluster"], r["algorithm"], r["exchange"], f"{r['workers']}", f"{r['batch']:,}",
                 r["rule"], f"{r['epochs']}",
                 f"{r['seeds']}" + (f", {r['unfinished']} unfinished" if r["unfinished"] else ""),
                 percent_text(Spread(r["top1"], r["top1_sd"])),
                 ", ".join(_UNKNOWN if s is None else f"{s:.1f}" for s in r["seconds_to_goal"])]
                for r in record["trained"]
            ],
        )
    )  # fmt: skip
    return parts


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.0f} %"


def _band(row: dict[str, Any], key: str) -> str:
    shared = row.get(f"{key}_on_shared_cores")
    text = _ends(row[key])
    return text if shared is None else f"{text} ({_ends(shared)})"


def _ends(ends: Sequence[float]) -> str:
    low, high = (f"{end:,.0f}" for end in ends)
    return low if low == high else f"{low} – {high}"


def _off(row: dict[str, Any]) -> str:
    shared = row.get("error_on_shared_cores")
    text = f"{100 * row['error']:+.0f} %"
    return text if shared is None else f"{text} ({100 * shared:+.0f} %)"


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
    if (options.bandwidth is None) != (options.latency is None):
        print("error: --bandwidth and --latency go together: give both", file=sys.stderr)
        return 1
    network = None if options.bandwidth is None else Network(options.bandwidth, options.latency)
    goal = None if options.accuracy is None else options.accuracy / 100
    try:
        notes = write_study(options.runs, options.out, network, goal)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say((options.out / "scaling.md").read_text(encoding="utf-8"))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
