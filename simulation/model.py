"""Synchronous training on a modelled cluster: step by step, with the real partitioner.

Worker i's busy time with b samples is (a_i * b + d_i) times a log-normal jitter with median 1 and
`jitter_i` as the deviation of its log. A step lasts as long as its slowest worker and what the
exchange adds, so jitter costs: the greatest of n jittered times exceeds the greatest of their
medians. After each epoch, or each `every` steps, the partitioner gets what balancer.py would have
measured, and its plan takes effect where balancer.py's would. balancer.py looks for a change of
speed in every segment; here it is looked for only where there is one, so that of jitter beyond some
3 % the model takes nothing for a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import balancer
from balancer import WARM_UP_STEPS, EpochPlan
from partitioner import LeftOut, Optimum, Partitioner, better_without, optimum
from simulation.exchange import Exchange


@dataclass(frozen=True)
class Phase:
    """Every worker's costs from step `first_step` of the run on: float64 [n] each."""

    first_step: int
    a: np.ndarray  # seconds per sample
    d: np.ndarray  # seconds
    jitter: np.ndarray  # deviation of the log of a step's busy time


@dataclass(frozen=True)
class Cluster:
    """Workers, their batch and their exchange.

    phases: by rising first_step, the first at 0; minimum, maximum: float64 [n], bounds of the batch
    sizes; epoch_seconds: what an epoch takes beside its steps, e.g. evaluation.
    """

    batch_size: int
    epoch_steps: int
    phases: tuple[Phase, ...]
    exchange: Exchange
    minimum: np.ndarray
    maximum: np.ndarray
    epoch_seconds: float = 0.0

    @property
    def workers(self) -> int:
        return len(self.phases[0].a)

    @cached_property
    def optima(self) -> list[Optimum]:
        """The best plan of each phase; its time T* knows neither jitter nor exchange."""
        bounds = self.minimum, self.maximum
        return [optimum(phase.a, phase.d, self.batch_size, *bounds) for phase in self.phases]

    def left_out(self) -> list[LeftOut | None]:
        """For each phase the workers without whom a step would be shorter."""
        return [
            better_without(phase.a, phase.d, self.batch_size, self.minimum, self.maximum, best)
            for phase, best in zip(self.phases, self.optima)
        ]

    def changes_within(self, first: int, stop: int) -> bool:
        """Whether costs change between two of the run's steps first … stop-1."""
        return any(first < phase.first_step < stop for phase in self.phases)

    def phases_of(self, first: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Which phases hold within the run's steps first … stop-1: (number, steps from `first`)."""
        ends = [phase.first_step for phase in self.phases[1:]] + [stop]
        for number, (phase, end) in enumerate(zip(self.phases, ends)):
            begin, end = max(phase.first_step, first), min(end, stop)
            if begin < end:
                yield number, slice(begin - first, end - first)


@dataclass(frozen=True)
class Strategy:
    """What moves the shares and when; lookahead: steps a new plan waits inside an epoch."""

    policy: str
    every: str | int = "epoch"
    lookahead: int = 0


@dataclass(frozen=True)
class Run:
    """What a simulated run does.

    step_seconds, imbalance, optimum_seconds: float64 [S], the imbalance by costs without jitter;
    busy_seconds: float64 [epochs, n], mean over an epoch's steps; changes: (step, batch sizes
    int64 [n]) at the first step and wherever they change.
    """

    step_seconds: np.ndarray
    imbalance: np.ndarray
    optimum_seconds: np.ndarray
    busy_seconds: np.ndarray
    changes: list[tuple[int, np.ndarray]]
    epoch_seconds_besides: float

    @property
    def epochs(self) -> int:
        return len(self.busy_seconds)

    @property
    def epoch_seconds(self) -> np.ndarray:
        """Seconds of each epoch, all that belongs to it included: [epochs]."""
        return self.by_epoch(self.step_seconds).sum(1) + self.epoch_seconds_besides

    @property
    def seconds(self) -> float:
        return float(self.epoch_seconds.sum())

    @property
    def efficiency(self) -> np.ndarray:
        """T* over the mean step time, of each epoch: [epochs]."""
        optimum_seconds = self.by_epoch(self.optimum_seconds).sum(1)
        return optimum_seconds / self.by_epoch(self.step_seconds).sum(1)

    def by_epoch(self, steps: np.ndarray) -> np.ndarray:
        """[S] as [epochs, steps of an epoch]."""
        return steps.reshape(self.epochs, -1)


def simulate(cluster: Cluster, strategy: Strategy, epochs: int, seed: int = 0) -> Run:
    """Runs `epochs` epochs; memory grows with a segment's steps times the workers.

    Raises PlanError for bounds that do not hold the batch.
    """
    partitioner = Partitioner(
        cluster.workers,
        cluster.batch_size,
        strategy.policy,
        min_batch=cluster.minimum.tolist(),
        max_batch=cluster.maximum.tolist(),
    )
    draw = np.random.default_rng(seed)
    parts, busy_seconds, changes = [], [], []
    for epoch in range(epochs):
        begin, busy_sum = epoch * cluster.epoch_steps, np.zeros(cluster.workers)
        plan = _lay_out(epoch, cluster, partitioner)
        for first, stop, due in segments(cluster.epoch_steps, strategy.every):
            sizes = plan.batch_sizes[first:stop]
            busy, *times = _steps(cluster, begin + first, sizes, draw)
            parts.append(times)
            busy_sum += busy.sum(0)
            if due:
                clean = plan.clean_steps(first, stop)
                changing = cluster.changes_within(begin + clean[0], begin + clean[-1] + 1)
                measured = _measured(busy[clean - first], changing)
                partitioner.rebalance(plan.batch_sizes[clean[0]], *measured)
                plan.batch_sizes[stop + strategy.lookahead :] = partitioner.batch_sizes
        busy_seconds.append(busy_sum / cluster.epoch_steps)
        for step, used in plan.changes():
            if not changes or used != changes[-1][1].tolist():
                changes.append((begin + step, np.array(used)))
    steps = [np.concatenate(series) for series in zip(*parts)]
    return Run(*steps, np.array(busy_seconds), changes, cluster.epoch_seconds)


def segments(steps: int, every: str | int) -> Iterator[tuple[int, int, bool]]:
    """An epoch's segments as balancer.py measures them: first step, end, whether it rebalances."""
    length = steps if every == "epoch" else every
    for first in range(0, steps, length):
        stop = min(first + length, steps)
        yield first, stop, stop - first == length or stop - first > max(WARM_UP_STEPS, length // 2)


def _measured(busy: np.ndarray, changing: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the workers tell of busy times [S, n]: means and standard errors, [n] each."""
    if not changing:
        return balancer.typical(busy)
    told = [balancer.typical(balancer.since_change(times)) for times in busy.T]
    means, errors = np.array(told).T
    return means, errors


def _lay_out(epoch: int, cluster: Cluster, partitioner: Partitioner) -> EpochPlan:
    steps = cluster.epoch_steps
    starts = np.arange(steps) * cluster.batch_size
    return EpochPlan(epoch, starts, np.tile(partitioner.batch_sizes, (steps, 1)), 0)


def _steps(
    cluster: Cluster, first: int, sizes: np.ndarray, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps from `first` on with batch sizes [S, n].

    Returns busy times [S, n], and step times, imbalance and T* [S] each.
    """
    busy, compute = np.empty(sizes.shape), np.empty(sizes.shape)
    imbalance, best = np.empty(len(sizes)), np.empty(len(sizes))
    for number, steps in cluster.phases_of(first, first + len(sizes)):
        phase = cluster.phases[number]
        compute[steps] = phase.a * sizes[steps]
        busy[steps] = compute[steps] + phase.d
        best[steps] = cluster.optima[number].seconds
        imbalance[steps] = busy[steps].max(1) / best[steps]
        jitter = np.exp(phase.jitter * draw.standard_normal(busy[steps].shape))
        busy[steps] *= jitter
        compute[steps] *= jitter
    slowest = busy.argmax(1)[:, None]
    longest, window = (np.take_along_axis(x, slowest, 1)[:, 0] for x in (busy, compute))
    return busy, longest + cluster.exchange.exposed(window), imbalance, best
