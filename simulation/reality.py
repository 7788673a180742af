"""Predictions of the balance benchmark's runs, beside what they took.

A run is simulated from what it measured of itself: the a and d that its time model had fitted by
the end of each phase, the median time of its all-reduce, and the jitter its workers were given.
Plans are not taken over: the simulated partitioner finds its own, from simulated times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.files import read_json
from simulation.exchange import Exchange
from simulation.model import Cluster, Phase, Strategy, simulate

TARGET = 0.05  # predicted against measured wall time
# Whose fit stands in where a run's own policy never saw two batch sizes, in this order.
DONORS = ("affine", "proportional")

Fit = Mapping[str, Any]


def read_balance(path: Path) -> Mapping[str, Any]:
    """The results of a record of benchmarks/balance.py. Raises UserError where it is none."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("benchmark") != "balance":
        raise UserError(f"{path}: holds no results of benchmarks/balance.py")
    try:
        results = document["results"]
        runs = [run for scenario in results["scenarios"] for run in scenario["runs"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: its results are damaged: measure again") from error
    needed = [
        ("results", [results], ("epoch_steps", "lookahead", "jitter")),
        ("scenarios", results["scenarios"], ("name", "workers", "batch_size", "phases")),
        ("runs", runs, ("label", "policy", "every", "communication_seconds", "wall_seconds",
                        "steps", "fits")),
    ]  # fmt: skip
    for what, entries, keys in needed:
        for key in keys:
            if not all(isinstance(entry, dict) and key in entry for entry in entries):
                raise UserError(
                    f"{path}: its {what} lack {key}: measure again with benchmarks/balance.py"
                )
    return results


def compare(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured wall time of every run."""
    return [
        _compared(results, scenario, run)
        for scenario in results["scenarios"]
        for run in scenario["runs"]
    ]


def reality_misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per run that is off by more than TARGET, or has no prediction."""
    misses = []
    for row in rows:
        name = f"{row['scenario']}; {row['run']}"
        if row["error"] is None:
            misses.append(f"{name}: no prediction, {row['fit_of']}")
        elif abs(row["error"]) > TARGET:
            misses.append(f"{name}: predicted time is off by {row['error']:+.1%}, not {TARGET:.0%}")
    return misses


def reality_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table per run."""
    return [
        {
            "scenario": row["scenario"],
            "run": row["run"],
            "predicted (s)": row["predicted_seconds"],
            "measured (s)": row["measured_seconds"],
            "off (%)": None if row["error"] is None else 100 * row["error"],
            "fit": row["fit_of"],
        }
        for row in rows
    ]


def phase_fits(
    scenario: Mapping[str, Any], run: Mapping[str, Any], epoch_steps: int
) -> list[tuple[Fit, str]] | None:
    """For each phase the fit to use and whose it is; None where no run of the scenario has one.

    A phase's fit is the one after its last whole epoch: the time model forgets slowly and knows
    most then. While a run has not seen each worker at two batch sizes since its speed changed, its
    fit's split into a and d is a guess, and another run's on the same workers is better.
    """
    others = sorted(
        (other for other in scenario["runs"] if other is not run and other["policy"] in DONORS),
        key=lambda other: DONORS.index(other["policy"]),
    )
    chosen = []
    for number in range(len(scenario["phases"])):
        for candidate in (run, *others):
            fit = _fit_after(scenario, candidate, number, epoch_steps)
            if fit is not None and fit["known"]:
                chosen.append((fit, "its own" if candidate is run else candidate["label"]))
                break
        else:
            return None
    return chosen


def _fit_after(
    scenario: Mapping[str, Any], run: Mapping[str, Any], number: int, epoch_steps: int
) -> Fit | None:
    """The fit after the last epoch that lies whole inside phase `number`; None without one."""
    starts = [phase["first_step"] for phase in scenario["phases"]]
    end = starts[number + 1] if number + 1 < len(starts) else run["steps"]
    epoch = min(end, run["steps"]) // epoch_steps - 1
    return run["fits"][epoch] if epoch >= 0 and epoch * epoch_steps >= starts[number] else None


def _compared(
    results: Mapping[str, Any], scenario: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    fits = phase_fits(scenario, run, results["epoch_steps"])
    row = {
        "scenario": scenario["name"],
        "run": run["label"],
        "measured_seconds": run["wall_seconds"],
    }
    if fits is None:
        # Nothing better than a guess: said, not hidden behind a number.
        return {**row, "predicted_seconds": None, "error": None, "fit_of": "no run has a known fit"}
    predicted = _predict(results, scenario, run, [fit for fit, _ in fits])
    return {
        **row,
        "predicted_seconds": predicted,
        "error": predicted / run["wall_seconds"] - 1,
        "fit_of": " and ".join(dict.fromkeys(whose for _, whose in fits)),
    }


def _predict(
    results: Mapping[str, Any], scenario: Mapping[str, Any], run: Mapping[str, Any],
    fits: Sequence[Fit],
) -> float:  # fmt: skip
    workers = scenario["workers"]
    jitter = np.full(workers, float(results["jitter"]))
    phases = [
        Phase(phase["first_step"], np.array(fit["a"]), np.array(fit["d"]), jitter)
        for phase, fit in zip(scenario["phases"], fits)
    ]
    cluster = Cluster(
        scenario["batch_size"],
        results["epoch_steps"],
        tuple(phases),
        Exchange(run["communication_seconds"]),
        np.ones(workers),
        np.full(workers, float(scenario["batch_size"])),
    )
    strategy = Strategy(run["policy"], run["every"], results["lookahead"])
    return simulate(cluster, strategy, run["steps"] // results["epoch_steps"]).seconds
