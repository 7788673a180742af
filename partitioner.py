"""From busy times to batch sizes: the arithmetic of dynamic partitioning.

A global batch of B samples is cut into one contiguous part per worker. A *share* is a worker's
fraction of B, its *batch size* the whole number of samples that follows from it. This module turns
measured busy times into shares, shares into batch sizes, and batch sizes into slices of an epoch's
order. It knows no process group, no clock and no file, and imports nothing of this project.

Policies: `equal` keeps B/n each, `static` keeps the shares it was given, `proportional` applies the
paper's rule share_i <- share_i / t_i after every measurement (arXiv 2110.08941).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

POLICIES = ("equal", "static", "proportional")

# Names the random stream of the epoch order, so that no other consumer of the same seed shares it.
_ORDER_STREAM = 0x0DE5
_BISECTIONS = 200


class PlanError(ValueError):
    """A plan that cannot be had: bounds that do not hold the batch, a bad share or time."""


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the samples: int64 [size], a permutation of 0 … size-1.

    It follows from (seed, epoch) alone, so it is the same on every worker and for every partition.
    """
    return np.random.default_rng([_ORDER_STREAM, seed, epoch]).permutation(size)


def global_batches(size: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Start and stop position of every global batch of an epoch; the last one may be short."""
    for start in range(0, size, batch_size):
        yield start, min(start + batch_size, size)


def part(batch_sizes: np.ndarray, rank: int) -> slice:
    """The part of a global batch that worker `rank` takes, as positions from the batch's start."""
    start = int(batch_sizes[:rank].sum())
    return slice(start, start + int(batch_sizes[rank]))


def water_level(
    a: np.ndarray, d: np.ndarray, total: float, minimum: np.ndarray, maximum: np.ndarray
) -> float:
    """The level T at which sum_i clip((T - d_i) / a_i, minimum_i, maximum_i) reaches `total`.

    All arrays are float64 [n], a > 0 and sum(minimum) <= total <= sum(maximum). The left side is
    piecewise linear in T and never falls, so the answer lies between two neighbouring break points,
    found by one sort: O(n log n). Without bounds this is T = (B + sum d_i/a_i) / sum 1/a_i.
    """
    breaks = np.concatenate([d + a * minimum, d + a * maximum])
    slopes = np.concatenate([1.0 / a, -1.0 / a])
    order = np.argsort(breaks, kind="stable")
    breaks, slope = breaks[order], np.cumsum(slopes[order])
    gains = np.maximum(slope[:-1], 0.0) * np.diff(breaks)
    filled = minimum.sum() + np.concatenate([[0.0], np.cumsum(gains)])
    after = int(np.searchsorted(filled, total))
    if after == 0:
        return float(breaks[0])
    if after == len(filled):
        return float(breaks[-1])
    before = after - 1
    return float(breaks[before] + (total - filled[before]) / slope[before])


def round_shares(
    shares: np.ndarray, total: int, minimum: np.ndarray, maximum: np.ndarray
) -> np.ndarray:
    """Whole batch sizes, int64 [n], that follow `shares` and keep to the bounds.

    Where a worker's part would leave its bounds it gets the bound, and the others' parts are scaled
    alike to make up for it. Left-over samples go to the largest remainders (ties: lowest rank).
    Raises PlanError where the bounds cannot hold `total`.
    """
    _check_bounds(total, minimum, maximum)
    inverse = 1.0 / shares
    level = water_level(inverse, np.zeros_like(shares), total, minimum, maximum)
    ideal = np.clip(level * shares, minimum, maximum)
    # A hair is added so that 127.99999999999997, which is 128, is not cut down to 127.
    sizes = np.minimum(np.floor(ideal * (1 + 1e-12)), maximum).astype(np.int64)
    left_over = total - int(sizes.sum())
    room = np.where(sizes < maximum, ideal - sizes, -np.inf)
    sizes[np.argsort(-room, kind="stable")[:left_over]] += 1
    return sizes


@dataclass(frozen=True)
class Optimum:
    """The plan with the least possible step time, for busy times t_i(b) = a_i * b + d_i.

    batch_sizes: int64 [n]; seconds: step time with these whole numbers (T*); continuous_seconds:
    the bound that fractions of a sample would reach.
    """

    batch_sizes: np.ndarray
    seconds: float
    continuous_seconds: float


def optimum(
    a: np.ndarray, d: np.ndarray, total: int, minimum: np.ndarray, maximum: np.ndarray
) -> Optimum:
    """The bounded integer batch sizes that minimise max_i (a_i * b_i + d_i), sum b_i = total.

    Rounds the continuous solution down, then gives each left-over sample to the worker whose time
    with it is least, which is optimal because times only grow with b. Handing out one by one is
    done at once for all: by bisection for the time at which the samples run out.
    """
    _check_bounds(total, minimum, maximum)
    level = water_level(a, d, total, minimum, maximum)

    def sizes_at(time: float) -> np.ndarray:
        return np.clip(np.floor((time - d) / a), minimum, maximum)

    low, high = level - 1e-12 * abs(level), level + float(a.max()) * (1 + 1e-9)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if sizes_at(middle).sum() <= total else (low, middle)
    sizes = sizes_at(low).astype(np.int64)
    next_times = np.where(sizes < maximum, d + a * (sizes + 1), np.inf)
    left_over = total - int(sizes.sum())
    sizes[np.argsort(next_times, kind="stable")[:left_over]] += 1
    continuous = np.clip((level - d) / a, minimum, maximum)
    return Optimum(sizes, float((a * sizes + d).max()), float((a * continuous + d).max()))


def _check_bounds(total: int, minimum: np.ndarray, maximum: np.ndarray) -> None:
    if total < minimum.sum():
        raise PlanError(
            f"a batch of {total} samples is too small for {len(minimum)} workers: "
            f"their minima add up to {int(minimum.sum())}"
        )
    if total > maximum.sum():
        raise PlanError(
            f"a batch of {total} samples does not fit: the workers' maxima add up to "
            f"{int(maximum.sum())}, {int(total - maximum.sum())} too few"
        )


class TimeModel:
    """Busy time of each worker as a_i * b + d_i, fitted to what was measured.

    A worker whose newest time is far from what its earlier ones predict has changed its speed: its
    earlier measurements are dropped.
    """

    # Far: beyond what noise and a slightly curved cost make of a good fit.
    CHANGE = 0.15

    def __init__(self, workers: int) -> None:
        self.measurements: list[list[tuple[float, float]]] = [[] for _ in range(workers)]

    def add(self, batch_sizes: Sequence[float], times: Sequence[float]) -> None:
        """Books one busy time (seconds) per worker under the batch size it was measured with."""
        for known, size, time in zip(self.measurements, batch_sizes, times):
            line = _line(known)
            if line is not None and abs(line[0] * size + line[1] - time) > self.CHANGE * time:
                known.clear()
            known.append((float(size), float(time)))

    def fit(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(a, d): float64 [n] each, seconds per sample and seconds; None while one is unknown."""
        lines = [_line(known) for known in self.measurements]
        if any(line is None for line in lines):
            return None
        a, d = np.array(lines, dtype=np.float64).T
        return a, d


def _line(points: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Least squares with slope > 0 and intercept >= 0; None where the points do not give it."""
    if not points:
        return None
    sizes, times = np.array(points, dtype=np.float64).T
    spread = sizes - sizes.mean()
    # A slope from batch sizes that hardly differ would be noise alone.
    if spread.max() - spread.min() < max(1.0, 0.02 * sizes.mean()):
        return None
    slope = float(spread @ times / (spread @ spread))
    if slope <= 0:
        return None
    intercept = float(times.mean() - slope * sizes.mean())
    if intercept < 0:
        return float(sizes @ times / (sizes @ sizes)), 0.0
    return slope, intercept


class Partitioner:
    """Holds every worker's share of the global batch and moves the shares after measurements.

    workers: n; batch_size: B; policy: one of POLICIES; shares: [n] positive weights for `static`;
    min_batch, max_batch: bounds of every worker's batch size (max_batch None: no bound). Raises
    PlanError for bounds that cannot hold B and for shares that are not positive. All workers must
    make the same calls with the same numbers; their plans then agree.
    """

    def __init__(
        self,
        workers: int,
        batch_size: int,
        policy: str = "proportional",
        shares: Sequence[float] | None = None,
        min_batch: int = 1,
        max_batch: int | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise PlanError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
        if (shares is not None) != (policy == "static"):
            raise PlanError("shares are given with the policy static, and only with it")
        self.workers, self.batch_size, self.policy = workers, batch_size, policy
        self._minimum = np.full(workers, float(min_batch))
        self._maximum = np.full(workers, float(batch_size if max_batch is None else max_batch))
        self.shares = _normalised(np.ones(workers) if shares is None else shares, workers, "share")
        self.time_model = TimeModel(workers)
        self.batch_sizes = self._round(batch_size)

    def split(self, size: int) -> np.ndarray | None:
        """Batch sizes, int64 [n], for a global batch of `size` <= B samples by the present shares.

        None where `size` is too small for every worker's minimum: such a batch is left out.
        """
        if size == self.batch_size:
            return self.batch_sizes
        return None if size < self._minimum.sum() else self._round(size)

    def rebalance(self, batch_sizes: Sequence[float], times: Sequence[float]) -> None:
        """Takes one busy time per worker, measured with `batch_sizes`, and moves the shares."""
        if self.policy == "proportional":
            speeds = 1.0 / _normalised(times, self.workers, "busy time")
            self.shares = _normalised(self._base() * speeds, self.workers, "share")
            self.batch_sizes = self._round(self.batch_size)
        self.time_model.add(batch_sizes, times)

    def optimum(self) -> Optimum | None:
        """The best plan for a full global batch; None while the time model is unknown."""
        fit = self.time_model.fit()
        if fit is None:
            return None
        return optimum(*fit, self.batch_size, self._minimum, self._maximum)

    def state_dict(self) -> dict[str, list]:
        """Plain lists from which `load_state_dict` goes on exactly."""
        return {"shares": self.shares.tolist(), "measurements": self.time_model.measurements}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self.shares = np.array(state["shares"], dtype=np.float64)
        self.time_model.measurements = [
            [(float(size), float(time)) for size, time in known] for known in state["measurements"]
        ]
        self.batch_sizes = self._round(self.batch_size)

    def _base(self) -> np.ndarray:
        """The shares that the measured times belong to.

        Where a bound holds a worker, its real share is what counts: the wished-for one would run
        away from it. Elsewhere the two differ by rounding only, and the exact one is kept, so that
        a correction of less than half a sample adds up instead of being lost.
        """
        rounded = np.abs(self.shares * self.batch_size - self.batch_sizes) < 1
        return np.where(rounded, self.shares, self.batch_sizes / self.batch_size)

    def _round(self, size: int) -> np.ndarray:
        return round_shares(self.shares, size, self._minimum, np.minimum(self._maximum, size))


def _normalised(values: Sequence[float], workers: int, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (workers,):
        raise PlanError(f"{workers} workers need {workers} {what}s, not {array.size}")
    for rank, value in enumerate(array):
        if not (np.isfinite(value) and value > 0):
            raise PlanError(f"the {what} of rank {rank} must be a positive number, not {value}")
    return array / array.sum()
