"""Memory and open files over 200 short epochs with a rebalance each: they must not grow.

    python benchmarks/soak.py --check --out results/reliability/soak.json

Two gloo workers, each with a loader process that is kept over all epochs, train LeNet on made-up
images; worker 1 takes three times its own busy time in every other five epochs, the first five
among them, so that shares keep moving. Saved after each epoch, of which two checkpoints are kept.

After the tenth epoch nothing may be more than 2 % above what it was then, for each worker. Two
libraries remember on purpose, up to a limit that takes longer to reach: oneDNN its kernels for each
batch size, PyTorch the last 2,000 collective operations (its flight recorder). They are told to
remember nothing and 100.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import arguments, finish, launch, table
from reader import read_run

WORKERS, EPOCHS, QUICK_EPOCHS = 2, 200, 30
SETTLED = 10  # epochs
TARGET = 1.02
LIMIT = 1800.0  # seconds
REMEMBER_LITTLE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "TORCH_FR_BUFFER_SIZE": "100"}
QUANTITIES = ("bytes", "loader_bytes", "files", "loader_files")


def main() -> int:
    options = arguments(__doc__.partition("\n")[0])
    os.environ |= REMEMBER_LITTLE
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(_config(epochs, folder / "runs")))
        launch(
            WORKERS, "benchmarks/soak_worker.py", str(folder), "--config", str(config), limit=LIMIT
        )
        held = [_lines(folder / f"rank-{rank}.jsonl") for rank in range(WORKERS)]
        (records,) = (folder / "runs").rglob("epochs.jsonl")
        run = read_run(records.parent)
    rows, misses = judge(held)
    splits = [tuple(epoch["batch_sizes"]) for epoch in run.epochs]
    moved = sum(a != b for a, b in zip(splits, splits[1:]))
    table(rows)
    print(f"{epochs} epochs; batch sizes changed {moved} times")
    results = {"epochs": epochs, "changes": moved, "rows": rows, "held": held}
    return finish("soak", results, misses, options)


def judge(
    held: Sequence[Sequence[Mapping[str, int]]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """By worker and quantity: after the tenth epoch, the most later on, and at the end."""
    rows, misses = [], []
    for rank, lines in enumerate(held):
        for name in QUANTITIES:
            values = np.array([line[name] for line in lines])
            settled, later = int(values[SETTLED - 1]), values[SETTLED:]
            growth = float(later.max() / settled)
            rows.append(
                {"worker": rank, "what": name, "after the tenth": settled,
                 "most later": int(later.max()), "last": int(later[-1]), "growth": growth}
            )  # fmt: skip
            if growth > TARGET:
                misses.append(f"worker {rank}: {name} grew to {growth:.3f} of what it was")
    return rows, misses


def _lines(file: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _config(epochs: int, output: Path) -> dict[str, Any]:
    slow = [
        {"ranks": [1], "kind": "slowdown", "factor": 3.0, "first_epoch": e, "last_epoch": e + 4}
        for e in range(0, epochs, 10)
    ]
    return {
        "name": "soak", "algorithm": "dp-sgd", "epochs": epochs, "batch_size": 64,
        "model": {"name": "lenet"}, "optimizer": {"lr": 0.01}, "stragglers": slow,
        "data": {
            "name": "synthetic", "train_samples": 512, "test_samples": 128, "placement": "loader",
            "loader_workers": 1,
        },
        "device": "cpu", "threads": 1, "timeout": 120.0, "output": str(output),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
