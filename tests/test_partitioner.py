"""The arithmetic of plans against properties and brute force."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partitioner import (
    Partitioner,
    PlanError,
    TimeModel,
    epoch_order,
    global_batches,
    optimum,
    part,
    round_shares,
)

AUTHORS = Path(__file__).parent / "authors_resnet50.csv"


def positive(low: float = 1e-3, high: float = 1.0) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


# --- shards -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.integers(1, 700), batch=st.integers(1, 300), seed=st.integers(0, 99))
def test_shards_are_disjoint_complete_and_equally_many(data, size, batch, seed):
    workers = data.draw(st.integers(1, min(batch, 6)))
    shares = data.draw(st.lists(positive(), min_size=workers, max_size=workers))
    if workers > 1 and data.draw(st.booleans()):
        shares[0] = 1000 * shares[1]
    minimum = data.draw(st.integers(1, batch // workers))
    partitioner = Partitioner(workers, batch, "static", shares, min_batch=minimum)
    order, shards, left_out = epoch_order(size, seed, 3), [[] for _ in range(workers)], 0
    for start, stop in global_batches(size, batch):
        sizes = partitioner.split(stop - start)
        if sizes is None:
            left_out += stop - start
            continue
        assert sizes.sum() == stop - start and sizes.min() >= minimum
        for rank in range(workers):
            shards[rank].append(order[start:stop][part(sizes, rank)])
    assert len({len(shard) for shard in shards}) == 1
    seen = [sample for shard in shards for one in shard for sample in one]
    assert len(seen) == len(set(seen)) == size - left_out
    assert left_out < workers * minimum


@given(st.integers(1, 500), st.integers(0, 2**31), st.integers(0, 500))
def test_epoch_order_is_a_repeatable_permutation(size, seed, epoch):
    order = epoch_order(size, seed, epoch)
    assert sorted(order) == list(range(size))
    assert (order == epoch_order(size, seed, epoch)).all()


def test_epoch_orders_differ_by_epoch_and_seed():
    orders = [tuple(epoch_order(100, *key)) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(set(orders)) == 4


def test_a_short_batch_grants_the_minimum_from_the_others_part():
    partitioner = Partitioner(3, 1002, "static", [1, 1, 1000], min_batch=2)
    assert partitioner.split(50).tolist() == [2, 2, 46]
    assert partitioner.split(6).tolist() == [2, 2, 2]
    assert partitioner.split(5) is None


# --- rounding ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(positive(1e-6, 1e3), min_size=1, max_size=40), st.integers(0, 5000))
def test_unbounded_rounding_is_the_largest_remainder(shares, total):
    shares = np.array(shares)
    sizes = round_shares(shares, total, np.zeros(len(shares)), np.full(len(shares), float(total)))
    ideal = shares / shares.sum() * total
    assert sizes.sum() == total
    assert (np.abs(sizes - ideal) < 1 + 1e-6).all()
    up = ideal - np.floor(ideal)
    got, not_got = up[sizes > np.floor(ideal + 1e-9)], up[sizes <= np.floor(ideal + 1e-9)]
    assert got.size == 0 or not_got.size == 0 or got.min() >= not_got.max() - 1e-6


@settings(deadline=None)
@given(st.data(), st.integers(1, 8))
def test_bounded_rounding_keeps_to_the_bounds(data, workers):
    low = np.array(data.draw(st.lists(st.integers(0, 20), min_size=workers, max_size=workers)))
    extra = np.array(data.draw(st.lists(st.integers(0, 50), min_size=workers, max_size=workers)))
    shares = data.draw(st.lists(positive(1e-4), min_size=workers, max_size=workers))
    total = data.draw(st.integers(int(low.sum()), int((low + extra).sum())))
    sizes = round_shares(np.array(shares), total, low * 1.0, (low + extra) * 1.0)
    assert sizes.sum() == total
    assert (sizes >= low).all() and (sizes <= low + extra).all()


def test_equal_shares_give_equal_sizes():
    assert Partitioner(2, 256, "equal").batch_sizes.tolist() == [128, 128]
    assert Partitioner(3, 256, "equal").batch_sizes.tolist() == [86, 85, 85]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(workers=3, batch_size=5, policy="equal", min_batch=2), "too small for 3 workers"),
        (dict(workers=2, batch_size=9, policy="equal", max_batch=4), "1 too few"),
        (dict(workers=2, batch_size=9, policy="static", shares=[1, -1]), "rank 1"),
        (dict(workers=2, batch_size=9, policy="static", shares=[1, 0]), "rank 1"),
        (dict(workers=2, batch_size=9, policy="static", shares=[1]), "2 workers need 2 shares"),
        (dict(workers=2, batch_size=9, policy="equal", shares=[1, 1]), "static"),
        (dict(workers=2, batch_size=9, policy="fastest"), "unknown policy"),
    ],
)
def test_impossible_plans_are_refused(arguments, words):
    with pytest.raises(PlanError, match=words):
        Partitioner(**arguments)


def test_a_time_that_is_no_time_names_its_rank():
    for time in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="busy time of rank 1"):
            Partitioner(2, 10).rebalance([5, 5], [1.0, time])


# --- the optimum ------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_the_optimum_equals_brute_force(data, workers):
    def drawn(strategy):
        return np.array(
            data.draw(st.lists(strategy, min_size=workers, max_size=workers)), dtype=float
        )

    a, d = drawn(positive(1e-3)), drawn(st.floats(0, 2))
    low = drawn(st.integers(0, 3))
    high = low + drawn(st.integers(0, 9))
    total = data.draw(st.integers(int(low.sum()), int(high.sum())))
    assume(total > 0)
    best = optimum(a, d, total, low, high)
    assert best.batch_sizes.sum() == total
    assert (best.batch_sizes >= low).all() and (best.batch_sizes <= high).all()
    choices = itertools.product(*(range(int(lo), int(hi) + 1) for lo, hi in zip(low, high)))
    times = [(a * np.array(b) + d).max() for b in choices if sum(b) == total]
    assert best.seconds == pytest.approx(min(times), rel=1e-12)
    assert best.continuous_seconds <= best.seconds * (1 + 1e-12)


def test_the_unbounded_optimum_follows_the_closed_form():
    a, d = np.array([0.001, 0.003, 0.002]), np.array([0.1, 0.05, 0.0])
    best = optimum(a, d, 1000, np.zeros(3), np.full(3, 1000.0))
    assert best.continuous_seconds == pytest.approx((1000 + (d / a).sum()) / (1 / a).sum())


@pytest.mark.parametrize("workers", [2, 100, 10_000])
def test_large_plans_are_within_one_sample_of_the_continuous_bound(workers):
    draw = np.random.default_rng(workers)
    a, d = draw.uniform(1e-4, 1e-2, workers), draw.uniform(0, 0.05, workers)
    best = optimum(a, d, 128 * workers, np.full(workers, 2.0), np.full(workers, 4096.0))
    assert best.batch_sizes.sum() == 128 * workers
    assert best.continuous_seconds <= best.seconds <= best.continuous_seconds + a.max()


# --- the time model ---------------------------------------------------------------------------


def test_the_time_model_is_unknown_until_two_batch_sizes_were_seen():
    model = TimeModel(2)
    model.add([128, 128], [0.2, 0.3])
    assert model.fit() is None
    model.add([128, 128], [0.2, 0.3])
    assert model.fit() is None
    model.add([154, 102], [0.235, 0.26])
    a, d = model.fit()
    assert a == pytest.approx([0.035 / 26, 0.04 / 26])
    assert d == pytest.approx([0.2 - 128 * 0.035 / 26, 0.3 - 128 * 0.04 / 26])


def test_the_time_model_never_has_negative_fixed_cost():
    model = TimeModel(1)
    model.add([100], [0.1])
    model.add([200], [0.3])
    a, d = model.fit()
    assert d == [0.0] and a > 0


def test_a_changed_speed_drops_the_earlier_measurements():
    model = TimeModel(1)
    for size in (100, 150, 120):
        model.add([size], [0.001 * size])
    model.add([110], [0.33])
    assert model.fit() is None
    model.add([60], [0.18])
    assert model.fit()[0] == pytest.approx([0.003])


# --- the paper's rule -------------------------------------------------------------------------


def settled(a: np.ndarray, d: np.ndarray, batch: int, rebalances: int = 150) -> np.ndarray:
    partitioner = Partitioner(len(a), batch)
    for _ in range(rebalances):
        sizes = partitioner.batch_sizes
        partitioner.rebalance(sizes, a * sizes + d)
    return a * partitioner.batch_sizes + d


@pytest.mark.parametrize("row", list(csv.DictReader(AUTHORS.open())), ids=lambda r: r["delay"])
def test_the_paper_s_rule_settles_where_the_authors_logs_do(row):
    """From the first epoch's times (d is the sleep) to the balanced ones of the last 50 epochs."""
    first = np.array([float(row["first_rank0"]), float(row["first_rank1"])])
    d = np.array([0.0, float(row["delay"])])
    balanced = settled((first - d) / 128, d, 256)
    logged = [float(row["last50_rank0"]), float(row["last50_rank1"])]
    assert balanced == pytest.approx(logged, rel=0.02)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(2, 6))
def test_the_paper_s_rule_approaches_the_optimum(data, workers):
    def drawn(strategy):
        return np.array(data.draw(st.lists(strategy, min_size=workers, max_size=workers)))

    a = drawn(positive(5e-4, 5e-3))
    d = drawn(st.floats(0, 0.3)) * a.min() * 64
    best = optimum(a, d, 64 * workers, np.ones(workers), np.full(workers, 64.0 * workers))
    assert settled(a, d, 64 * workers).max() <= best.seconds + 1.5 * a.max()


def test_a_bound_does_not_wind_the_shares_up():
    """A worker held at its minimum for long comes back at once when it is fast again."""
    partitioner = Partitioner(2, 100, min_batch=2)
    for _ in range(50):
        partitioner.rebalance(partitioner.batch_sizes, [9.0, 1.0])
    assert partitioner.batch_sizes.tolist() == [2, 98]
    for _ in range(6):
        sizes = partitioner.batch_sizes
        partitioner.rebalance(sizes, sizes * 0.01)
    assert partitioner.batch_sizes.tolist() == [50, 50]


def test_state_goes_on_exactly():
    first = Partitioner(3, 256)
    first.rebalance(first.batch_sizes, [0.1, 0.2, 0.17])
    second = Partitioner(3, 256)
    second.load_state_dict(first.state_dict())
    for partitioner in (first, second):
        partitioner.rebalance(partitioner.batch_sizes, [0.11, 0.16, 0.14])
    assert (first.shares == second.shares).all()
    assert first.state_dict() == second.state_dict()
