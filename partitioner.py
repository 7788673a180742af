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

POLICIES = ("equal", "static", "proportional", "affine")

# Names the random stream of the epoch order, so that no other consumer of the same seed shares it.
_ORDER_STREAM = 0x0DE5
# Times that differ by less than this part are of equally slow workers.
_ALIKE = 1e-9


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
    done at once for all: by bisection for the time at which the samples run out, until nobody gets
    more than one of those that are left.
    """
    _check_bounds(total, minimum, maximum)
    level = water_level(a, d, total, minimum, maximum)

    def sizes_at(time: float) -> np.ndarray:
        return np.clip(np.floor((time - d) / a), minimum, maximum)

    low, high = level - 1e-12 * abs(level), level + float(a.max()) * (1 + 1e-9)
    sizes, more = sizes_at(low), sizes_at(high)
    while (more - sizes).max() > 1 and low < (middle := 0.5 * (low + high)) < high:
        between = sizes_at(middle)
        if between.sum() <= total:
            low, sizes = middle, between
        else:
            high, more = middle, between
    sizes = sizes.astype(np.int64)
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
    """Busy time of each worker as t(b) = a * b + d, fitted to what was measured.

    Written with the elasticity e = a b / t at the mean measured batch size, t / t_mean - 1 =
    e (b / b_mean - 1): e is 1 without a fixed cost and 0 if nothing but the fixed cost counts.
    Weighted least squares for e is pulled towards the elasticity that all workers' measurements
    give together (a normal prior; the posterior mean): where a worker's batch sizes have hardly
    differed, the noise in its times would otherwise give any slope at all. Older measurements count
    less and less. A worker whose newest time is far from what its earlier ones predict has changed
    its speed: its earlier measurements are dropped.

    All that is kept of the measurements are each worker's weighted means and sums of squares and
    products about them, brought up to date one by one (West, Comm. ACM 22(9), 1979).
    """

    FORGETTING = 0.95  # weight of a measurement against the one after it
    PRIOR_ELASTICITY, PRIOR_DEVIATION = 0.8, 0.2
    LEAST_ELASTICITY = 0.02  # keeps a above 0
    LEAST_ERROR = 0.003  # relative: busy time is only close to affine
    UNKNOWN_ERROR = 0.02  # relative: for a time that comes without its error
    CHANGE, SIGMAS = 0.1, 4.0  # far from predicted: beyond both

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # Sum of the weights (1 / relative error^2), weighted means of batch sizes and seconds, and
        # the weighted sums of squares (sizes) and products (sizes, seconds) about these means.
        self._weight, self._size, self._time = np.zeros((3, workers))
        self._squares, self._products = np.zeros((2, workers))
        self._least = np.full(workers, np.inf)
        self._most = np.zeros(workers)

    @property
    def known(self) -> bool:
        """Whether each worker has been seen at two batch sizes since its speed last changed."""
        return bool((self._most > self._least).all())

    def add(
        self,
        sizes: Sequence[float],
        times: Sequence[float],
        errors: Sequence[float] | None = None,
    ) -> None:
        """Books one busy time (seconds, [n]) per worker under the batch size it was measured with.

        errors: the times' standard errors in seconds, [n].
        """
        sizes, times = np.asarray(sizes, float), np.asarray(times, float)
        errors = self.UNKNOWN_ERROR * times if errors is None else np.asarray(errors, float)
        relative = np.maximum(errors / times, self.LEAST_ERROR)
        changed = self._changed(sizes, times, relative)
        self._least = np.minimum(np.where(changed, np.inf, self._least), sizes)
        self._most = np.maximum(np.where(changed, 0.0, self._most), sizes)
        kept = np.where(changed, 0.0, self.FORGETTING)
        new, old = relative**-2.0, kept * self._weight
        self._weight = old + new
        size, time, gain = sizes - self._size, times - self._time, new / self._weight
        self._squares = kept * self._squares + old * gain * size * size
        self._products = kept * self._products + old * gain * size * time
        self._size, self._time = self._size + gain * size, self._time + gain * time

    def fit(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(a, d): float64 [n] each, seconds per sample and seconds; None before any measurement.

        While `known` is false, a worker's d rests on the other workers' or on the prior alone.
        """
        if not self._weight.any():
            return None
        elasticity, _ = self._elasticity()
        return elasticity * self._time / self._size, (1.0 - elasticity) * self._time

    def state_dict(self) -> dict[str, list]:
        return {name: getattr(self, f"_{name}").tolist() for name in self._STATE}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Goes on from such a state, also of another number of workers.

        Workers that are gone are forgotten. New ones start from the mean time of those that stay,
        as one measurement at one batch size. Raises ValueError for a state of another form.
        """
        if {len(state[name]) for name in self._STATE} != {len(state["weight"])}:
            raise ValueError("a time model's lists are of different lengths")
        self._check(**{name: np.array(state[name], dtype=np.float64) for name in self._STATE})
        stay = min(self._workers, len(state["weight"]))
        for name in self._STATE:
            kept = np.array(state[name][:stay], dtype=np.float64)
            new = np.zeros(self._workers - stay) if name in ("squares", "products") else kept.mean()
            setattr(self, f"_{name}", np.append(kept, np.broadcast_to(new, self._workers - stay)))
        if self._weight.any():
            self._least[stay:] = self._most[stay:] = self._size[stay:]

    @staticmethod
    def _check(
        weight: np.ndarray,
        size: np.ndarray,
        time: np.ndarray,
        squares: np.ndarray,
        products: np.ndarray,
        least: np.ndarray,
        most: np.ndarray,
    ) -> None:
        """Raises ValueError for what no measurements could have led to."""
        seen = weight > 0
        right = (
            (weight >= 0) & (weight < 1e12) & (squares >= 0) & (squares < 1e24)
            & (np.abs(products) < 1e24) & (least >= 0) & (most >= 0) & (most < 1e12)
            & np.where(seen, (size > 0.5) & (size < 1e12), size == 0)
            & np.where(seen, (time > 0) & (time < 1e10), time == 0)
        )  # fmt: skip
        if not right.all():
            raise ValueError("a time model that no measurements could have led to")

    _STATE = ("weight", "size", "time", "squares", "products", "least", "most")

    def _elasticity(self) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and variance of each worker's elasticity: [n] each."""
        xx = self._squares / self._size**2
        xy = self._products / (self._size * self._time)
        prior = self.PRIOR_DEVIATION**-2.0
        # What all workers say together says where a single one is likely to lie.
        common = (prior * self.PRIOR_ELASTICITY + xy.sum()) / (prior + xx.sum())
        common = np.clip(common, self.LEAST_ELASTICITY, 1.0)
        mean = (prior * common + xy) / (prior + xx)
        return np.clip(mean, self.LEAST_ELASTICITY, 1.0), 1.0 / (prior + xx)

    def _changed(self, sizes: np.ndarray, times: np.ndarray, relative: np.ndarray) -> np.ndarray:
        """Workers (bool [n]) whose newest time is not explained by the earlier ones and noise."""
        if not self._weight.any():
            return np.zeros(self._workers, dtype=bool)
        elasticity, variance = self._elasticity()
        margin = self.SIGMAS * np.sqrt(variance)
        possible = np.clip([elasticity - margin, elasticity + margin], 0.0, 1.0)
        expected = self._time * (1.0 + possible * (sizes / self._size - 1.0))
        tolerance = np.maximum(
            self.CHANGE, self.SIGMAS * np.sqrt(relative**2 + 1.0 / self._weight)
        )
        too_fast = times < expected.min(0) * (1.0 - tolerance)
        return too_fast | (times > expected.max(0) * (1.0 + tolerance))


@dataclass(frozen=True)
class LeftOut:
    """Workers without whom a step would be shorter: ranks, and the step time without them (s)."""

    ranks: tuple[int, ...]
    seconds: float


class Partitioner:
    """Holds every worker's share of the global batch and moves the shares after measurements.

    workers: n; batch_size: B; policy: one of POLICIES; shares: [n] positive weights for `static`;
    min_batch, max_batch: bounds of the batch size, one number or one per worker (max_batch None: no
    bound); min_gain: `affine` leaves the shares where a move would shorten the step by a smaller
    part than this. Raises PlanError for bounds that cannot hold B and for shares that are not
    positive. All workers must make the same calls with the same numbers; their plans then agree.
    """

    def __init__(
        self,
        workers: int,
        batch_size: int,
        policy: str = "proportional",
        shares: Sequence[float] | None = None,
        min_batch: float | Sequence[float] = 1,
        max_batch: float | Sequence[float] | None = None,
        min_gain: float = 0.01,
    ) -> None:
        if policy not in POLICIES:
            raise PlanError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
        if (shares is not None) != (policy == "static"):
            raise PlanError("shares are given with the policy static, and only with it")
        self.workers, self.batch_size, self.policy = workers, batch_size, policy
        self.min_gain = min_gain
        self.minimum = _bound(min_batch, workers, "min_batch")
        self.maximum = _bound(batch_size if max_batch is None else max_batch, workers, "max_batch")
        self.shares = _normalised(np.ones(workers) if shares is None else shares, workers, "share")
        self.time_model = TimeModel(workers)
        self.batch_sizes = self._round(batch_size)

    def split(self, size: int) -> np.ndarray | None:
        """Batch sizes, int64 [n], for a global batch of `size` <= B samples by the present shares.

        None where `size` is too small for every worker's minimum: such a batch is left out.
        """
        if size == self.batch_size:
            return self.batch_sizes
        return None if size < self.minimum.sum() else self._round(size)

    def rebalance(
        self,
        batch_sizes: Sequence[float],
        times: Sequence[float],
        errors: Sequence[float] | None = None,
    ) -> bool:
        """Takes one busy time per worker, measured with `batch_sizes`, and moves the shares.

        errors: standard errors of the times, in the same unit. Returns whether batch sizes changed.
        """
        _check_positive(times, self.workers, "busy time")
        first = self.time_model.fit() is None
        self.time_model.add(batch_sizes, times, errors)
        before = self.batch_sizes
        if self.policy == "proportional" or (self.policy == "affine" and first):
            self._move_proportionally(np.asarray(batch_sizes, float), np.asarray(times, float))
        elif self.policy == "affine":
            self._move_to_optimum()
        return bool((before != self.batch_sizes).any())

    def lower_caps(self, caps: Sequence[float]) -> None:
        """Gives each worker at most caps[rank] samples from now on (memory ran out)."""
        self.maximum = np.minimum(self.maximum, caps)
        if (self.batch_sizes > self.maximum).any():
            self.batch_sizes = self._round(self.batch_size)

    def with_equal_shares(self) -> Partitioner:
        """Another one of the same workers and bounds, with the policy `equal`."""
        return Partitioner(
            self.workers,
            self.batch_size,
            "equal",
            min_batch=self.minimum.tolist(),
            max_batch=self.maximum.tolist(),
        )

    def optimum(self) -> Optimum | None:
        """The best plan for a full global batch; None while the time model is unknown."""
        if not self.time_model.known:
            return None
        a, d = self.time_model.fit()
        return optimum(a, d, self.batch_size, self.minimum, self.maximum)

    def left_out(self) -> LeftOut | None:
        """Who sets the pace with the minimum alone: a step would be shorter without them."""
        best = self.optimum()
        if best is None or self.workers == 1:
            return None
        a, d = self.time_model.fit()
        return better_without(a, d, self.batch_size, self.minimum, self.maximum, best)

    def state_dict(self) -> dict[str, object]:
        """Plain lists from which `load_state_dict` goes on exactly."""
        return {
            "shares": self.shares.tolist(),
            "batch_sizes": self.batch_sizes.tolist(),
            "maximum": self.maximum.tolist(),
            "time_model": self.time_model.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Goes on from such a state.

        From one of another number of workers: ranks that are in both keep their caps, time models
        and shares in relation to each other; new ones get the mean share, and the policy `static`
        keeps the shares it was built with. Raises PlanError where the caps cannot hold the batch,
        and ValueError for a state of another form.
        """
        self._check(state)
        self.time_model.load_state_dict(state["time_model"])
        if len(state["shares"]) != self.workers:
            self._adopt(state)
            return
        self.shares = np.array(state["shares"], dtype=np.float64)
        self.batch_sizes = np.array(state["batch_sizes"], dtype=np.int64)
        self.maximum = np.array(state["maximum"], dtype=np.float64)

    def _check(self, state: dict) -> None:
        count = len(state["shares"])
        lists = (state["batch_sizes"], state["maximum"], state["time_model"]["weight"])
        if {len(values) for values in lists} != {count}:
            raise ValueError("a partitioner's lists are of different lengths")
        shares = np.array(state["shares"], dtype=np.float64)
        if not (np.isfinite(shares) & (shares > 0)).all():
            raise ValueError(f"shares {state['shares']} are not positive")
        sizes = np.array(state["batch_sizes"])
        others = count == self.workers and sizes.sum() != self.batch_size
        within = (sizes <= np.array(state["maximum"], dtype=np.float64)).all()
        if sizes.dtype.kind != "i" or sizes.min() < 0 or others or not within:
            raise ValueError(f"batch sizes {state['batch_sizes']} are none of {self.batch_size}")

    def _adopt(self, state: dict) -> None:
        """Takes over what still holds of the state of another number of workers."""
        stay = min(self.workers, len(state["shares"]))
        self.maximum[:stay] = np.minimum(self.maximum[:stay], state["maximum"][:stay])
        if self.policy in ("proportional", "affine"):
            kept = np.array(state["shares"][:stay], dtype=np.float64)
            new = np.full(self.workers - stay, kept.mean())
            self.shares = _normalised(np.append(kept, new), self.workers, "share")
        self.batch_sizes = self._round(self.batch_size)

    def _move_proportionally(self, sizes: np.ndarray, times: np.ndarray) -> None:
        self.shares = _normalised(self._base(sizes) / times, self.workers, "share")
        self.batch_sizes = self._round(self.batch_size)

    def _move_to_optimum(self) -> None:
        a, d = self.time_model.fit()
        best = optimum(a, d, self.batch_size, self.minimum, self.maximum)
        present = float((a * self.batch_sizes + d).max())
        if present * (1.0 - self.min_gain) <= best.seconds:
            return
        self.batch_sizes = best.batch_sizes
        self.shares = best.batch_sizes / self.batch_size

    def _base(self, sizes: np.ndarray) -> np.ndarray:
        """The shares that times measured with batch sizes `sizes` belong to.

        The present shares may be others: a bound may hold a worker away from its share, or a plan
        may not have been in force yet. Where the two differ by rounding only, the exact share is
        kept, so that a correction of less than half a sample adds up instead of being lost.
        """
        measured = sizes / sizes.sum()
        rounded = np.abs(self.shares - measured) * self.batch_size < 1
        return np.where(rounded, self.shares, measured)

    def _round(self, size: int) -> np.ndarray:
        return round_shares(self.shares, size, self.minimum, np.minimum(self.maximum, size))


def better_without(
    a: np.ndarray,
    d: np.ndarray,
    total: int,
    minimum: np.ndarray,
    maximum: np.ndarray,
    best: Optimum,
) -> LeftOut | None:
    """The workers that set the pace at their minimum and are better left out, if there are any.

    Takes away the slowest of those at their minimum, all that are equally slow at once, for as long
    as that shortens the step.
    """
    stay = np.arange(len(a))
    seconds, sizes = best.seconds, best.batch_sizes
    while True:
        times = a[stay] * sizes + d[stay]
        slowest = times >= times.max() * (1.0 - _ALIKE)
        rest = stay[~slowest]
        if (sizes > minimum[stay])[slowest].any() or maximum[rest].sum() < total:
            break
        without = optimum(a[rest], d[rest], total, minimum[rest], maximum[rest])
        if without.seconds >= seconds:
            break
        stay, seconds, sizes = rest, without.seconds, without.batch_sizes
    gone = tuple(int(rank) for rank in np.setdiff1d(np.arange(len(a)), stay))
    return LeftOut(gone, seconds) if gone else None


def _bound(value: float | Sequence[float], workers: int, what: str) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim and array.shape != (workers,):
        raise PlanError(f"{workers} workers need one {what} or {workers}, not {array.size}")
    return np.broadcast_to(array, (workers,)).copy()


def _normalised(values: Sequence[float], workers: int, what: str) -> np.ndarray:
    array = _check_positive(values, workers, what)
    return array / array.sum()


def _check_positive(values: Sequence[float], workers: int, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (workers,):
        raise PlanError(f"{workers} workers need {workers} {what}s, not {array.size}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(wrong):
        rank = int(wrong[0])
        raise PlanError(f"the {what} of rank {rank} must be a positive number, not {array[rank]}")
    return array
