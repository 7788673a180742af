"""Gradients, buffers and clocks of real gloo workers against one process."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from processes import run_workers, values
from torch import nn

from balancer import (
    EXCHANGES,
    Balancer,
    DdpExchange,
    StepClock,
    StepTimes,
    average_buffers,
    typical,
)
from cluster import join
from partitioner import Partitioner, part

SAMPLES, BATCH, EPOCHS = 46, 12, 2


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def small_data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 12, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 3, (SAMPLES,), generator=draw)


def train_with_changing_shares(exchange_name: str, weight: str) -> list[float]:
    """Every step of every epoch is split by other random shares; returns the final weights."""
    x, y = small_data()
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = small_model(seed=workers.rank)  # replicas must be made equal by the exchange
        exchange = EXCHANGES[exchange_name](module, StepClock(workers.device))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        partitioner = Partitioner(workers.size, BATCH)
        balancer = Balancer(partitioner, SAMPLES, 3, workers.rank, workers.gather, weight)
        draw = np.random.default_rng(11)
        for epoch in range(EPOCHS):
            plan = balancer.plan_epoch(epoch)
            for sizes in plan.batch_sizes:
                chances = np.full(workers.size, 1 / workers.size)
                sizes[:] = 1 + draw.multinomial(sizes.sum() - workers.size, chances)
            for step, index in enumerate(balancer.sampler):
                loss = nn.functional.cross_entropy(exchange.model(x[index]), y[index])
                exchange.backward(loss, balancer.weight(step))
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def reference_trajectory() -> np.ndarray:
    """Plain SGD in one process, written without the project's pieces but for the epoch's order."""
    from partitioner import epoch_order

    x, y = small_data()
    module = small_model(seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(EPOCHS):
        order = epoch_order(SAMPLES, 3, epoch)
        for start in range(0, SAMPLES, BATCH):
            index = order[start : start + BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighting_by_share_follows_one_process_whatever_the_partition(tmp_path, exchange, size):
    outcomes = run_workers(tmp_path, size, train_with_changing_shares, exchange, "share")
    for weights in values(outcomes):
        assert np.abs(np.array(weights) - reference_trajectory()).max() < 1e-9


def gradients_once(exchange_name: str, weight: str) -> dict[str, list]:
    x, y = small_data()
    with join("gloo", "cpu", 1, 30.0) as workers:
        module = small_model(seed=0)
        exchange = EXCHANGES[exchange_name](module, StepClock(workers.device))
        partitioner = Partitioner(workers.size, BATCH, "static", range(1, workers.size + 1))
        balancer = Balancer(partitioner, SAMPLES, 0, workers.rank, workers.gather, weight)
        index = next(iter(balancer.sampler))
        loss = nn.functional.cross_entropy(exchange.model(x[index]), y[index])
        exchange.backward(loss, balancer.weight(0))
        reduced = torch.cat([p.grad.flatten() for p in module.parameters()]).tolist()
        return {"reduced": reduced, "index": index.tolist()}


def mean_gradient(index: list[int]) -> np.ndarray:
    x, y = small_data()
    module = small_model(seed=0)
    nn.functional.cross_entropy(module(x[index]), y[index]).backward()
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
        exchange = DdpExchange(module, StepClock(workers.device))
        equal_at_start = [float(module.running_mean), float(module.weight)]
        exchange.model(torch.full((4, 1), float(workers.rank)))
        exchange.model(torch.full((4, 1), float(workers.rank)))
        return equal_at_start + [float(module.running_mean)]


def test_buffers_are_broadcast_at_the_start_and_not_in_the_forward_pass(tmp_path):
    first, second = values(run_workers(tmp_path, 2, broadcast_batch_norm))
    assert first[:2] == second[:2] == [0.0, 1.0]
    assert (first[2], second[2]) == pytest.approx((0.0, 0.19))


# --- busy time ----------------------------------------------------------------------------------


def busy_times(exchange_name: str, sleeps: list[float]) -> dict[str, list[float]]:
    x, y = small_data()
    with join("gloo", "cpu", 1, 30.0) as workers:
        module, clock = small_model(seed=0), StepClock(workers.device)
        exchange = EXCHANGES[exchange_name](module, clock)
        clock.begin()
        for _ in range(6):
            clock.mark("data")
            loss = nn.functional.cross_entropy(exchange.model(x), y)
            clock.mark("forward")
            exchange.backward(loss, 0.5, lambda: clock.sleep(sleeps[workers.rank]))
            clock.mark("step")
        times = clock.read()
        names = ("busy", "wait", "delay", "backward")
        return {name: getattr(times, name)[1:].tolist() for name in names}


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("delayed", [0, 1])
def test_a_delay_lengthens_its_own_worker_s_busy_time_alone(tmp_path, exchange, delayed):
    sleeps = [0.0, 0.0]
    sleeps[delayed] = 0.15
    got = values(run_workers(tmp_path, 2, busy_times, exchange, sleeps))
    slow, fast = got[delayed], got[1 - delayed]
    assert min(slow["busy"]) >= 0.15 and np.median(slow["busy"]) < 0.25
    assert min(slow["delay"]) >= 0.15 and np.median(slow["backward"]) < 0.1
    assert np.median(fast["busy"]) < 0.1 and np.median(fast["delay"]) < 0.01
    assert np.median(fast["wait"]) > 0.05 and np.median(slow["wait"]) < 0.1


def test_the_clock_books_each_part_of_a_step():
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    lengths = {"data": 0.02, "forward": 0.04, "ready": 0.06, "exchanged": 0.08, "step": 0.1}
    for _ in range(2):
        for name, seconds in lengths.items():
            time.sleep(seconds)
            if name == "ready":
                assert clock.busy_so_far() >= 0.12
                clock.sleep(0.03)
            clock.mark(name)
    times = clock.read()
    assert times.data == pytest.approx(0.02, abs=0.015)
    assert times.forward == pytest.approx(0.04, abs=0.015)
    assert times.backward == pytest.approx(0.06, abs=0.015)
    assert times.delay == pytest.approx(0.03, abs=0.015)
    assert times.wait == pytest.approx(0.08, abs=0.015)
    assert times.step == pytest.approx(0.1, abs=0.015)
    assert times.busy == pytest.approx([0.15, 0.25], abs=0.03)


def test_a_clock_without_steps_reads_empty():
    assert StepClock(torch.device("cpu")).read().busy.shape == (0,)


def test_a_single_spike_does_not_move_the_typical_time():
    times = np.full(30, 0.1)
    times[7] = 50.0
    assert typical(times) == pytest.approx(0.1)


# --- plans --------------------------------------------------------------------------------------


def alone(values_: np.ndarray) -> np.ndarray:
    return values_[None]


def test_a_plan_cannot_mistake_short_and_first_steps_for_clean_ones():
    balancer = Balancer(Partitioner(1, 10), 65, 0, 0, alone)
    assert balancer.plan.clean_steps().tolist() == [False] * 3 + [True] * 3 + [False]
    short = Balancer(Partitioner(1, 10), 7, 0, 0, alone)
    assert short.plan.clean_steps().tolist() == [True]


def test_a_left_out_batch_is_counted():
    balancer = Balancer(Partitioner(1, 10, min_batch=4), 23, 0, 0, alone)
    assert (len(balancer.sampler), balancer.plan.left_out) == (2, 3)


def plans_of_measured_times() -> list:
    with join("gloo", "cpu", 1, 30.0) as workers:
        partitioner = Partitioner(workers.size, 60)
        balancer = Balancer(partitioner, 600, 0, workers.rank, workers.gather)
        for epoch in range(4):
            balancer.plan_epoch(epoch)
            draw = np.random.default_rng([workers.rank, epoch])
            zero = np.zeros(10)
            times = StepTimes(*[zero] * 6, busy=draw.uniform(0.1, 0.2, 10) * (1 + workers.rank))
            balancer.rebalance(times)
        return [partitioner.batch_sizes.tolist(), partitioner.state_dict()]


def test_all_workers_compute_the_same_plan(tmp_path):
    first, *others = values(run_workers(tmp_path, 3, plans_of_measured_times))
    assert all(other == first for other in others)
    assert first[0][0] > first[0][1] > first[0][2]


def test_the_sampler_gives_each_worker_its_part_of_the_global_batch():
    whole = Balancer(Partitioner(1, 16), 50, 9, 0, alone)
    parts = [
        Balancer(Partitioner(3, 16, "static", [1, 2, 5]), 50, 9, rank, alone) for rank in range(3)
    ]
    for batch, *shards in zip(whole.sampler, *(balancer.sampler for balancer in parts)):
        assert np.concatenate(shards).tolist() == batch.tolist()
    assert part(np.array([2, 4, 10]), 1) == slice(2, 6)
