"""Runs of trainer.py, simulated: what steps cost, taken from a record, and a run at these costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import reader
from configs.errors import UserError
from configs.schema import Config, StragglerRule
from data.sources import CIFAR10_SAMPLES
from plots.records import column, per_worker, provenance, setting
from reader import PROVENANCE
from simulation.authors import NORMAL_P95
from simulation.exchange import Exchange
from simulation.model import Cluster, Phase, Run, Strategy, simulate

_SIMULATED = ("equal", "proportional", "affine")
_DRAWS = 4096  # the mean of their maximum is known to a thousandth


@dataclass(frozen=True)
class Costs:
    """What steps cost without delays: worker i is busy for a_i * b + d_i seconds.

    a, d: float64 [n]; exchange_seconds: what a step takes beyond its slowest worker;
    evaluation_seconds: per epoch; train_samples: None where only the data set would tell; jitter:
    deviation of the log of a step's busy time, float64 [n], None where it was not measured.
    """

    a: np.ndarray
    d: np.ndarray
    exchange_seconds: float
    evaluation_seconds: float
    train_samples: int | None
    jitter: np.ndarray | None = None


def costs_of_run(run: reader.Run) -> Costs:
    """Costs by the epoch of median length: its busy times without the injected delay.

    All that its steps took beyond the slowest worker counts as the exchange: also the optimizer and
    the bookkeeping, but not what jitter adds to the slowest of the workers. Raises UserError where
    a record lacks what is needed.
    """
    seconds = column(run, "epoch_seconds")
    middle = int(np.argsort(seconds)[len(seconds) // 2])
    busy, p5, p95 = (per_worker(run, "busy", name)[middle] for name in ("mean", "p5", "p95"))
    work = busy - per_worker(run, "phases", "delay")[middle]
    beside = float(column(run, "total_seconds")[-1] - column(run, "train_seconds")[-1])
    with np.errstate(all="ignore"):  # zeros and nulls are found below
        jitter = np.log(p95 / p5) / (2 * NORMAL_P95)  # of log-normal times
        a = work / per_worker(run, "batch_sizes")[middle]
        step = float(seconds[middle] / column(run, "steps")[middle])
    if not np.isfinite([*jitter, *a, step, beside]).all() or (a <= 0).any():
        raise UserError(f"{run.path}: the times of epoch {middle} do not tell what a step costs")
    return Costs(
        a,
        np.zeros(len(a)),
        max(0.0, step - _mean_of_slowest(busy, jitter)),
        beside / len(run.epochs),
        _recorded_samples(run) if setting(run, "data", "subset") is None else None,
        jitter,
    )


def _recorded_samples(run: reader.Run) -> int:
    samples = provenance(run, "data", dict).get("train_samples")
    if not isinstance(samples, int):
        raise UserError(
            f"{run.path / PROVENANCE}: 'data.train_samples' is no number: run this again"
        )
    return samples


def _mean_of_slowest(busy: np.ndarray, jitter: np.ndarray) -> float:
    """Mean of the greatest of n jittered times, as simulate() would draw them."""
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(busy)))
    return float((busy * np.exp(jitter * draws)).max(1).mean())


def simulated(costs: Costs, config: Config) -> Run | None:
    """A run of `config` on workers of these costs; evaluation counts to its epochs.

    Delays count with their mean. None where costs and config do not say the number of samples, or
    batch sizes are given beforehand. Raises PlanError for bounds that do not hold the batch.
    """
    samples, partition = _train_samples(config, costs), config.partition
    if samples is None or partition.policy not in _SIMULATED:
        return None
    steps, n = math.ceil(samples / config.batch_size), len(costs.a)
    jitter = np.zeros(n) if costs.jitter is None else costs.jitter
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
    return simulate(cluster, Strategy(partition.policy, every), config.epochs)


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
