"""Short trainings by real workers for the tests, and what they leave in their folders."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from processes import Outcome, run_trainer, run_workers, values

# Steps of 32, 32, 32 and 8 samples; no BatchNorm, and double precision to tell 1e-9 apart.
_CONFIG: dict[str, Any] = {
    "name": "short",
    "epochs": 3,
    "batch_size": 32,
    "model": {"name": "lenet"},
    "data": {"name": "synthetic", "train_samples": 104, "test_samples": 31},
    "optimizer": {"lr": 0.05},
    "precision": "fp64",
    "device": "cpu",
    "backend": "gloo",
    "threads": 1,
    "timeout": 60.0,
}


def short_config(**changes: Any) -> dict[str, Any]:
    """A config of a run of a second or two; nested keys as partition__shares=[1, 3]."""
    config = json.loads(json.dumps(_CONFIG))
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


def launch(
    folder: Path,
    size: int,
    *arguments: str,
    target: Callable[..., Any] = run_trainer,
    before: tuple[Any, ...] = (),
    limit: float = 60.0,
    **changes: Any,
) -> list[Outcome]:
    """Runs the trainer on `size` workers, with records below folder/runs.

    target: called with `before`, then the command line (run_trainer's arguments); changes: of the
    config, see short_config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(short_config(**changes)))
    line = ["--config", str(config), "--output", str(folder / "runs"), *arguments]
    inside = Path(tempfile.mkdtemp(prefix="workers-", dir=folder))
    return run_workers(inside, size, target, *before, *line, limit=limit)


def train(folder: Path, size: int, *arguments: str, **options: Any) -> Trained:
    """Runs the trainer to the end and reads its records; arguments and options as in `launch`."""
    values(launch(folder, size, *arguments, **options))
    return read(folder)


def work_per_sample(seconds: float, *argv: str) -> None:
    """The command line on workers whose forward pass takes so much longer per sample.

    Busy times then grow with batch sizes for certain, also where the machine is busy with others.
    """
    import trainer

    forward = trainer.Trainer._forward

    def slower(self: Any, model: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
        time.sleep(seconds * len(images))
        return forward(self, model, images, labels)

    trainer.Trainer._forward = slower
    run_trainer(*argv)


@dataclass(frozen=True)
class Trained:
    """A finished run, read without the project's own reader."""

    path: Path
    epochs: list[dict[str, Any]]
    steps: dict[str, np.ndarray]
    weights: dict[str, torch.Tensor]
    provenance: dict[str, Any]

    def flat(self) -> np.ndarray:
        """All parameters and buffers in one float64 array."""
        return torch.cat([t.double().flatten() for t in self.weights.values()]).numpy()

    def column(self, key: str) -> list[Any]:
        return [epoch[key] for epoch in self.epochs]


def run_path(folder: Path) -> Path:
    """The one run's folder below folder/runs."""
    (config,) = (folder / "runs").rglob("config.yaml")
    return config.parent


def read(folder: Path) -> Trained:
    path = run_path(folder)
    with np.load(path / "steps.npz", allow_pickle=False) as arrays:
        steps = dict(arrays)
    return Trained(
        path,
        records(path),
        steps,
        torch.load(path / "final.pt", weights_only=True),
        json.loads((path / "provenance.json").read_text()),
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "epochs.jsonl").read_text().splitlines()]
