"""How fast and how well unequal workers are balanced, and what a balanced step costs.

    python benchmarks/balance.py --out results/balance.json --check

Real gloo processes on this machine take real DDP steps through balancer.py. Only the compute is
modelled: a step of worker i lasts as long as its true cost says, with 2 % jitter, so that the best
possible step time T* is known. Reported is, per scenario and policy, the true imbalance
max_i t_i / T* after the rebalances, the number of steps until it stays below 1.05, and from then
on the wall time against the ideal: T* and that step's own all-reduce, which lasts from when the
last worker is ready until every worker has the sum. T* knows neither the jitter nor what the
balancer itself takes.

A change of speed at the border of two epochs has targets. One amid an epoch has a target for
rebalances every 20 steps; of one rebalance an epoch it is only reported what it does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.balance_scenarios import (
    EPOCH_STEPS,
    FREQUENT,
    QUICK_EPOCH_STEPS,
    Scenario,
    Strategy,
    scenarios,
)
from benchmarks.common import arguments, finish, launch, table

JITTER = 0.02  # deviation of the log of a step's time
# Steps until a plan takes effect: what two loader processes draw ahead by default.
LOOKAHEAD = 4

WITHIN = 1.05  # imbalance at which workers count as balanced
TARGET_IMBALANCE = 1.03  # from the second rebalance on
TARGET_STEPS = 60  # until balanced, with a rebalance every FREQUENT steps
TARGET_WALL = 1.05  # wall time over the ideal from then on


# --- running ----------------------------------------------------------------------------------


def job(scenario: Scenario, strategy: Strategy, epoch_steps: int) -> dict[str, Any]:
    """One run as balance_worker.py wants it."""
    return {
        "policy": strategy.policy,
        "every": strategy.every,
        "batch_size": scenario.batch_size,
        "epoch_steps": epoch_steps,
        "epochs": scenario.epochs(strategy),
        "lookahead": LOOKAHEAD,
        "jitter": JITTER,
        "seed": 0,
        "phases": [phase.facts() for phase in scenario.phases],
    }


def carry_out(workers: int, jobs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The records of every job, a list with one per worker each."""
    limit = 60.0
    for one in jobs:
        slowest = max(max(phase["a"]) for phase in one["phases"]) * one["batch_size"]
        limit += one["epochs"] * one["epoch_steps"] * (slowest + 0.02)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs))
        launch(workers, "benchmarks/balance_worker.py", str(path), folder, limit=limit)
        ranks = [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(workers)]
    return [list(records) for records in zip(*ranks)]


def measure(chosen: Sequence[Scenario], epoch_steps: int) -> list[dict[str, Any]]:
    """What all strategies of the scenarios do; scenarios of n workers share n processes."""
    runs: dict[str, list[dict[str, Any]]] = {scenario.name: [] for scenario in chosen}
    for workers in sorted({scenario.workers for scenario in chosen}):
        pairs = [
            (scenario, strategy)
            for scenario in chosen
            for strategy in scenario.strategies
            if scenario.workers == workers
        ]
        records = carry_out(workers, [job(*pair, epoch_steps) for pair in pairs])
        for (scenario, strategy), mine in zip(pairs, records):
            runs[scenario.name].append(analyse(scenario, strategy, epoch_steps, mine))
    return [
        {
            "name": scenario.name,
            "aligned": scenario.aligned,
            "workers": scenario.workers,
            "batch_size": scenario.batch_size,
            "phases": [phase.facts() for phase in scenario.phases],
            "runs": runs[scenario.name],
        }
        for scenario in chosen
    ]


# --- analysis ---------------------------------------------------------------------------------


def settled(imbalance: np.ndarray) -> int | None:
    """Steps until the imbalance [S] stays within WITHIN; None where it is not at the end."""
    outside = np.flatnonzero(imbalance > WITHIN)
    steps = int(outside[-1]) + 1 if len(outside) else 0
    return steps if steps < len(imbalance) else None


def second_plan(start: int, every: str | int, epoch_steps: int) -> int:
    """The first step with the plan of the second rebalance after step `start`."""
    period = epoch_steps if every == "epoch" else every
    step = (start // period + 2) * period
    # A new epoch is laid out with the newest shares: nothing of it was drawn ahead.
    return step if step % epoch_steps == 0 else step + LOOKAHEAD


def judged(imbalance: np.ndarray, measured: np.ndarray, second: int) -> dict[str, Any]:
    """What is said of the steps [S] between two changes of speed.

    imbalance, measured: by true costs, and by measured busy times; second: the step from which the
    second rebalance's plan is in force. None where there are no such steps.
    """
    after = len(imbalance) > second
    return {
        "steps_until_within": settled(imbalance),
        "imbalance_after_two": float(imbalance[second:].max()) if after else None,
        "measured_after_two": float(np.median(measured[second:])) if after else None,
    }


def analyse(
    scenario: Scenario, strategy: Strategy, epoch_steps: int, records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What one run says; records: its workers' (see balance_worker.train)."""
    sizes = np.array(records[0]["batch_sizes"])
    busy, ready, exchanged = (
        np.array([record[key] for record in records]).T for key in ("busy", "ready", "exchanged")
    )
    true, best = np.zeros(sizes.shape), np.zeros(len(sizes))
    starts = [phase.first_step for phase in scenario.phases]
    for phase in scenario.phases:
        true[phase.first_step :] = phase.times(sizes[phase.first_step :])
        best[phase.first_step :] = phase.optimum().seconds
    imbalance, measured = true.max(1) / best, busy.max(1) / best
    phases, balanced = [], np.zeros(len(sizes), bool)
    for start, end in zip(starts, [*starts[1:], len(sizes)]):
        second = second_plan(start, strategy.every, epoch_steps) - start
        phases.append(judged(imbalance[start:end], measured[start:end], second))
        steps = phases[-1]["steps_until_within"]
        balanced[start + (end - start if steps is None else steps) : end] = True
    # The all-reduce itself: from when the last worker is ready until every worker has the sum.
    exchange = exchanged.max(1) - ready.max(1)
    wall, ideal = np.diff(records[0]["moments"]), best + exchange
    over = float(wall[balanced].sum() / ideal[balanced].sum()) if balanced.any() else None
    return {
        "label": strategy.label,
        "policy": strategy.policy,
        "every": strategy.every,
        "phases": phases,
        "communication_seconds": float(np.median(exchange)),
        # What the balancer, the sampler and late wake-ups add to the modelled compute, per worker.
        "busy_above_true_seconds": np.median(busy - true, axis=0).tolist(),
        "steps": len(wall),
        "wall_seconds": float(wall.sum()),
        "wall_over_ideal": float(wall.sum() / ideal.sum()),
        "wall_over_ideal_balanced": over,
        "fits": records[0]["fits"],
        "imbalance": imbalance.tolist(),
        "batch_sizes": sizes.tolist(),
    }


# --- report -----------------------------------------------------------------------------------


def missed(scenario: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """One line per target that a run of the policy affine misses."""
    frequent = run["every"] == FREQUENT
    if run["policy"] != "affine":
        return []
    misses = []
    for since, phase in zip(("the start", "the change"), run["phases"]):
        worst, steps = phase["imbalance_after_two"], phase["steps_until_within"]
        # Amid a segment the first of the two rebalances has mixed times to go by.
        if scenario["aligned"] and (worst is None or worst > TARGET_IMBALANCE):
            misses.append(
                f"imbalance {_number(worst)} two rebalances after {since}, not {TARGET_IMBALANCE}"
            )
        if frequent and (steps is None or steps > TARGET_STEPS):
            misses.append(f"{steps} steps from {since} until within {WITHIN}, not {TARGET_STEPS}")
    wall = run["wall_over_ideal_balanced"]
    if frequent and (wall is None or wall > TARGET_WALL):
        misses.append(f"wall time over ideal {_number(wall)} once balanced, not {TARGET_WALL}")
    return [f"{scenario['name']}; {run['label']}: {miss}" for miss in misses]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table per run and phase."""
    return [
        {
            "scenario": scenario["name"] + (", after the change" if number else ""),
            "policy": run["label"],
            "steps to 1.05": phase["steps_until_within"],
            "imbalance": phase["imbalance_after_two"],
            "measured": phase["measured_after_two"],
            "wall/ideal": run["wall_over_ideal_balanced"],
            "T* (ms)": 1e3 * scenario["phases"][number]["optimum_seconds"],
            "exchange (ms)": 1e3 * run["communication_seconds"],
        }
        for scenario in results
        for run in scenario["runs"]
        for number, phase in enumerate(run["phases"])
    ]


def main() -> int:
    options = arguments("How fast and how well unequal workers are balanced.")
    epoch_steps = QUICK_EPOCH_STEPS if options.quick else EPOCH_STEPS
    results = measure(scenarios(epoch_steps, options.quick), epoch_steps)
    table(rows(results))
    misses = [
        miss for scenario in results for run in scenario["runs"] for miss in missed(scenario, run)
    ]
    facts = {
        "epoch_steps": epoch_steps,
        "lookahead": LOOKAHEAD,
        "jitter": JITTER,
        "within": WITHIN,
        "scenarios": results,
    }
    return finish("balance", facts, misses, options)


if __name__ == "__main__":
    sys.exit(main())
