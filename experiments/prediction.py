"""Predicted times of runs, from what has been measured of their workload.

The best source there is counts: finished runs of the same config and settings; another finished run
of the same workload; the calibration; what the paper's authors measured. Without any of them a time
is unknown.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config, StragglerRule, from_mapping, resolve
from data.sources import CIFAR10_SAMPLES
from experiments.calibration import Calibrations, workload
from experiments.grid import PlannedRun
from experiments.launcher import ROOT
from partitioner import Partitioner, PlanError
from recorder import Run, read_run

AUTHORS = ROOT / "data" / "reference" / "authors_runs.csv"
# Busy times of a simulated epoch have no noise, but the time model wants an error.
_RELATIVE_ERROR = 0.01


@dataclass(frozen=True)
class Costs:
    """What steps cost without delays: worker i is busy for a_i * b + d_i seconds.

    a, d: float64 [n]; exchange_seconds: what a step takes beyond its slowest worker;
    evaluation_seconds: per epoch; train_samples: None where only the data set would tell.
    """

    a: np.ndarray
    d: np.ndarray
    exchange_seconds: float
    evaluation_seconds: float
    train_samples: int | None


@dataclass(frozen=True)
class Prediction:
    """Seconds of a whole run with its start and evaluation, or None; source: what it rests on."""

    seconds: float | None
    source: str


class Predictor:
    """Predicts runs of one experiment; `learn` takes in what has finished."""

    def __init__(self, calibrations: Calibrations, workers: int | None) -> None:
        self._calibrations, self._workers = calibrations, workers
        self._seconds: dict[Path, list[float]] = defaultdict(list)  # of one setting, per epoch
        self._costs: list[tuple[dict[str, Any], Costs]] = []
        # Seconds until the first epoch begins, which no record knows.
        self._starts: list[float] = [entry["start_seconds"] for entry in calibrations.entries]

    def learn(self, run: PlannedRun, wall_seconds: float | None = None) -> None:
        """Takes in the records of a finished run; wall_seconds: of all of it, made in one go."""
        record = read_run(run.folder)
        if wall_seconds is not None:
            self._starts.append(wall_seconds - record.epochs[-1]["total_seconds"])
        self._seconds[run.folder.parent].append(
            record.epochs[-1]["total_seconds"] / len(record.epochs)
        )
        self._costs.append((workload(run.launch.config), _costs_of_run(record)))

    def predict(self, run: PlannedRun) -> Prediction:
        """run.launch.config holds the delays' measured times, as far as there are any."""
        told = self._predict_epochs(run)
        if told.seconds is None or not self._starts:
            return told
        return Prediction(told.seconds + float(np.median(self._starts)), told.source)

    def _predict_epochs(self, run: PlannedRun) -> Prediction:
        config = run.launch.config
        if same := self._seconds.get(run.folder.parent):
            return Prediction(float(np.mean(same)) * config.epochs, "finished runs alike")
        own = workload(config)
        for known, costs in reversed(self._costs):
            if known == own:
                return _predicted(costs, config, "finished run of this workload")
        if (entry := self._calibrations.find(config)) is not None:
            return _predicted(_costs_of_calibration(entry, config), config, "calibration")
        if (costs := authors_costs(config, self._workers)) is not None:
            return _predicted(costs, config, "the authors' machine")
        return Prediction(None, "nothing measured yet")


def run_seconds(costs: Costs, config: Config) -> float | None:
    """Seconds of a run of `config` on workers of these costs, evaluation included.

    The real partitioner plans each epoch from the simulated busy times of the one before; delays
    count with their mean. None where costs and config do not say the number of samples, or batch
    sizes are those of another run.
    """
    samples = _train_samples(config, costs)
    partition = config.partition
    if samples is None or partition.policy == "replay":
        return None
    partitioner = Partitioner(
        len(costs.a),
        config.batch_size,
        partition.policy,
        partition.shares,
        partition.min_batch,
        partition.max_batch,
        partition.min_gain,
    )
    steps, total = math.ceil(samples / config.batch_size), 0.0
    for epoch in range(config.epochs):
        left = steps
        length = steps if partition.every == "epoch" else partition.every
        while left > 0:
            sizes, segment = partitioner.batch_sizes, min(length, left)
            busy = _busy(costs, config, epoch, sizes)
            total += segment * (busy.max() + costs.exchange_seconds)
            partitioner.rebalance(sizes, busy, _RELATIVE_ERROR * busy)
            left -= segment
        total += costs.evaluation_seconds
    return float(total)


def authors_costs(config: Config, workers: int | None) -> Costs | None:
    """What the paper's authors measured of a workload of theirs; None for any other, or without it.

    The undelayed worker of the sync-sgd run with the longer delay (the shorter one's ran on a
    slower machine state; see data/reference/README.md) stands for both.
    """
    known = config.batch_size == 256 and config.data.name == "cifar10" and workers == 2
    if not known or not AUTHORS.exists():
        return None
    with open(AUTHORS, encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model"] == config.model.name and row["algorithm"] == "sync-sgd"
        ]
    if not rows:
        return None
    row = max(rows, key=lambda row: float(row["delay_seconds"]))
    a = float(row["process_seconds_rank0_last50"]) / 128
    # The delayed worker waits for nobody: beyond its own work a step is all-reduce and update.
    beyond = float(row["batch_seconds_rank1"]) - float(row["process_seconds_rank1_last50"])
    evaluation = float(row["test_seconds_rank0"])
    return Costs(np.full(2, a), np.zeros(2), beyond, evaluation, CIFAR10_SAMPLES)


def _predicted(costs: Costs, config: Config, source: str) -> Prediction:
    try:
        return Prediction(run_seconds(costs, config), source)
    except PlanError:
        return Prediction(None, source)


def _busy(costs: Costs, config: Config, epoch: int, sizes: np.ndarray) -> np.ndarray:
    """Each worker's busy seconds [n] in a step of an epoch, by the delays' means."""
    work = costs.a * sizes + costs.d
    equal = costs.a * config.batch_size / len(costs.a) + costs.d
    busy = work.copy()
    for rule in config.stragglers:
        if rule.first_epoch <= epoch and (rule.last_epoch is None or epoch <= rule.last_epoch):
            for place, rank in enumerate(rule.ranks):
                busy[rank] += _mean_delay(rule, place, work[rank], equal[rank])
    return busy


def _mean_delay(rule: StragglerRule, place: int, work: float, equal: float) -> float:
    """Mean seconds per step; work, equal: the worker's own now and at an equal split."""
    if rule.kind == "slowdown":
        return (rule.factor - 1.0) * work
    if rule.kind == "constant" and rule.seconds is not None:
        return rule.seconds
    if rule.kind == "constant":
        return rule.fraction * (equal if rule.busy_seconds is None else rule.busy_seconds[place])
    return (1.0 if rule.shape is None else rule.shape) * rule.scale


def _train_samples(config: Config, costs: Costs) -> int | None:
    data = config.data
    if data.subset is not None:
        return data.subset
    if data.name == "synthetic":
        return data.train_samples
    return CIFAR10_SAMPLES if data.name == "cifar10" else costs.train_samples


def _costs_of_calibration(entry: dict[str, Any], config: Config) -> Costs:
    busy = np.array(entry["busy_seconds"], float)
    return Costs(
        busy * len(busy) / config.batch_size,
        np.zeros(len(busy)),
        entry["exchange_seconds"],
        entry["evaluation_seconds"],
        entry["train_samples"],
    )


def _costs_of_run(run: Run) -> Costs:
    """Costs by the epoch of median length: its busy times without the injected delay."""
    config = resolve(from_mapping(run.config, str(run.path)))
    seconds = np.array([epoch["epoch_seconds"] for epoch in run.epochs])
    epoch = run.epochs[int(np.argsort(seconds)[len(seconds) // 2])]
    busy, wait = np.array(epoch["busy"]["mean"]), np.array(epoch["wait"]["mean"])
    work = busy - np.array(epoch["phases"]["delay"])
    last = run.epochs[-1]
    beside = (last["total_seconds"] - last["train_seconds"]) / len(run.epochs)
    samples = run.provenance["data"]["train_samples"] if config.data.subset is None else None
    sizes = np.array(epoch["batch_sizes"], float)
    exchange = float(wait.min())
    return Costs(work / sizes, np.zeros(len(work)), exchange, beside, samples)
