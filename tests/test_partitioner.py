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
    better_without,
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

EXACT = np.full(2, 1e-6)  # standard errors of times without noise


def test_the_time_model_is_unknown_until_two_batch_sizes_were_seen():
    model = TimeModel(2)
    assert model.fit() is None
    for _ in range(2):
        model.add([128, 128], [0.2, 0.3], EXACT)
        assert not model.known
    model.add([154, 102], [0.235, 0.26], EXACT)
    assert model.known
    a, d = model.fit()
    assert a == pytest.approx([0.035 / 26, 0.04 / 26], rel=0.02)
    assert a * 128 + d == pytest.approx([0.2, 0.3], rel=0.002)


def test_the_time_model_has_neither_negative_fixed_cost_nor_free_samples():
    model = TimeModel(2)
    model.add([100, 100], [0.1, 0.1], EXACT)
    model.add([200, 50], [0.35, 0.11], EXACT)
    a, d = model.fit()
    assert (d >= 0).all() and (a > 0).all()


def test_noise_at_one_batch_size_is_not_taken_for_a_slope():
    """Batch sizes that differ by one say nothing; the others' elasticity is the better guess."""
    model = TimeModel(3)
    model.add([100, 100, 100], [0.10, 0.10, 0.2], [0.002] * 3)
    model.add([101, 140, 59], [0.097, 0.14, 0.118], [0.002] * 3)
    a, d = model.fit()
    assert d == pytest.approx(0, abs=0.02)


def test_a_changed_speed_drops_the_earlier_measurements():
    model = TimeModel(2)
    for size in (100, 150, 120):
        model.add([size, size], [0.001 * size, 0.002 * size], EXACT)
    model.add([110, 90], [0.33, 0.18], EXACT)
    assert not model.known  # worker 0 starts anew, worker 1 does not
    a, d = model.fit()
    assert a[0] * 110 + d[0] == pytest.approx(0.33)
    model.add([60, 90], [0.18, 0.18], EXACT)
    assert model.known
    assert model.fit()[0] == pytest.approx([0.003, 0.002], rel=0.02)


def test_ordinary_noise_is_not_taken_for_a_change():
    draw = np.random.default_rng(3)
    model = TimeModel(4)
    for step in range(200):
        sizes = draw.integers(50, 80, 4)
        times = (0.001 * sizes + 0.02) * np.exp(draw.normal(0, 0.0115, 4))
        model.add(sizes, times, 0.0115 * times)
        assert step < 2 or model.known


# --- the affine policy ------------------------------------------------------------------------


def world(draw: np.random.Generator, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """True a and d of workers that differ in speed, in fixed cost or in both."""
    mean_time = 1e-3 * 64
    kind = draw.integers(4)
    a = 1e-3 * np.exp(draw.normal(0, 0.4, workers))
    d = draw.uniform(0, (0.3, 0.85, 0.2, 0)[kind], workers) * mean_time
    if kind == 2:
        a = 1e-3 * draw.choice([1, 1.5, 2.3, 5.2], workers)
    if kind == 3:
        d[draw.integers(workers)] = draw.uniform(0.3, 0.9) * mean_time
    return a, d


def imbalances(
    seed: int, workers: int, steps: int, windows: int, noise: float = 0.05
) -> tuple[list[float], list[bool]]:
    """True max t / T* after each rebalance, and whether it moved anything."""
    draw = np.random.default_rng([seed, workers, steps])
    a, d = world(draw, workers)
    partitioner = Partitioner(workers, 64 * workers, "affine", min_batch=2)
    best = optimum(a, d, 64 * workers, partitioner.minimum, partitioner.maximum)
    states, moves = [], []
    for _ in range(windows):
        sizes = partitioner.batch_sizes
        times = (a * sizes + d) * np.exp(draw.normal(0, noise, (steps, workers)))
        errors = times.std(0) / np.sqrt(steps)
        moves.append(partitioner.rebalance(sizes, times.mean(0), errors))
        states.append((a * partitioner.batch_sizes + d).max() / best.seconds)
    return states, moves


@pytest.mark.parametrize("steps", [20, 196])
@pytest.mark.parametrize("workers", [2, 3, 8, 16, 64])
def test_affine_is_within_5_percent_of_the_optimum_after_two_rebalances(workers, steps):
    """In 99 % of the states from the second rebalance on, with 5 % noise in every step."""
    runs = [imbalances(seed, workers, steps, windows=12) for seed in range(30)]
    states = np.array([states[1:] for states, _ in runs])
    assert (states > 1.05).mean() <= 0.01
    moves = np.array([moves[-4:] for _, moves in runs])
    assert moves.mean() <= 0.1  # it comes to rest: no oscillation


def test_affine_reaches_the_exact_optimum_where_there_is_no_noise():
    a, d = np.array([0.001, 0.001, 0.004]), np.array([0.0, 0.06, 0.0])
    partitioner = Partitioner(3, 300, "affine")
    for _ in range(3):
        sizes = partitioner.batch_sizes
        partitioner.rebalance(sizes, a * sizes + d, np.full(3, 1e-9))
    best = optimum(a, d, 300, partitioner.minimum, partitioner.maximum)
    assert (a * partitioner.batch_sizes + d).max() <= best.seconds * 1.01


def test_affine_s_first_rebalance_is_the_paper_s():
    affine, paper = Partitioner(3, 256, "affine"), Partitioner(3, 256, "proportional")
    for partitioner in (affine, paper):
        partitioner.rebalance(partitioner.batch_sizes, [0.1, 0.2, 0.3])
    assert (affine.batch_sizes == paper.batch_sizes).all()


def test_affine_follows_a_change_within_three_rebalances():
    partitioner = Partitioner(2, 256, "affine")
    d = np.zeros(2)
    for number in range(9):
        a = np.array([0.001, 0.001 if number < 5 else 0.004])
        sizes = partitioner.batch_sizes
        partitioner.rebalance(sizes, a * sizes + d, 0.003 * (a * sizes))
    assert partitioner.batch_sizes[0] == pytest.approx(256 * 0.8, abs=4)


def test_a_small_gain_moves_nothing():
    partitioner = Partitioner(2, 256, "affine", min_gain=0.05)
    partitioner.rebalance([128, 128], [0.10, 0.10])
    assert not partitioner.rebalance([128, 128], [0.102, 0.10])
    assert partitioner.batch_sizes.tolist() == [128, 128]


def test_lower_caps_hold_from_then_on_and_move_the_surplus():
    partitioner = Partitioner(3, 300, "affine", max_batch=[300, 120, 300])
    partitioner.lower_caps([40, np.inf, np.inf])
    assert partitioner.batch_sizes.sum() == 300
    assert partitioner.batch_sizes[0] <= 40 and partitioner.batch_sizes[1] <= 120
    partitioner.rebalance(partitioner.batch_sizes, [0.01, 0.1, 0.1])
    assert partitioner.batch_sizes[0] <= 40
    with pytest.raises(PlanError, match="20 too few"):
        partitioner.lower_caps([40, 40, 200])


def test_a_worker_that_holds_all_others_up_is_named():
    partitioner = Partitioner(3, 96, "affine", min_batch=2)
    a, d = np.array([0.001, 0.001, 0.001]), np.array([0.0, 0.0, 0.2])
    for _ in range(4):
        sizes = partitioner.batch_sizes
        partitioner.rebalance(sizes, a * sizes + d, np.full(3, 1e-6))
    assert partitioner.batch_sizes[2] == 2
    left_out = partitioner.left_out()
    assert left_out.ranks == (2,)
    assert left_out.seconds == pytest.approx(0.048, rel=0.1)


def test_workers_that_are_equally_slow_are_left_out_together():
    """Without one of the two the other still sets the pace."""
    a, d = np.full(4, 0.001), np.array([0.0, 0.25, 0.0, 0.25])
    bounds = np.ones(4), np.full(4, 256.0)
    best = optimum(a, d, 256, *bounds)
    assert best.seconds == pytest.approx(0.251)
    found = better_without(a, d, 256, *bounds, best)
    assert found.ranks == (1, 3) and found.seconds == pytest.approx(0.128)
    # There is nobody else who could take the whole batch.
    few = np.array([127.0, 256.0, 127.0, 256.0])
    assert better_without(a, d, 256, bounds[0], few, optimum(a, d, 256, bounds[0], few)) is None


def test_no_worker_of_a_balanced_run_is_better_left_out():
    partitioner = Partitioner(2, 96, "affine", min_batch=2)
    for sizes in ([48, 48], [60, 36]):
        partitioner.rebalance(sizes, np.array([0.001, 0.002]) * sizes)
    assert partitioner.left_out() is None


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


@pytest.mark.parametrize("policy", ["proportional", "affine"])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_plans_that_take_effect_late_do_not_make_shares_swing(policy, lag):
    """Rebalanced at every step, while prefetched batches still have sizes of earlier plans."""
    partitioner = Partitioner(2, 64, policy, min_batch=2)
    a, waiting = np.array([0.001, 0.003]), [partitioner.batch_sizes] * (lag + 1)
    seen = []
    for _ in range(60):
        sizes = waiting.pop(0)
        partitioner.rebalance(sizes, a * sizes)
        waiting.append(partitioner.batch_sizes)
        seen.append(int(partitioner.batch_sizes[1]))
    assert all(15 <= size <= 17 for size in seen[20:])


def test_state_goes_on_exactly():
    first = Partitioner(3, 256)
    first.rebalance(first.batch_sizes, [0.1, 0.2, 0.17])
    second = Partitioner(3, 256)
    second.load_state_dict(first.state_dict())
    for partitioner in (first, second):
        partitioner.rebalance(partitioner.batch_sizes, [0.11, 0.16, 0.14])
    assert (first.shares == second.shares).all()
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    "place, value",
    [
        ("shares", [0.5, -0.5]),
        ("batch_sizes", [40, -8]),
        ("batch_sizes", [16, 15]),
        ("batch_sizes", [16.5, 15.5]),
        ("maximum", [32.0]),
        ("maximum", [15.0, 32.0]),
        ("maximum", [float("nan")] * 2),
        ("time_model.weight", [1.0]),
        ("time_model.weight", [float("inf")] * 2),
        ("time_model.time", [float("nan")] * 2),
        ("time_model.time", [0.0, 0.1]),
        ("time_model.size", [1e30] * 2),
        ("time_model.squares", [-1.0, 0.0]),
    ],
)
def test_a_state_that_no_measurements_could_have_led_to_is_refused(place, value):
    partitioner = Partitioner(2, 32, "equal")
    partitioner.rebalance([16, 16], [0.1, 0.2])
    state = partitioner.state_dict()
    Partitioner(2, 32, "equal").load_state_dict(state)
    part, _, name = place.rpartition(".")
    (state[part] if part else state)[name] = value
    with pytest.raises(ValueError):
        Partitioner(2, 32, "equal").load_state_dict(state)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), before=st.integers(1, 6), after=st.integers(1, 6),
    policy=st.sampled_from(["equal", "proportional", "affine"]), measured=st.integers(0, 3),
)  # fmt: skip
def test_another_number_of_workers_takes_over_what_still_holds(
    data, before, after, policy, measured
):
    batch = 96
    first = Partitioner(before, batch, policy, max_batch=[batch - rank for rank in range(before)])
    for _ in range(measured):
        times = data.draw(st.lists(positive(), min_size=before, max_size=before))
        first.rebalance(first.batch_sizes, times)
    state = first.state_dict()
    second = Partitioner(after, batch, policy)
    second.load_state_dict(state)
    assert second.batch_sizes.sum() == batch and second.batch_sizes.min() >= 1
    assert second.shares.sum() == pytest.approx(1)
    stay = min(before, after)
    caps = [batch - rank if rank < stay else batch for rank in range(after)]
    assert second.maximum.tolist() == caps
    if policy == "equal":
        assert second.shares == pytest.approx(1 / after)
    else:
        # In the old relation to each other, and as the mean of those that stay.
        old, new = np.array(state["shares"]), second.shares
        assert new[:stay] / new[0] == pytest.approx(old[:stay] / old[0])
        assert new[stay:] == pytest.approx(new[:stay].mean())
    then, now = state["time_model"], second.state_dict()["time_model"]
    assert all(now[name][:stay] == then[name][:stay] for name in then)
    if measured == 0:
        assert second.time_model.fit() is None and not second.time_model.known
    elif after > before:
        # At the mean batch size a new worker is expected to take the mean time.
        a, d = second.time_model.fit()
        size, time = np.mean(then["size"]), np.mean(then["time"])
        assert a[before:] * size + d[before:] == pytest.approx(time)
        assert not second.time_model.known
    second.rebalance(second.batch_sizes, np.full(after, 0.1))
