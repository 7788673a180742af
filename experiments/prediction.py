"""Predicted times of runs, simulated from what has been measured of their workload.

The best source there is counts: finished runs of the same config and settings; another finished run
of the same workload; the calibration; what the paper's authors measured. Without any of them a time
is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from data.sources import CIFAR10_SAMPLES
from experiments.calibration import Calibrations, workload
from experiments.grid import PlannedRun
from partitioner import PlanError
from plots.records import column
from reader import read_run
from simulation.authors import SAMPLES_PER_WORKER, measured_parts, read_rows
from simulation.training import Costs, costs_of_run, simulated


@dataclass(frozen=True)
class Prediction:
    """Seconds of a whole run with its start and evaluation, or None; source: what it rests on."""

    seconds: float | None
    source: str


class Predictor:
    """Predicts runs of one experiment; `learn` takes in what has finished."""

    def __init__(self, calibrations: Calibrations) -> None:
        self._calibrations = calibrations
        self._seconds: dict[Path, list[float]] = defaultdict(list)  # of one setting, per epoch
        self._costs: list[tuple[dict[str, Any], Costs]] = []
        self._told: dict[tuple[Any, ...], Prediction] = {}
        # Seconds until the first epoch begins, which no record knows.
        self._starts: list[float] = []

    def learn(self, run: PlannedRun, wall_seconds: float | None = None) -> None:
        """Takes in the records of a finished run; wall_seconds: of all of it, made in one go.

        Raises UserError where they tell no costs; its time counts all the same.
        """
        record = read_run(run.folder)
        self._told.clear()
        total = float(column(record, "total_seconds")[-1])
        if wall_seconds is not None:
            self._starts.append(max(0.0, wall_seconds - total))
        self._seconds[run.folder.parent].append(total / len(record.epochs))
        self._costs.append((workload(run.config), costs_of_run(record)))

    def predict(self, run: PlannedRun) -> Prediction:
        """run.config holds the delays' measured times, as far as there are any."""
        # Runs that differ by seed alone take as long, and there are many.
        known = self._calibrations.entries
        key = (run.folder.parent, run.config.stragglers, len(known))
        if key not in self._told:
            self._told[key] = self._predict_epochs(run)
        told = self._told[key]
        starts = [entry["start_seconds"] for entry in known] + self._starts
        if told.seconds is None or not starts:
            return told
        return Prediction(told.seconds + float(np.median(starts)), told.source)

    def _predict_epochs(self, run: PlannedRun) -> Prediction:
        config = run.config
        if same := self._seconds.get(run.folder.parent):
            return Prediction(float(np.mean(same)) * config.epochs, "finished runs alike")
        own = workload(config)
        for known, costs in reversed(self._costs):
            if known == own and run.workers in (None, len(costs.a)):
                return _predicted(costs, config, "finished run of this workload")
        if (entry := self._calibrations.find(config, run.workers)) is not None:
            return _predicted(_costs_of_calibration(entry, config), config, "calibration")
        if (costs := authors_costs(config, run.workers)) is not None:
            return _predicted(costs, config, "the authors' machine")
        return Prediction(None, "nothing measured yet")


def authors_costs(config: Config, workers: int | None) -> Costs | None:
    """What the paper's authors measured of a workload of theirs; None for any other.

    The undelayed worker of the sync-sgd run with the longer delay (the shorter one's ran on a
    slower machine state; see data/reference/README.md) stands for both.
    """
    if config.batch_size != 256 or config.data.name != "cifar10" or workers != 2:
        return None
    rows = [
        row
        for row in read_rows("authors_runs.csv")
        if row["model"] == config.model.name and row["algorithm"] == "sync-sgd"
    ]
    if not rows:
        return None
    row = max(rows, key=lambda row: row["delay_seconds"])
    parts = measured_parts(row, row["process_seconds_rank1_last50"])
    return Costs(
        np.full(2, row["process_seconds_rank0_last50"] / SAMPLES_PER_WORKER),
        np.zeros(2),
        (parts.reduce + parts.step_rest) / row["iterations_per_epoch"],
        parts.evaluation + parts.epoch_rest,
        CIFAR10_SAMPLES,
    )


def _predicted(costs: Costs, config: Config, source: str) -> Prediction:
    try:
        run = simulated(costs, config)
    except PlanError:
        run = None
    return Prediction(None if run is None else run.seconds, source)


def _costs_of_calibration(entry: dict[str, Any], config: Config) -> Costs:
    busy = np.array(entry["busy_seconds"], float)
    return Costs(
        busy * len(busy) / config.batch_size,
        np.zeros(len(busy)),
        entry["exchange_seconds"],
        entry["evaluation_seconds"],
        entry["train_samples"],
    )
