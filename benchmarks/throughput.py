"""Training speed by precision, memory format and input pipeline.

    python benchmarks/throughput.py --check --out results/throughput.json
    python benchmarks/throughput.py --model lenet --data data/cifar10-jpeg.tar.gz

Whole runs of trainer.py on two workers (gloo, one thread each), B = 256, equal shares, no delay; on
made-up images, or on those of a folder or archive that data.name=image_folder takes. Beside them,
for small models, the loop that anyone would write: the same images as PIL images, torchvision's
transforms, a DataLoader with 0, 1 or 2 processes per worker, DistributedDataParallel.

Speeds are of the last epoch's steps after warm-up, the epoch's end left out; only where pipelines
are compared, whole epochs are: the median of all but the first. Evaluation is never counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from benchmarks.common import arguments, finish, launch, table
from cluster import join
from configs.errors import UserError
from configs.schema import from_mapping, resolve
from data.images import Data, ImageSet
from data.sources import open_data, prepare
from reader import Run, read_run
from workload import build_module, build_optimizer

WORKERS, BATCH_SIZE = 2, 256
LIMIT = 600.0  # seconds for one run
PLAIN, CHANNELS_LAST = ("fp32", "contiguous"), ("fp32", "channels-last")
HALF, BOTH = ("bf16", "contiguous"), ("bf16", "channels-last")
PHASES = ("data", "forward", "backward", "wait", "step")

# Least ratios of speeds: precision and format against fp32 and contiguous, by model; in-memory
# pipeline against the fastest DataLoader, by model.
FORMAT_TARGETS = {"vgg16": 1.5, "resnet50": 2.0}
PIPELINE_TARGETS = {"lenet": 1.3}


@dataclass(frozen=True)
class Work:
    """What is run for one model; loaders: processes per worker of each plain loop."""

    train_samples: int
    epochs: int
    formats: tuple[tuple[str, str], ...]
    loaders: tuple[int, ...] = ()
    test_samples: int = 256


ALL = (PLAIN, CHANNELS_LAST, HALF, BOTH)
WORKS = {
    "lenet": Work(8192, 4, ALL, loaders=(0, 1, 2)),
    "resnet20": Work(2048, 2, ALL, loaders=(0, 2)),
    "vgg16": Work(2048, 1, ALL),
    "resnet50": Work(1024, 1, ALL),
}
QUICK_WORKS = {
    "lenet": Work(1024, 2, (PLAIN, BOTH), loaders=(0,)),
    "resnet20": Work(512, 1, (PLAIN, BOTH)),
}


def main() -> int:
    options = _options()
    works = QUICK_WORKS if options.quick else WORKS
    if options.model is not None:
        works = {options.model: works[options.model]}
    models, pipelines, misses = [], [], []
    for model, work in works.items():
        runs = [_train(model, work, *kind, options.data) for kind in work.formats]
        models += _compared(runs)
        misses += _format_misses(model, models)
        if work.loaders:
            rows = [_pipeline_row(runs[0]), *_plain_loops(model, work, options.data)]
            pipelines += _against_first(rows)
            misses += _pipeline_misses(model, pipelines)
    print(f"{WORKERS} workers, B = {BATCH_SIZE}; samples/s of both; ms per step of worker 0")
    table([_flat(row) for row in models])
    print("\nwhole epochs: pixels in memory against a DataLoader of torchvision's transforms")
    table(pipelines)
    data = options.data or "synthetic"
    return finish(
        "throughput", {"data": data, "models": models, "pipelines": pipelines}, misses, options
    )


def _options() -> argparse.Namespace:
    """The options of every benchmark; `data`: a path or None; `model`: the only one, or None."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--data", help="a folder or archive of images instead of made-up ones")
    own.add_argument("--model", choices=list(WORKS), help="this one alone")
    options = arguments(__doc__.partition("\n")[0], own)
    if options.quick and options.model not in (None, *QUICK_WORKS):
        own.error(f"--quick goes with {' and '.join(QUICK_WORKS)}, not with {options.model}")
    return options


# --- runs of the trainer ----------------------------------------------------------------------


def _train(
    model: str, work: Work, precision: str, memory_format: str, data: str | None
) -> dict[str, Any]:
    """One run's speed and the parts of its steps; its records are deleted."""
    mapping = {
        **_mapping(model, work.train_samples, work.test_samples, data),
        "epochs": work.epochs, "precision": precision, "memory_format": memory_format,
        "schedule": {"kind": "constant"},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(mapping))
        launch(WORKERS, "trainer.py", "--config", str(config), "--output", folder, limit=LIMIT)
        run = read_run(next(Path(folder).rglob("epochs.jsonl")).parent)
    names = {"model": model, "precision": precision, "memory_format": memory_format}
    return names | _speed(run)


def _speed(run: Run) -> dict[str, Any]:
    """Steps are as the records summarise them: those of the epoch after warm-up."""
    last = run.epochs[-1]
    seconds = last["busy"]["mean"][0] + last["wait"]["mean"][0]
    epochs = [epoch["epoch_seconds"] for epoch in run.epochs]
    return {
        "samples_per_second": sum(last["batch_sizes"]) / seconds,
        "seconds_per_step": seconds,
        "phases": {name: last["phases"][name][0] for name in PHASES},
        "epoch_seconds": _settled(epochs),
        "train_samples": last["train_samples"],
    }


def _settled(epoch_seconds: Sequence[float]) -> float:
    """The median of all epochs but the first, where there are others."""
    return statistics.median(epoch_seconds[1:] or epoch_seconds)


def _mapping(model: str, train_samples: int, test_samples: int, data: str | None) -> dict[str, Any]:
    source: dict[str, Any] = {"name": "synthetic", "train_samples": train_samples,
                              "test_samples": test_samples}  # fmt: skip
    if data is not None:
        source = {"name": "image_folder", "root": data, "subset": train_samples,
                  "test_subset": test_samples}  # fmt: skip
    return {
        "name": "throughput", "algorithm": "sync-sgd", "batch_size": BATCH_SIZE,
        "model": {"name": model}, "data": source, "optimizer": {"lr": 0.01},
        "device": "cpu", "backend": "gloo", "threads": 1,
    }  # fmt: skip


def _compared(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first = runs[0]["samples_per_second"]
    return [run | {"speed_up": run["samples_per_second"] / first} for run in runs]


def _format_misses(model: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    target = FORMAT_TARGETS.get(model)
    return [
        f"{model}: {run['precision']}, {run['memory_format']} is {run['speed_up']:.2f} times as "
        f"fast as fp32, contiguous, not {target}"
        for run in runs
        if target is not None
        and (run["model"], run["precision"], run["memory_format"]) == (model, *BOTH)
        and run["speed_up"] < target
    ]


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table, with times in milliseconds."""
    return {
        "model": run["model"],
        "precision": run["precision"],
        "format": run["memory_format"],
        "samples/s": run["samples_per_second"],
        "speed-up": run["speed_up"],
        "whole step": 1000 * run["seconds_per_step"],
        **{name: 1000 * seconds for name, seconds in run["phases"].items()},
    }


# --- the plain loop ---------------------------------------------------------------------------


def _plain_loops(model: str, work: Work, data: str | None) -> list[dict[str, Any]]:
    rows = []
    for processes in work.loaders:
        numbers = map(str, (work.train_samples, work.epochs, processes))
        printed = launch(
            WORKERS, "benchmarks/throughput.py", model, *numbers, *filter(None, [data]), limit=LIMIT
        )
        seconds = _settled(json.loads(printed.splitlines()[-1]))
        pipeline = f"DataLoader, {processes} processes each"
        rows.append({"model": model, "pipeline": pipeline, "epoch_seconds": seconds,
                     "samples_per_second": work.train_samples / seconds})  # fmt: skip
    return rows


def _pipeline_row(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": run["model"],
        "pipeline": "in memory",
        "epoch_seconds": run["epoch_seconds"],
        "samples_per_second": run["train_samples"] / run["epoch_seconds"],
    }


def _against_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first = rows[0]["epoch_seconds"]
    return [row | {"times_in_memory": row["epoch_seconds"] / first} for row in rows]


def _pipeline_misses(model: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    target = PIPELINE_TARGETS.get(model)
    others = [row["times_in_memory"] for row in rows if row["model"] == model][1:]
    if target is None or min(others) >= target:
        return []
    ratio = f"{min(others):.2f} times as long as one from memory, not {target}"
    return [f"{model}: an epoch from a DataLoader takes {ratio}"]


class Pictures(Dataset):
    """An image set as PIL images, transformed one at a time."""

    def __init__(self, images: ImageSet, data: Data) -> None:
        self._pixels = images.read(np.arange(len(images))).transpose(0, 2, 3, 1).copy()
        self._labels = images.labels.tolist()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(data.image_size, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(data.mean, data.std),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


def measure(
    model: str, train_samples: int, epochs: int, processes: int, data: str | None
) -> list[float]:
    """Seconds of each epoch of the plain loop, until all workers are done with it."""
    config = resolve(from_mapping(_mapping(model, train_samples, BATCH_SIZE, data)))
    with join(config.backend, config.device, config.threads, LIMIT) as workers:
        prepared = workers.once_per_node(partial(prepare, config.data))
        opened = open_data(config.data, config.seed, prepared)
        pictures = Pictures(opened.train, opened)
        sampler = DistributedSampler(pictures, workers.size, workers.rank)
        loader = DataLoader(
            pictures,
            BATCH_SIZE // workers.size,
            sampler=sampler,
            num_workers=processes,
            persistent_workers=processes > 0,
        )
        module = build_module(config, len(opened.classes), opened.image_size)
        network = DistributedDataParallel(module)
        optimizer, seconds = build_optimizer(config, network), []
        for epoch in range(epochs):
            start = time.perf_counter()
            sampler.set_epoch(epoch)
            for images, labels in loader:
                cross_entropy(network(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            workers.gather(np.zeros(1))
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    if "RANK" in os.environ:
        name, *numbers = sys.argv[1:5]
        where = sys.argv[5] if len(sys.argv) > 5 else None
        print(json.dumps(measure(name, *map(int, numbers), where)))
    else:
        try:
            sys.exit(main())
        except UserError as error:
            sys.exit(str(error))
