"""CIFAR-10 (Krizhevsky 2009), by torchvision: downloaded, checked, and put into the cache.

Its authors' files are pickles. torchvision opens them only if their MD5 sums are the authors'; a
file of anyone else is refused unopened.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity, download_url

from configs.errors import UserError
from data.cache import (
    Fingerprint,
    Meta,
    new_folder,
    new_image_file,
    save_array,
    temporary_folder,
    write_meta,
)

DOWNLOAD_TIMEOUT = 60.0  # seconds without an answer
# Per channel, over the training images.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def prepare_cifar10(config: Any) -> str:
    """Returns the folder of the cache. config: the `data` section.

    Raises UserError if the data are not in data.root and cannot be downloaded.
    """
    fingerprint = Fingerprint()
    fingerprint.add(CIFAR10.tgz_md5)
    target = fingerprint.folder(config.cache, config.name)
    if os.path.isdir(target):
        return target
    sets = _obtain(os.path.abspath(os.path.expanduser(config.root)))
    with new_folder(target) as folder:
        for split, dataset in sets.items():
            pixels = dataset.data.transpose(0, 3, 1, 2)
            new_image_file(folder, split, len(pixels), pixels.shape[-1])[:] = pixels
            save_array(folder, split, "labels", np.array(dataset.targets, dtype=np.int64))
        meta = Meta(
            classes=list(sets["train"].classes),
            mean=list(MEAN),
            std=list(STD),
            image_size=32,
            train_samples=len(sets["train"]),
            test_samples=len(sets["test"]),
            files=CIFAR10.tgz_md5,
            decoded=True,
        )
        write_meta(folder, meta)
    return target


def _obtain(root: str) -> dict[str, CIFAR10]:
    """Both sets, from the unpacked files, the archive or the network: whichever is there first."""
    archive = os.path.join(root, CIFAR10.filename)
    with contextlib.suppress(RuntimeError):  # files missing or damaged
        return _load(root)
    try:
        with _quiet_unless_terminal():
            if not check_integrity(archive, CIFAR10.tgz_md5):
                _download(root, archive)
            return _load(root, download=True)  # unpacks the archive
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())
        damaged = f"{archive} is damaged and the " if os.path.isfile(archive) else ""
        raise UserError(
            f"CIFAR-10: {damaged}download failed ({reason}): get {CIFAR10.url} by other means "
            f"and put it at {archive}"
        ) from error


def _load(root: str, download: bool = False) -> dict[str, CIFAR10]:
    return {
        split: CIFAR10(root, train=split == "train", download=download)
        for split in ("train", "test")
    }


def _download(root: str, archive: str) -> None:
    """Puts the archive in place only when it is whole, so that no partial file is left."""
    with temporary_folder(root, "download") as folder:
        download_url(CIFAR10.url, folder, CIFAR10.filename, CIFAR10.tgz_md5)
        os.replace(os.path.join(folder, CIFAR10.filename), archive)


@contextlib.contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """Keeps torchvision's progress bar out of log files, and a dead connection from hanging."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        with contextlib.ExitStack() as stack:
            if not sys.stderr.isatty():
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            yield
    finally:
        socket.setdefaulttimeout(timeout)
