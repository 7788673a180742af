"""Reading, cropping and normalising image files: images a second, against a plain DataLoader.

    python benchmarks/decoding.py --check --out results/decoding.json
    python benchmarks/decoding.py --data /path/to/imagenet    # train/<class>/ and val/<class>/

Both give batches of 64 at 224 pixels, cut out of the files at random, flipped and normalised; by
the training's own pipeline (data.crop=resized, whose draws are of (seed, epoch, sample)), and by
what anyone would write: torchvision's ImageFolder, RandomResizedCrop, RandomHorizontalFlip,
ToTensor and Normalize in a DataLoader. Each with 0, 1 and 2 loader processes, in turns; nothing is
trained. The made-up files are JPEG of 375 to 500 pixels a side, smooth: photographs take longer.
Ratios are medians over rounds of the ratio within a round; the first epoch of each is left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.common import arguments, finish, table
from configs.errors import UserError
from configs.schema import DataConfig
from data import Data, make_pipeline, open_data, prepare

BATCH, SIZE = 64, 224
PROCESSES = (0, 1, 2)
IMAGES, QUICK_IMAGES = 512, 96
ROUNDS, QUICK_ROUNDS = 5, 1
# The pipeline is to be as fast as the plain loop, up to what measuring leaves uncertain.
TARGET = 0.95

Epoch = Callable[[int], Iterable[Any]]


def main() -> int:
    options = _options()
    images, rounds = (QUICK_IMAGES, QUICK_ROUNDS) if options.quick else (IMAGES, ROUNDS)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = options.data or _made_up(Path(folder) / "tree", images)
        images = min(images, _count(root, folder))
        rows = [_compared(root, folder, images, rounds, count) for count in PROCESSES]
    print(f"images/s of {images} files in batches of {BATCH}, {SIZE} pixels")
    table([{key: value for key, value in row.items() if key != "ratios"} for row in rows])
    results = {"data": options.data or "made up", "images": images, "rounds": rounds, "rows": rows}
    return finish("decoding", results, _misses(rows), options)


def _options() -> argparse.Namespace:
    """The options of every benchmark, and `data`: a path or None."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--data")
    chosen, sys.argv[1:] = own.parse_known_args()
    return argparse.Namespace(**vars(arguments(__doc__.partition("\n")[0])), **vars(chosen))


def _made_up(tree: Path, images: int) -> str:
    script = str(ROOT / "scripts" / "make_image_tree.py")
    counts = ["--classes", "8", "--train", str(images // 8), "--sides", "375", "500"]
    subprocess.run([sys.executable, script, str(tree), *counts], check=True)
    return str(tree)


def _config(root: str, folder: str, **more: Any) -> DataConfig:
    return DataConfig(
        name="image_folder", root=root, cache=f"{folder}/cache", image_size=SIZE, crop="resized",
        **more,
    )  # fmt: skip


def _count(root: str, folder: str) -> int:
    """The training images of a folder; torchvision's loop reads no archive."""
    if not Path(root).is_dir():
        raise UserError(f"--data: {root} is no folder: give one that holds train/<class>/")
    config = _config(root, folder)
    return len(open_data(config, 0, prepare(config)).train)


def _compared(root: str, folder: str, images: int, rounds: int, processes: int) -> dict[str, Any]:
    """Both loops in turns, with so many loader processes each."""
    config = _config(root, folder, subset=images, loader_workers=processes)
    data = open_data(config, 0, prepare(config))
    own, plain = _own(config, data), _plain(root, data, processes)
    seconds = [(_seconds(own, epoch), _seconds(plain, epoch)) for epoch in range(rounds + 1)][1:]
    ratios = [theirs / ours for ours, theirs in seconds]
    ours, theirs = (images / statistics.median(column) for column in zip(*seconds))
    return {
        "processes": processes,
        "own (images/s)": ours,
        "plain (images/s)": theirs,
        "own / plain": statistics.median(ratios),
        "ratios": ratios,
    }


def _own(config: DataConfig, data: Data) -> Epoch:
    sampler = np.array_split(np.arange(len(data.train)), -(-len(data.train) // BATCH))
    cpu, layout = torch.device("cpu"), torch.contiguous_format
    pipeline = make_pipeline(data.train, sampler, config, data, cpu, torch.float32, layout, 0, True)
    return pipeline.batches


def _plain(root: str, data: Data, processes: int) -> Epoch:
    steps = [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(data.mean, data.std),
    ]
    files = datasets.ImageFolder(f"{root}/train", transforms.Compose(steps))
    # The files of the other loop's subset, in its order.
    chosen = torch.utils.data.Subset(files, data.train.positions.tolist())
    loader = DataLoader(chosen, BATCH, num_workers=processes, persistent_workers=processes > 0)
    return lambda epoch: loader


def _seconds(batches: Epoch, epoch: int) -> float:
    start = time.perf_counter()
    for _ in batches(epoch):
        pass
    return time.perf_counter() - start


def _misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"with {row['processes']} loader processes: {row['own / plain']:.2f} times as fast as a "
        f"plain DataLoader, not {TARGET}"
        for row in rows
        if row["own / plain"] < TARGET
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
