"""Where images come from: `synthetic`, `cifar10` and `image_folder`.

`prepare` does what must happen once per node; `open_data` is cheap and called by every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from configs.errors import UserError
from data.cache import read_meta
from data.cifar10 import prepare_cifar10
from data.folder import prepare_folder
from data.images import CachedImages, Data, FileImages, ImageSet, Subset
from data.synthetic import synthetic_data

CIFAR10_SAMPLES, CIFAR10_TEST_SAMPLES = 50_000, 10_000
CIFAR10_CLASSES, CIFAR10_IMAGE_SIZE = 10, 32
STREAMS = {"train": 0x737562, "test": 0x737563}  # keep these draws apart from others of the seed


def prepare(config: Any) -> str:
    """Downloads, unpacks and decodes what has not been yet: once per node, while others wait.

    config: the `data` section. Returns what `open_data` needs on this node: a folder of the cache,
    or "" where there is nothing to prepare. Raises UserError.
    """
    if config.name == "synthetic":
        return ""
    if config.name == "cifar10":
        return prepare_cifar10(config)
    if config.name == "image_folder":
        return prepare_folder(config)
    raise UserError(
        f"data.name: unknown data set {config.name!r}; there are cifar10, image_folder, synthetic"
    )


def open_data(config: Any, seed: int, prepared: str) -> Data:
    """The data that `prepare` left on this node; `seed` draws subsets.

    Raises UserError if a subset is larger than its set or a deviation is not positive.
    """
    if config.name == "synthetic":
        data = synthetic_data(config.train_samples, config.test_samples)
    else:
        data = _open_folder(prepared)
    _check_image_size(config, data.image_size)
    std = tuple(config.std or data.std)
    if min(std) <= 0:
        raise UserError(f"data.std: {std} must be positive; a constant channel needs it set")
    return Data(
        train=_subset(data.train, config.subset, seed, "train", "data.subset"),
        test=_subset(data.test, config.test_subset, seed, "test", "data.test_subset"),
        classes=data.classes,
        mean=tuple(config.mean or data.mean),
        std=std,
        image_size=data.image_size,
        files=data.files,
    )


@dataclass(frozen=True)
class Outline:
    """What a dry run needs to know of the data."""

    train_samples: int
    classes: int
    image_size: int


def outline(config: Any, seed: int, once_per_node: Callable[[Callable[[], str]], str]) -> Outline:
    """The data's numbers: CIFAR-10's without having it, others' by preparing and opening them.

    once_per_node: runs a function on one worker of the node and gives its result to all.
    """
    if config.name == "cifar10":
        _check_image_size(config, CIFAR10_IMAGE_SIZE)
        total = _subset_size(CIFAR10_SAMPLES, config.subset, "data.subset")
        _subset_size(CIFAR10_TEST_SAMPLES, config.test_subset, "data.test_subset")
        return Outline(total, CIFAR10_CLASSES, CIFAR10_IMAGE_SIZE)
    data = open_data(config, seed, once_per_node(partial(prepare, config)))
    return Outline(len(data.train), len(data.classes), data.image_size)


def _subset(images: ImageSet, count: int | None, seed: int, split: str, key: str) -> ImageSet:
    """The first `count` samples of a permutation: a smaller subset is part of a larger one."""
    if count is None:
        return images
    kept = _subset_size(len(images), count, key)
    generator = np.random.default_rng(np.random.SeedSequence((STREAMS[split], seed)))
    return Subset(images, generator.permutation(len(images))[:kept])


def _subset_size(size: int, count: int | None, key: str) -> int:
    """The number of samples that are used of a set of `size`. Raises UserError for too many."""
    if count is not None and not 1 <= count <= size:
        raise UserError(f"{key}: {count} is not within 1..{size}, the size of the set")
    return size if count is None else count


def _check_image_size(config: Any, own: int) -> None:
    if config.image_size not in (None, own):
        raise UserError(
            f"data.image_size: {config.name} has images of {own} pixels a side; "
            "only image_folder can bring them to another size"
        )


def _open_folder(folder: str) -> Data:
    meta = read_meta(folder)
    sets: dict[str, ImageSet] = {}
    for split, count, shorter in (
        ("train", meta.train_samples, meta.train_shorter),
        ("test", meta.test_samples, meta.test_shorter),
    ):
        if meta.decoded:
            sets[split] = CachedImages(folder, split, count, meta.image_size)
        else:
            sets[split] = FileImages(folder, split, count, meta.image_size, meta.root, shorter)
    return Data(
        train=sets["train"],
        test=sets["test"],
        classes=tuple(meta.classes),
        mean=tuple(meta.mean),
        std=tuple(meta.std),
        image_size=meta.image_size,
        files=meta.files,
    )
