"""Unpacking of an archive that may be damaged, too large or hostile."""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator

from tqdm import tqdm

from configs.errors import UserError
from data.cache import Fingerprint, new_folder, require_space

SUFFIXES = (".tar.gz", ".tgz", ".tar")
SIZE_LIMIT = 64 * 2**30  # bytes unpacked
BLOCK = 4096  # bytes; a file takes whole blocks of the disk, and one for its entry


def unpack(archive: str, cache: str) -> str:
    """Unpacks a tar archive into a folder of the cache, once, and returns that folder.

    Nothing is written before all members have been checked: regular files and folders that stay
    inside, not more than SIZE_LIMIT bytes nor than the disk has. Raises UserError otherwise.
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
    with _reported_errors(archive), tarfile.open(archive) as tar:
        members = _checked_members(tar, archive)
        require_space(target, sum(map(_disk_usage, members)), f"unpacking {archive}")
        with new_folder(target) as folder:
            hidden = not sys.stderr.isatty()
            for member in tqdm(members, desc="unpacking", disable=hidden, leave=False):
                tar.extract(member, folder, filter="data")
    return target


def _checked_members(tar: tarfile.TarFile, archive: str) -> list[tarfile.TarInfo]:
    members = []
    total = 0
    for member in tar:
        name = f"{archive}: member {member.name!r}"
        if not (member.isreg() or member.isdir()):
            raise UserError(f"{name} is neither a file nor a folder: refusing to unpack it")
        if os.path.isabs(member.name) or ".." in member.name.split("/"):
            raise UserError(f"{name} lies outside of the archive: refusing to unpack it")
        total += _disk_usage(member)
        if total > SIZE_LIMIT:
            raise UserError(
                f"{archive} holds more than {SIZE_LIMIT / 2**30:.0f} GiB: unpack it by hand and "
                "set data.root to the folder"
            )
        members.append(member)
    return members


def _disk_usage(member: tarfile.TarInfo) -> int:
    return (member.size // BLOCK + 1) * BLOCK


@contextlib.contextmanager
def _reported_errors(archive: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot unpack {archive}: {reason}") from error
