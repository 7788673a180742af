"""Image folders: `<root>/train/<class>/...` and `<root>/test/<class>/...` (or `val`).

`root` may also be a tar archive of such a tree. `prepare_folder` makes a folder of the cache: with
all pixels if the set is small enough, or else with the list of files to be read at access.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from configs.errors import UserError
from data.archive import SUFFIXES, unpack
from data.cache import (
    Fingerprint,
    Meta,
    new_folder,
    new_image_file,
    require_space,
    save_array,
    write_meta,
)
from data.decoding import histogram, image_side, in_threads, mean_and_std
from data.images import FileImages

MEASURED_IMAGES = 10_000  # mean and deviation of a large set are those of so many of its images
SPLITS = ("train", "test")
DEEPEST = 20  # folders below a class's


@dataclass(frozen=True)
class Split:
    """The files of a training or test set, sorted by class and path."""

    paths: list[bytes]  # relative to the root
    labels: np.ndarray  # int64 [N]


def prepare_folder(config: Any) -> str:
    """Unpacks, lists, and decodes or measures an image folder where that has not been done.

    config: the `data` section. Returns the folder of the cache. Raises UserError in one line for
    whatever is wrong with the tree or its images.
    """
    root = _tree(config.root, config.cache)
    fingerprint, files = Fingerprint(), Fingerprint()
    classes, splits = _scan(root, fingerprint, files)
    size = config.image_size or image_side(_first_file(root, splits))
    nbytes = sum(len(split.paths) for split in splits.values()) * 3 * size**2
    # Random parts are cut out of the files themselves.
    decoded = nbytes <= config.memory_limit_gib * 2**30 and config.crop != "resized"
    fingerprint.add(root, config.image_size, config.test_resize, decoded)
    target = fingerprint.folder(config.cache, config.name)
    if os.path.isdir(target):
        return target
    if decoded:
        require_space(target, nbytes, f"the decoded cache of {root}")
    with new_folder(target) as folder:
        shorter = {"train": config.image_size, "test": config.test_resize or config.image_size}
        sets = _save_lists(folder, splits, size, root, shorter)
        counts = _decode_all(folder, sets) if decoded else _measure(sets["train"])
        mean, std = mean_and_std(counts)
        meta = Meta(
            classes=classes,
            mean=mean,
            std=std,
            image_size=size,
            train_samples=len(sets["train"]),
            test_samples=len(sets["test"]),
            files=files.text,
            decoded=decoded,
            root=root,
            train_shorter=shorter["train"],
            test_shorter=shorter["test"],
        )
        write_meta(folder, meta)
    return target


def _save_lists(
    folder: str, splits: dict[str, Split], size: int, root: str, shorter: dict[str, int | None]
) -> dict[str, FileImages]:
    sets = {}
    for name, split in splits.items():
        save_array(folder, name, "paths", np.array(split.paths))
        save_array(folder, name, "labels", split.labels)
        sets[name] = FileImages(folder, name, len(split.paths), size, root, shorter[name])
    return sets


def _decode_all(folder: str, sets: dict[str, FileImages]) -> np.ndarray:
    """Writes {train,test}-images.npy; returns the histogram of the training images."""
    counts = {}
    for name, files in sets.items():
        images = new_image_file(folder, name, len(files), files.image_size)

        def work(start: int, stop: int, files=files, images=images) -> np.ndarray:
            images[start:stop] = files.read(np.arange(start, stop))
            return histogram(images[start:stop])

        counts[name] = sum(in_threads(work, len(files), f"decoding {name}"))
    return counts["train"]


def _measure(files: FileImages) -> np.ndarray:
    """The histogram of some training images; the same ones for all runs of an experiment."""
    count = min(MEASURED_IMAGES, len(files))
    sample = np.random.default_rng(0).permutation(len(files))[:count]

    def work(start: int, stop: int) -> np.ndarray:
        return histogram(files.read(sample[start:stop]))

    return sum(in_threads(work, count, "measuring mean and std"))


def _tree(root: str, cache: str) -> str:
    """The absolute path of the folder that holds train/, unpacked if need be."""
    path = os.path.abspath(os.path.expanduser(root))
    if not os.path.exists(path):
        raise UserError(f"data.root: {path} does not exist")
    if os.path.isfile(path):
        if not path.lower().endswith(SUFFIXES):
            kinds = ", ".join(SUFFIXES)
            raise UserError(f"data.root: {path} is neither a folder nor an archive ({kinds})")
        path = unpack(path, cache)
        inside = [entry.path for entry in _entries(path) if entry.is_dir()]
        if len(inside) == 1 and os.path.basename(inside[0]) != "train":
            path = inside[0]
    return path


def _scan(
    root: str, fingerprint: Fingerprint, files: Fingerprint
) -> tuple[list[str], dict[str, Split]]:
    """Lists both sets.

    Adds each file's path, size and time of change to the fingerprint; to `files` path and size
    alone, which a copy of the tree has in common.
    """
    folders = {"train": os.path.join(root, "train"), "test": os.path.join(root, "test")}
    if not os.path.isdir(folders["test"]) and os.path.isdir(os.path.join(root, "val")):
        folders["test"] = os.path.join(root, "val")
    for folder in folders.values():
        if not os.path.isdir(folder):
            raise UserError(
                f"data.root: there is no folder {folder}: an image folder holds "
                "train/<class>/ and test/<class>/ (or val/<class>/)"
            )
    classes = {name: _class_names(folder) for name, folder in folders.items()}
    for one, other in (SPLITS, SPLITS[::-1]):
        missing = sorted(set(classes[one]) - set(classes[other]))
        if missing:
            raise UserError(
                f"class {missing[0]} is in {folders[one]} but not in {folders[other]}: "
                "both sets need the same classes"
            )
    splits = {
        name: _list_split(root, folder, classes["train"], fingerprint, files)
        for name, folder in folders.items()
    }
    return classes["train"], splits


def _class_names(folder: str) -> list[str]:
    names = sorted(entry.name for entry in _entries(folder) if entry.is_dir())
    if not names:
        raise UserError(f"{folder} has no class folders")
    return names


def _list_split(
    root: str, folder: str, classes: list[str], fingerprint: Fingerprint, files: Fingerprint
) -> Split:
    paths: list[bytes] = []
    labels = []
    for label, name in enumerate(classes):
        class_folder = os.path.join(folder, name)
        before = len(paths)
        for entry in _image_files(class_folder):
            path = os.fsencode(os.path.relpath(entry.path, root))
            status = entry.stat()
            fingerprint.add(path, status.st_size, status.st_mtime_ns)
            files.add(path, status.st_size)
            paths.append(path)
        if len(paths) == before:
            raise UserError(f"{class_folder} has no images ({', '.join(IMG_EXTENSIONS)})")
        labels += [label] * (len(paths) - before)
    return Split(paths, np.array(labels, dtype=np.int64))


def _image_files(folder: str, depth: int = 0) -> Iterator[os.DirEntry[str]]:
    """All images below a folder, in sorted order. Raises UserError where it does not end."""
    if depth > DEEPEST:
        raise UserError(f"{folder}: more than {DEEPEST} folders deep: is one linked into itself?")
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _image_files(entry.path, depth + 1)
        elif entry.name.lower().endswith(IMG_EXTENSIONS) and entry.is_file():
            yield entry


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, but hidden files such as the ._* that some systems put in archives."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


def _first_file(root: str, splits: dict[str, Split]) -> str:
    return os.path.join(root, os.fsdecode(splits["train"].paths[0]))
