"""What the paper's authors measured, predicted from their sync-sgd runs alone.

Per model and delay, the sync-sgd row of data/reference/authors_runs.csv gives all the numbers that
the prediction of dp-sgd and edp-sgd rests on; no constant is fitted to the rows that are predicted:

- a: the undelayed worker's busy time over its 128 samples, for both workers (the GPUs are alike);
  d: the injected sleep, for worker 1. For ResNet50 at 0.1 s, a is that of the 0.2 s row: its own
  sync-sgd run was made on a slower machine state (data/reference/README.md).
- What a step takes beside the slowest worker's busy time: its reduce time (the delayed worker
  waits for nobody) and the rest of the step (optimizer, loading, bookkeeping).
- What an epoch takes beside its steps: evaluation, and what is left of the run's measured time.

A run of the paper's rule is simulated from equal shares, its first unbalanced epochs included.
Predicted and measured run times both include evaluation. The authors' runs have no record of the
jitter, so none is assumed.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulation.exchange import Exchange
from simulation.model import Cluster, Phase, Run, Strategy, simulate

FOLDER = Path(__file__).resolve().parent.parent / "data" / "reference"
# (model, delay): the delay of the sync-sgd row whose undelayed worker is taken instead.
COMPUTE_FROM = {("resnet50", 0.1): 0.2}
LAST_EPOCHS = 50
SAMPLES_PER_WORKER = 128
TARGETS = {"resnet50": 0.05}  # predicted against measured run time
# An AWS row's busy time at one batch size does not tell a from d: the part of it that grows with
# the batch is 1 at most, and 0.8 is what TimeModel takes for likely.
ELASTICITIES = (1.0, 0.8)
NORMAL_P95 = 1.6449

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """Mean seconds of an epoch: where a run's time goes. They add up to the run's time."""

    busy: float  # of the slowest worker
    reduce: float  # of the worker that waits least
    step_rest: float  # what a step takes beside these two
    evaluation: float
    epoch_rest: float  # what the run's time has beside all of them

    @property
    def total(self) -> float:
        return self.busy + self.reduce + self.step_rest + self.evaluation + self.epoch_rest

    def facts(self) -> dict[str, float]:
        return {**vars(self), "total": self.total}


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a CSV in data/reference, numbers as floats."""
    with open(FOLDER / name, encoding="utf-8", newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def predict_runs() -> list[dict[str, Any]]:
    """Prediction and measurement of the eight dp-sgd and edp-sgd rows."""
    rows, epochs = read_rows("authors_runs.csv"), read_rows("authors_epochs.csv")
    sync = {
        (row["model"], row["delay_seconds"]): row for row in rows if row["algorithm"] == "sync-sgd"
    }
    return [
        _predicted(row, sync, _slowest_busy(row, epochs))
        for row in rows
        if row["algorithm"] != "sync-sgd"
    ]


def measured_parts(row: Row, busy: float) -> Parts:
    """Where an epoch of a row goes; busy: the slowest worker's mean busy time per step."""
    steps = row["iterations_per_epoch"]
    # Both workers make the same steps. On VGG16 worker 1 spends some of a step outside of what its
    # own timers see, so the longer of the two is the step.
    step = max(row["batch_seconds_rank0"], row["batch_seconds_rank1"])
    reduce = min(row["reduce_seconds_rank0"], row["reduce_seconds_rank1"])
    evaluation = row["test_seconds_rank0"]
    return Parts(
        steps * busy,
        steps * reduce,
        steps * (step - busy - reduce),
        evaluation,
        row["run_seconds_mean"] / row["epochs"] - steps * step - evaluation,
    )


def simulated(row: Row, undelayed: float, beside: Parts, policy: str) -> Run:
    """A run under the row's delay, with the time `beside` the busy time."""
    steps = int(row["iterations_per_epoch"])
    a = np.full(2, undelayed / SAMPLES_PER_WORKER)
    phase = Phase(0, a, np.array([0.0, row["delay_seconds"]]), np.zeros(2))
    batch = int(row["global_batch"])
    cluster = Cluster(
        batch,
        steps,
        (phase,),
        Exchange((beside.reduce + beside.step_rest) / steps),
        np.ones(2),
        np.full(2, float(batch)),
        beside.evaluation + beside.epoch_rest,
    )
    return simulate(cluster, Strategy(policy), int(row["epochs"]))


def _predicted(
    row: Row, sync: Mapping[tuple[str, float], Row], measured_busy: float
) -> dict[str, Any]:
    key = row["model"], row["delay_seconds"]
    own = sync[key]
    undelayed = sync[key[0], COMPUTE_FROM.get(key, key[1])]["process_seconds_rank0_last50"]
    beside = measured_parts(own, _slowest(own))
    run, equal = (simulated(row, undelayed, beside, policy) for policy in ("proportional", "equal"))
    busy = run.busy_seconds.max(1).mean() * row["iterations_per_epoch"]
    return {
        **{name: row[name] for name in ("model", "delay_seconds", "algorithm")},
        **_run_times(row, run.seconds, beside),
        "predicted_busy_seconds": run.busy_seconds[-LAST_EPOCHS:].mean(0).tolist(),
        "measured_busy_seconds": [row[f"process_seconds_rank{rank}_last50"] for rank in (0, 1)],
        "optimum_seconds": float(run.optimum_seconds[0]),
        "predicted_epoch_parts": dataclasses.replace(beside, busy=float(busy)).facts(),
        "measured_epoch_parts": measured_parts(row, measured_busy).facts(),
        "predicted_speed_up": equal.seconds / run.seconds,
        "measured_speed_up": own["run_seconds_mean"] / row["run_seconds_mean"],
    }


def _run_times(row: Row, seconds: float, beside: Parts) -> dict[str, float]:
    """Predicted against measured, and what using less of the sync-sgd row would give."""
    measured, epochs = row["run_seconds_mean"], row["epochs"]
    without_rest = seconds - epochs * beside.epoch_rest
    return {
        "predicted_run_seconds": seconds,
        "measured_run_seconds": measured,
        "measured_run_seconds_std": row["run_seconds_std"],
        "error": seconds / measured - 1,
        # Steps and evaluation of the last of the five runs, not the mean run time of all.
        "error_without_epoch_rest": without_rest / measured - 1,
        # Busy, reduce and evaluation times alone.
        "error_from_phases_alone": (without_rest - epochs * beside.step_rest) / measured - 1,
    }


def _slowest(row: Row) -> float:
    return max(row["process_seconds_rank0_last50"], row["process_seconds_rank1_last50"])


def _slowest_busy(row: Row, epochs: Sequence[Row]) -> float:
    """The slowest worker's busy time per step, mean over all epochs of a row's run."""
    keys = ("model", "delay_seconds", "algorithm")
    return float(
        np.mean(
            [
                max(epoch["process_seconds_rank0"], epoch["process_seconds_rank1"])
                for epoch in epochs
                if all(epoch[key] == row[key] for key in keys)
            ]
        )
    )


# --- the AWS pair -----------------------------------------------------------------------------


def predict_aws() -> list[dict[str, Any]]:
    """What dp-sgd would give on the authors' P2 and P3, which they measured with equal shares."""
    rows = read_rows("authors_aws.csv")
    models = dict.fromkeys(row["model"] for row in rows)
    return [
        _predicted_aws([row for row in rows if row["model"] == model], elasticity)
        for model in models
        for elasticity in ELASTICITIES
    ]


def _predicted_aws(rows: Sequence[Row], elasticity: float) -> dict[str, Any]:
    busy = np.array([row["process"] for row in rows])
    samples = np.array([row["batch_per_worker"] for row in rows])
    spread = [np.log(row["process_p95"] / row["process_p5"]) / (2 * NORMAL_P95) for row in rows]
    step = max(row["batch"] for row in rows)
    phase = Phase(0, elasticity * busy / samples, (1 - elasticity) * busy, np.array(spread))
    total = int(samples.sum())
    cluster = Cluster(
        total, 196, (phase,), Exchange(step - busy.max()), np.ones(2), np.full(2, float(total))
    )
    run = simulate(cluster, Strategy("proportional"), epochs=10)
    settled = float(run.by_epoch(run.step_seconds)[-1].mean())
    return {
        "model": rows[0]["model"],
        "instances": [row["instance"] for row in rows],
        "elasticity": elasticity,
        "measured_equal_step_seconds": step,
        "exchange_and_rest_seconds": float(step - busy.max()),
        "predicted_step_seconds": settled,
        "predicted_speed_up": step / settled,
        "predicted_batch_sizes": run.changes[-1][1].tolist(),
        "predicted_busy_seconds": run.busy_seconds[-1].tolist(),
        "optimum_seconds": cluster.optima[0].seconds,
    }


# --- report -----------------------------------------------------------------------------------


def author_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table per predicted run."""
    return [
        {
            "model": run["model"],
            "delay (s)": run["delay_seconds"],
            "algorithm": run["algorithm"],
            "run predicted (s)": f"{run['predicted_run_seconds']:.0f}",
            "measured (s)": f"{run['measured_run_seconds']:.0f}",
            "off": f"{run['error']:+.1%}",
            "busy predicted (ms)": _pair(run["predicted_busy_seconds"]),
            "busy measured (ms)": _pair(run["measured_busy_seconds"]),
        }
        for run in runs
    ]


def part_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measured minus predicted, per part, as a percentage of the measured epoch."""
    return [
        {
            "model": run["model"],
            "delay (s)": run["delay_seconds"],
            "algorithm": run["algorithm"],
            **{
                f"{part} (%)": 100 * (run["measured_epoch_parts"][part] - seconds)
                / run["measured_epoch_parts"]["total"]
                for part, seconds in run["predicted_epoch_parts"].items()
            },
        }
        for run in runs
    ]  # fmt: skip


def aws_rows(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "model": pair["model"],
            "a*b part": pair["elasticity"],
            "equal step (ms)": 1e3 * pair["measured_equal_step_seconds"],
            "dp-sgd step (ms)": 1e3 * pair["predicted_step_seconds"],
            "speed-up": pair["predicted_speed_up"],
            "batch sizes": " ".join(map(str, pair["predicted_batch_sizes"])),
        }
        for pair in pairs
    ]


def author_misses(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per run of a model with a target that is missed."""
    return [
        f"{run['model']}, {run['delay_seconds']} s, {run['algorithm']}: predicted run time is off "
        f"by {run['error']:+.1%}, not {TARGETS[run['model']]:.0%}"
        for run in runs
        if run["model"] in TARGETS and abs(run["error"]) > TARGETS[run["model"]]
    ]


def _pair(seconds: Sequence[float]) -> str:
    return " ".join(f"{1e3 * value:.1f}" for value in seconds)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
