"""A run's folder, read: its records, and how far it has come.

Records are JSON lines and NPZ without objects, configs are YAML: nothing is read with pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import checkpoint
import record_form
from configs.errors import UserError
from configs.files import JSON_BYTES, parse_json, read_mapping, read_text, refuse_compressed
from configs.filling import printable
from configs.schema import from_mapping
from record_form import STEP_ARRAYS

CONFIG, PROVENANCE, EPOCHS, STEPS = "config.yaml", "provenance.json", "epochs.jsonl", "steps.npz"
FINAL, LOCK, PREEMPTED, DIVERGED = "final.pt", ".lock", "preempted", "diverged"


@dataclass(frozen=True)
class Run:
    """One run's records. steps: arrays by name, [steps of all epochs, …] each."""

    path: Path
    config: dict[str, Any]
    provenance: dict[str, Any]
    epochs: list[dict[str, Any]]
    steps: dict[str, np.ndarray]


def read_run(path: Path | str) -> Run:
    """Reads a run's folder, finished or not. Raises UserError that names a file and its fault.

    A run that diverged in its first epoch has no epochs, and arrays of no steps.
    """
    path = Path(path)
    epochs = _epoch_lines(path)
    if not epochs and not has_diverged(path):
        raise UserError(f"{path / EPOCHS} has no epoch yet")
    for number, record in enumerate(epochs):
        if record["epoch"] != number:
            raise UserError(
                f"{path / EPOCHS} line {number + 1} is of epoch {printable(record['epoch'])}, not "
                f"{number}: it must hold each epoch once and in order"
            )
    config, facts = read_mapping(path / CONFIG), read_object(path / PROVENANCE)
    from_mapping(config, where=printable(str(path / CONFIG)))
    return Run(path, config, facts, epochs, _read_steps(path) if epochs else _no_steps())


def is_finished(path: Path) -> bool:
    """Whether a run's folder holds all epochs: with its final weights, or shipped without them.

    A folder with a checkpoint is still being trained, however many epochs it has recorded; so is
    one whose run has begun and was killed before its first.
    """
    if (path / FINAL).exists():
        return True
    if checkpoint.exists(path) or _has_begun(path) or not (path / CONFIG).exists():
        return False
    config = from_mapping(read_mapping(path / CONFIG), where=str(path / CONFIG))
    return len(_epoch_lines(path)) >= config.epochs


def has_diverged(path: Path) -> bool:
    """Whether the run in a folder was ended by a number that is not finite."""
    return (path / DIVERGED).exists()


def _has_begun(path: Path) -> bool:
    """Whether a run in the folder has begun and not ended; true also of one that was killed."""
    lock = path / LOCK
    return lock.exists() and lock.stat().st_size > 0


def count_epochs(path: Path) -> int:
    """How many epochs a run's folder has recorded."""
    file = path / EPOCHS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def recorded_workers(path: Path) -> int | None:
    """The number of workers of the run in a folder; None where it has not got so far."""
    file = path / PROVENANCE
    if not file.exists():
        return None
    workers = read_object(file).get("world_size")
    if not record_form.is_count(workers):
        raise UserError(f"{file} has no number of workers: put it back, or remove the folder")
    return workers


def last_workers(path: Path) -> int | None:
    """The number of workers of a run's last start; None where it has not got so far."""
    starts = all_starts(path)
    return starts[-1].get("world_size") if starts else None


def all_starts(path: Path) -> list[dict[str, Any]]:
    """What provenance.json holds of each start of a run, the first one first; none without it."""
    file = path / PROVENANCE
    if not file.exists():
        return []
    first = read_object(file)
    later = first.get("continued", [])
    if not isinstance(later, list) or not all(isinstance(start, dict) for start in later):
        raise UserError(f"{file}: its 'continued' is no list of starts: put the file back")
    return [first, *later]


def batch_sizes_by_epoch(path: Path | str) -> list[list[list[int]]]:
    """The batch sizes of a run's every step: by epoch, step and worker. Raises UserError."""
    if not (Path(path) / EPOCHS).exists():
        raise UserError(f"partition.replay: {path} is no run's folder: it has no {EPOCHS}")
    steps = _read_steps(Path(path))
    epochs = range(int(steps["epoch"][-1]) + 1 if len(steps["epoch"]) else 0)
    return [steps["batch_sizes"][steps["epoch"] == epoch].tolist() for epoch in epochs]


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """All run folders at or beneath `paths` that have records, sorted. Raises UserError if none.

    Also those that diverged before the end of their first epoch. Hidden folders beneath `paths` are
    passed over: a killed calibration may have left one.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: name a run's folder or one above it")
    found = {
        file.parent
        for path in paths
        for file in path.rglob(EPOCHS)
        if (file.stat().st_size or has_diverged(file.parent))
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    }
    if not found:
        raise UserError(f"no run in {', '.join(map(str, paths))}: no {EPOCHS} with an epoch in it")
    return sorted(found)


def _epoch_lines(path: Path) -> list[dict[str, Any]]:
    file = path / EPOCHS
    if not file.exists():
        return []
    lines = read_text(file, JSON_BYTES).split("\n")
    # What stands after the last line end was being written when the run was cut off.
    records = [parse_object(line, f"{file} line {n}") for n, line in enumerate(lines[:-1], 1)]
    for number, record in enumerate(records, 1):
        record_form.check(record, f"{file} line {number}")
    return records


def _read_steps(path: Path) -> dict[str, np.ndarray]:
    file = path / STEPS
    if not file.is_file():  # reading a pipe might never end
        raise UserError(f"{file} cannot be read: there is no such file")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            refuse_compressed(arrays.zip)
            steps = {name: arrays[name] for name in STEP_ARRAYS}
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise UserError(f"{file} cannot be read: {_one_line(error)}") from error
    except Exception as error:  # zipfile and zlib raise types of their own for damaged files
        raise UserError(f"{file} is damaged: {_one_line(error)}") from error
    if fault := record_form.step_fault(steps):
        raise UserError(f"{file} is damaged: {fault}")
    return steps


def _no_steps() -> dict[str, np.ndarray]:
    wide = ("batch_sizes", "busy", "wait")
    return {k: np.zeros((0, 1) if k in wide else 0, kind) for k, kind in STEP_ARRAYS.items()}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError where it holds none."""
    return parse_object(read_text(path, JSON_BYTES), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that `text` is. Raises UserError that begins with `where`."""
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)
