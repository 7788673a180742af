"""What the simulator says of numbers of workers that were not run, from what was measured.

A worker's step of b samples costs a * b + d seconds, fitted to runs of one worker with several
batch sizes. What a step takes beyond its slowest worker was measured at the least number of workers
above one, n0. A ring all-reduce of M bytes takes 2 (n-1)/n * M / bandwidth + 2 (n-1) * latency (see
simulation/exchange.py); one measurement cannot tell the two terms apart, so there are two
predictions, one as if all of it were bandwidth and one as if all were latency: the truth lies
between them. With a given bandwidth and latency there is one prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plots.records import provenance
from plots.scaling_records import Family, Point, settled_steps
from simulation.exchange import Exchange, ring
from simulation.model import Cluster, Phase, Strategy, simulate

_STEPS, _EPOCHS = 40, 6
NO_COSTS = "they need settled steps of one worker, longer with more samples, and of several"


@dataclass(frozen=True)
class Network:
    """bandwidth: bytes/s of each worker; latency: seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Costs:
    """Measured seconds: per sample, per step, and of an exchange among `exchanged` workers.

    jitter: deviation of the log of a step's time; bytes: of all gradients; cores: the family's, for
    how many workers its machine has any.
    """

    a: float
    d: float
    jitter: float
    exchange: float
    exchanged: int
    bytes: int
    cores: float | None


def measured_costs(family: Family) -> Costs | None:
    """The costs of equal workers that run sync-sgd under ddp; None without them: see NO_COSTS."""
    plain = [
        point
        for point in family.points
        if point.setting.plain and point.setting.exchange == "ddp" and point.busy_share is not None
    ]
    alone = [point for point in plain if point.setting.workers == 1]
    several = [point for point in plain if point.setting.workers > 1]
    if not alone or not several:
        return None
    a, d, jitter = _fit(alone)
    if a <= 0:
        return None
    least = min(point.setting.workers for point in several)
    return Costs(
        a=a,
        d=d,
        jitter=jitter,
        exchange=_exchange([point for point in several if point.setting.workers == least]),
        exchanged=least,
        bytes=provenance(alone[0].runs[0], "allreduce_bytes_per_step", int),
        cores=family.cores,
    )


def predicted(
    costs: Costs,
    batch: int,
    factors: Sequence[float],
    policy: str = "equal",
    network: Network | None = None,
    share_cores: bool = False,
) -> tuple[float, float]:
    """Samples/s of workers that are `factors` times slower than the measured one: least and most.

    share_cores: as if they had only the measured machine's cores among them.
    """
    n, slow = len(factors), np.array(factors, float)
    if share_cores and costs.cores is not None:
        slow = slow * max(1.0, n / costs.cores)
    phase = Phase(0, costs.a * slow, costs.d * slow, np.full(n, costs.jitter))
    bounds = np.ones(n), np.full(n, float(batch))
    found = []
    for exchange in _exchanges(costs, n, network):
        cluster = Cluster(batch, _STEPS, (phase,), exchange, *bounds)
        run = simulate(cluster, Strategy(policy), 1 if policy == "equal" else _EPOCHS)
        found.append(batch / float(run.step_seconds[-_STEPS:].mean()))
    return min(found), max(found)


def _exchanges(costs: Costs, n: int, network: Network | None) -> list[Exchange]:
    if n == 1:
        return [Exchange(0.0)]
    if network is not None:
        return [ring(n, costs.bytes, network.bandwidth, network.latency, overlapped=True)]
    hops = (n - 1) / (costs.exchanged - 1)
    by_bandwidth = hops * costs.exchanged / n
    return [Exchange(costs.exchange * by_bandwidth), Exchange(costs.exchange * hops)]


def _fit(alone: Sequence[Point]) -> tuple[float, float, float]:
    """a, d and jitter from one worker's median busy times, with relative errors of equal weight."""
    by_batch: dict[int, list[float]] = defaultdict(list)
    spreads = []
    for point in alone:
        for run in point.runs:
            busy = settled_steps(run).busy
            if len(busy):
                by_batch[point.setting.batch].append(float(np.median(busy)))
                logs = np.log(busy)
                spreads.append(1.4826 * float(np.median(np.abs(logs - np.median(logs)))))
    batches = np.array(list(by_batch), float)
    times = np.array([np.median(values) for values in by_batch.values()])
    if len(batches) == 1:
        return float(times[0] / batches[0]), 0.0, float(np.median(spreads))
    columns = np.stack([batches, np.ones(len(batches))], axis=1) / times[:, None]
    a, d = np.linalg.lstsq(columns, np.ones(len(batches)), rcond=None)[0]
    if d < 0:  # a line through the origin then fits best of those that are possible
        a, d = float(columns[:, 0].sum() / (columns[:, 0] ** 2).sum()), 0.0
    return float(a), float(d), float(np.median(spreads))


def _exchange(several: Sequence[Point]) -> float:
    """Median seconds that a step takes beyond its slowest worker's busy time."""
    beyond = []
    for point in several:
        for run in point.runs:
            steps = settled_steps(run)
            if len(steps.busy):
                beyond.append(float(np.median(steps.seconds - steps.busy.max(axis=1))))
    return float(np.median(beyond))
