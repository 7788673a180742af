"""Small image folders for tests, and how data sets are opened or refused."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs.errors import UserError
from configs.schema import DataConfig
from data import Data, ImageSet, open_data, prepare


def write_tree(
    root: Path,
    classes: tuple[str, ...] = ("cat", "dog"),
    train: int = 6,
    test: int = 2,
    size: tuple[int, int] = (8, 8),
    test_name: str = "test",
) -> Path:
    """Writes `<root>/{train,test}/<class>/NN.png` with random pixels; size is (width, height)."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), (test_name, test)):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return root


def pixels_of(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All images [N, 3, H, W] and labels [N] of one set, read file by file in sorted order."""
    images, labels = [], []
    for label, name in enumerate(sorted(os.listdir(root / split))):
        for file in sorted((root / split / name).iterdir()):
            images.append(np.asarray(Image.open(file)).transpose(2, 0, 1))
            labels.append(label)
    return np.stack(images), np.array(labels)


def write_archive(archive: Path, tree: Path, inside: str = "") -> Path:
    """Packs a tree, under the folder `inside` if one is given."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(tree.iterdir()):
            tar.add(path, os.path.join(inside, path.name))
    return archive


def config_for(root: Path, tmp_path: Path, **changes: object) -> DataConfig:
    """The `data` section for an image folder, cached in tmp_path."""
    settings = {"name": "image_folder", "root": str(root), "cache": str(tmp_path / "cache")}
    return dataclasses.replace(DataConfig(), **{**settings, **changes})


def opened(config: DataConfig, seed: int = 0) -> Data:
    return open_data(config, seed, prepare(config))


def refusal(config: DataConfig, seed: int = 0) -> str:
    """The message with which `config` is refused: one line, and nothing half-made is left."""
    with pytest.raises(UserError) as caught:
        opened(config, seed)
    message = str(caught.value)
    assert message and "\n" not in message
    if os.path.isdir(config.cache):
        assert [name for name in os.listdir(config.cache) if name.endswith(".part")] == []
    return message


def whole(images: ImageSet) -> np.ndarray:
    return images.read(np.arange(len(images)))
