"""Sets of labelled images: in memory, mapped from the cache, or decoded at access.

Sets that lie in files pickle as a few paths and open their files at first use, so that loader
workers can be started by any method.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import UserError
from data.decoding import decode, decode_part


class ImageSet(ABC):
    """N labelled square images of `image_size` pixels a side.

    `in_memory`: pixels are in an array or a mapped file, so that reading is a copy, not a decode.
    """

    image_size: int
    in_memory: bool

    @property
    @abstractmethod
    def labels(self) -> np.ndarray:
        """Class numbers, int64 [N]."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: np.ndarray) -> np.ndarray:
        """Pixels of the given samples (int64 [k]): a new uint8 array [k, 3, H, W].

        Raises UserError if a file cannot be read.
        """

    def read_parts(self, indices: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """As `read`, but of each sample's file a random part by its seed (int64 [k]).

        Only for sets that are not in memory.
        """
        raise TypeError("parts are cut out of files, and these images are in memory")

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels, decoded."""
        return len(self) * 3 * self.image_size**2


@dataclass(frozen=True)
class Data:
    """A training and a test set.

    `mean` and `std` are per channel, in units of 0..1; `files` is a hash of the names and sizes of
    the files behind it, or "".
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    files: str = ""


class ArrayImages(ImageSet):
    """Images in this process's memory: uint8 [N, 3, H, W] and int64 [N]."""

    in_memory = True

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self._images = images
        self._labels = labels
        self.image_size = images.shape[-1]

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        return self._labels

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._images[indices]


class _FolderImages(ImageSet):
    """Arrays `<folder>/<split>-<kind>.npy`, each mapped at first use and never pickled."""

    def __init__(self, folder: str, split: str, count: int, image_size: int) -> None:
        self._folder = folder
        self._split = split
        self._count = count
        self._arrays: dict[str, np.ndarray] = {}
        self.image_size = image_size

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}

    @property
    def labels(self) -> np.ndarray:
        return self._array("labels")

    def _array(self, kind: str) -> np.ndarray:
        if kind not in self._arrays:
            path = os.path.join(self._folder, f"{self._split}-{kind}.npy")
            # A plain view of the map: indexing np.memmap itself is slower.
            array = np.asarray(self._mapped(path))
            if array.shape[:1] != (self._count,):
                raise UserError(f"data cache: {path} is damaged: delete {self._folder}")
            self._arrays[kind] = array
        return self._arrays[kind]

    def _mapped(self, path: str) -> np.ndarray:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (EOFError, OSError, TypeError, ValueError) as error:
            raise UserError(f"data cache: {path} cannot be read: delete {self._folder}") from error


class CachedImages(_FolderImages):
    """Decoded images, mapped from the cache: processes of a node share the pages."""

    in_memory = True

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._array("images")[indices]


class FileImages(_FolderImages):
    """Image files below `root`, decoded at access.

    Their paths are an array of fixed-width bytes in the cache: a list of a million strings would
    be copied page by page into every loader worker as reference counts change.
    `shorter`: as in `decode`; None makes another size than `image_size` an error.
    """

    in_memory = False

    def __init__(
        self, folder: str, split: str, count: int, image_size: int, root: str, shorter: int | None
    ) -> None:
        super().__init__(folder, split, count, image_size)
        self._root = root
        self._shorter = shorter

    def path(self, index: int) -> str:
        """The file of one sample."""
        return os.path.join(self._root, os.fsdecode(self._array("paths")[index]))

    def read(self, indices: np.ndarray) -> np.ndarray:
        images = self._empty(len(indices))
        for row, index in enumerate(indices):
            images[row] = decode(self.path(index), self.image_size, self._shorter)
        return images

    def read_parts(self, indices: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        images = self._empty(len(indices))
        for row, (index, seed) in enumerate(zip(indices, seeds.tolist())):
            images[row] = decode_part(self.path(index), self.image_size, seed)
        return images

    def _empty(self, count: int) -> np.ndarray:
        return np.empty((count, 3, self.image_size, self.image_size), np.uint8)


class Subset(ImageSet):
    """The samples of another set at the given positions (int64), in that order."""

    def __init__(self, base: ImageSet, positions: np.ndarray) -> None:
        self._base = base
        self.positions = positions
        self.image_size = base.image_size
        self.in_memory = base.in_memory

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def labels(self) -> np.ndarray:
        return self._base.labels[self.positions]

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._base.read(self.positions[indices])

    def read_parts(self, indices: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return self._base.read_parts(self.positions[indices], seeds)
