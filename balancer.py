"""What a training script needs to be balanced: batches by share, weighted gradients, busy times.

In any DistributedDataParallel script:

    balancer = Balancer(len(dataset), batch_size=256)           # all workers' samples of a step
    loader = DataLoader(dataset, batch_sampler=balancer.sampler)
    model = wrap(model)                                         # DistributedDataParallel
    balancer.attach(model)                                      # weights the gradients by share
    for epoch in range(epochs):
        for inputs, labels in balancer.steps(loader, epoch):    # measures, and moves the shares
            …                                                   # forward, backward, step as ever

The busy time of a step, which is what gets balanced, runs from the end of the previous all-reduce
to the moment the worker's own last gradient bucket is ready: fetching data, forward and backward
pass and the optimizer, but not waiting for others.

Uses partitioner.py and nothing else of this project.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

# DistributedDataParallel imports it. Imported while there is a process group, it keeps gloo's
# threads past the group's end, and these may abort a process that is just exiting.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from partitioner import Partitioner, PlanError, epoch_order, global_batches, part

Batch = TypeVar("Batch")

GRADIENT_WEIGHTS = ("uniform", "share", "share-over-n")

# Steps at the start of an epoch or segment that say little of the rest: kernels are selected for
# new batch sizes, caches are cold.
WARM_UP_STEPS = 3
# Of the sorted busy times this part is left out at either end, so that single spikes do not count.
TRIM = 0.1
# Times before and after a change of speed differ by this part of the later ones, and by so many
# times the spread within either side.
CHANGE, SPREADS = 0.1, 4.0
LEAST_SIDE = 4  # times


# --- time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step of one worker, float64 [steps] each.

    data: fetching and augmenting; forward: forward pass and loss (0 where it is not marked, then it
    counts as backward); backward: until the last bucket is ready, without the delay; delay:
    injected; wait: for the others, and the all-reduce; step: optimizer; busy: previous step's
    optimizer + data + forward + backward + delay.
    """

    data: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    delay: np.ndarray
    wait: np.ndarray
    step: np.ndarray
    busy: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[StepTimes]) -> StepTimes:
        """One series after the other."""
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )


class StepClock:
    """Marks the moments of a step: on CUDA as events, read only when a series of steps is over."""

    MARKS = ("data", "forward", "ready", "exchanged", "step")

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Starts a new series of steps and forgets the last one."""
        self._before = self._last_exchange = self._now()
        self._before_step = 0.0
        self._marks: dict[str, list] = {name: [] for name in self.MARKS}
        self._delays: list[float] = []
        self._delay = 0.0

    def mark(self, name: str) -> None:
        """Notes that the part of the step called `name` (one of MARKS) is done."""
        moment = self._now()
        marked = len(self._marks["forward"]) == len(self._marks["data"])
        if name == "forward" and marked:
            self._marks["forward"].pop()  # the forward pass had to be repeated
        if name == "ready" and not marked:
            self._marks["forward"].append(self._marks["data"][-1])
        self._marks[name].append(moment)
        if name == "ready":
            self._delays.append(self._delay)
            self._delay = 0.0
        if name == "exchanged":
            self._last_exchange = moment

    @property
    def exchanged(self) -> bool:
        """Whether the all-reduce of every step so far is done."""
        return len(self._marks["exchanged"]) == len(self._marks["data"])

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
            torch.cuda.current_stream(self._device).synchronize()
        start = time.perf_counter()
        time.sleep(seconds)
        self._delay += time.perf_counter() - start

    def take(self) -> StepTimes:
        """The times of all whole steps since `begin` or the last `take`; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        steps = min(len(moments) for moments in self._marks.values())
        lengths = np.zeros((steps, len(self.MARKS)))
        for number in range(steps):
            for column, name in enumerate(self.MARKS):
                moment = self._marks[name][number]
                lengths[number, column] = self._seconds(self._before, moment)
                self._before = moment
        data, forward, ready, wait, step = lengths.T
        delay, self._delays = np.array(self._delays[:steps]), self._delays[steps:]
        self._marks = {name: moments[steps:] for name, moments in self._marks.items()}
        previous_step = np.concatenate([[self._before_step], step])[:steps]
        self._before_step = float(step[-1]) if steps else self._before_step
        busy = previous_step + data + forward + ready
        return StepTimes(data, forward, ready - delay, delay, wait, step, busy)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # Said outright: in a thread of the communication library another GPU may be current.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
        return start.elapsed_time(stop) / 1000 if self._cuda else stop - start


def since_change(times: np.ndarray) -> np.ndarray:
    """The times after an abrupt change of level among them; all of them where there is none.

    The place is where two means fit best in least squares (Sen and Srivastava, Annals of Statistics
    3(1), 1975), after spikes have been clipped. Where one side would be so short that `typical`
    trims it or that it says little, nothing is cut off.
    """
    steps, trimmed = len(times), _trimmed(len(times))
    least = max(trimmed + 1, LEAST_SIDE)
    before = np.arange(least, steps - least + 1)
    if not len(before):
        return times
    ordered = np.sort(times)
    clipped = np.clip(times, ordered[trimmed], ordered[-1 - trimmed])
    above_mean = np.cumsum(clipped - clipped.mean())[before - 1]
    place = int(before[(above_mean**2 / (before * (steps - before))).argmax()])
    old, new = times[:place], times[place:]
    middles = np.median(old), np.median(new)
    residuals = np.concatenate([old - middles[0], new - middles[1]])
    spread = 1.4826 * np.median(np.abs(residuals))  # of normal noise: its standard deviation
    gap = abs(middles[1] - middles[0])
    return new if gap > max(CHANGE * middles[1], SPREADS * spread) else times


def typical(times: np.ndarray) -> tuple[Any, Any]:
    """Mean of the times [S, …] without the largest and the smallest tenth, and its standard error.

    Of three times or more at least one at either end is left out, so that a single spike moves
    neither. Too few times to tell their error are taken to be off by a tenth.
    """
    cut = _trimmed(len(times))
    kept = np.sort(times, axis=0)[cut : len(times) - cut]
    mean = kept.mean(0)
    return mean, kept.std(0) / np.sqrt(len(kept)) if len(kept) >= 3 else 0.1 * mean


def _trimmed(count: int) -> int:
    """How many of `count` times `typical` leaves out at either end."""
    return max(int(count * TRIM), int(count >= 3))


# --- batches ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochPlan:
    """Who takes what in one epoch.

    starts: int64 [steps], each global batch's first position in the epoch's order; batch_sizes:
    int64 [steps, n], which a rebalance inside the epoch changes from a later step on; left_out:
    samples of a short last batch that was too small for all workers. Where the number of workers
    has changed inside the epoch, n is the larger one, and a worker has 0 samples while not there.
    """

    epoch: int
    starts: np.ndarray
    batch_sizes: np.ndarray
    left_out: int

    def clean_steps(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Numbers of the steps within first … stop-1 whose times tell of the newest plan there.

        Left out are a short last batch, and the first steps of the epoch, the segment and the plan.
        """
        stop = len(self.starts) if stop is None else stop
        sizes = self.batch_sizes[first:stop]
        full = np.flatnonzero(sizes.sum(1) == sizes.sum(1).max())
        same = (sizes == sizes[full[-1]]).all(1)
        # The present plan's run of steps reaches back from the last full batch without a gap.
        others = np.flatnonzero(~same[: full[-1]])
        begin = int(others[-1]) + 1 if len(others) else 0
        begin += min(WARM_UP_STEPS, (int(full[-1]) + 1 - begin) // 2)
        return first + np.arange(begin, int(full[-1]) + 1)

    def joined(self) -> int:
        """The first step of the present workers: 0, unless their number has changed since."""
        numbers = (self.batch_sizes > 0).sum(1)
        others = np.flatnonzero(numbers != numbers[-1])
        return int(others[-1]) + 1 if len(others) else 0

    def changes(self) -> list[tuple[int, list[int]]]:
        """(step, batch sizes) at the first step and wherever the plan changes after it."""
        moved = (self.batch_sizes[1:] != self.batch_sizes[:-1]).any(1)
        steps = [0, *(np.flatnonzero(moved) + 1).tolist()]
        present = [[size for size in self.batch_sizes[step].tolist() if size] for step in steps]
        return list(zip(steps, present))


class ShardSampler(Sampler):
    """Batch sampler of one worker: lists of sample numbers, one for each step of the epoch.

    It reads the plan as late as it can: a step's batch sizes when that step's batch is drawn.
    """

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    def __iter__(self) -> Iterator[list[int]]:
        balancer, plan = self._balancer, self._balancer.plan
        order = epoch_order(balancer.size, balancer.seed, plan.epoch)
        for step in range(balancer.next_step, len(plan.starts)):
            balancer.drawn = step + 1
            yield order[plan.starts[step] :][part(plan.batch_sizes[step], balancer.rank)].tolist()

    def __len__(self) -> int:
        return len(self._balancer.plan.starts) - self._balancer.next_step


# --- the balancer -----------------------------------------------------------------------------


class Peers(Protocol):
    """What a balancer needs of the other workers."""

    rank: int
    size: int

    def gather(self, values: np.ndarray) -> np.ndarray:
        """One float64 array of the same shape from each worker, stacked to [n, …], on all."""


class GroupPeers:
    """The workers of the default process group; numbers travel over gloo, between CPU buffers."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def gather(self, values: np.ndarray) -> np.ndarray:
        mine = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        return torch.stack(rows).numpy()


class Balancer:
    """Plans epochs, gives each worker its batches and weights, and moves shares by measured times.

    size: samples in the training set; batch_size: global; policy, shares, min_batch, max_batch,
    min_gain: as in partitioner.Partitioner; every: "epoch", or the number of steps between two
    rebalances; gradient_weight: how worker i's mean gradient enters the sum: `uniform` 1/n, `share`
    b_i/B (exactly the gradient of the mean loss over the global batch), `share-over-n` b_i/(B n);
    seed: of the epochs' orders; device: where the model is (default: the current GPU where there is
    one); peers: the other workers (default: the process group); replay: batch sizes [steps, n] by
    epoch, taken instead of planned ones. Raises PlanError for a plan that cannot be had.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        policy: str = "affine",
        shares: Sequence[float] | None = None,
        min_batch: int | Sequence[int] = 1,
        max_batch: int | Sequence[int] | None = None,
        min_gain: float = 0.01,
        every: str | int = "epoch",
        gradient_weight: str = "share",
        seed: int = 0,
        device: torch.device | None = None,
        peers: Peers | None = None,
        replay: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        if gradient_weight not in GRADIENT_WEIGHTS:
            raise PlanError(f"gradient_weight is one of {', '.join(GRADIENT_WEIGHTS)}")
        if every != "epoch" and not (isinstance(every, int) and every > 0):
            raise PlanError(f"every is the word epoch or a number of steps, not {every!r}")
        self._peers = GroupPeers() if peers is None else peers
        self.rank, self.workers = self._peers.rank, self._peers.size
        self.partitioner = Partitioner(
            self.workers, batch_size, policy, shares, min_batch, max_batch, min_gain
        )
        self.size, self.every, self.seed = size, every, seed
        self.gradient_weight = gradient_weight
        self._replay = replay
        self._leaves_out = False  # a short last batch that could be had, as the run has begun so
        self.clock = StepClock(_default_device() if device is None else device)
        self.sampler = ShardSampler(self)
        self.before_ready: Callable[[], None] = _nothing
        self.on_gradient: Callable[[torch.Tensor], None] = _nothing_of
        self.buckets_sent = self._buckets_summed = 0
        self._all_sent, self._counting = False, threading.Lock()
        self.drawn = 0
        self.busy = np.full(self.workers, np.nan)
        self.cap = int(self.partitioner.maximum[self.rank])
        self.plan_epoch(0)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Lays out an epoch with the present shares; the sampler's next pass follows it."""
        batches = list(global_batches(self.size, self.partitioner.batch_size))
        splits = [self.partitioner.split(stop - start) for start, stop in batches]
        last = batches[-1][1] - batches[-1][0]
        if self._leaves_out and last < self.partitioner.batch_size:
            splits[-1] = None
        left_out = last if splits[-1] is None else 0
        sizes = [split for split in splits if split is not None]
        starts = np.array([start for start, _ in batches][: len(sizes)], np.int64)
        planned = np.array(sizes, np.int64).reshape(len(sizes), self.workers)
        if self._replay is not None:
            planned = self._replayed(epoch, planned)
        self.plan, self.next_step = EpochPlan(epoch, starts, planned, left_out), 0
        # Times of the epoch's steps so far, and the step from which on a rebalance counts them.
        self._parts: list[StepTimes] = []
        self._segment = 0
        return self.plan

    def steps(
        self,
        batches: Iterable[Batch],
        epoch: int,
        lookahead: int = 0,
        pause: Callable[[int], bool] | None = None,
    ) -> Iterator[Batch]:
        """Goes through an epoch's batches, measures the steps, and rebalances when it is time.

        batches: of a loader with `self.sampler`, wrapped or not; lookahead: steps that a new plan
        waits at least. It always waits until no worker's loader has drawn further ahead. All
        workers must make all steps. pause: asked after each step but the last, with the number of
        steps done; where it says yes on all workers, this ends, and called again it goes on there.
        After `load_state_dict` inside this epoch, too, it goes on where that state was.
        """
        if (self.plan.epoch, self.next_step > 0) != (epoch, True):
            self.plan_epoch(epoch)
        if self.every != "epoch" and self.every > len(self.plan.starts):
            raise PlanError(
                f"partition.every: {self.every} steps are more than an epoch has, "
                f"{len(self.plan.starts)}: lower it, or say epoch"
            )
        self.drawn = self.next_step
        self.clock.begin()
        iterator = iter(batches)
        while self.next_step < len(self.plan.starts):
            try:
                batch = next(iterator)
            except StopIteration:
                raise RuntimeError(
                    f"the loader ended before step {self.next_step} of {len(self.plan.starts)}: "
                    "does it use the balancer's sampler as its batch_sampler?"
                ) from None
            self.buckets_sent = self._buckets_summed = 0
            self._all_sent = False
            self.clock.mark("data")
            yield batch
            if not self.clock.exchanged:
                raise RuntimeError(
                    "no gradient was exchanged in this step: is the balancer attached to the model?"
                )
            self.clock.mark("step")
            self.next_step += 1
            if self._is_due(self.next_step - self._segment):
                self._rebalance(lookahead)
                self._segment = self.next_step
            last = self.next_step == len(self.plan.starts)
            if pause is not None and not last and pause(self.next_step):
                self.step_times()  # before the clock begins anew
                return
        # Lets the loader see its own end; it has nothing left to give.
        next(iterator, None)
        self.next_step = 0

    def announce_cap(self, cap: int) -> None:
        """From the next rebalance on this worker gets at most `cap` samples a step."""
        self.cap = min(self.cap, cap)

    def agree_on_caps(self) -> None:
        """Puts all workers' announced caps in force at once; all must call it between epochs."""
        self.partitioner.lower_caps(self._peers.gather(np.array([self.cap]))[:, 0])

    @contextmanager
    def equal_split(self) -> Iterator[None]:
        """Within it, plans are of equal shares, and what is measured moves nothing."""
        kept, replay = self.partitioner, self._replay
        self.partitioner, self._replay = kept.with_equal_shares(), None
        yield
        self.partitioner, self._replay = kept, replay
        self.plan_epoch(self.plan.epoch)

    def step_times(self) -> StepTimes:
        """The times of this epoch's steps so far; NaN for steps that this worker did not see."""
        self._parts = [StepTimes.joined([*self._parts, self.clock.take()])]
        return self._parts[0]

    def weight(self) -> float:
        """The factor of this worker's mean gradient in the sum over all workers, at this step."""
        if self.gradient_weight == "uniform":
            return 1.0 / self.workers
        # A list: arithmetic with NumPy's scalars is felt in the step of a small model.
        sizes = self.plan.batch_sizes[self.next_step].tolist()
        share = sizes[self.rank] / sum(sizes)
        return share if self.gradient_weight == "share" else share / self.workers

    def epoch_share(self) -> float:
        """This worker's part of all samples that the present workers train on in this epoch."""
        handled = self.plan.batch_sizes[:, : self.workers].sum(0)
        return float(handled[self.rank] / handled.sum())

    def attach(self, model: DistributedDataParallel) -> None:
        """Makes `model` sum the workers' gradients by weight, overlapped with the backward pass.

        Gradient accumulation under `no_sync` works if the micro-batches' losses add up to the mean
        over this worker's batch; mixed precision and gradient scaling work as ever.
        """
        # Not itself: DDP keeps its hook's state for good, and all that the balancer refers to with
        # it, process groups for instance.
        model.register_comm_hook(weakref.proxy(self), _weighted_sum)

    def reduce_flat(self, parameters: Iterable[nn.Parameter]) -> None:
        """The same sum for a plain module, by one all-reduce after the backward pass."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.on_gradient(flat)
        flat.mul_(self.weight())
        self.before_ready()
        self.clock.mark("ready")
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(total.view_as(gradient))
        self.clock.mark("exchanged")

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists from which `load_state_dict` goes on, also inside an epoch.

        They are the same on all workers.
        """
        return {
            "epoch": self.plan.epoch,
            "next_step": self.next_step,
            "segment": self._segment,
            "changes": self.plan.changes(),
            "busy": self.busy.tolist(),
            "left_out": self.plan.left_out,
            "partition": self.partitioner.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], times: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Goes on from such a state, also of another number of workers.

        A short last batch stays left out where it was. Where it was not, and is too small for the
        present workers, it is from now on; if it alone was to come, the epoch ends without it.
        times: this worker's step times of the state's epoch, `vars` of a StepTimes as lists;
        without them on one worker, none may have them, and the next rebalance counts later steps.
        Raises ValueError (KeyError, TypeError …) for a state of another form.
        """
        self.partitioner.load_state_dict(state["partition"])
        self.announce_cap(int(self.partitioner.maximum[self.rank]))
        same = len(state["partition"]["shares"]) == self.workers
        self._leaves_out = state["left_out"] > 0
        steps = len(self.plan_epoch(state["epoch"]).starts)
        before = steps + (self.plan.left_out > 0 and not self._leaves_out)
        if not (0 <= state["next_step"] < before and 0 <= state["segment"] <= before):
            raise ValueError(f"step {state['next_step']} or {state['segment']} of {before}")
        # Of what lies ahead, other workers' plans are void.
        done, self.next_step = state["next_step"] or steps, state["next_step"]
        self._restore_plan(state["changes"], steps if same else done)
        busy = state["busy"] if same else [np.nan] * self.workers
        self.busy = np.array(busy, np.float64).reshape(self.workers)
        self._segment = state["segment"] if same and times is not None else self.next_step
        seen = {name: np.full(done, np.nan) for name in (field.name for field in fields(StepTimes))}
        for name, seconds in (times or {}).items():
            seen[name][: len(seconds)] = seconds[:done]
        self._parts = [StepTimes(**seen)]

    def _restore_plan(self, changes: Sequence[tuple[int, Sequence[int]]], stop: int) -> None:
        """Puts `changes` into the plan's steps before `stop`; they may be of other workers."""
        sizes, totals = self.plan.batch_sizes, self.plan.batch_sizes.sum(1)
        begins, widest = [step for step, _ in changes], max(len(split) for _, split in changes)
        in_order = begins[0] == 0 and all(a < b for a, b in zip(begins, begins[1:]))
        if not in_order or widest > self.partitioner.batch_size:
            raise ValueError("a plan's changes are in disorder, or of more workers than samples")
        sizes = np.pad(sizes, ((0, 0), (0, max(0, widest - self.workers))))
        for (begin, split), end in zip(changes, [*begins[1:], stop]):
            sizes[begin : min(end, stop)] = 0
            sizes[begin : min(end, stop), : len(split)] = split
        # A finished epoch's plan is not used any more.
        wrong = sizes.min() < 0 or (sizes.sum(1) != totals).any()
        if wrong and self.next_step > 0:
            raise ValueError("a plan's batches are of other sizes")
        self.plan = replace(self.plan, batch_sizes=sizes)

    def bucket_ready(self, gradients: torch.Tensor, is_last: bool) -> None:
        """Weights one bucket of the step's gradients; called for each, before it is sent."""
        self.on_gradient(gradients)
        gradients.mul_(self.weight())
        if is_last:
            self.before_ready()
            self.clock.mark("ready")
        with self._counting:
            self.buckets_sent += 1
            self._all_sent = is_last

    def bucket_summed(self) -> None:
        """Called when a bucket's sum is there, by whichever thread saw it: not always in order."""
        with self._counting:
            self._buckets_summed += 1
            done = self._all_sent and self._buckets_summed == self.buckets_sent
        if done:
            self.clock.mark("exchanged")

    def _rebalance(self, lookahead: int) -> None:
        """Books the busy times of the segment that ends and moves the shares from a later step on.

        One all-gather of a few numbers per worker; all workers then compute the same plan.
        """
        clean = self.plan.clean_steps(self._segment, self.next_step)
        mine = typical(since_change(self.step_times().busy[clean]))
        rows = self._peers.gather(np.array([*mine, self.cap, self.drawn]))
        self.busy, errors, caps, drawn = rows.T
        self.partitioner.lower_caps(caps)
        used = self.plan.batch_sizes[clean[0], : self.workers]
        self.partitioner.rebalance(used, self.busy, errors)
        self._replan(max(int(drawn.max()), self.next_step + lookahead))

    def _is_due(self, steps: int) -> bool:
        """Whether to rebalance now, `steps` steps after the last time."""
        ends = self.next_step == len(self.plan.starts)
        if self.every == "epoch":
            return ends
        # What is left at an epoch's end counts if it is long enough to tell something.
        return steps == self.every or (ends and steps > max(WARM_UP_STEPS, self.every // 2))

    def _replan(self, first: int) -> None:
        """Puts the partitioner's present batch sizes in force from step `first` on."""
        if self._replay is not None:
            return
        sizes = self.plan.batch_sizes[first:, : self.workers]
        for row, total in zip(sizes, sizes.sum(1)):
            split = self.partitioner.split(int(total))
            # A short batch keeps its split where a lowered cap no longer holds it all.
            row[:] = row if split is None else split

    def _replayed(self, epoch: int, planned: np.ndarray) -> np.ndarray:
        recorded = self._replay.get(epoch)
        if recorded is None or recorded.shape != planned.shape:
            have = "no such epoch" if recorded is None else f"batch sizes {recorded.shape}"
            raise PlanError(
                f"replay: epoch {epoch} has {planned.shape} steps and workers, the record {have}"
            )
        if (recorded.sum(1) != planned.sum(1)).any() or recorded.min() < 1:
            raise PlanError(f"replay: the record's batches of epoch {epoch} are of other sizes")
        return np.array(recorded, np.int64)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _nothing() -> None:
    pass


def _nothing_of(gradient: torch.Tensor) -> None:
    pass


def _weighted_sum(balancer: Balancer, bucket):
    """DDP's hook. No annotation on `bucket`: DDP compares it with a class, and ours are strings."""
    balancer.bucket_ready(bucket.buffer(), bucket.is_last())
    # A sum with explicit weights: a mean would be one for equal batches only, and gloo has none.
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def done(future: torch.futures.Future) -> torch.Tensor:
        # On CUDA the current stream here is one that waits for the all-reduce.
        balancer.bucket_summed()
        return future.value()[0]

    return future.then(done)


# --- models -----------------------------------------------------------------------------------


def wrap(module: nn.Module) -> DistributedDataParallel:
    """DDP as a balanced run needs it: same weights and buffers at the start, none sent later.

    By default DDP broadcasts buffers in each forward pass, and fast workers would wait inside their
    busy time. PyTorch has renamed the argument that says so.
    """
    broadcast_state(module)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    device = next(module.parameters()).device
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{new if new in known else "broadcast_buffers": False},
    )


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
