"""What our training loop costs where nothing is to be balanced, against plain PyTorch.

    python benchmarks/overhead.py --check --out results/overhead.json

Four loops train the same model from the same weights, on the same prepared batches, with the same
optimizer, in the same two processes (gloo, one thread each), a few steps at a time, in any order:

plain    DistributedDataParallel as it comes, and no more than forward, backward and step
lean     the same loop, with the options that balancer.wrap gives DistributedDataParallel
ddp      the trainer's: sampler, weighted buckets, busy times, metrics, the flag to stop, the look
         for numbers that are not finite; equal shares, no delay
flat     the trainer's with one all-reduce after the backward pass

Fetching, augmenting and normalising images, which cost all loops the same, are left out, so the
ratios are of the rest alone. The target is for ddp against plain. Each is the median over rounds of
ratios within a round. Ratios of worker 0's processor time stand beside them: other programs on the
machine disturb them less.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from balancer import wrap
from benchmarks.common import arguments, finish, launch, table
from cluster import Workers, join
from configs.schema import Config, from_mapping, resolve
from data.images import ArrayImages, Data
from metrics import Metrics
from trainer import Trainer
from workload import build_module, build_optimizer

WORKERS, BATCH_SIZE, CLASSES, SIDE = 2, 256, 10, 32
PREPARED = 8  # different batches, gone through again and again
WARM_UP = 3  # steps of each loop before the first round
TARGET = 1.02
LIMIT = 600.0  # seconds for one model
LOOPS = ("plain", "lean", "ddp", "flat")
# Ratios of step times, and whether the target holds for them.
RATIOS = {("ddp", "plain"): True, ("ddp", "lean"): False, ("flat", "ddp"): False}

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Amount:
    """rounds: of all four loops; steps: of one loop in a round."""

    rounds: int
    steps: int


AMOUNTS = {"lenet": Amount(160, 4), "resnet20": Amount(24, 1), "vgg16": Amount(8, 1)}
QUICK_AMOUNTS = {"lenet": Amount(40, 4), "resnet20": Amount(6, 1)}


def main() -> int:
    options = arguments(__doc__.partition("\n")[0])
    amounts = QUICK_AMOUNTS if options.quick else AMOUNTS
    results, misses = {}, []
    for model, amount in amounts.items():
        work = (model, str(amount.rounds), str(amount.steps))
        printed = launch(WORKERS, "benchmarks/overhead.py", *work, limit=LIMIT)
        results[model] = summarise(json.loads(printed.splitlines()[-1]))
        for (loop, base), has_target in RATIOS.items():
            ratio = results[model]["ratios"][f"{loop}/{base}"]["median"]
            if has_target and ratio > TARGET:
                misses.append(f"{model}: {loop} takes {ratio:.3f} of {base}'s time, not {TARGET}")
    print(f"{WORKERS} workers, B = {BATCH_SIZE}; ms per step; ratios (quartiles; processor)")
    table([_row(model, result) for model, result in results.items()])
    return finish("overhead", results, misses, options)


def summarise(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Median seconds per step by loop, and the medians and quartiles of ratios within rounds."""
    # Per loop [rounds, 2]: by the clock, and of the processor.
    times = {loop: np.array(rounds) for loop, rounds in measured["times"].items()}
    ratios = {}
    for loop, base in RATIOS:
        low, middle, high = np.percentile(times[loop] / times[base], (25, 50, 75), axis=0)
        ratios[f"{loop}/{base}"] = {
            "median": middle[0],
            "quartiles": [low[0], high[0]],
            "processor_median": middle[1],
        }
    return {
        "rounds": len(times["plain"]),
        "steps": measured["steps"],
        "seconds_per_step": {loop: np.median(pairs[:, 0]) for loop, pairs in times.items()},
        "ratios": ratios,
        "epoch_end_seconds": measured["epoch_end_seconds"],
    }


def _row(model: str, result: Mapping[str, Any]) -> dict[str, Any]:
    ratios = {
        name: "{:.3f} ({:.3f}-{:.3f}; {:.3f})".format(
            ratio["median"], *ratio["quartiles"], ratio["processor_median"]
        )
        for name, ratio in result["ratios"].items()
    }
    times = {loop: 1000 * result["seconds_per_step"][loop] for loop in LOOPS}
    rounds = f"{result['rounds']} x {result['steps']}"
    end = 1000 * result["epoch_end_seconds"]
    return {"model": model, "rounds x steps": rounds, **times, **ratios, "epoch's end": end}


# --- inside a worker --------------------------------------------------------------------------


def measure(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """By loop, of each round: seconds per step by the clock, and worker 0's of the processor."""
    total = WARM_UP + rounds * steps
    with join("gloo", "cpu", 1, LIMIT) as workers:
        batches = prepare(workers.rank)
        ours = {kind: Ours(_config(model, kind), workers, batches, total) for kind in LOOPS[2:]}
        loops: dict[str, Callable[[int], None]] = {
            "plain": plain_loop(_config(model, "ddp"), batches, DistributedDataParallel),
            "lean": plain_loop(_config(model, "ddp"), batches, wrap),
            **{kind: loop.run for kind, loop in ours.items()},
        }
        for run in loops.values():
            run(WARM_UP)
        times: dict[str, list[list[float]]] = {loop: [] for loop in LOOPS}
        # At random, as a loop's time depends on which one ran before it; alike on all workers.
        orders = np.random.default_rng(0)
        for _ in range(rounds):
            for loop in orders.permutation(LOOPS):
                taken = timed(partial(loops[loop], steps), workers)
                times[loop].append([seconds / steps for seconds in taken])
        end, _ = timed(ours["ddp"].end_epoch, workers)
    return {"steps": steps, "times": times, "epoch_end_seconds": end}


def timed(run: Callable[[], None], workers: Workers) -> tuple[float, float]:
    """Seconds from when all workers begin until all are done, and this one's processor time."""
    everyone = np.zeros(1)
    workers.gather(everyone)
    start, processor = time.perf_counter(), time.process_time()
    run()
    workers.gather(everyone)
    return time.perf_counter() - start, time.process_time() - processor


def prepare(rank: int) -> Batches:
    """This worker's batches: images float32 [b, 3, 32, 32] and labels int64 [b]."""
    draw, share = torch.Generator().manual_seed(rank), BATCH_SIZE // WORKERS
    return [
        (
            torch.randn(share, 3, SIDE, SIDE, generator=draw),
            torch.randint(0, CLASSES, (share,), generator=draw),
        )
        for _ in range(PREPARED)
    ]


def plain_loop(
    config: Config, batches: Batches, distribute: Callable[[nn.Module], nn.Module]
) -> Callable[[int], None]:
    """The loop that anyone would write."""
    model = distribute(build_module(config, CLASSES, SIDE))
    optimizer, endless = build_optimizer(config, model), cycle(batches)

    def run(steps: int) -> None:
        model.train()
        for images, labels in islice(endless, steps):
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


class Ours:
    """The trainer's loop, in one epoch of `steps` steps that can be halted at any step."""

    def __init__(self, config: Config, workers: Workers, batches: Batches, steps: int) -> None:
        # Only their number counts: memory of pixels that are never read is never taken.
        pixels = np.zeros((steps * BATCH_SIZE, 3, SIDE, SIDE), np.uint8)
        images = ArrayImages(pixels, np.zeros(len(pixels), np.int64))
        classes, ones = tuple(map(str, range(CLASSES))), (1.0, 1.0, 1.0)
        data = Data(images, images, classes, ones, ones, SIDE)
        self._trainer = Trainer(config, workers, data)
        self._metrics = Metrics(workers.device)
        self._steps = self._trainer.balancer.steps(
            self._drawn(batches), 0, pause=self._trainer._pauses
        )

    def run(self, steps: int) -> None:
        self._trainer.module.train()
        for images, labels in islice(self._steps, steps):
            self._trainer._step(images, labels, self._metrics)

    def end_epoch(self) -> None:
        """What follows the last step: reading the clock, one all-gather, the next plan."""
        if next(self._steps, None) is not None:
            raise RuntimeError("the epoch has steps left")

    def _drawn(self, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        for _, batch in zip(self._trainer.balancer.sampler, cycle(batches)):
            yield batch


def _config(model: str, exchange: str) -> Config:
    mapping = {
        "name": "overhead", "algorithm": "sync-sgd", "batch_size": BATCH_SIZE,
        "model": {"name": model}, "data": {"name": "synthetic"}, "optimizer": {"lr": 0.01},
        "exchange": exchange,
    }  # fmt: skip
    return resolve(from_mapping(mapping))


if __name__ == "__main__":
    if "RANK" in os.environ:
        name, *numbers = sys.argv[1:]
        print(json.dumps(measure(name, *map(int, numbers))))
    else:
        sys.exit(main())
