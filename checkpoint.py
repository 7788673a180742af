"""Checkpoint files: written so that one whole one is always there, checked before they are used.

`checkpoint.pt` is the newest, `checkpoint-1.pt` the one before it, and so on; one that turned out
to be damaged has `.damaged` added to its name. Each is a mapping of numbers, texts, lists and
tensors that loads with `weights_only=True`, on any device:

    format                    3
    config, config_hash       the run's resolved configuration, and its SHA-256
    world_size                number of workers
    data                      what the data are known by (data/identity.py)
    next_epoch, epoch_began   the epoch to go on with; the training clock at its start
    trained                   of an epoch that lacks its evaluation alone: record and step arrays
    model, optimizer          state_dicts, names as in the model alone, not as in a wrapper
    balancer                  shares, time model, the epoch's plan, its next step, plans to come
    calibrated, clocks        measured delays; seconds of training and of everything
    workers                   inside an epoch, for each worker: its BatchNorm buffers, random
                              stream, sums of loss and hits, and step times; otherwise empty
    records, steps            epochs.jsonl and steps.npz up to here

The learning rate, the order, the augmentation and the delays follow from config, epoch and step.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

import checkpoint_form
import storage
from checkpoint_form import FormError
from configs.errors import UserError
from configs.files import refuse_compressed
from configs.schema import from_mapping, to_mapping

NEWEST = "checkpoint.pt"
_DAMAGED = ".damaged"


def is_due(every: str | int, epoch: int, step: int, steps: int) -> bool:
    """Whether checkpoint.every asks for one after `step` of the `steps` steps of an epoch.

    Steps are counted from the run's start.
    """
    if every == "epoch":
        every = steps
    elif isinstance(every, str):
        every = int(every.split()[0]) * steps
    return (epoch * steps + step) % every == 0


def save(folder: Path, state: Mapping[str, Any], keep: int) -> None:
    """Makes `state` the newest checkpoint and keeps `keep` in all. Raises UserError (disk full)."""
    temporary = storage.stage(folder / NEWEST, packed(state))
    # Only now, as the new one is whole. From the oldest on, so that none is overwritten but the
    # last to be kept; those behind a gap stay where they are.
    numbers = _numbers(folder)
    gap = next(number for number in count() if number not in numbers)
    for number in reversed(range(min(gap, keep - 1))):
        storage.replace(folder / _name(number), folder / _name(number + 1))
    storage.replace(temporary, folder / NEWEST)
    for number in numbers:
        if number >= keep:
            storage.remove(folder / _name(number))


def exists(folder: Path) -> bool:
    """Whether a run's folder has a checkpoint, whole or not."""
    return bool(_numbers(folder))


def drop(folder: Path) -> None:
    """Deletes all checkpoints of a run's folder, damaged ones too."""
    for number in _numbers(folder):
        storage.remove(folder / _name(number))
    for path in folder.glob(f"checkpoint*.pt{_DAMAGED}"):
        if path.is_file():
            storage.remove(path)


def set_aside(path: Path) -> None:
    """Renames a damaged checkpoint, so that it takes the place of no whole one."""
    storage.replace(path, path.with_name(path.name + _DAMAGED))


def newest(
    folder: Path, check: Callable[[Mapping[str, Any]], None]
) -> tuple[bytes | None, dict[Path, str]]:
    """The content of the newest whole checkpoint, or None where there is no file at all.

    check: raises UserError for a checkpoint that is whole but not this run's, which is the end of
    the search. With it comes what is wrong with each damaged file that was passed over. Raises
    UserError where all are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in _files(folder):
        try:
            if not path.is_file():  # reading a pipe might never end
                raise UserError("no regular file")
            content = path.read_bytes()
            state = load(content, path, torch.device("cpu"))
        except (OSError, UserError) as error:
            damaged[path] = str(error)
            continue
        check(state)
        return content, damaged
    if damaged:
        names = ", ".join(str(path) for path in _files(folder))
        raise UserError(f"damaged: {names}: put one back, or --overwrite to start again")
    return None, {}


def load(content: bytes, path: Path, device: torch.device) -> dict[str, Any]:
    """The state on `device` in a checkpoint file, of which `content` was read.

    Raises UserError, in one line that names the file, for what is damaged or no checkpoint.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            refuse_compressed(archive)
            broken = archive.testzip()  # PyTorch does not compare the checksums
        if broken is not None:
            raise ValueError(f"checksum of {broken}")
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # damaged files make zipfile and the unpickler raise anything
        raise UserError(f"{path} is damaged or no checkpoint") from error
    try:
        checkpoint_form.check(state, len(content))
    except FormError as error:
        raise UserError(f"{path} is no checkpoint of this version: {error}") from error
    except Exception as error:  # contents that nobody has thought of
        raise UserError(f"{path} is damaged or no checkpoint") from error
    # Keys that have come since it was saved have the values that they had before.
    state["config"] = to_mapping(from_mapping(state["config"]))
    return state


def packed(state: Mapping[str, Any]) -> memoryview:
    """What `torch.save` makes of a mapping."""
    # In memory: an error of the disk would reach us in PyTorch's disguise.
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getbuffer()


def unpacked(parts: Sequence[bytes | memoryview]) -> list[dict[str, Any]]:
    """What `packed` was given, on the CPU."""
    return [torch.load(io.BytesIO(p), map_location="cpu", weights_only=True) for p in parts]


def _name(number: int) -> str:
    return NEWEST if number == 0 else f"checkpoint-{number}.pt"


def _files(folder: Path) -> Iterator[Path]:
    """From the newest to the oldest."""
    return (folder / _name(number) for number in sorted(_numbers(folder)))


def _numbers(folder: Path) -> list[int]:
    found = [0] if (folder / NEWEST).exists() else []
    for path in folder.glob("checkpoint-*.pt"):
        number = path.stem.partition("-")[2]
        if number.isdecimal() and number == str(int(number)) and int(number) > 0:
            found.append(int(number))
    return found
