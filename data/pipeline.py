"""From this worker's sample numbers to batches on its device.

There are two ways, with results equal to the bit: `MemoryPipeline` takes pixels from memory (on a
GPU: from the GPU's), `LoaderPipeline` reads them ahead in other processes. Both augment and
normalise whole batches on the device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from configs.errors import UserError
from data.augment import augment, augmentation_table, crop_seeds, normalise
from data.images import Data, ImageSet

# What reaches all processes of a job when it is asked to end.
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
LOAD_CHUNK = 4096  # images that are copied to the device at a time


@dataclass(frozen=True)
class Transform:
    """What turns uint8 pixels into a model's input.

    padding, flip: as in `augmentation_table`; 0 and False leave images as they are. parts: pixels
    are of a random part of each file, drawn anew in each epoch.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    device: torch.device
    dtype: torch.dtype
    memory_format: torch.memory_format
    seed: int
    padding: int
    flip: bool
    parts: bool = False

    @property
    def augments(self) -> bool:
        return self.padding > 0 or self.flip


class Pipeline(ABC):
    """Batches of one image set.

    sampler: each `iter(sampler)` gives one epoch's index arrays, int64 [b], one per step; b may
    change from step to step and may be 0. Set the sampler's epoch before calling `batches`.
    """

    def __init__(
        self, images: ImageSet, sampler: Iterable[np.ndarray], transform: Transform
    ) -> None:
        self._images = images
        self._sampler = sampler
        self._transform = transform
        self._labels = torch.tensor(images.labels, device=transform.device)
        self._mean = self._channel_values(transform.mean)
        self._std = self._channel_values(transform.std)

    def batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (images, labels): dtype [b, 3, H, W] and int64 [b], on the device.

        `epoch` selects the augmentation. Raises UserError if an image cannot be read.
        """
        transform = self._transform
        table = None
        if transform.augments:
            table = augmentation_table(
                len(self._images), transform.seed, epoch, transform.padding, transform.flip
            ).to(transform.device)
        for indices, images in self._pixels(epoch):
            if table is not None:
                images = augment(images, table[indices], transform.padding)
            inputs = normalise(
                images, self._mean, self._std, transform.dtype, transform.memory_format
            )
            yield inputs, self._labels[indices]

    def close(self) -> None:
        """Ends what the pipeline has started; there are no batches afterwards."""

    @abstractmethod
    def _pixels(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """An epoch's (indices, uint8 images), both on the device."""

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._transform.device, non_blocking=True)

    def _channel_values(self, values: tuple[float, float, float]) -> torch.Tensor:
        """As a tensor that `normalise` can use without another copy to the device."""
        dtype = torch.float64 if self._transform.dtype == torch.float64 else torch.float32
        return torch.tensor(values, dtype=dtype, device=self._transform.device)


class MemoryPipeline(Pipeline):
    """Pixels from memory: a GPU holds all of them; on a CPU they stay in the mapped cache."""

    def __init__(
        self, images: ImageSet, sampler: Iterable[np.ndarray], transform: Transform
    ) -> None:
        super().__init__(images, sampler, transform)
        self._resident: torch.Tensor | None = None
        if transform.device.type != "cpu" or not images.in_memory:
            self._resident = self._load()

    def _load(self) -> torch.Tensor:
        count, size = len(self._images), self._images.image_size
        resident = torch.empty(
            (count, 3, size, size), dtype=torch.uint8, device=self._transform.device
        )
        for start in range(0, count, LOAD_CHUNK):
            chunk = np.arange(start, min(start + LOAD_CHUNK, count))
            resident[start : start + len(chunk)] = torch.from_numpy(self._images.read(chunk))
        return resident

    def _pixels(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for drawn in self._sampler:
            indices = np.array(drawn, dtype=np.int64)
            on_device = self._to_device(indices)
            if self._resident is None:
                yield on_device, self._to_device(self._images.read(indices))
            else:
                yield on_device, self._resident[on_device]


class LoaderPipeline(Pipeline):
    """Pixels read ahead by `loader_workers` processes that live as long as the pipeline.

    They are started in the first epoch and kept: new ones each epoch would cost start-up time and
    file descriptors. Each uses one thread. With 0 processes this one reads.
    start_method: of the processes; None is the platform's default.
    """

    def __init__(
        self,
        images: ImageSet,
        sampler: Iterable[np.ndarray],
        transform: Transform,
        loader_workers: int,
        prefetch: int,
        start_method: str | None = None,
    ) -> None:
        super().__init__(images, sampler, transform)
        several: dict[str, Any] = {}
        if loader_workers > 0:
            several = {
                "persistent_workers": True,
                "prefetch_factor": prefetch,
                "multiprocessing_context": start_method,
                "worker_init_fn": _end_by_parent_alone,
            }
        self._requests = _Requests(sampler)
        self._batches: Any = None
        self._loader = DataLoader(
            _Reader(images),
            batch_sampler=self._requests,
            num_workers=loader_workers,
            collate_fn=_as_it_is,
            pin_memory=transform.device.type == "cuda",
            # Its own, as the loader draws a number each epoch: dropout must not notice.
            generator=torch.Generator(),
            **several,
        )

    def close(self) -> None:
        """Ends the processes that read ahead."""
        # Left to the garbage collector, their queues would be closed before they are told, and
        # each would be waited for in vain for 5 seconds.
        if self._loader.num_workers > 0 and self._batches is not None:
            self._batches._shutdown_workers()

    def _pixels(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._transform.parts:
            self._requests.seeds = crop_seeds(len(self._images), self._transform.seed, epoch)
        with _signals_held():
            self._batches = batches = iter(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker (pid" not in str(error):
                    raise
                reason = " ".join(str(error).split())
                raise UserError(
                    f"a process that reads images ahead died ({reason}): "
                    "set data.loader_workers to 0 if memory or /dev/shm is short"
                ) from error
            if isinstance(batch, str):
                raise UserError(batch)
            indices, images = batch
            yield self._to_device(indices), images.to(self._transform.device, non_blocking=True)


def make_pipeline(
    image_set: ImageSet,
    sampler: Iterable[np.ndarray],
    config: Any,
    data: Data,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    seed: int,
    train: bool,
    prefetch: int = 2,
) -> Pipeline:
    """The pipeline that `config` (the `data` section) asks for, for one of `data`'s two sets.

    train: augment. prefetch: batches that each loader process reads ahead. Raises UserError if
    data.placement is `memory` and the data do not fit in data.memory_limit_gib.
    """
    transform = Transform(
        mean=data.mean,
        std=data.std,
        device=device,
        dtype=dtype,
        memory_format=memory_format,
        seed=seed,
        padding=config.crop_padding if train and config.crop == "pad" else 0,
        flip=config.flip and train,
        parts=config.crop == "resized" and train,
    )
    if _in_memory(config, data, image_set):
        return MemoryPipeline(image_set, sampler, transform)
    return LoaderPipeline(image_set, sampler, transform, config.loader_workers, prefetch)


def _in_memory(config: Any, data: Data, image_set: ImageSet) -> bool:
    nbytes = data.train.nbytes + data.test.nbytes
    fits = nbytes <= config.memory_limit_gib * 2**30
    if config.placement == "auto":
        return fits and image_set.in_memory
    if config.placement == "memory" and not fits:
        raise UserError(
            f"data.placement: memory, but the images take {nbytes / 2**30:.2f} GiB: "
            "raise data.memory_limit_gib or set data.placement to auto"
        )
    return config.placement == "memory"


class _Requests:
    """The batches that a sampler asks for: index arrays, with the seeds of random parts if any.

    seeds: of the epoch that begins, int64 [N], as loader processes know nothing of epochs.
    """

    def __init__(self, sampler: Iterable[np.ndarray]) -> None:
        self._sampler = sampler
        self.seeds: np.ndarray | None = None

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for drawn in self._sampler:
            indices = np.array(drawn, dtype=np.int64)
            yield indices, None if self.seeds is None else self.seeds[indices]


class _Reader:
    """The loader's data set: whole batches, with the index array that asked for them."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(
        self, request: tuple[np.ndarray, np.ndarray | None]
    ) -> tuple[np.ndarray, torch.Tensor] | str:
        indices, seeds = request
        try:
            if seeds is None:
                return indices, torch.from_numpy(self._images.read(indices))
            return indices, torch.from_numpy(self._images.read_parts(indices, seeds))
        except UserError as error:
            # Raised here, it would reach the user with a process's traceback in its message.
            return str(error)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back what ends training until the end of it, and in processes started in it for good.

    Launchers send signals to whole process groups, and one may come before a new process is ready
    to wait for it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_by_parent_alone(worker: int) -> None:
    """Ctrl-C and a scheduler's signals reach this process too, but the training process decides
    when it ends: it alone may send SIGTERM."""
    # Held already, but by a fork server that somebody else has started.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    parent = multiprocessing.parent_process()
    assert parent is not None  # DataLoader calls this in its processes alone
    threading.Thread(target=_wait_for_parent, args=(parent.pid,), daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
