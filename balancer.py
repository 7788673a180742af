"""What a training script needs to be balanced: batches by share, weighted gradients, busy times.

A `Balancer` plans each epoch and gives every worker its own part of each global batch. An exchange
(`DdpExchange`, `FlatExchange`) sums the workers' gradients with explicit weights, so that unequal
batch sizes give the gradient that was asked for. A `StepClock` notes, without stopping the device,
when each part of a step was done; the busy time of a step runs from the end of the previous
all-reduce to the moment the worker's own last gradient bucket is ready.

Uses partitioner.py and nothing else of this project.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import Sampler

from partitioner import Partitioner, epoch_order, global_batches, part

GRADIENT_WEIGHTS = ("uniform", "share", "share-over-n")

# Steps at the start of an epoch that say little of the rest: kernels are selected, caches are cold.
WARM_UP_STEPS = 3
# Of the sorted busy times this part is left out at either end, so that single spikes do not count.
TRIM = 0.1


# --- time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step of one worker, float64 [steps] each.

    data: fetching and augmenting; forward: forward pass and loss; backward: until the last bucket
    is ready, without the delay; delay: injected; wait: for the others, and the all-reduce; step:
    optimizer; busy: previous step's optimizer + data + forward + backward + delay.
    """

    data: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    delay: np.ndarray
    wait: np.ndarray
    step: np.ndarray
    busy: np.ndarray


class StepClock:
    """Marks the moments of a step: on CUDA as events that are read only when the epoch is over."""

    MARKS = ("data", "forward", "ready", "exchanged", "step")

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Starts a new series of steps and forgets the last one."""
        self._start = self._last_exchange = self._now()
        self._marks: dict[str, list] = {name: [] for name in self.MARKS}
        self._delays: list[float] = []
        self._delay = 0.0

    def mark(self, name: str) -> None:
        """Notes that the part of the step called `name` (one of MARKS) is done."""
        moment = self._now()
        self._marks[name].append(moment)
        if name == "exchanged":
            self._last_exchange = moment
            self._delays.append(self._delay)
            self._delay = 0.0

    def busy_so_far(self) -> float:
        """Seconds of work since the last all-reduce was done; waits for the device to get there."""
        now = self._now()
        if self._cuda:
            now.synchronize()
        return self._seconds(self._last_exchange, now)

    def sleep(self, seconds: float) -> None:
        """Lengthens the step: lets the device finish its own work, then sleeps, and books it."""
        if self._cuda:
            # Only this stream: the exchange's stream also waits for other workers.
            torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        time.sleep(seconds)
        self._delay += time.perf_counter() - start

    def read(self) -> StepTimes:
        """The times of all steps since `begin`; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        before, lengths = self._start, []
        for moments in zip(*(self._marks[name] for name in self.MARKS)):
            lengths.append([self._seconds(a, b) for a, b in zip((before, *moments), moments)])
            before = moments[-1]
        data, forward, ready, wait, step = np.array(lengths).reshape(-1, len(self.MARKS)).T
        delay = np.array(self._delays[: len(data)])
        previous_step = np.concatenate([[0.0], step[:-1]])[: len(data)]
        busy = previous_step + data + forward + ready
        return StepTimes(data, forward, ready - delay, delay, wait, step, busy)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
        return start.elapsed_time(stop) / 1000 if self._cuda else stop - start


def typical(times: np.ndarray) -> float:
    """Mean of the times without the largest and the smallest tenth: one spike does not move it."""
    cut = int(len(times) * TRIM)
    return float(np.sort(times)[cut : len(times) - cut].mean())


# --- batches ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochPlan:
    """Who takes what in one epoch.

    starts: int64 [steps], each global batch's first position in the epoch's order; batch_sizes:
    int64 [steps, n]; left_out: samples of a short last batch that was too small for all workers.
    """

    epoch: int
    starts: np.ndarray
    batch_sizes: np.ndarray
    left_out: int

    def clean_steps(self) -> np.ndarray:
        """bool [steps]: those whose times tell of the plan, not of warming up or a short batch."""
        steps = len(self.starts)
        clean = np.arange(steps) >= min(WARM_UP_STEPS, steps // 2)
        full = self.batch_sizes.sum(1) == self.batch_sizes[0].sum()
        return clean & full if (clean & full).any() else clean


class ShardSampler(Sampler):
    """Batch sampler of one worker: int64 index arrays, one for each step of the planned epoch."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    def __iter__(self) -> Iterator[np.ndarray]:
        balancer, plan = self._balancer, self._balancer.plan
        order = epoch_order(balancer.size, balancer.seed, plan.epoch)
        for start, sizes in zip(plan.starts, plan.batch_sizes):
            yield order[start:][part(sizes, balancer.rank)]

    def __len__(self) -> int:
        return len(self._balancer.plan.starts)


class Balancer:
    """Plans epochs, gives each worker its batches and weights, and moves shares by measured times.

    partitioner: holds the shares; size: samples in the training set; rank: this worker; gather:
    stacks one float64 array per worker to [n, …], the same on all; gradient_weight: how worker i's
    mean gradient enters the sum: `uniform` 1/n, `share` b_i/B (exactly the gradient of the mean
    loss over the global batch), `share-over-n` b_i/(B n).
    """

    def __init__(
        self,
        partitioner: Partitioner,
        size: int,
        seed: int,
        rank: int,
        gather: Callable[[np.ndarray], np.ndarray],
        gradient_weight: str = "share",
    ) -> None:
        if gradient_weight not in GRADIENT_WEIGHTS:
            raise ValueError(f"gradient_weight is one of {', '.join(GRADIENT_WEIGHTS)}")
        self.partitioner, self.size, self.seed, self.rank = partitioner, size, seed, rank
        self.gradient_weight = gradient_weight
        self._gather = gather
        self.sampler = ShardSampler(self)
        self.plan_epoch(0)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Lays out an epoch with the present shares; the sampler's next pass follows it."""
        starts, sizes, left_out = [], [], 0
        for start, stop in global_batches(self.size, self.partitioner.batch_size):
            split = self.partitioner.split(stop - start)
            if split is None:
                left_out = stop - start
                continue
            starts.append(start)
            sizes.append(split)
        shape = (len(starts), self.partitioner.workers)
        self.plan = EpochPlan(
            epoch, np.array(starts, np.int64), np.array(sizes, np.int64).reshape(shape), left_out
        )
        return self.plan

    def weight(self, step: int) -> float:
        """The factor of this worker's mean gradient in the sum over all workers at `step`."""
        sizes = self.plan.batch_sizes[step]
        share = float(sizes[self.rank]) / float(sizes.sum())
        if self.gradient_weight == "uniform":
            return 1.0 / len(sizes)
        return share if self.gradient_weight == "share" else share / len(sizes)

    def epoch_share(self) -> float:
        """This worker's part of all samples that the planned epoch trains on."""
        return float(self.plan.batch_sizes[:, self.rank].sum() / self.plan.batch_sizes.sum())

    def rebalance(self, times: StepTimes) -> np.ndarray:
        """Books the epoch's busy times and moves the shares; returns busy seconds [n] per step.

        One all-gather of one number per worker; all workers then compute the same plan.
        """
        clean = self.plan.clean_steps()
        busy = self._gather(np.array([typical(times.busy[clean])]))[:, 0]
        self.partitioner.rebalance(self.plan.batch_sizes[clean][0], busy)
        return busy


# --- gradients --------------------------------------------------------------------------------


def broadcast_state(module: nn.Module) -> None:
    """Gives every worker rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, src=0)


def average_buffers(module: nn.Module, share: float) -> None:
    """Sets each floating-point buffer (BatchNorm's statistics) to its mean weighted by share.

    share: this worker's; those of all workers sum to 1. Summed in float64.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.double().flatten() for buffer in buffers]) * share
    dist.all_reduce(flat)
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(mean.view_as(buffer))


class DdpExchange:
    """Weighted gradient sum by DistributedDataParallel, overlapped with the backward pass.

    module: already on its device. `model` is what the training step calls.
    """

    def __init__(self, module: nn.Module, clock: StepClock) -> None:
        broadcast_state(module)
        self._clock = clock
        self._weight = 1.0
        self._before_ready: Callable[[], None] = _nothing
        device = next(module.parameters()).device
        self.model = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_no_buffer_broadcast(),
        )
        self.model.register_comm_hook(self, _weighted_sum)

    def backward(
        self, loss: torch.Tensor, weight: float, before_ready: Callable[[], None] | None = None
    ) -> None:
        """Leaves sum_i weight_i * grad loss_i in every worker's gradients.

        before_ready: called once, when the last bucket is complete and not yet handed over.
        """
        self._weight, self._before_ready = weight, before_ready or _nothing
        loss.backward()
        self._clock.mark("exchanged")

    def bucket_ready(self, bucket: dist.GradBucket) -> None:
        bucket.buffer().mul_(self._weight)
        if bucket.is_last():
            self._before_ready()
            self._clock.mark("ready")


def _weighted_sum(exchange: DdpExchange, bucket):
    """DDP's hook. No annotation on `bucket`: DDP compares it with a class, and ours are strings."""
    exchange.bucket_ready(bucket)
    # A sum with explicit weights: a mean would be one for equal batches only, and gloo has none.
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(_first_tensor)


def _first_tensor(future: torch.futures.Future) -> torch.Tensor:
    return future.value()[0]


class FlatExchange:
    """Weighted gradient sum by one all-reduce of one flat buffer after the backward pass."""

    def __init__(self, module: nn.Module, clock: StepClock) -> None:
        broadcast_state(module)
        self.model = module
        self._clock = clock

    def backward(
        self, loss: torch.Tensor, weight: float, before_ready: Callable[[], None] | None = None
    ) -> None:
        """As DdpExchange.backward; nothing is sent before the whole backward pass is done."""
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = parameters_to_vector(gradients).mul_(weight)
        (before_ready or _nothing)()
        self._clock.mark("ready")
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)
        self._clock.mark("exchanged")


EXCHANGES = {"ddp": DdpExchange, "flat": FlatExchange}


def _nothing() -> None:
    pass


def _no_buffer_broadcast() -> dict[str, bool]:
    """The argument that keeps DDP from broadcasting buffers in each forward pass.

    The broadcast would make fast workers wait inside their busy time. PyTorch has renamed it.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    return {new if new in known else "broadcast_buffers": False}
