"""Clusters from YAML files: keys with their meaning, checks, and what is said of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.files import read_mapping
from configs.filling import fill, setting
from partitioner import LeftOut
from simulation.exchange import Exchange, ring
from simulation.model import Cluster, Phase, Run, Strategy, simulate

# Workers that are named one by one in a record.
MOST_NAMED = 32
# What is held in memory at once: the steps of a run, those of an epoch (and the epochs) times the
# workers.
MOST_WORKERS, MOST_STEPS, MOST_TIMES = 100_000, 20_000_000, 100_000_000


@dataclass(frozen=True)
class Group:
    """Workers that are alike; their step of b samples lasts a * b + d seconds."""

    name: str = setting(..., "Name of these workers, for changes.")
    a: float = setting(..., "Seconds per sample.", above=0)
    count: int = setting(1, "How many there are.", at_least=1, at_most=MOST_WORKERS)
    d: float = setting(0.0, "Seconds of a step that do not depend on the batch.", at_least=0)
    jitter: float = setting(0.0, "Deviation of the log of a step's time.", at_least=0, at_most=2)
    max_batch: int | None = setting(
        None, "Most samples per step (memory); null sets no cap.", at_least=1
    )


@dataclass(frozen=True)
class Change:
    """From a moment on, a group's costs are others; null leaves one as it was."""

    workers: str = setting(..., "Name of the group.")
    epoch: int = setting(..., "Epoch of the change (from 0).", at_least=0)
    step: int = setting(0, "Step of that epoch (from 0).", at_least=0)
    a: float | None = setting(None, "Seconds per sample from then on.", above=0)
    d: float | None = setting(None, "Fixed seconds from then on.", at_least=0)
    jitter: float | None = setting(None, "Jitter from then on.", at_least=0, at_most=2)


@dataclass(frozen=True)
class Communication:
    """The all-reduce of a step: its measured time, or what a ring takes."""

    seconds: float | None = setting(None, "Measured time, not hidden by anything.", at_least=0)
    gradient_bytes: float | None = setting(None, "Bytes of all gradients.", above=0)
    bandwidth: float | None = setting(None, "Bytes per second of each worker.", above=0)
    latency: float | None = setting(None, "Seconds per message.", at_least=0)
    overlapped: bool = setting(True, "Whether a ring runs beside the backward pass, in buckets.")


@dataclass(frozen=True)
class ClusterFile:
    """Everything that a cluster's file says."""

    batch_size: int = setting(..., "Global batch.", at_least=1)
    epoch_steps: int = setting(..., "Steps of an epoch.", at_least=1)
    epochs: int = setting(..., "Epochs to simulate.", at_least=1)
    workers: tuple[Group, ...] = setting(..., "Groups of workers.", nonempty=True)
    communication: Communication = setting(..., "The all-reduce of a step.")
    changes: tuple[Change, ...] = setting((), "Changes of speed during the run.")
    policies: tuple[str, ...] = setting(
        ("equal", "proportional", "affine"),
        "What moves the shares; each is simulated.",
        choices=("equal", "proportional", "affine"),
        nonempty=True,
    )
    every: str | int = setting(
        "epoch", "Rebalance after each epoch, or each so many steps.", choices=("epoch",),
        at_least=1,
    )  # fmt: skip
    lookahead: int = setting(
        0, "Steps until a new plan takes effect inside an epoch (prefetch).", at_least=0
    )
    min_batch: int = setting(1, "Least samples per step of each worker.", at_least=1)
    epoch_seconds: float = setting(
        0.0, "What an epoch takes beside its steps, e.g. evaluation.", at_least=0
    )
    seed: int = setting(0, "Seed of the jitter.", at_least=0)
    least_efficiency: float | None = setting(
        None, "Target of --check: T* over the step time, the best policy's last epoch.", above=0,
        at_most=1,
    )  # fmt: skip


def read_cluster(path: str | Path) -> tuple[ClusterFile, Cluster]:
    """What a cluster's file says, and the cluster. Raises UserError, one line."""
    where = str(path)
    file = fill(ClusterFile, read_mapping(path), where)
    names = [group.name for group in file.workers]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: workers: two groups have the same name; give each its own")
    if file.every != "epoch" and file.every > file.epoch_steps:
        raise UserError(
            f"{where}: every: {file.every} steps are more than an epoch has, {file.epoch_steps}: "
            "lower it, or say epoch"
        )
    counts = [group.count for group in file.workers]
    _check_size(file, sum(counts), where)
    caps = [group.max_batch or file.batch_size for group in file.workers]
    _check_bounds(file, caps, counts, where)
    workers = sum(counts)
    cluster = Cluster(
        file.batch_size,
        file.epoch_steps,
        _phases(file, names, counts, where),
        _exchange(file.communication, workers, where),
        np.full(workers, float(file.min_batch)),
        np.repeat(np.array(caps, float), counts),
        file.epoch_seconds,
    )
    return file, cluster


def _check_size(file: ClusterFile, workers: int, where: str) -> None:
    """Raises UserError where a simulation would not fit into memory."""
    if workers > MOST_WORKERS:
        raise UserError(f"{where}: {workers:,} workers are more than {MOST_WORKERS:,}")
    if file.epochs * file.epoch_steps > MOST_STEPS:
        raise UserError(f"{where}: epochs * epoch_steps is more than {MOST_STEPS:,}: lower one")
    if max(file.epoch_steps, file.epochs) * workers > MOST_TIMES:
        raise UserError(
            f"{where}: epoch_steps or epochs * {workers:,} workers is more than {MOST_TIMES:,}: "
            "lower one"
        )


def describe_cluster(file: ClusterFile, cluster: Cluster) -> dict[str, Any]:
    """The record of a cluster: its phases' optima, and a run with each policy."""
    runs = {
        policy: simulate(
            cluster, Strategy(policy, file.every, file.lookahead), file.epochs, file.seed
        )
        for policy in dict.fromkeys(("equal", *file.policies))
    }
    equal = runs["equal"]
    return {
        "workers": cluster.workers,
        "batch_size": cluster.batch_size,
        "phases": [
            {
                "first_step": phase.first_step,
                "optimum_seconds": best.seconds,
                "better_without": _left_out(left_out),
            }
            for phase, best, left_out in zip(cluster.phases, cluster.optima, cluster.left_out())
        ],
        "runs": [describe_run(policy, runs[policy], equal) for policy in file.policies],
    }


def describe_run(policy: str, run: Run, equal: Run) -> dict[str, Any]:
    """A run's record; equal: the same cluster's with equal shares."""
    sizes = run.changes[-1][1]
    named = len(sizes) <= MOST_NAMED
    return {
        "policy": policy,
        "seconds": run.seconds,
        "speed_up": equal.seconds / run.seconds,
        "last_epoch_speed_up": float(equal.epoch_seconds[-1] / run.epoch_seconds[-1]),
        "epoch_seconds": run.epoch_seconds.tolist(),
        "step_seconds": run.by_epoch(run.step_seconds).mean(1).tolist(),
        "imbalance": run.by_epoch(run.imbalance).max(1).tolist(),
        "efficiency": run.efficiency.tolist(),
        "last_batch_sizes": sizes.tolist() if named else None,
    }


def cluster_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line of the table per policy."""
    return [
        {
            "policy": run["policy"],
            "run (s)": run["seconds"],
            "last epoch (s)": run["epoch_seconds"][-1],
            "step (ms)": 1e3 * run["step_seconds"][-1],
            "imbalance": run["imbalance"][-1],
            "efficiency": run["efficiency"][-1],
            "speed-up": run["speed_up"],
            "of the last epoch": run["last_epoch_speed_up"],
        }
        for run in results["runs"]
    ]


def cluster_remarks(results: Mapping[str, Any]) -> list[str]:
    """One line per phase: the best possible step, and who had better be left out."""
    lines = []
    for phase in results["phases"]:
        line = f"from step {phase['first_step']}: T* = {1e3 * phase['optimum_seconds']:.4g} ms"
        without = phase["better_without"]
        if without is not None:
            ranks = without["ranks"] or [f"{without['count']} of them"]
            who = ", ".join(map(str, ranks))
            line += f"; {1e3 * without['seconds']:.4g} ms without the workers {who}"
        lines.append(line)
    return lines


def cluster_misses(file: ClusterFile, results: Mapping[str, Any]) -> list[str]:
    best = max(run["efficiency"][-1] for run in results["runs"])
    if file.least_efficiency is None or best >= file.least_efficiency:
        return []
    return [f"efficiency of the last epoch {best:.3f}, not {file.least_efficiency}"]


def _check_bounds(
    file: ClusterFile, caps: Sequence[int], counts: Sequence[int], where: str
) -> None:
    """Raises UserError where the bounds contradict each other or cannot hold the batch."""
    for group, cap in zip(file.workers, caps):
        if cap < file.min_batch:
            raise UserError(
                f"{where}: workers {group.name}: max_batch {cap} is less than min_batch "
                f"{file.min_batch}: raise the one or lower the other"
            )
    least = file.min_batch * sum(counts)
    most = sum(cap * count for cap, count in zip(caps, counts))
    if not least <= file.batch_size <= most:
        raise UserError(
            f"{where}: batch_size {file.batch_size} does not fit: by min_batch and max_batch the "
            f"workers take {least} to {most} samples"
        )


def _phases(
    file: ClusterFile, names: list[str], counts: list[int], where: str
) -> tuple[Phase, ...]:
    costs = {group.name: (group.a, group.d, group.jitter) for group in file.workers}

    def phase(first_step: int) -> Phase:
        table = np.repeat(np.array([costs[name] for name in names]), counts, axis=0)
        return Phase(first_step, *table.T.copy())

    phases = {0: phase(0)}
    for index, change in enumerate(file.changes):
        if change.workers not in costs:
            raise UserError(
                f"{where}: changes.{index}.workers: there is no group {change.workers}; the groups "
                f"are {', '.join(names)}"
            )
        if change.step >= file.epoch_steps or change.epoch >= file.epochs:
            raise UserError(
                f"{where}: changes.{index} comes after the end: epochs are 0 to {file.epochs - 1}, "
                f"their steps 0 to {file.epoch_steps - 1}"
            )
    for change in sorted(file.changes, key=lambda change: (change.epoch, change.step)):
        new = change.a, change.d, change.jitter
        old = costs[change.workers]
        costs[change.workers] = tuple(o if n is None else n for o, n in zip(old, new))
        first_step = change.epoch * file.epoch_steps + change.step
        phases[first_step] = phase(first_step)
    return tuple(phases.values())


def _exchange(communication: Communication, workers: int, where: str) -> Exchange:
    ring_keys = ("gradient_bytes", "bandwidth", "latency")
    values = [getattr(communication, key) for key in ring_keys]
    given = [value is not None for value in values]
    if communication.seconds is not None and not any(given):
        return Exchange(communication.seconds)
    if communication.seconds is None and all(given):
        return ring(workers, *values, communication.overlapped)
    raise UserError(
        f"{where}: communication needs either seconds, or all of {', '.join(ring_keys)}"
    )


def _left_out(left_out: LeftOut | None) -> dict[str, Any] | None:
    if left_out is None:
        return None
    count = len(left_out.ranks)
    ranks = list(left_out.ranks) if count <= MOST_NAMED else None
    return {"count": count, "ranks": ranks, "seconds": left_out.seconds}
