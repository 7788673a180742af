"""Rules that tie several keys together, and those that need the number of workers."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, NoReturn

from configs.errors import UserError
from configs.filling import show

if TYPE_CHECKING:
    from configs.schema import Config, DataConfig, PartitionConfig, ScheduleConfig, StragglerRule

# The keys that belong to each kind of straggler; of `constant`'s two, exactly one is given.
STRAGGLER_KEYS = {
    "constant": ("seconds", "fraction"),
    "gamma": ("shape", "scale"),
    "exponential": ("scale",),
    "slowdown": ("factor",),
}


def check(config: Config, where: str) -> None:
    """Raise UserError, beginning with `where`, for keys that contradict each other."""
    optimizer = config.optimizer
    if optimizer.nesterov and not optimizer.momentum:
        _fail(
            where,
            "optimizer.nesterov needs optimizer.momentum > 0:"
            " set optimizer.nesterov to false or give a momentum",
        )
    if config.backend == "nccl" and config.device == "cpu":
        _fail(where, "backend nccl needs device cuda: set backend to gloo or device to cuda")
    _check_data(config.data, where)
    _check_schedule(config.schedule, where)
    _check_partition(config.partition, where)
    for index, rule in enumerate(config.stragglers):
        _check_rule(rule, f"stragglers.{index}", config.timeout, where)


def with_normalised_shares(partition: PartitionConfig, where: str) -> PartitionConfig:
    """Shares divided by their sum and the policy static; unchanged where no shares are given."""
    if partition.shares is None:
        return partition
    # Exact fractions: no overflow, and shares that sum to 1 already stay as they are, bit by bit.
    exact = [Fraction(share) for share in partition.shares]
    total = sum(exact)
    shares = partition.shares
    if abs(total - 1) > 1e-12:
        shares = tuple(float(share / total) for share in exact)
    if 0.0 in shares:
        index = shares.index(0.0)
        _fail(where, f"partition.shares.{index} is too small beside the others: give it more")
    return dataclasses.replace(partition, shares=shares, policy="static")


def check_workers(config: Config, world_size: int) -> None:
    """Raise UserError where the configuration, batch_size given, does not fit so many workers."""
    n = world_size
    if config.batch_per_worker is not None and config.batch_size != n * config.batch_per_worker:
        raise UserError(
            f"batch_size {config.batch_size} is not batch_per_worker {config.batch_per_worker} "
            f"times {_workers(n)}: set one of the two to null"
        )
    for index, rule in enumerate(config.stragglers):
        if max(rule.ranks) >= n:
            _fail_rank(index, max(rule.ranks), n)
    shares, partition = config.partition.shares, config.partition
    if shares is not None and len(shares) != n:
        raise UserError(
            f"partition.shares has {len(shares)} entries but there {_are_workers(n)}: "
            f"give one share per worker, or start {_start(len(shares))}"
        )
    low, high = _each(partition, "min_batch", n), _each(partition, "max_batch", n)
    if config.batch_size < sum(low):
        raise UserError(
            f"batch_size {config.batch_size} is too small: there {_are_workers(n)} with "
            f"partition.min_batch {show(partition.min_batch)}, so at least {sum(low)} samples "
            "are needed"
        )
    if high and sum(high) < config.batch_size:
        raise UserError(
            f"partition.max_batch {show(partition.max_batch)} lets {_workers(n)} take {sum(high)} "
            f"samples, {config.batch_size - sum(high)} short of batch_size {config.batch_size}: "
            "raise partition.max_batch or lower batch_size"
        )
    for rank, (least, most) in enumerate(zip(low, high)):
        if least > most:
            raise UserError(
                f"rank {rank} has partition.min_batch {least} but partition.max_batch {most}: "
                "lower the one or raise the other"
            )


def _each(partition: PartitionConfig, key: str, n: int) -> list[int]:
    """The bound of each of n workers; none where there is no bound."""
    bound = getattr(partition, key)
    if bound is None:
        return []
    if isinstance(bound, int):
        return [bound] * n
    if len(bound) != n:
        raise UserError(
            f"partition.{key} has {len(bound)} entries but there {_are_workers(n)}: give one "
            f"number for all or one per worker, or start {_start(len(bound))}"
        )
    return list(bound)


def _check_data(data: DataConfig, where: str) -> None:
    sized = data.name == "image_folder" and data.image_size is not None
    for key, given in (("crop resized", data.crop == "resized"), ("test_resize", data.test_resize)):
        if given and not sized:
            _fail(where, f"data.{key} needs data.name image_folder and data.image_size")
    if data.crop == "resized" and data.placement == "memory":
        _fail(
            where,
            "data.crop resized cuts its parts out of whole files, so it needs data.placement auto"
            " or loader, not memory",
        )
    if data.test_resize is not None and sized and data.test_resize < data.image_size:
        _fail(
            where,
            f"data.test_resize {data.test_resize} is less than data.image_size {data.image_size}:"
            " raise the one or lower the other",
        )


def _check_schedule(schedule: ScheduleConfig, where: str) -> None:
    milestones = schedule.milestones
    if (schedule.kind == "step") != (milestones is not None):
        _fail(where, "schedule.kind step and schedule.milestones, e.g. [30, 60, 80], go together")
    if schedule.warmup_epochs and schedule.scale_lr == "none":
        _fail(
            where,
            "schedule.warmup_epochs leads from optimizer.lr to the scaled rate, so it needs"
            " schedule.scale_lr linear: set that, or warmup_epochs to 0",
        )
    starts = (schedule.warmup_epochs, *(milestones or ()))
    if any(later <= earlier for earlier, later in zip(starts, starts[1:])):
        _fail(
            where,
            f"schedule.milestones {show(milestones)} must rise and lie behind the"
            f" {schedule.warmup_epochs:g} epochs of schedule.warmup_epochs",
        )


def _check_partition(partition: PartitionConfig, where: str) -> None:
    policy, shares = partition.policy, partition.shares
    if policy == "static" and shares is None:
        _fail(where, "partition.policy static needs partition.shares, e.g. [3, 1]")
    if shares is not None and policy not in (None, "static"):
        _fail(
            where,
            f"partition.shares needs partition.policy static or null, not {policy}:"
            " change the policy or set partition.shares to null",
        )
    if (policy == "replay") != (partition.replay is not None):
        _fail(where, "partition.policy replay and partition.replay (a run's folder) go together")
    low, high = partition.min_batch, partition.max_batch
    if isinstance(low, int) and isinstance(high, int) and low > high:
        _fail(
            where,
            f"partition.min_batch {low} is more than"
            f" partition.max_batch {high}: lower the one or raise the other",
        )


def _check_rule(rule: StragglerRule, name: str, timeout: float, where: str) -> None:
    _check_rule_keys(rule, name, where)
    if len(set(rule.ranks)) != len(rule.ranks):
        _fail(where, f"{name}.ranks names a rank twice: give each rank once")
    if rule.last_epoch is not None and rule.last_epoch < rule.first_epoch:
        _fail(
            where,
            f"{name}.last_epoch {rule.last_epoch} is before"
            f" {name}.first_epoch {rule.first_epoch}: it must not be less",
        )
    if rule.scale is not None and (mean := (rule.shape or 1) * rule.scale) >= timeout:
        _fail(
            where,
            f"{name} of kind {rule.kind} sleeps {mean:g} s on average, which must be less than"
            f" timeout {timeout:g}, or the other workers give up: lower it or raise timeout",
        )
    if rule.seconds is not None and rule.seconds >= timeout:
        _fail(
            where,
            f"{name}.seconds {rule.seconds:g} must be less than timeout {timeout:g},"
            " or the other workers give up: lower it or raise timeout",
        )


def _check_rule_keys(rule: StragglerRule, name: str, where: str) -> None:
    """Each kind has its own keys: all of them are needed, and no others are allowed."""
    own = STRAGGLER_KEYS[rule.kind]
    joined = (" or " if rule.kind == "constant" else " and ").join(own)
    for key in sorted({key for keys in STRAGGLER_KEYS.values() for key in keys} - set(own)):
        if getattr(rule, key) is not None:
            kinds = " or ".join(kind for kind, keys in STRAGGLER_KEYS.items() if key in keys)
            _fail(
                where,
                f"{name}.{key} belongs to kind {kinds}, not to {rule.kind}, which takes {joined}:"
                f" drop {key} or set it to null",
            )
    given = [key for key in own if getattr(rule, key) is not None]
    if rule.kind == "constant" and len(given) != 1:
        count = "both are" if given else "neither is"
        _fail(
            where,
            f"{name} of kind constant needs exactly one of {name}.seconds and {name}.fraction,"
            f" but {count} given: give one and leave the other null",
        )
    if rule.busy_seconds is not None:
        _check_busy_seconds(rule, name, where)
    for key in own:
        if rule.kind != "constant" and getattr(rule, key) is None:
            _fail(where, f"{name}.{key} is missing: kind {rule.kind} needs {joined}")


def _check_busy_seconds(rule: StragglerRule, name: str, where: str) -> None:
    if rule.fraction is None:
        _fail(where, f"{name}.busy_seconds needs {name}.fraction: give both or drop it")
    if len(rule.busy_seconds) != len(rule.ranks):
        _fail(
            where,
            f"{name}.busy_seconds has {len(rule.busy_seconds)} entries but {name}.ranks "
            f"{len(rule.ranks)}: give one for each rank",
        )


def _fail_rank(index: int, rank: int, world_size: int) -> NoReturn:
    ranks = "rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
    raise UserError(
        f"stragglers.{index}.ranks names rank {rank} but there {_are_workers(world_size)}"
        f" ({ranks}): start {_start(rank + 1)}, or change the ranks,"
        " or drop the rules with stragglers=[]"
    )


def _start(workers: int) -> str:
    return f"{_workers(workers)} with torchrun --nproc_per_node={workers}"


def _workers(n: int) -> str:
    return f"{n} worker" if n == 1 else f"{n} workers"


def _are_workers(n: int) -> str:
    return f"is {_workers(n)}" if n == 1 else f"are {_workers(n)}"


def _fail(where: str, text: str) -> NoReturn:
    raise UserError(f"{where}: {text}")
