"""Trains one model on one data set with synchronous SGD on workers of unequal speed.

    torchrun --standalone --nproc_per_node=2 trainer.py --config configs/demo.yaml
    torchrun --standalone --nproc_per_node=2 trainer.py --config configs/resnet50-low.yaml \\
        --algorithm edp-sgd
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 --master_addr=HOST --master_port=29500 \\
        trainer.py --config configs/resnet50-low.yaml
    horovodrun -np 2 python trainer.py --config configs/demo.yaml --exchange horovod
    python trainer.py --config configs/demo.yaml stragglers=[]    # one process, no launcher
    python trainer.py --help                                      # all keys
"""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record as report_to_launcher
from torch.nn.functional import cross_entropy

from balancer import average_buffers, typical
from cluster import Workers, environment_rank, join
from configs.command_line import Launch, parse, run_folder
from configs.errors import UserError
from configs.schema import Config, check_workers
from console import Console, epoch_line, headline, summary
from data.pipeline import make_pipeline
from data.sources import Data, open_data, prepare
from exchange import EXCHANGES
from metrics import Clocks, Metrics
from partitioner import PlanError
from preview import preview
from recorder import (
    PHASES,
    NoFolder,
    RunFolder,
    batch_sizes_by_epoch,
    epoch_record,
    load_state,
    provenance,
    step_arrays,
)
from schedule import learning_rate
from stragglers import Stragglers, calibrate, must_measure
from workload import (
    DTYPES,
    MEMORY_FORMATS,
    build_balancer,
    build_module,
    build_optimizer,
    check_steps,
    count_parameters,
    gradient_bytes,
)

# Throw-away steps before each start or resume: DDP re-orders its buckets after the first backward
# pass, and only then is a resumed run the bitwise twin of an undisturbed one.
REHEARSAL_STEPS = 2
# Further ones, where a delay is given as a fraction of the busy time that they measure.
CALIBRATION_STEPS = 10

# Names the random stream of dropout, apart from every other consumer of the same seed.
_DROPOUT_STREAM = 0xD809


class Trainer:
    """One worker's part of a run: its model, its data, and the state that a checkpoint holds."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        data: Data,
        replay: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self.config, self.workers, self.clocks = config, workers, Clocks()
        self.balancer = build_balancer(config, len(data.train), workers, workers.device, replay)
        self.module = build_module(config, len(data.classes), data.image_size).to(workers.device)
        self.exchange = EXCHANGES[config.exchange](self.module, self.balancer, self._forward)
        self.optimizer = build_optimizer(config, self.module)
        pipeline = partial(
            make_pipeline,
            config=config.data,
            data=data,
            device=workers.device,
            dtype=DTYPES[config.precision],
            memory_format=MEMORY_FORMATS[config.memory_format],
            seed=config.seed,
        )
        self.train_batches = pipeline(data.train, self.balancer.sampler, train=True)
        self.test_batches = pipeline(data.test, self._test_shard(len(data.test)), train=False)
        self.stragglers = Stragglers((), workers.rank, config.seed)
        self.calibrated: list[dict[str, Any]] = []
        self.next_epoch = 0

    # --- start and resume ---

    def start(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Rehearses, then sets the state: as built, or as the checkpoint has it."""
        rules = self.config.stragglers
        calibrates = checkpoint is None and must_measure(rules)
        busy = self._rehearse(CALIBRATION_STEPS if calibrates else 0)
        if checkpoint is None:
            self.calibrated = calibrate(rules, busy, self.config.timeout)
        else:
            self._load(checkpoint)
        self.balancer.agree_on_caps()
        rank = self.workers.rank
        mine = {c["rule"]: c["seconds"] for c in self.calibrated if c["rank"] == rank}
        self.stragglers = Stragglers(rules, rank, self.config.seed, mine)
        self.workers.check_replicas(self.module)

    def state(self) -> dict[str, Any]:
        """All that a continued run needs; the random streams follow from seed, epoch and step."""
        return {
            "next_epoch": self.next_epoch,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "balancer": self.balancer.state_dict(),
            "calibrated": self.calibrated,
            "clocks": {"train": self.clocks.train, "total": self.clocks.total},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.next_epoch = state["next_epoch"]
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.balancer.load_state_dict(state["balancer"])
        self.calibrated = state["calibrated"]
        self.clocks = Clocks(**state["clocks"])

    def _rehearse(self, measured_steps: int) -> np.ndarray:
        """Undelayed throw-away steps at an equal split; returns each worker's busy seconds, [n]."""
        built = copy.deepcopy(self.module.state_dict())
        scrap, left = Metrics(self.workers.device), REHEARSAL_STEPS + measured_steps
        self.module.train()
        busy = []
        with self.balancer.equal_split():
            while left > 0:  # an epoch with fewer steps is gone through again
                steps = self.balancer.steps(self.train_batches.batches(0), 0)
                for images, labels in islice(steps, left):
                    self._step(images, labels, scrap)
                    left -= 1
                steps.close()
                busy.append(self.balancer.step_times().busy)
        self.module.load_state_dict(built)
        self.optimizer = build_optimizer(self.config, self.module)
        self.clocks = Clocks()
        measured, _ = typical(np.concatenate(busy)[-measured_steps or None :])
        return self.workers.gather(np.array([measured]))[:, 0]

    # --- one epoch ---

    def run_epoch(self, epoch: int, console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trains for one epoch, rebalances and evaluates; returns its record and step arrays."""
        rate, before = self._set_learning_rate(epoch), self.clocks.train
        with self.clocks.training():
            metrics = self._train_epoch(epoch, console)
            average_buffers(self.module, self.balancer.epoch_share())
            times = self.balancer.step_times()  # on CUDA this waits for all that was queued
        train, test = metrics.total(self.workers.sum), self._evaluate(epoch)
        self.next_epoch = epoch + 1
        gathered = self.workers.gather(np.stack([getattr(times, name) for name in PHASES]))
        phases = dict(zip(PHASES, gathered.transpose(1, 2, 0)))
        plan, seconds = self.balancer.plan, self.clocks.train - before
        record = epoch_record(plan, phases, self.balancer.busy, self.balancer.partitioner) | {
            "learning_rate": rate,
            **{f"train_{name}": value for name, value in train.items()},
            **{f"test_{name}": value for name, value in test.items()},
            "samples_per_second": train["samples"] / seconds,
            "allreduce_bytes": gradient_bytes(self.module) * len(plan.starts),
            "epoch_seconds": seconds,
            "train_seconds": self.clocks.train,
            "total_seconds": self.clocks.total,
        }
        return record, step_arrays(plan, phases)

    def _train_epoch(self, epoch: int, console: Console) -> Metrics:
        self.module.train()
        # Dropout alone draws from PyTorch's own generator: a stream for each epoch and worker.
        key = np.random.SeedSequence(
            [_DROPOUT_STREAM, self.config.seed, epoch, self.workers.rank]
        )
        torch.manual_seed(int(key.generate_state(1)[0]))
        metrics, balancer = Metrics(self.workers.device), self.balancer
        balancer.before_ready = lambda: self.stragglers.apply(
            balancer.clock, epoch, balancer.next_step
        )
        batches = self.train_batches.batches(epoch)
        steps = balancer.steps(batches, epoch)
        for images, labels in console.steps(steps, f"epoch {epoch + 1}"):
            self._step(images, labels, metrics)
        return metrics

    def _step(self, images: Tensor, labels: Tensor, metrics: Metrics) -> None:
        outputs, loss = self.exchange.learn(images, labels)
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics.add(outputs, labels, loss)

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> dict[str, float | int]:
        """Loss and accuracy over the whole test set, each sample seen by exactly one worker."""
        self.module.eval()
        metrics = Metrics(self.workers.device)
        for images, labels in self.test_batches.batches(epoch):
            outputs, loss = self._forward(self.module, images, labels)
            metrics.add(outputs, labels, loss)
        return metrics.total(self.workers.sum)

    def _forward(
        self, model: nn.Module, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs [b, classes] and their mean loss, in the config's precision."""
        if self.config.precision != "bf16":
            outputs = model(images)
        else:
            with torch.autocast(self.workers.device.type, torch.bfloat16):
                outputs = model(images).float()
        return outputs, cross_entropy(outputs, labels)

    def _set_learning_rate(self, epoch: int) -> float:
        rate = learning_rate(self.config, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _test_shard(self, size: int) -> list[np.ndarray]:
        """This worker's test samples in batches: an even, contiguous part of the set."""
        edges = np.linspace(0, size, self.workers.size + 1).astype(np.int64)
        mine = np.arange(edges[self.workers.rank], edges[self.workers.rank + 1])
        return [
            mine[start : start + self.config.evaluation_batch_size]
            for start in range(0, len(mine), self.config.evaluation_batch_size)
        ]


def train(launch: Launch, workers: Workers) -> None:
    """Trains from the last checkpoint, or from the start, to the end; rank 0 records."""
    config, console = launch.config, Console(workers.is_first)
    folder, continued = _open_folder(launch, workers)
    prepared = workers.once_per_node(partial(prepare, config.data))
    data = open_data(config.data, config.seed, prepared)
    check_steps(config, len(data.train), workers.size)
    trainer = Trainer(config, workers, data, _replay(config, workers))
    checkpoint = None
    if continued:
        content = workers.broadcast_bytes(folder.checkpoint_bytes())
        checkpoint = load_state(content, folder.path, workers.device)
    trainer.start(checkpoint)
    workers.once(lambda: folder.replace(config))
    folder.records = workers.once(lambda: folder.keep_epochs(trainer.next_epoch))
    facts = _facts(trainer, data)
    folder.write_provenance(facts)
    console.say(headline(config, facts, folder.path))
    console.start(config.epochs, trainer.next_epoch, len(trainer.balancer.sampler))
    for epoch in range(trainer.next_epoch, config.epochs):
        record, steps = trainer.run_epoch(epoch, console)
        folder.append_epoch(record, steps)
        folder.save_checkpoint(trainer.state())
        console.say(epoch_line(record, config.epochs))
    console.close()
    folder.finish(trainer.module.state_dict())
    console.say(summary(folder.records, facts["devices"]))


def _open_folder(launch: Launch, workers: Workers) -> tuple[RunFolder | NoFolder, bool]:
    """The run's folder, which rank 0 alone decides and opens; and whether a run in it goes on."""
    config = launch.config
    folder = (RunFolder if workers.is_first else NoFolder)(run_folder(launch))
    # A launcher's restart continues the run whose start may have been told to overwrite.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    overwrite = launch.overwrite and not restarted
    continued = workers.once(lambda: folder.open(config, workers.size, launch.resume, overwrite))
    return folder, continued


def _replay(config: Config, workers: Workers) -> dict[int, np.ndarray] | None:
    """By epoch, the batch sizes [steps, n] of the run that partition.replay names."""
    path = config.partition.replay
    if path is None:
        return None
    recorded = workers.once(lambda: batch_sizes_by_epoch(path))
    if len(recorded) < config.epochs:
        raise UserError(
            f"partition.replay: {path} has {len(recorded)} epochs, not the {config.epochs} of "
            "this run: lower epochs, or finish that run first"
        )
    return {epoch: np.array(sizes) for epoch, sizes in enumerate(recorded)}


def _facts(trainer: Trainer, data: Data) -> dict[str, Any]:
    """What provenance.json holds."""
    workers, module = trainer.workers, trainer.module
    return provenance(Path(__file__).parent) | {
        "command": workers.launcher + shlex.join(sys.argv),
        "world_size": workers.size,
        "backend": workers.backend,
        "devices": workers.gather_json(workers.device_name),
        "threads": workers.threads,
        "parameters": count_parameters(module),
        "allreduce_bytes_per_step": gradient_bytes(module),
        "data": {
            "train_samples": len(data.train),
            "test_samples": len(data.test),
            "classes": len(data.classes),
        },
        "calibrated_delays": trainer.calibrated,
    }


@report_to_launcher
def main() -> None:
    """The command line. A UserError ends the process with one line and exit code 2."""
    try:
        launch = parse(sys.argv[1:])
        config = launch.config
        place = (launch.local_rank, launch.local_world_size)
        where = (config.backend, config.device, config.threads, config.timeout, *place)
        with join(*where, horovod=config.exchange == "horovod") as workers:
            check_workers(config, workers.size)
            if launch.dry_run:
                Console(workers.is_first).say(preview(launch, workers))
            else:
                train(launch, workers)
    except (UserError, PlanError) as error:
        print(f"trainer.py: error: rank {environment_rank()}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("trainer.py: interrupted: the same command continues the run", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
