"""Folders of the cache: they appear whole or not at all, and say in meta.json what they hold.

    <cache>/<name>-<fingerprint>/
        meta.json                     see `Meta`
        {train,test}-labels.npy       int64 [N]
        {train,test}-images.npy       uint8 [N, 3, S, S], if decoded
        {train,test}-paths.npy        bytes [N], relative to the root, of an image folder

Any of them may be deleted: the next start makes it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from configs.errors import UserError

FORMAT = 3  # part of every fingerprint: a change of the format makes new folders

_PART, _LOCK = ".part", ".lock"
# Seconds after which a temporary folder without a lock is no one's.
_ABANDONED = 24 * 3600.0


@dataclass(frozen=True)
class Meta:
    """What a folder of the cache holds. `mean` and `std` are per channel, in units of 0..1."""

    classes: list[str]
    mean: list[float]
    std: list[float]
    image_size: int
    train_samples: int
    test_samples: int
    files: str  # a hash of what the files are called and how large they are; "" without any
    decoded: bool  # pixels are in {train,test}-images.npy; otherwise files are read at access
    root: str | None = None  # folder of the image files
    # Shorter side in pixels that files are brought to before the centre is cut out.
    train_shorter: int | None = None
    test_shorter: int | None = None


class Fingerprint:
    """A short hash of all that the content of a folder of the cache depends on."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self.add(FORMAT)

    def add(self, *parts: object) -> None:
        for part in parts:
            raw = part if isinstance(part, bytes) else str(part).encode(errors="surrogateescape")
            # The length keeps ("ab", "c") and ("a", "bc") apart.
            self._hash.update(b"%d:%b" % (len(raw), raw))

    @property
    def text(self) -> str:
        """16 hexadecimal digits."""
        return self._hash.hexdigest()

    def folder(self, cache: str, name: str) -> str:
        """<cache>/<name>-<fingerprint>"""
        parent = os.path.abspath(os.path.expanduser(cache))
        return os.path.join(parent, f"{name}-{self.text}")


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[str]:
    """A temporary folder that becomes `target` at the end, or is removed if the block fails.

    If another process was quicker, its folder stays and this one is dropped.
    """
    parent, name = os.path.split(target)
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_folder(parent, name))
        except OSError as error:
            raise UserError(f"data.cache: cannot write to {parent}: {error.strerror}") from error
        yield temporary
        try:
            os.rename(temporary, target)
        except OSError:
            if not os.path.isdir(target):
                raise


@contextlib.contextmanager
def temporary_folder(parent: str, name: str) -> Iterator[str]:
    """A folder `.NAME.….part` in `parent` that is removed at the end, if it is still there.

    Those of the same name that killed processes have left are removed first. Raises OSError where
    it cannot be made.
    """
    os.makedirs(parent, exist_ok=True)
    _remove_left_over(parent, name)
    temporary = os.path.join(parent, f".{name}.{uuid.uuid4().hex[:8]}{_PART}")
    os.mkdir(temporary)
    try:
        with open(f"{temporary}{_LOCK}.new", "w") as lock:
            lock.write(socket.gethostname())
            lock.flush()
            _locks(lock)
            os.rename(lock.name, f"{temporary}{_LOCK}")  # it is seen when it is locked, not before
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for left in glob.iglob(f"{glob.escape(temporary)}{_LOCK}*"):
            with contextlib.suppress(FileNotFoundError):  # the lock is free: others may remove it
                os.unlink(left)


def _remove_left_over(parent: str, name: str) -> None:
    """Removes temporary folders, and locks of such, whose process has ended.

    A process holds a lock beside each of its own. Where there is none, which may be about to come,
    or it is another machine's, whose locks not all file systems know, age tells.
    """
    pattern = glob.escape(os.path.join(parent, f".{name}."))
    for folder in {path.removesuffix(_LOCK) for path in glob.iglob(f"{pattern}*{_PART}*")}:
        left = _age(folder) > _ABANDONED
        with contextlib.suppress(OSError), open(folder + _LOCK, "r+") as lock:
            left = (left or lock.read() == socket.gethostname()) and _locks(lock)
        if left:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(folder + _LOCK)


def _age(path: str) -> float:
    """Seconds since the last change; 0 where there is no such file any more."""
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


def _locks(file: TextIO) -> bool:
    """Locks a file that no one else has locked; False where one has, or files cannot be locked.

    The lock is the open file's, not the process's: it also keeps out this process's own threads.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def require_space(folder: str, needed: int, purpose: str) -> None:
    """Raises UserError unless `needed` bytes are free where `folder` (absolute) will be."""
    existing = folder
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{purpose} takes {needed / 2**30:.2f} GiB but {existing} has {free / 2**30:.2f} GiB "
            "free: make room or set data.cache to another disk"
        )


def write_meta(folder: str, meta: Meta) -> None:
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(meta), file, indent=1)


def read_meta(folder: str) -> Meta:
    """Raises UserError if `folder` is not a folder of the cache."""
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as file:
            return Meta(**json.load(file))
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"data cache: {path} cannot be read: delete {folder}") from error


def save_array(folder: str, split: str, kind: str, array: np.ndarray) -> None:
    np.save(os.path.join(folder, f"{split}-{kind}.npy"), array, allow_pickle=False)


def new_image_file(folder: str, split: str, count: int, size: int) -> np.ndarray:
    """A mapped, writable uint8 array [count, 3, size, size] behind {split}-images.npy."""
    return np.lib.format.open_memmap(
        os.path.join(folder, f"{split}-images.npy"),
        mode="w+",
        dtype=np.uint8,
        shape=(count, 3, size, size),
    )
