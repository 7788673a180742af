"""Writing files so that a crash, or a full disk, leaves the old content or the new, never half."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import TextIO

from configs.errors import UserError

Buffer = bytes | memoryview

# What temporary files are called.
TEMPORARY = ".*.tmp"


def write(path: Path, content: Buffer) -> None:
    """Writes a file by way of a temporary one in the same folder, flushed to disk and renamed.

    Raises UserError where the disk refuses; the old file then stays, and nothing temporary is left.
    """
    temporary = stage(path, content)
    try:
        replace(temporary, path)
    except UserError:
        temporary.unlink(missing_ok=True)
        raise


def stage(path: Path, content: Buffer) -> Path:
    """The temporary file, whole and on disk, that `replace` puts in the place of `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)
        raise _refusal(path, error) from error
    return temporary


def replace(temporary: Path, path: Path) -> None:
    """Renames what `stage` gave, or another file, durably. Raises UserError."""
    try:
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise _refusal(path, error) from error


def append(path: Path, content: bytes) -> None:
    """Adds to a file's end, durably. Raises UserError where the disk refuses: all or nothing."""
    try:
        with open(path, "ab", buffering=0) as file:
            before = os.path.getsize(path)
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise _refusal(path, error) from error


def remove(path: Path) -> None:
    """Deletes a file, if there is one. Raises UserError for a folder, or if the disk refuses."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def lock(path: Path, held: str) -> TextIO:
    """The file, open for appending and this process's alone until it is closed or the process ends.

    Raises UserError with the text `held` where another process has it, and for what is no regular
    file: a link would have us write elsewhere, and a pipe might never open.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(os.open(path, flags, 0o666), "a")
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is no regular file: move it away")
        # Unlike flock's, this lock is not held on by loader processes that outlive a crash.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may just have deleted it, and another one made anew is somebody else's.
        if not os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError, PermissionError):
        file.close()
        raise UserError(held) from None
    except BaseException:
        file.close()
        raise
    return file


def drop_temporary(folder: Path) -> None:
    """Deletes what writers that were killed have left."""
    for file in folder.glob(TEMPORARY):
        remove(file)


def _refusal(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({error.strerror or error}): free or repair the disk, or move "
        "away what is in its place, then give the same command again"
    )
