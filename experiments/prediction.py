"""Predicted times of runs, simulated from what has been measured of their workload.

The best source there is counts: finished runs of the same config and settings; another finished run
of the same workload; the calibration; what the paper's authors measured. Without any of them a time
is unknown.
"""

from __future__ import annotations

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
from partitioner import PlanError
from recorder import Run, read_run
from simulation.authors import SAMPLES_PER_WORKER, measured_parts, read_rows
from simulation.exchange import Exchange
from simulation.model import Cluster, Phase, Strategy, simulate

_SIMULATED = ("equal", "proportional", "affine")


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

    def __init__(self, calibrations: Calibrations) -> None:
        self._calibrations = calibrations
        self._seconds: dict[Path, list[float]] = defaultdict(list)  # of one setting, per epoch
        self._costs: list[tuple[dict[str, Any], Costs]] = []
        self._told: dict[tuple[Any, ...], Prediction] = {}
        # Seconds until the first epoch begins, which no record knows.
        self._starts: list[float] = []

    def learn(self, run: PlannedRun, wall_seconds: float | None = None) -> None:
        """Takes in the records of a finished run; wall_seconds: of all of it, made in one go."""
        record = read_run(run.folder)
        self._told.clear()
        if wall_seconds is not None:
            self._starts.append(wall_seconds - record.epochs[-1]["total_seconds"])
        self._seconds[run.folder.parent].append(
            record.epochs[-1]["total_seconds"] / len(record.epochs)
        )
        self._costs.append((workload(run.config), _costs_of_run(record)))

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


def run_seconds(costs: Costs, config: Config) -> float | None:
    """Seconds of a run of `config` on workers of these costs, evaluation included, as simulated.

    Delays count with their mean. None where costs and config do not say the number of samples, or
    batch sizes are given beforehand. Raises PlanError for bounds that do not hold the batch.
    """
    samples, partition = _train_samples(config, costs), config.partition
    if samples is None or partition.policy not in _SIMULATED:
        return None
    steps, n = math.ceil(samples / config.batch_size), len(costs.a)
    jitter = np.zeros(n)
    cluster = Cluster(
        config.batch_size,
        steps,
        tuple(
            Phase(epoch * steps, *_delayed(costs, config, epoch), jitter)
            for epoch in _changes(config)
        ),
        Exchange(costs.exchange_seconds),
        _bounds(partition.min_batch, n),
        _bounds(config.batch_size if partition.max_batch is None else partition.max_batch, n),
        costs.evaluation_seconds,
    )
    every = partition.every if partition.every == "epoch" else min(partition.every, steps)
    return simulate(cluster, Strategy(partition.policy, every), config.epochs).seconds


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
        return Prediction(run_seconds(costs, config), source)
    except PlanError:
        return Prediction(None, source)


def _changes(config: Config) -> list[int]:
    """The epochs from which on other delays are in force, 0 among them."""
    found = {0}
    for rule in config.stragglers:
        found.add(rule.first_epoch)
        found.add(0 if rule.last_epoch is None else rule.last_epoch + 1)
    return sorted(epoch for epoch in found if epoch < config.epochs)


def _delayed(costs: Costs, config: Config, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Each worker's a and d, float64 [n], with the delays of an epoch."""
    factor, sleep = np.ones(len(costs.a)), np.zeros(len(costs.a))
    equal = costs.a * config.batch_size / len(costs.a) + costs.d
    for rule in config.stragglers:
        if rule.first_epoch <= epoch and (rule.last_epoch is None or epoch <= rule.last_epoch):
            for place, rank in enumerate(rule.ranks):
                if rule.kind == "slowdown":
                    factor[rank] += rule.factor - 1.0
                else:
                    sleep[rank] += _mean_sleep(rule, place, equal[rank])
    return costs.a * factor, costs.d * factor + sleep


def _mean_sleep(rule: StragglerRule, place: int, equal: float) -> float:
    """Mean seconds per step; equal: the worker's own undelayed busy time at an equal split."""
    if rule.kind == "constant" and rule.seconds is not None:
        return rule.seconds
    if rule.kind == "constant":
        return rule.fraction * (equal if rule.busy_seconds is None else rule.busy_seconds[place])
    return (1.0 if rule.shape is None else rule.shape) * rule.scale


def _bounds(value: int | tuple[int, ...], n: int) -> np.ndarray:
    return np.full(n, value, float) if isinstance(value, int) else np.array(value, float)


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
