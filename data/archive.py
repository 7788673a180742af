"""Unpacking of an archive that may be damaged, too large or hostile."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from tqdm import tqdm

from configs.errors import UserError
from configs.filling import printable
from data.cache import Fingerprint, new_folder, require_space

SUFFIXES = (".tar.gz", ".tgz", ".tar")
SIZE_LIMIT = 64 * 2**30  # bytes unpacked
HEADER_LIMIT = 2**16  # bytes in front of a member: name, owner, attributes
HEADERS_LIMIT = 4 * 2**30  # bytes in front of all members: two to four million
ATTRIBUTES_LIMIT = 100  # that one member has; each has a copy of those that are for all
BLOCK = 4096  # bytes; a file takes whole blocks of the disk, and one for its entry


def unpack(archive: str, cache: str) -> str:
    """Unpacks a tar archive into a folder of the cache, once, and returns that folder.

    Nothing is written before all members have been checked: regular files and folders that stay
    inside, not more than SIZE_LIMIT bytes nor than the disk has. Nor is more held in memory than
    their names take, whatever they unfold to. Raises UserError otherwise.
    """
    archive = os.path.abspath(archive)
    status = os.stat(archive)
    fingerprint = Fingerprint()
    fingerprint.add(archive, status.st_size, status.st_mtime_ns)
    target = fingerprint.folder(cache, os.path.basename(archive).split(".")[0])
    if os.path.isdir(target):
        return target
    if not hasattr(tarfile, "data_filter"):
        raise UserError(f"unpacking {archive} safely needs Python 3.10.12, 3.11.4 or newer")
    with _reported_errors(archive), _opened(archive) as (tar, source):
        members = _checked_members(tar, source, archive)
        require_space(target, sum(map(_disk_usage, members)), f"unpacking {archive}")
        with new_folder(target) as folder:
            hidden = not sys.stderr.isatty()
            for member in tqdm(members, desc="unpacking", disable=hidden, leave=False):
                tar.extract(member, folder, filter="data")
    return target


class _Source:
    """The unpacked bytes of an archive, for tarfile: it hands out headers of limited size alone.

    tarfile takes a header's word for its length and reads it into memory, and a few kilobytes can
    unfold to gigabytes. `start_member` begins a member; after `lift` what is read has no limit.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self._left_in_all: float = HEADERS_LIMIT
        self.start_member()

    def start_member(self) -> None:
        self._left: float = HEADER_LIMIT

    def lift(self) -> None:
        self._left = self._left_in_all = float("inf")

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= min(self._left, self._left_in_all):
            raise tarfile.ReadError("its headers are damaged, or larger than any should be")
        self._left -= size
        self._left_in_all -= size
        return self._file.read(size)


@contextlib.contextmanager
def _opened(archive: str) -> Iterator[tuple[tarfile.TarFile, _Source]]:
    with open(archive, "rb") as packed:
        compressed = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        with gzip.open(packed) if compressed else contextlib.nullcontext(packed) as file:
            source = _Source(file)
            with tarfile.open(fileobj=source, mode="r:") as tar:
                yield tar, source


def _checked_members(
    tar: tarfile.TarFile, source: _Source, archive: str
) -> list[tarfile.TarInfo]:
    members: list[tarfile.TarInfo] = []
    total = 0
    for member in tar:
        source.start_member()
        name = f"{archive}: member {printable(member.name)}"
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise UserError(f"{name} is neither a plain file nor a folder: refusing to unpack it")
        if member.size < 0 or len(member.pax_headers) > ATTRIBUTES_LIMIT:
            raise UserError(f"{name} has a damaged header: refusing to unpack it")
        if os.path.isabs(member.name) or ".." in member.name.split("/"):
            raise UserError(f"{name} lies outside of the archive: refusing to unpack it")
        total += _disk_usage(member)
        members.append(member)
        if total > SIZE_LIMIT:
            raise UserError(
                f"{archive} holds more than {SIZE_LIMIT / 2**30:.0f} GiB: unpack it by hand and "
                "set data.root to the folder"
            )
    source.lift()
    return members


def _disk_usage(member: tarfile.TarInfo) -> int:
    return (member.size // BLOCK + 1) * BLOCK


@contextlib.contextmanager
def _reported_errors(archive: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged archives make tarfile and gzip raise anything
        reason = printable(" ".join(str(error).split()) or type(error).__name__)
        raise UserError(f"cannot unpack {archive}: {reason}") from error
