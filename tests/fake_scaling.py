"""Records of a scaling study that nobody ran: every number follows from costs that are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from fake_runs import fake_record

from configs.schema import Config, to_mapping
from experiments.grid import PlannedRun

STEPS = 16  # at most, in an epoch


@dataclass(frozen=True)
class Truth:
    """A step of b samples costs a * b + d seconds, times `jitter`; all-reduces are by `exchange`.

    cores: workers beyond this number share them; by_bandwidth: whether the exchange grows as a ring
    of long messages, or of short ones. diverges: the highest scaled learning rate is too much, with
    a warm-up for seed 42 alone.
    """

    a: float = 1e-4
    d: float = 2e-3
    exchange: float = 1e-3
    cores: int = 2
    by_bandwidth: bool = False
    jitter: float = 0.02
    diverges: bool = False

    def exchange_of(self, workers: int) -> float:
        """Seconds of an all-reduce, which are `exchange` for two workers."""
        return self.exchange * (workers - 1) * (2 / workers if self.by_bandwidth else 1)


def write_study(runs: Iterable[PlannedRun], truth: Truth) -> None:
    """Writes all runs' records into their folders."""
    for run in runs:
        write_records(run.folder, run.config, run.workers, truth)


def write_records(
    path: Path, config: Config, workers: int, truth: Truth, recorded: int | None = None
) -> None:
    """Slowdowns are in force throughout, other delays never; recorded: number of epochs, else all.

    A run that diverges leaves what trainer.py then leaves: here no epoch, and the marker.
    """
    lost = _is_lost(config, truth)
    recorded = 0 if lost else config.epochs if recorded is None else recorded
    draw = np.random.default_rng([config.seed, workers, config.batch_size])
    factors = _factors(config, workers, truth)
    epochs, busy, wait, sizes, total = [], [], [], [], 0.0
    samples = config.data.subset or 50_000
    steps = -(-samples // config.batch_size)
    shown = min(STEPS, steps)
    shares = np.full(workers, 1 / workers)
    for epoch in range(recorded):
        split = np.floor(shares * config.batch_size).astype(int)
        split[0] += config.batch_size - split.sum()
        rows = (truth.a * split + truth.d) * factors
        rows = rows * np.exp(truth.jitter * draw.standard_normal((shown, workers)))
        own = rows.max(1, keepdims=True) + truth.exchange_of(workers)
        busy.append(rows)
        wait.append(own - rows)
        sizes.append(np.tile(split, (shown, 1)))
        total += steps * float(own.mean())
        epochs.append(
            {**fake_record(epoch, workers), "train_seconds": total, "shares": shares.tolist(),
             "test_top1": _learned(config, epoch), "train_loss": 1.0}
        )  # fmt: skip
        if config.algorithm != "sync-sgd":
            shares = shares / rows.mean(0)
            shares /= shares.sum()
    path.mkdir(parents=True)
    provenance = {
        "world_size": workers, "devices": ["cpu"] * workers, "cores": truth.cores,
        "command": "torchrun trainer.py", "allreduce_bytes_per_step": 250_000,
        "threads": config.threads,
    }  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
    (path / "provenance.json").write_text(json.dumps(provenance))
    (path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
    if lost:
        (path / "diverged").write_text('{"epoch": 0, "message": "not finite in epoch 0 (from 0)"}')
        return
    np.savez(
        path / "steps.npz", busy=np.concatenate(busy), wait=np.concatenate(wait),
        batch_sizes=np.concatenate(sizes), epoch=np.repeat(np.arange(recorded), shown),
        step=np.tile(np.arange(shown), recorded),
    )  # fmt: skip


def _factors(config: Config, workers: int, truth: Truth) -> np.ndarray:
    """How many times slower each worker is than one alone: [n]."""
    factors = np.ones(workers)
    for rule in config.stragglers:
        if rule.kind == "slowdown":
            factors[list(rule.ranks)] += rule.factor - 1
    return factors * max(1.0, workers / truth.cores)


def _is_lost(config: Config, truth: Truth) -> bool:
    schedule = config.schedule
    if not truth.diverges or schedule.scale_lr != "linear" or config.batch_size != 8192:
        return False
    return not schedule.warmup_epochs or config.seed == 42


def _learned(config: Config, epoch: int) -> float:
    """Larger batches learn less an epoch; scaling the rate makes up for much of it."""
    schedule = config.schedule
    handicap = np.log2(config.batch_size / 128) if config.batch_size > 128 else 0.0
    slower = {"none": 0.5, "linear": 0.22}[schedule.scale_lr]
    slower = 0.1 if schedule.warmup_epochs else slower
    pace = np.exp(-slower * handicap) * 4 * (epoch + 1) / 15
    return float(0.1 + 0.58 * (1 - np.exp(-pace)) + 0.002 * (config.seed - 42))
