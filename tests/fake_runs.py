"""Plausible run folders without training, for tests of what reads them.

Workers have busy times a·b + d with noise and an injected delay; dynamic algorithms move shares as
share / t once an epoch. Losses and accuracies follow smooth curves with noise.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

_CONFIG: dict[str, Any] = {
    "name": "lenet-low",
    "algorithm": "edp-sgd",
    "epochs": 12,
    "batch_size": 64,
    "seed": 42,
    "model": {"name": "lenet"},
    "data": {
        "name": "synthetic", "root": "data", "cache": "data/cache", "subset": None,
        "test_subset": None, "image_size": None, "mean": None, "std": None, "crop_padding": 4,
        "flip": True, "placement": "auto", "memory_limit_gib": 4.0, "loader_workers": 2,
        "train_samples": 4096, "test_samples": 1024,
    },
    "optimizer": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5.0e-4},
    "schedule": {"kind": "cosine"},
    "partition": {
        "policy": "proportional", "shares": None, "every": "epoch", "min_batch": 2,
        "max_batch": None, "min_gain": 0.01, "replay": None,
    },
    "gradient_weight": "share",
    "stragglers": [{"ranks": [1], "kind": "constant", "seconds": 0.05}],
    "exchange": "ddp",
    "precision": "fp32",
    "memory_format": "contiguous",
    "evaluation_batch_size": 500,
    "backend": "gloo",
    "device": "cpu",
    "threads": 1,
    "timeout": 600.0,
    "output": "runs",
}  # fmt: skip


def fake_config(**changes: Any) -> dict[str, Any]:
    """A resolved config; nested keys as partition__policy="static"."""
    config = copy.deepcopy(_CONFIG)
    if changes.get("algorithm") == "sync-sgd":
        config["partition"]["policy"] = "equal"
    if changes.get("algorithm") in ("sync-sgd", "dp-sgd"):
        config["gradient_weight"] = "uniform"
    for name, value in changes.items():
        *parents, key = name.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    return config


def write_run(
    root: Path,
    folder: str | None = None,
    *,
    workers: int = 2,
    recorded: int | None = None,
    steps: int = 40,
    calibrated: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write root/<folder>/<algorithm>/seed-<n> and return it.

    folder: default the config's name; recorded: epochs recorded so far (default: all); steps: per
    epoch; changes: see fake_config.
    """
    config = fake_config(**changes)
    path = root / (folder or config["name"]) / config["algorithm"] / f"seed-{config['seed']}"
    path.mkdir(parents=True)
    write_records(path, config, workers, recorded or config["epochs"], steps, calibrated)
    return path


def write_records(
    path: Path,
    config: dict[str, Any],
    workers: int,
    recorded: int,
    steps: int = 40,
    calibrated: list[dict[str, Any]] | None = None,
) -> None:
    """Write the records of a resolved config's run into the folder `path`; as in `write_run`."""
    epochs, arrays = _simulate(config, workers, steps, recorded)
    provenance = {
        "command": "torchrun trainer.py", "git_commit": None, "git_dirty": None, "versions": {},
        "devices": ["cpu"] * workers, "world_size": workers, "backend": "gloo", "threads": 1,
        "started": "2026-01-01T00:00:00", "parameters": 44426,
        "data": {"train_samples": 4096, "test_samples": 1024, "classes": 10},
        "allreduce_bytes_per_step": 177704, "calibrated_delays": calibrated or [],
    }  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (path / "provenance.json").write_text(json.dumps(provenance))
    (path / "epochs.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    np.savez(path / "steps.npz", **arrays)


def fake_record(number: int, workers: int = 1, **changes: Any) -> dict[str, Any]:
    """One epoch's record, whole, with batches of one sample per worker."""
    ones = np.ones(workers)
    config = fake_config(epochs=number + 1, batch_size=workers, stragglers=[])
    epochs, _ = _simulate(config, workers, 5, number + 1)
    sizes = {"batch_sizes": ones.astype(int).tolist(), "shares": (ones / workers).tolist()}
    return {**json.loads(json.dumps(epochs[-1])), **sizes, **changes}


def _simulate(
    config: dict[str, Any], workers: int, steps: int, recorded: int
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    rng = np.random.default_rng([config["seed"], len(config["algorithm"]), workers])
    slope = 2e-3 * np.random.default_rng(workers).uniform(0.9, 1.2, workers)
    slope *= rng.normal(1, 0.005)
    fixed = 4e-3 + _delays(config, workers)
    shares = np.full(workers, 1 / workers)
    epochs: list[dict[str, Any]] = []
    parts: dict[str, list[np.ndarray]] = {"busy": [], "wait": [], "batch_sizes": []}
    train = total = 0.0
    for number in range(recorded):
        batches = _round(shares, config["batch_size"])
        busy, wait = _measure(slope * batches + fixed, steps, rng)
        seconds = float((busy + wait)[:, 0].sum())
        train, total = train + seconds, total + seconds + 0.4
        dynamic = config["partition"]["policy"] in ("proportional", "affine")
        known = number > 0 and dynamic
        epochs.append(
            {
                **_learning(config, number, rng),
                **_times(busy, wait, slope, fixed, batches, known),
                "epoch": number, "steps": steps, "left_out": 0, "shares": shares.tolist(),
                "batch_sizes": batches.tolist(), "allreduce_bytes": steps * 177704,
                "samples_per_second": steps * config["batch_size"] / seconds,
                "epoch_seconds": seconds, "train_seconds": train, "total_seconds": total,
            }
        )  # fmt: skip
        for name, values in (("busy", busy), ("wait", wait)):
            parts[name].append(values.astype(np.float32))
        parts["batch_sizes"].append(np.tile(batches.astype(np.int32), (steps, 1)))
        if dynamic:
            shares = shares / np.median(busy, axis=0)
            shares /= shares.sum()
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    arrays["epoch"] = np.repeat(np.arange(recorded, dtype=np.int32), steps)
    arrays["step"] = np.tile(np.arange(steps, dtype=np.int32), recorded)
    return epochs, arrays


def _measure(
    mean: np.ndarray, steps: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """busy and wait [steps, n]: noise, three warm-up steps, a spike now and then."""
    busy = mean * rng.gamma(400, 1 / 400, (steps, len(mean)))
    busy[:3] *= 1 + rng.exponential(1.5)
    busy[rng.random(busy.shape) < 0.002] *= 6
    return busy, busy.max(axis=1, keepdims=True) - busy + rng.gamma(50, 1e-4, (steps, 1))


def _delays(config: dict[str, Any], workers: int) -> np.ndarray:
    delays = np.zeros(workers)
    for rule in config["stragglers"]:
        for rank in rule["ranks"]:
            delays[rank] += rule.get("seconds") or 0.02
    return delays


def _round(shares: np.ndarray, total: int) -> np.ndarray:
    batches = np.floor(shares * total).astype(int)
    rest = np.argsort(batches - shares * total, kind="stable")[: total - batches.sum()]
    batches[rest] += 1
    return batches


def _learning(config: dict[str, Any], epoch: int, rng: np.random.Generator) -> dict[str, Any]:
    progress = (epoch + 1) / config["epochs"]
    loss = 0.3 + 2.0 * np.exp(-4 * progress) + rng.normal(0, 0.03)
    top1 = 0.92 - 0.75 * np.exp(-4 * progress) + rng.normal(0, 0.01)
    return {
        "learning_rate": 0.05 * (1 + np.cos(np.pi * progress)),
        "train_loss": loss - 0.1 * progress, "test_loss": loss + 0.05,
        "train_top1": top1 + 0.03 * progress, "test_top1": top1,
        "train_top5": 1 - (1 - top1) / 4, "test_top5": 1 - (1 - top1) / 3,
        "train_samples": 4096, "test_samples": 1024,
    }  # fmt: skip


def _times(
    busy: np.ndarray, wait: np.ndarray, slope: np.ndarray, fixed: np.ndarray,
    batches: np.ndarray, known: bool,
) -> dict[str, Any]:  # fmt: skip
    warm_up = min(3, len(busy) - 1)
    busy, wait = busy[warm_up:], wait[warm_up:]
    mean, others = busy.mean(axis=0), wait.mean(axis=0)
    split = {"data": 0.05, "forward": 0.3, "backward": 0.62, "step": 0.03}
    work = mean - (fixed - 4e-3)
    phases = {name: (part * work).tolist() for name, part in split.items()}
    optimum = float((batches.sum() + (fixed / slope).sum()) / (1 / slope).sum())
    median = np.median(busy, axis=0)
    return {
        "busy": _spread(busy) | {"typical": median.tolist()},
        "wait": _spread(wait),
        "phases": {**phases, "delay": (fixed - 4e-3).tolist(), "wait": others.tolist()},
        "time_model": {"a": slope.tolist(), "d": fixed.tolist()} if known else None,
        "optimum": optimum if known else None,
        "optimum_continuous": optimum if known else None,
        "optimum_batch_sizes": batches.tolist() if known else None,
        "imbalance": float(median.max() / optimum) if known else None,
        "better_without": None,
        "changes": [{"step": 0, "batch_sizes": batches.tolist()}],
    }


def _spread(values: np.ndarray) -> dict[str, list[float]]:
    p5, median, p95 = np.percentile(values, [5, 50, 95], axis=0)
    return {
        "mean": values.mean(axis=0).tolist(), "median": median.tolist(),
        "p5": p5.tolist(), "p95": p95.tolist(),
    }  # fmt: skip
