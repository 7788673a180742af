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
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record as report_to_launcher
from torch.nn.functional import cross_entropy

import checkpoint
from balancer import average_buffers, typical
from cluster import (
    Preempted,
    Workers,
    environment_rank,
    join,
    launcher_names,
    naming_lost_peers,
)
from configs.command_line import Launch, parse, run_folder
from configs.errors import NotFiniteError, UserError
from configs.schema import Config, for_workers, to_mapping
from console import Console, epoch_line, headline, summary
from data import identity as data_identity
from data.pipeline import make_pipeline
from data.sources import Data, open_data, prepare
from exchange import EXCHANGES
from interruption import FiniteGuard, Request, StopFlag, listening
from metrics import Clocks, Metrics
from partitioner import PlanError
from preview import preview
from record_form import PHASES
from recorder import (
    CONTINUES,
    FINISHED,
    REPLACES,
    Job,
    RunFolder,
    epoch_record,
    provenance,
    step_arrays,
)
from schedule import learning_rate
from stragglers import Stragglers, calibrate, check_calibrated, must_measure
from worker_state import own_part, restore_part, seed_dropout
from workload import (
    DTYPES,
    MEMORY_FORMATS,
    build_balancer,
    build_module,
    build_optimizer,
    check_steps,
    count_parameters,
    gradient_bytes,
    replayed,
)

# Throw-away steps before each start or resume: DDP re-orders its buckets after the first backward
# pass, and only then is a resumed run the bitwise twin of an undisturbed one.
REHEARSAL_STEPS = 2
# Further ones, where a delay is given as a fraction of the busy time that they measure.
CALIBRATION_STEPS = 10

# A checkpoint is not ours, or not whole, if setting the state from it raises one of these.
_MISFITS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip


class Trainer:
    """One worker's part of a run: its model, its data, and the state that a checkpoint holds."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        data: Data,
        replay: Mapping[int, np.ndarray] | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.workers, self.clocks = config, workers, Clocks()
        self.data = data_identity.identity(data)
        self.balancer = build_balancer(config, len(data.train), workers, workers.device, replay)
        self.module = build_module(config, len(data.classes), data.image_size).to(workers.device)
        self.exchange = EXCHANGES[config.exchange](
            self.module, self.balancer, self._forward, config.accumulate
        )
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
        balancer = self.balancer
        self.guard = FiniteGuard(
            workers, self.module, lambda: (balancer.plan.epoch, balancer.next_step)
        )
        balancer.on_gradient = self.guard.add_gradient
        self.flag = StopFlag(workers, asked_to_stop, self.guard)
        self.stragglers = Stragglers((), workers.rank, config.seed)
        self.calibrated: list[dict[str, Any]] = []
        self.next_epoch = 0
        # Of the epoch so far: sums, the training clock at its start, and once all its steps are
        # done its record and step arrays, which then lack the evaluation alone.
        self.metrics, self.began = Metrics(workers.device), 0.0
        self.trained: dict[str, Any] = {}

    # --- start and resume ---

    def start(self, saved: Mapping[str, Any] | None) -> None:
        """Rehearses, then sets the state: as built, or as a checkpoint has it.

        Raises UserError for a checkpoint that does not fit.
        """
        rules = self.config.stragglers
        now = to_mapping(self.config)["stragglers"]
        known = saved is not None and saved["config"]["stragglers"] == now
        busy = self._rehearse(0 if known or not must_measure(rules) else CALIBRATION_STEPS)
        if saved is not None:
            self.workers.together(lambda: self._load(saved))
        if known:
            check_calibrated(rules, self.calibrated, self.config.timeout)
        else:
            self.calibrated = calibrate(rules, busy, self.config.timeout)
        self.balancer.agree_on_caps()
        rank = self.workers.rank
        mine = {c["rule"]: c["seconds"] for c in self.calibrated if c["rank"] == rank}
        self.stragglers = Stragglers(rules, rank, self.config.seed, mine)
        self.workers.check_replicas(self.module)
        if saved is not None and saved["workers"]:
            self.workers.together(lambda: self._load_part(saved["workers"]))

    def close(self) -> None:
        """Ends the processes that read images ahead."""
        self.train_batches.close()
        self.test_batches.close()

    def state(self) -> dict[str, Any]:
        """All that a continued run needs: whole on rank 0 alone, but all workers must call it.

        Raises NotFiniteError on all workers where something in it is not finite.
        """
        self.guard.settle()
        parts: list[bytes] = []
        if self.balancer.next_step > 0:
            times = self.balancer.step_times()
            part = own_part(self.module, self.workers.device, self.metrics, times)
            parts = self.workers.collect(checkpoint.packed(part))
        return {
            "world_size": self.workers.size,
            "data": self.data,
            "next_epoch": self.next_epoch,
            "epoch_began": self.began,
            "trained": self.trained,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "balancer": self.balancer.state_dict(),
            "calibrated": self.calibrated,
            "clocks": {"train": self.clocks.train, "total": self.clocks.total},
            "workers": checkpoint.unpacked(parts),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Sets what all workers have in common, and this worker's step times."""
        if changes := data_identity.changes(state["data"], self.data):
            raise UserError(
                f"the run was begun with other data ({changes}): put them back (mean and std also "
                "follow from data.memory_limit_gib), choose another --output, or --overwrite"
            )
        own = dict(enumerate(state["workers"])).get(self.workers.rank)
        try:
            self.next_epoch, self.began = state["next_epoch"], state["epoch_began"]
            self.trained, self.calibrated = state["trained"], state["calibrated"]
            self.module.load_state_dict(state["model"])
            self._load_optimizer(state["optimizer"])
            self.balancer.load_state_dict(state["balancer"], own and own["times"])
            self.clocks = Clocks(**state["clocks"])
        except PlanError:
            raise
        except _MISFITS as error:
            raise UserError(f"the checkpoint does not fit this run: {error!r}") from error

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Sets the momentum alone: all else follows from the config. Raises ValueError."""
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state)
        for group, own in zip(self.optimizer.param_groups, settings):
            group.update(own)
        for parameter, kept in self.optimizer.state.items():
            momentum = kept.get("momentum_buffer")
            if set(kept) - {"momentum_buffer"} or (
                momentum is not None and momentum.shape != parameter.shape
            ):
                raise ValueError("the optimizer's state is of another model")

    def _load_part(self, parts: list[dict[str, Any]]) -> None:
        """Sets what each worker has of its own inside an epoch."""
        rank, size, balancer = self.workers.rank, self.workers.size, self.balancer
        seed_dropout(self.config.seed, balancer.plan.epoch, rank)  # for a new worker
        handled = balancer.plan.batch_sizes[: balancer.next_step].sum(0)
        try:
            restore_part(parts, rank, size, handled, self.module, self.metrics)
        except _MISFITS as error:
            raise UserError(f"the checkpoint does not fit this run: {error!r}") from error

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
        self.guard.forget()
        measured, _ = typical(np.concatenate(busy)[-measured_steps or None :])
        return self.workers.gather(np.array([measured]))[:, 0]

    # --- one epoch ---

    def run_epoch(
        self, epoch: int, console: Console, save: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trains for one epoch, rebalances and evaluates; returns its record and step arrays.

        Goes on inside the epoch where a checkpoint was loaded. save: called on all workers where a
        checkpoint is due inside the epoch. Raises Preempted on all workers where one was asked to
        stop, and NotFiniteError where a number is not finite.
        """
        if not self.trained:
            self._begin(epoch)
            while not self._train(epoch, console):
                save()
            self.trained = self._training_record()
        test = self._evaluate(epoch)
        steps = {name: tensor.cpu().numpy() for name, tensor in self.trained["steps"].items()}
        record = {
            **self.trained["record"],
            **{f"test_{name}": value for name, value in test.items()},
            "total_seconds": self.clocks.total,
        }
        self.next_epoch, self.trained = epoch + 1, {}
        return record, steps

    def _begin(self, epoch: int) -> None:
        """Makes ready for an epoch, unless it has begun already."""
        if self.balancer.next_step == 0:
            self.metrics, self.began = Metrics(self.workers.device), self.clocks.train
            seed_dropout(self.config.seed, epoch, self.workers.rank)
        balancer = self.balancer
        balancer.before_ready = lambda: self.stragglers.apply(
            balancer.clock, epoch, balancer.next_step
        )

    def _train(self, epoch: int, console: Console) -> bool:
        """Trains to the epoch's end, or until a checkpoint is due inside it; whether it ended."""
        self.module.train()
        with self.clocks.training():
            batches = self.train_batches.batches(epoch)
            steps = self.balancer.steps(batches, epoch, pause=self._pauses)
            for images, labels in console.steps(steps, f"epoch {epoch + 1}"):
                self._step(images, labels, self.metrics)
            if ended := self.balancer.next_step == 0:
                average_buffers(self.module, self.balancer.epoch_share())
            self.balancer.step_times()  # on CUDA this waits for all that was queued
        return ended

    def _pauses(self, step: int) -> bool:
        """Between two steps: whether a checkpoint is due. Raises Preempted and NotFiniteError."""
        self.flag.check()
        plan = self.balancer.plan
        return checkpoint.is_due(self.config.checkpoint.every, plan.epoch, step, len(plan.starts))

    def _step(self, images: Tensor, labels: Tensor, metrics: Metrics) -> None:
        outputs, loss = self.exchange.learn(images, labels)
        self.guard.add_loss(loss)
        self._set_learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics.add(outputs, labels, loss)

    def _training_record(self) -> dict[str, Any]:
        """The epoch's record, but for the evaluation, and its step arrays."""
        self.guard.settle()
        train, times = self.metrics.total(self.workers.sum), self.balancer.step_times()
        names = (*PHASES, "busy")
        gathered = self.workers.gather(np.stack([getattr(times, name) for name in names]))
        phases = dict(zip(names, gathered.transpose(1, 2, 0)))
        plan, seconds = self.balancer.plan, self.clocks.train - self.began
        record = epoch_record(plan, phases, self.balancer.busy, self.balancer.partitioner) | {
            "learning_rate": self.optimizer.param_groups[0]["lr"],  # the last step's
            **{f"train_{name}": value for name, value in train.items()},
            "samples_per_second": train["samples"] / seconds,
            "allreduce_bytes": gradient_bytes(self.module) * len(plan.starts),
            "epoch_seconds": seconds,
            "train_seconds": self.clocks.train,
        }
        steps = step_arrays(plan, phases)
        return {"record": record, "steps": {k: torch.as_tensor(v) for k, v in steps.items()}}

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> dict[str, float | int]:
        """Loss and accuracy over the whole test set, each sample seen by exactly one worker."""
        self.module.eval()
        metrics = Metrics(self.workers.device)
        batches = self.test_batches.batches(epoch)
        for images, labels in self.flag.between(batches, self.most_test_batches):
            outputs, loss = self._forward(self.module, images, labels)
            metrics.add(outputs, labels, loss)
        total = metrics.total(self.workers.sum)
        if not math.isfinite(total["loss"]):
            raise NotFiniteError(
                f"not finite in epoch {epoch} (from 0): the loss over the test set", epoch
            )
        return total

    def _forward(
        self, model: nn.Module, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs [b, classes] and their mean loss, in the config's precision."""
        if self.config.precision != "bf16":
            outputs = model(images)
        else:
            with torch.autocast(self.workers.device.type, torch.bfloat16):
                outputs = model(images).float()
        smoothing = self.config.label_smoothing if self.module.training else 0.0
        return outputs, cross_entropy(outputs, labels, label_smoothing=smoothing)

    def _set_learning_rate(self) -> None:
        plan = self.balancer.plan
        rate = learning_rate(
            self.config, plan.epoch, self.balancer.next_step, len(plan.starts)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _test_shard(self, size: int) -> list[np.ndarray]:
        """This worker's test samples in batches: an even, contiguous part of the set."""
        edges = np.linspace(0, size, self.workers.size + 1).astype(np.int64)
        most = int(np.diff(edges).max())
        self.most_test_batches = -(-most // self.config.evaluation_batch_size)
        mine = np.arange(edges[self.workers.rank], edges[self.workers.rank + 1])
        return [
            mine[start : start + self.config.evaluation_batch_size]
            for start in range(0, len(mine), self.config.evaluation_batch_size)
        ]


def train(launch: Launch, workers: Workers) -> None:
    """Trains from the last checkpoint, or from the start, to the end; rank 0 records.

    Ends early, with a checkpoint and the marker `preempted`, where a worker is asked to stop; and
    with NotFiniteError and the marker `diverged`, where a number is not finite.
    """
    console, job = Console(workers.is_first), _job(workers)
    folder, found, config = _open_folder(launch, workers, job, console)
    if found == FINISHED:
        console.say(f"{folder.path} holds this job's run, which is finished: nothing is left to do")
        return
    if found == CONTINUES and launch.overwrite:
        console.say(
            "--overwrite: done at the first start of this job, which goes on; for a new one give "
            "torchrun another --rdzv-id"
        )
    with listening() as request:
        asked = partial(_asked, request)
        try:
            prepared = workers.once_per_node(partial(prepare, config.data), asked)
        except Preempted:
            _stop_early(folder, found, workers, request, console)
            return
        data = open_data(config.data, config.seed, prepared)
        _check_same_data(data, workers)
        check_steps(config, len(data.train), workers.size)
        with closing(Trainer(config, workers, data, replayed(config, workers), asked)) as trainer:
            records = _start(trainer, folder, found, console)
            facts = _facts(trainer, data, job)
            workers.once(lambda: folder.write_provenance(facts))
            console.say(headline(config, facts, folder.path))
            if found == CONTINUES:
                console.say(_place(trainer, launch.config.batch_size))
            try:
                ended = _run_or_stop(trainer, folder, records, request, console)
            except NotFiniteError as error:
                end = {"epoch": error.epoch, "message": str(error)}
                workers.once(lambda: folder.mark_diverged(end))
                raise
        if ended:
            console.say(summary(records, facts["devices"]))


def _start(
    trainer: Trainer, folder: RunFolder, found: str, console: Console
) -> list[dict[str, Any]]:
    """Brings the trainer to where the run begins or goes on; the records of the epochs before."""
    config, workers = trainer.config, trainer.workers
    saved = None
    if found == CONTINUES:
        for line in workers.once(lambda: folder.find_checkpoint(config, workers.size)):
            console.say(line)
        content = workers.broadcast_bytes(folder.found)
        saved = checkpoint.load(content, folder.path / checkpoint.NEWEST, workers.device)
        folder.found = None
    trainer.start(saved)
    plan = trainer.balancer.plan
    if saved is not None and plan.left_out > saved["balancer"]["left_out"]:
        console.say(
            f"an epoch's last batch, of {plan.left_out} samples, is too small for {workers.size} "
            f"workers: left out from here on, so that epochs have {len(plan.starts)} steps"
        )
    if found == REPLACES:
        workers.once(folder.replace)
    return workers.once(lambda: folder.restore(saved))


def _check_same_data(data: Data, workers: Workers) -> None:
    """Raises UserError unless all nodes have the same data."""
    first, *others = workers.gather_json(data_identity.identity(data))
    for rank, other in enumerate(others, 1):
        if changes := data_identity.changes(first, other):
            raise UserError(
                f"rank {rank} has other data than rank 0 ({changes}): give all nodes the same"
            )


def _run_or_stop(
    trainer: Trainer,
    folder: RunFolder,
    records: list[dict[str, Any]],
    request: Request,
    console: Console,
) -> bool:
    """Runs to the end, or to where all workers have agreed to stop; whether it was the end."""
    try:
        _run(trainer, folder, records, console)
    except Preempted:
        request.heard.set()
        _stop(trainer, folder, request, console)
        return False
    return True


def _run(
    trainer: Trainer, folder: RunFolder, records: list[dict[str, Any]], console: Console
) -> None:
    """All epochs that are left, and the end; `records` gets those that are done."""
    config, workers, every = trainer.config, trainer.workers, trainer.config.checkpoint.every
    save = partial(_save, trainer, folder)
    steps_per_epoch = len(trainer.balancer.plan.starts)
    done = trainer.next_epoch * steps_per_epoch + trainer.balancer.next_step
    console.start(config.epochs * steps_per_epoch, done)
    for epoch in range(trainer.next_epoch, config.epochs):
        record, steps = trainer.run_epoch(epoch, console, save)
        workers.once(partial(folder.append_epoch, record, steps))
        records.append(record)
        last = epoch + 1 == config.epochs
        if last or checkpoint.is_due(every, epoch, steps_per_epoch, steps_per_epoch):
            save()
        console.say(epoch_line(record, config.epochs))
    trainer.flag.finish()
    console.close()
    workers.once(lambda: folder.finish(trainer.module.state_dict()))


def _save(trainer: Trainer, folder: RunFolder) -> None:
    state = trainer.state()
    trainer.workers.once(lambda: folder.save_checkpoint(state))


def _stop(trainer: Trainer, folder: RunFolder, request: Request, console: Console) -> None:
    """What is done where all workers have agreed to stop: a checkpoint, and a marker beside it."""
    console.close()
    _save(trainer, folder)
    signals = _signals(trainer.workers, request)
    place = {"epoch": trainer.next_epoch, "step": trainer.balancer.next_step}
    trainer.workers.once(lambda: folder.mark_preempted({"signal": signals[0], **place}))
    console.say(
        f"asked to stop ({signals[0]}): saved at {_moment(trainer)}; the same command goes on from "
        "there"
    )


def _moment(trainer: Trainer) -> str:
    step = "its evaluation" if trainer.trained else f"step {trainer.balancer.next_step}"
    return f"epoch {trainer.next_epoch + 1}, {step}"


def _place(trainer: Trainer, asked: int) -> str:
    """Where a run goes on, and with what global batch if another was asked for."""
    batch = trainer.config.batch_size
    kept = f", with its global batch of {batch} (of this start it would be {asked})"
    return f"goes on from {_moment(trainer)}{kept if batch != asked else ''}"


def _stop_early(
    folder: RunFolder, found: str, workers: Workers, request: Request, console: Console
) -> None:
    """What is done where all workers have agreed to stop while the data were made ready."""
    request.heard.set()
    signals = _signals(workers, request)
    if found == REPLACES:  # what is there is another run, and stays as it is
        workers.once(folder.leave)
    else:
        workers.once(lambda: folder.mark_preempted({"signal": signals[0]}))
    console.say(
        f"asked to stop ({signals[0]}) while the data were made ready: nothing is changed; give "
        "the same command again"
    )


def _signals(workers: Workers, request: Request) -> list[str]:
    """The names of the signals that workers were asked to stop by."""
    return [name for name in workers.gather_json(request.signal) if name is not None]


def _asked(request: Request) -> bool:
    return request.signal is not None


def _open_folder(
    launch: Launch, workers: Workers, job: Job, console: Console
) -> tuple[RunFolder, str, Config]:
    """The run's folder, which rank 0 alone decides and opens; what it holds; how to train."""
    config, folder = launch.config, RunFolder(run_folder(launch))
    arguments = (config, workers.size, launch.resume, launch.overwrite, job)
    found, batch_size = workers.once(lambda: (folder.open(*arguments), folder.batch_size))
    if workers.size > workers.local_size:
        name = workers.once(folder.show)
        blind = workers.gather_json(workers.local_rank == 0 and not folder.sees(name))
        workers.once(partial(folder.hide, name))
        if any(blind):
            nodes = ", ".join(str(rank) for rank, is_blind in enumerate(blind) if is_blind)
            console.say(
                f"output: {folder.path} of rank 0's node is not seen by the nodes of ranks {nodes}:"
                " were that node lost, these could not go on from its checkpoints"
            )
    return folder, found, replace(config, batch_size=batch_size)


def _job(workers: Workers) -> Job:
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    launchers = {name for names in workers.gather_json(launcher_names()) for name in names}
    # torchrun's --rdzv-id is "none" unless given: no two starts of that name need be one job.
    return Job(None if name == "none" else name, tuple(sorted(launchers)))


def _facts(trainer: Trainer, data: Data, job: Job) -> dict[str, Any]:
    """What provenance.json holds."""
    workers, module = trainer.workers, trainer.module
    return provenance(Path(__file__).parent) | {
        "command": workers.launcher + shlex.join(sys.argv),
        "job": job.name,
        "launchers": job.launchers,
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
            launch = replace(launch, config=for_workers(config, workers.size))
            if launch.dry_run:
                Console(workers.is_first).say(preview(launch, workers))
            else:
                with naming_lost_peers(config.timeout):
                    train(launch, workers)
    except (UserError, PlanError) as error:
        # In one write: other workers may have as much to say at the same moment.
        sys.stderr.write(f"trainer.py: error: rank {environment_rank()}: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        print("trainer.py: interrupted: the same command continues the run", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
