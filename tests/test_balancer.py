"""Gradients, buffers, plans and clocks of real gloo workers against one process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_workers, values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from balancer import (
    Balancer,
    StepClock,
    average_buffers,
    broadcast_state,
    since_change,
    typical,
    wrap,
)
from cluster import join
from partitioner import PlanError, epoch_order, part

SAMPLES, BATCH, EPOCHS = 46, 12, 2
CPU = torch.device("cpu")


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def small_data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 12, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 3, (SAMPLES,), generator=draw)


def loss_of(model: nn.Module, index: Any) -> torch.Tensor:
    x, y = small_data()
    return nn.functional.cross_entropy(model(x[index]), y[index])


def exchanged(balancer: Balancer, module: nn.Module, exchange: str) -> nn.Module:
    """What the training step calls."""
    if exchange == "flat":
        broadcast_state(module)
        return module
    model = wrap(module)
    balancer.attach(model)
    return model


def backward(balancer: Balancer, model: nn.Module, loss: torch.Tensor, exchange: str) -> None:
    loss.backward()
    if exchange == "flat":
        balancer.reduce_flat(model.parameters())


# --- gradients --------------------------------------------------------------------------------


def train_with_changing_shares(exchange: str, parts: int) -> list[float]:
    """Every step of every epoch is split by other random shares; returns the final weights.

    parts: micro-batches that a step's samples are accumulated from.
    """
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = small_model(seed=workers.rank)  # must be made equal
        balancer = Balancer(SAMPLES, BATCH, "equal", seed=3, device=CPU)
        model = exchanged(balancer, module, exchange)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        draw = np.random.default_rng(11)
        for epoch in range(EPOCHS):
            for sizes in balancer.plan_epoch(epoch).batch_sizes:
                chances = np.full(workers.size, 1 / workers.size)
                sizes[:] = 1 + draw.multinomial(sizes.sum() - workers.size, chances)
            plan, planned = balancer.plan, balancer.plan_epoch
            balancer.plan_epoch = lambda epoch: plan  # keep what was drawn above
            for index in balancer.steps(balancer.sampler, epoch):
                pieces = np.array_split(index, min(parts, len(index)))
                for piece in pieces[:-1]:
                    with model.no_sync():
                        (loss_of(model, piece) * len(piece) / len(index)).backward()
                last = loss_of(model, pieces[-1]) * len(pieces[-1]) / len(index)
                backward(balancer, model, last, exchange)
                optimizer.step()
                optimizer.zero_grad()
            balancer.plan_epoch = planned
        return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def reference_trajectory() -> np.ndarray:
    """Plain SGD in one process, written without the project's pieces but for the epoch's order."""
    module = small_model(seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(EPOCHS):
        order = epoch_order(SAMPLES, 3, epoch)
        for start in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            loss_of(module, order[start : start + BATCH]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighting_by_share_follows_one_process_whatever_the_partition(tmp_path, exchange, size):
    outcomes = run_workers(tmp_path, size, train_with_changing_shares, exchange, 1)
    for weights in values(outcomes):
        assert np.abs(np.array(weights) - reference_trajectory()).max() < 1e-9


@pytest.mark.parametrize("size", [1, 3])
def test_accumulated_micro_batches_follow_it_too(tmp_path, size):
    for weights in values(run_workers(tmp_path, size, train_with_changing_shares, "ddp", 3)):
        assert np.abs(np.array(weights) - reference_trajectory()).max() < 1e-9


def gradients_once(exchange: str, weight: str) -> dict[str, list]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        module, shares = small_model(seed=0), range(1, workers.size + 1)
        balancer = Balancer(
            SAMPLES, BATCH, "static", shares, gradient_weight=weight, device=CPU
        )
        model = exchanged(balancer, module, exchange)
        index = next(iter(balancer.sampler))
        backward(balancer, model, loss_of(model, index), exchange)
        reduced = torch.cat([p.grad.flatten() for p in module.parameters()]).tolist()
        return {"reduced": reduced, "index": index}


def mean_gradient(index: list[int]) -> np.ndarray:
    module = small_model(seed=0)
    loss_of(module, index).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]).numpy()


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("weight", ["uniform", "share", "share-over-n"])
def test_reduced_gradient_is_the_one_asked_for(tmp_path, exchange, weight):
    got = values(run_workers(tmp_path, 3, gradients_once, exchange, weight))
    shards = [worker["index"] for worker in got]
    assert [len(shard) for shard in shards] == [2, 4, 6]
    if weight == "uniform":
        expected = np.mean([mean_gradient(shard) for shard in shards], axis=0)
    else:
        expected = mean_gradient(sum(shards, [])) / (3 if weight == "share-over-n" else 1)
    for worker in got:
        assert np.abs(np.array(worker["reduced"]) - expected).max() < 1e-15


def averaged_batch_norm() -> dict[str, list]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = nn.BatchNorm1d(2)
        module.running_mean[:] = torch.tensor([1.0, 10.0]) * (workers.rank + 1)
        module.running_var[:] = torch.tensor([2.0, 3.0]) + workers.rank
        average_buffers(module, [0.5, 0.3, 0.2][workers.rank])
        return {"mean": module.running_mean.tolist(), "var": module.running_var.tolist()}


def test_running_statistics_are_averaged_by_share(tmp_path):
    got = values(run_workers(tmp_path, 3, averaged_batch_norm))
    assert got[0] == got[1] == got[2]
    assert got[0]["mean"] == pytest.approx([1.7, 17.0])
    assert got[0]["var"] == pytest.approx([2.7, 3.7])


def broadcast_batch_norm() -> list[float]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = nn.BatchNorm1d(1)
        module.running_mean += workers.rank
        module.weight.data += workers.rank
        model = wrap(module)
        equal_at_start = [float(module.running_mean), float(module.weight)]
        model(torch.full((4, 1), float(workers.rank)))
        model(torch.full((4, 1), float(workers.rank)))
        return equal_at_start + [float(module.running_mean)]


def test_buffers_are_broadcast_at_the_start_and_not_in_the_forward_pass(tmp_path):
    first, second = values(run_workers(tmp_path, 2, broadcast_batch_norm))
    assert first[:2] == second[:2] == [0.0, 1.0]
    assert (first[2], second[2]) == pytest.approx((0.0, 0.19))


# --- busy time --------------------------------------------------------------------------------


def busy_times(exchange: str, sleeps: list[float]) -> dict[str, list[float]]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = small_model(seed=0)
        balancer = Balancer(SAMPLES, 8, "equal", device=CPU)
        model = exchanged(balancer, module, exchange)
        balancer.before_ready = lambda: balancer.clock.sleep(sleeps[workers.rank])
        for index in balancer.steps(balancer.sampler, 0):
            loss = loss_of(model, index)
            balancer.clock.mark("forward")
            backward(balancer, model, loss, exchange)
        times = balancer.step_times()
        names = ("busy", "wait", "delay", "backward")
        return {name: getattr(times, name)[1:].tolist() for name in names}


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("delayed", [0, 1])
def test_a_delay_lengthens_its_own_worker_s_busy_time_alone(tmp_path, exchange, delayed):
    sleeps = [0.0, 0.0]
    sleeps[delayed] = 0.15
    got = values(run_workers(tmp_path, 2, busy_times, exchange, sleeps))
    slow, fast = got[delayed], got[1 - delayed]
    assert len(slow["busy"]) == 5
    assert min(slow["busy"]) >= 0.15 and np.median(slow["busy"]) < 0.25
    assert min(slow["delay"]) >= 0.15 and np.median(slow["backward"]) < 0.1
    assert np.median(fast["busy"]) < 0.1 and np.median(fast["delay"]) < 0.01
    assert np.median(fast["wait"]) > 0.05 and np.median(slow["wait"]) < 0.1


class Timepiece:
    """In place of the module `time`: it moves in `sleep` alone, whatever else the machine does."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def timepiece(monkeypatch) -> Timepiece:
    timepiece = Timepiece()
    monkeypatch.setattr("balancer.time", timepiece)
    return timepiece


@pytest.mark.parametrize("taken_after_each_step", [False, True])
def test_the_clock_books_each_part_of_a_step(taken_after_each_step, timepiece):
    clock = StepClock(CPU)
    lengths = {"data": 0.02, "forward": 0.04, "ready": 0.06, "exchanged": 0.08, "step": 0.1}
    parts = []
    for before in (0.0, lengths["step"]):  # the update follows the all-reduce, and is work too
        for name, seconds in lengths.items():
            timepiece.sleep(seconds)
            if name == "ready":
                assert clock.busy_so_far() == pytest.approx(before + 0.12)
                clock.sleep(0.03)
            clock.mark(name)
        if taken_after_each_step:
            parts.append(clock.take())
    times = type(parts[0]).joined(parts) if parts else clock.take()
    assert times.data == pytest.approx([0.02] * 2)
    assert times.forward == pytest.approx([0.04] * 2)
    assert times.backward == pytest.approx([0.06] * 2)
    assert times.delay == pytest.approx([0.03] * 2)
    assert times.wait == pytest.approx([0.08] * 2)
    assert times.step == pytest.approx([0.1] * 2)
    assert times.busy == pytest.approx([0.15, 0.25])


def test_an_unmarked_forward_pass_counts_as_backward(timepiece):
    clock = StepClock(CPU)
    clock.mark("data")
    timepiece.sleep(0.05)
    for name in ("ready", "exchanged", "step"):
        clock.mark(name)
    times = clock.take()
    assert times.forward == [0.0] and times.backward == pytest.approx([0.05])


def test_a_clock_without_whole_steps_reads_empty():
    clock = StepClock(CPU)
    clock.mark("data")
    assert clock.take().busy.shape == (0,)


def test_a_single_spike_moves_neither_the_typical_time_nor_its_error():
    times = np.random.default_rng(0).normal(0.1, 0.005, 30)
    spiked = times.copy()
    spiked[7] = 50.0
    assert typical(spiked)[0] == pytest.approx(typical(times)[0], rel=0.01)
    assert typical(spiked)[1] == pytest.approx(typical(times)[1], rel=0.3)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([17, 37, 57, 200]),
    st.floats(0, 1),
    st.sampled_from([1 / 3, 0.5, 0.7, 1.5, 2.0, 5.0]),
    st.floats(0.001, 0.05),
)
def test_times_before_an_abrupt_change_are_cut_off(seed, steps, place, factor, noise):
    # The gap of the closest levels is six times the strongest noise.
    after = int(np.clip(place * steps, steps // 8 + 2, steps - steps // 8 - 2))
    times = np.exp(np.random.default_rng(seed).normal(0, noise, steps))
    times[after:] *= factor
    cut = steps - len(since_change(times))
    # A step of noise may look as if it were on the other side, more hardly.
    assert abs(cut - after) <= 2 if noise > 0.02 else cut == after


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.05), st.integers(0, 190))
def test_noise_and_spikes_cut_nothing_off(seed, noise, place):
    times = np.exp(np.random.default_rng(seed).normal(0, noise, 200))
    times[place : place + 10] *= 3
    assert len(since_change(times)) == 200


@pytest.mark.parametrize("steps", range(1, 12))
def test_few_or_equal_times_are_all_kept(steps):
    assert len(since_change(np.full(steps, 0.1))) == steps


# --- plans ------------------------------------------------------------------------------------


def one_of(rank: int, size: int) -> SimpleNamespace:
    """Peers of a worker that asks nobody."""
    return SimpleNamespace(rank=rank, size=size, gather=lambda values: np.stack([values] * size))


def lone(*arguments: Any, rank: int = 0, size: int = 1, **options: Any) -> Balancer:
    return Balancer(*arguments, device=CPU, peers=one_of(rank, size), **options)


def test_a_plan_cannot_mistake_short_first_and_replanned_steps_for_clean_ones():
    assert lone(65, 10).plan.clean_steps().tolist() == [3, 4, 5]
    assert lone(7, 10).plan.clean_steps().tolist() == [0]
    plan = lone(400, 20, size=2).plan
    plan.batch_sizes[10:] = [5, 15]
    assert plan.clean_steps().tolist() == list(range(13, 20))
    assert plan.clean_steps(0, 10).tolist() == list(range(3, 10))
    assert plan.clean_steps(5, 15).tolist() == [12, 13, 14]
    assert plan.changes() == [(0, [10, 10]), (10, [5, 15])]


def test_a_left_out_batch_is_counted():
    balancer = lone(23, 10, min_batch=4)
    assert (len(balancer.sampler), balancer.plan.left_out) == (2, 3)


def test_the_sampler_gives_each_worker_its_part_of_the_global_batch():
    whole = lone(50, 16, seed=9)
    parts = [
        lone(50, 16, "static", [1, 2, 5], seed=9, rank=rank, size=3) for rank in range(3)
    ]
    for batch, *shards in zip(whole.sampler, *(balancer.sampler for balancer in parts)):
        assert sum(shards, []) == batch
    assert part(np.array([2, 4, 10]), 1) == slice(2, 6)


def test_arguments_that_make_no_plan_are_refused():
    for options in ({"every": 0}, {"every": "step"}, {"gradient_weight": "mean"}):
        with pytest.raises(PlanError):
            lone(10, 5, **options)


def test_every_must_fit_into_an_epoch():
    with pytest.raises(PlanError, match="partition.every"):
        next(lone(100, 10, every=11).steps([], 0))


def test_a_model_without_the_balancer_is_noticed():
    with pytest.raises(RuntimeError, match="attached"):
        for _ in lone(10, 5).steps([[0], [1]], 0):
            pass


def test_a_loader_without_the_sampler_is_noticed():
    with pytest.raises(RuntimeError, match="batch_sampler"):
        next(lone(10, 5).steps([], 0))


def balanced_by(loader_workers: int, policy: str, every: Any) -> dict[str, Any]:
    """Three epochs of a plain DDP script on a worker whose cost per sample depends on its rank."""
    x, y = small_data()
    x, y = x.repeat(20, 1), y.repeat(20)
    with join("gloo", "cpu", 1, 60.0) as workers:
        balancer = Balancer(len(x), 20, policy, every=every, device=CPU, seed=1)
        loader = DataLoader(
            TensorDataset(x, y), batch_sampler=balancer.sampler, num_workers=loader_workers
        )
        model = wrap(small_model(0))
        balancer.attach(model)
        plans, seen = [], []
        for epoch in range(3):
            # Wrapped, as by a progress bar: what the loader has drawn must still be known.
            for inputs, labels in balancer.steps(tqdm(loader, disable=True), epoch):
                time.sleep(0.0004 * len(inputs) * (1 + 2 * workers.rank))
                nn.functional.cross_entropy(model(inputs), labels).backward()
                seen.append(len(inputs))
            plans.append(balancer.plan.batch_sizes.tolist())
        return {"plans": plans, "seen": seen, "state": balancer.state_dict()}


@pytest.mark.parametrize(("loader_workers", "every"), [(0, "epoch"), (0, 10), (1, 10)])
def test_a_plain_script_is_balanced_and_all_workers_agree(tmp_path, loader_workers, every):
    arguments = (loader_workers, "affine", every)
    first, second = values(run_workers(tmp_path, 2, balanced_by, *arguments, limit=90))
    assert first["plans"] == second["plans"] and first["state"] == second["state"]
    plans = np.concatenate(first["plans"])
    # Booked is what was used: each worker really got the planned number of samples at each step.
    assert [first["seen"], second["seen"]] == plans.T.tolist()
    assert (plans.sum(1) == 20).all()
    fast, slow = plans[-1]
    assert fast > 1.8 * slow
    if every == 10:
        # Prefetching delays a plan by what the loader has drawn ahead: two batches per process.
        change = int(np.flatnonzero((plans[1:] != plans[:-1]).any(1))[0]) + 1
        assert change == 10 + 2 * loader_workers


# --- state and replay ---------------------------------------------------------------------------


def shards_of(balancer: Balancer, epoch: int, stop: int | None = None) -> list[list[int]]:
    """Goes through an epoch, or its first `stop` steps, marking what the hook would."""
    drawn = []
    for index in balancer.steps(balancer.sampler, epoch):
        balancer.clock.mark("ready")
        balancer.clock.mark("exchanged")
        drawn.append(index)
        if stop is not None and len(drawn) == stop:
            break
    return drawn


def test_state_goes_on_inside_an_epoch():
    def fresh() -> Balancer:
        return lone(100, 10, "static", [1, 3], rank=1, size=2, seed=4)

    whole, before, after = fresh(), fresh(), fresh()
    before.plan_epoch(1)
    started = shards_of(before, 1, stop=4)
    state = before.state_dict()
    state["next_step"] = 4  # the fourth step was done when its batch was left
    after.load_state_dict(state)
    assert started + shards_of(after, 1) == shards_of(whole, 1)
    assert shards_of(after, 2) == shards_of(whole, 2)


@pytest.mark.parametrize(
    "name, value",
    [
        ("busy", None),
        ("busy", [0.1]),
        ("segment", -1),
        ("next_step", 10),
        ("changes", [(0, [1, 2])]),
        ("changes", [(0, [-2, 12])]),
        ("changes", [(0, [1e300, 1])]),
        ("changes", [(0, [5, 5]), (0, [5, 5])]),
        ("changes", [(3, [5, 5]), (2, [5, 5])]),
        ("changes", [(1, [5, 5])]),
        ("changes", [(0, [10] + [0] * 10**6)]),
    ],
)
def test_a_state_of_another_plan_is_refused(name, value):
    def fresh() -> Balancer:
        return lone(100, 10, "static", [1, 3], rank=1, size=2)

    state = {**fresh().state_dict(), "next_step": 4}
    fresh().load_state_dict(state, {"busy": [0.1] * 4})
    with pytest.raises((OverflowError, TypeError, ValueError)):
        fresh().load_state_dict({**state, name: value}, {"busy": [0.1] * 4})


def test_replay_takes_the_recorded_sizes_and_refuses_others():
    recorded = np.array([[3, 7], [4, 6], [1, 9]])
    balancer = lone(30, 10, "equal", size=2, replay={0: recorded, 1: recorded[:2]})
    assert (balancer.plan.batch_sizes == recorded).all()
    for epoch in (1, 2):
        with pytest.raises(PlanError, match="replay"):
            balancer.plan_epoch(epoch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_keeps_what_other_workers_have_done_of_it(size):
    before = lone(65, 10, "static", [3, 1], size=2)
    before.plan_epoch(1)
    before.plan.batch_sizes[2:] = [4, 6]
    before.plan.batch_sizes[-1] = [3, 2]
    state = {**before.state_dict(), "next_step": 4, "segment": 2}
    after = lone(65, 10, "equal", rank=size - 1, size=size)
    after.load_state_dict(state)
    assert [sizes for step, sizes in after.plan.changes() if step < 4] == [[8, 2], [4, 6]]
    ahead = after.plan.batch_sizes[4:, :size]
    assert ahead.tolist()[:2] == ([[10]] * 2, [[4, 6]] * 2, [[4, 3, 3]] * 2)[size - 1]
    assert after.plan.batch_sizes.sum(1).tolist() == [10] * 6 + [5]
    assert after.plan.joined() == (0 if size == 2 else 4)
    assert after.epoch_share() > 0
    # What was measured before does not count with others, nor where it is not known.
    assert (after.next_step, after._segment) == (4, 4)
    seen = shards_of(after, 1)
    assert len(seen) == 3 and len(after.step_times().busy) == 7
    # From there it can be saved and goes on again.
    twin = lone(65, 10, "equal", rank=size - 1, size=size)
    twin.load_state_dict({**after.state_dict(), "next_step": 5})
    assert twin.plan.changes() == after.plan.changes()
    assert shards_of(twin, 1) == seen[1:]


def test_a_last_batch_that_was_left_out_stays_so_with_fewer_workers():
    """For the number of steps in an epoch, which the learning rate follows."""
    before = lone(65, 10, "equal", min_batch=3, size=2)
    assert (len(before.plan.starts), before.plan.left_out) == (6, 5)
    after = lone(65, 10, "equal", min_batch=3)
    assert (len(after.plan.starts), after.plan.left_out) == (7, 0)
    after.load_state_dict({**before.state_dict(), "next_step": 4})
    for _ in range(2):
        assert (len(after.plan.starts), after.plan.left_out) == (6, 5)
        assert after.state_dict()["left_out"] == 5
        after.plan_epoch(1)


@pytest.mark.parametrize("step", [0, 4, 6])
def test_a_last_batch_that_is_too_small_for_more_workers_is_left_out(step):
    """Also if it alone was to come: the epoch then has no more steps."""
    before = lone(65, 10, "equal", min_batch=3)
    after = lone(65, 10, "equal", min_batch=3, rank=1, size=2)
    after.load_state_dict({**before.state_dict(), "next_step": step, "segment": 7 - step})
    assert (len(after.plan.starts), after.plan.left_out) == (6, 5)
    assert len(shards_of(after, 0)) == 6 - step
    assert after.next_step == 0 and after.epoch_share() >= 0
    assert len(shards_of(after, 1)) == 6


def test_steps_pause_where_they_are_told_and_go_on():
    paused, whole = lone(100, 10, seed=3), lone(100, 10, seed=3)
    asked: list[int] = []

    def pause(step: int) -> bool:
        asked.append(step)
        return step in (3, 7)

    seen, parts = [], 0
    while not seen or paused.next_step > 0:
        parts += 1
        for index in paused.steps(paused.sampler, 0, pause=pause):
            paused.clock.mark("ready")
            paused.clock.mark("exchanged")
            seen.append(index)
    assert seen == shards_of(whole, 0) and parts == 3
    assert asked == list(range(1, 10))  # not after the last
    times = paused.step_times()
    assert len(times.busy) == 10 and (times.busy > 0).all()
    # The one rebalance at the end counts the steps before the pauses as well.
    assert np.isfinite(paused.busy).all()
