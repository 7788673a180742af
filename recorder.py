"""A run's folder: resolved config, provenance, records, checkpoints; and reading them.

Records are JSON lines and NPZ without objects, configs are YAML, checkpoints load with
`weights_only=True`: nothing is read back with pickle. What matters is written to a temporary file
in the same folder, flushed to disk and renamed: a crash leaves the old or the new, never half.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torchvision
import yaml

from balancer import EpochPlan
from configs.errors import UserError
from configs.files import read_mapping
from configs.schema import Config, differences, from_mapping, to_mapping
from partitioner import Partitioner

CONFIG, PROVENANCE, EPOCHS, STEPS = "config.yaml", "provenance.json", "epochs.jsonl", "steps.npz"
CHECKPOINT, FINAL, LOCK = "checkpoint.pt", "final.pt", ".lock"

# The parts of a step that are recorded, by their names in balancer.StepTimes.
PHASES = ("data", "forward", "backward", "delay", "wait", "step", "busy")

# Keys that may differ between a run and its continuation: they say where and how, not what.
MAY_DIFFER = frozenset(
    {"output", "data.root", "data.cache", "data.placement", "data.memory_limit_gib",
     "data.loader_workers", "backend", "device", "threads", "timeout"}
)  # fmt: skip

_STEP_ARRAYS = {
    "epoch": np.int32,
    "step": np.int32,
    "batch_sizes": np.int32,
    "busy": np.float32,
    "wait": np.float32,
}


# --- writing ----------------------------------------------------------------------------------


class RunFolder:
    """Writes one run; made on rank 0 only. Raises UserError where the folder holds another run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Mapping[str, Any]] = []
        self._steps: list[dict[str, np.ndarray]] = []

    def open(self, config: Config, workers: int, resume: str, overwrite: bool) -> bool:
        """Makes the folder ready; True where an unfinished run in it is to be continued.

        resume: `auto` continues an unfinished run, `never` refuses to touch it; overwrite: what the
        folder holds is to be deleted, which `replace` does.
        """
        self._replaces = overwrite and self.path.exists()
        if self._replaces and not (self.path / CONFIG).exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} holds no run: --overwrite does not delete it")
        continued = not self._replaces and self._continues(config, workers, resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise UserError(f"output: cannot make {self.path}: {error.strerror}") from error
        if not continued and not self._replaces:
            self._write_config(config)
        return continued

    def replace(self, config: Config) -> None:
        """Deletes what --overwrite replaces: only now, as the new run has been found to start."""
        if not self._replaces:
            return
        for file in self.path.iterdir():
            if file.name != LOCK:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._write_config(config)

    def write_provenance(self, facts: Mapping[str, Any]) -> None:
        """Writes provenance.json; a continued run keeps the first start's facts and adds these."""
        path = self.path / PROVENANCE
        if path.exists():
            first = _read_json(path)
            facts = {**first, "continued": [*first.get("continued", []), facts]}
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        _write(self.path / PROVENANCE, lambda file: file.write(text.encode()))

    def append_epoch(self, record: Mapping[str, Any], steps: Mapping[str, np.ndarray]) -> None:
        """Adds a line to epochs.jsonl and this epoch's arrays, [steps, …] each, to steps.npz."""
        with open(self.path / EPOCHS, "ab") as file:
            file.write((json.dumps(record) + "\n").encode())
            _flush(file)
        self.records.append(record)
        self._steps.append({k: np.asarray(steps[k], kind) for k, kind in _STEP_ARRAYS.items()})
        self._write_steps()

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        _write(self.path / CHECKPOINT, lambda file: torch.save(state, file))

    def checkpoint_bytes(self) -> bytes | None:
        """The checkpoint file's content, or None where there is none yet."""
        path = self.path / CHECKPOINT
        return path.read_bytes() if path.exists() else None

    def keep_epochs(self, count: int) -> list[Mapping[str, Any]]:
        """Cuts the records back to the first `count` epochs, those the checkpoint stands for.

        Returns them. Raises UserError where they are not all there.
        """
        self.records = [line for line in _epoch_lines(self.path) if line["epoch"] < count]
        if [line["epoch"] for line in self.records] != list(range(count)):
            raise UserError(
                f"{self.path / EPOCHS} lacks some of the {count} epochs that {CHECKPOINT} stands "
                "for: put it back, or --overwrite to start again"
            )
        text = "".join(json.dumps(line) + "\n" for line in self.records)
        _write(self.path / EPOCHS, lambda file: file.write(text.encode()))
        if count:
            steps = _read_steps(self.path)
            kept = steps["epoch"] < count
            self._steps = [{name: array[kept] for name, array in steps.items()}]
            self._write_steps()
        return self.records

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes final.pt, a plain state_dict, and drops the checkpoint: the run is done."""
        _write(self.path / FINAL, lambda file: torch.save(dict(weights), file))
        (self.path / CHECKPOINT).unlink(missing_ok=True)
        (self.path / LOCK).unlink(missing_ok=True)

    def _continues(self, config: Config, workers: int, resume: str) -> bool:
        if is_finished(self.path):
            raise UserError(f"{self.path} holds a finished run: --overwrite to do it again")
        if not (self.path / CHECKPOINT).exists() and not (self.path / EPOCHS).exists():
            return False
        if resume == "never":
            raise UserError(
                f"{self.path} holds an unfinished run: --resume auto continues it, "
                "--overwrite starts it again"
            )
        earlier = from_mapping(read_mapping(self.path / CONFIG), where=str(self.path / CONFIG))
        changed = [key for key in differences(earlier, config) if key not in MAY_DIFFER]
        if changed:
            raise UserError(
                f"{self.path} holds an unfinished run with another {', '.join(changed)}: "
                "set it back, choose another --output, or --overwrite"
            )
        self._check_workers(workers)
        # Without a checkpoint nothing of the earlier start is used, not even its calibration.
        return (self.path / CHECKPOINT).exists()

    def _lock(self) -> None:
        """Keeps other processes out of the folder until this one ends, however it ends."""
        self._lock_file = open(self.path / LOCK, "w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path} is being written by another process: wait for it, or stop it"
            ) from None

    def _write_config(self, config: Config) -> None:
        (self.path / PROVENANCE).unlink(missing_ok=True)
        text = yaml.safe_dump(to_mapping(config), sort_keys=False)
        _write(self.path / CONFIG, lambda file: file.write(text.encode()))

    def _check_workers(self, workers: int) -> None:
        before = recorded_workers(self.path)
        if before not in (None, workers):
            raise UserError(
                f"{self.path} holds an unfinished run of {before} workers, not {workers}: "
                f"start {before}, or --overwrite"
            )

    def _write_steps(self) -> None:
        arrays = {k: np.concatenate([part[k] for part in self._steps]) for k in _STEP_ARRAYS}
        self._steps = [arrays]
        _write(self.path / STEPS, lambda file: np.savez(file, **arrays))


class NoFolder:
    """Stands in for RunFolder on all other ranks: knows the path, writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Mapping[str, Any]] = []

    def write_provenance(self, facts: Mapping[str, Any]) -> None:
        pass

    def append_epoch(self, record: Mapping[str, Any], steps: Mapping[str, np.ndarray]) -> None:
        self.records.append(record)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        pass

    def checkpoint_bytes(self) -> bytes | None:
        return None

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        pass


def load_state(content: bytes, folder: Path, device: torch.device) -> dict[str, Any]:
    """The state on `device` in the checkpoint file of `folder`, of which `content` was read.

    Raises UserError that names the file if it is damaged.
    """
    try:
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # damaged files make the unpickler raise anything
        raise UserError(
            f"{folder / CHECKPOINT} is damaged: put it back, or --overwrite to start again"
        ) from error


def provenance(repository: Path) -> dict[str, Any]:
    """What tells where a run came from: code, versions, machine, moment (UTC)."""
    commit = _git(repository, "rev-parse", "HEAD")
    status = _git(repository, "status", "--porcelain")
    return {
        "git_commit": commit,
        "git_dirty": None if status is None else bool(status),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
            "horovod": _installed_version("horovod"),
        },
        "platform": platform.platform(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(repository: Path, *arguments: str) -> str | None:
    """git's answer, or None where this is no checkout or there is no git."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        fill(file)
        _flush(file)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# --- records ----------------------------------------------------------------------------------


def epoch_record(
    plan: EpochPlan,
    phases: Mapping[str, np.ndarray],
    typical_busy: np.ndarray,
    partitioner: Partitioner,
) -> dict[str, Any]:
    """The part of an epoch's record that is about balance; lists have one entry per worker.

    phases: seconds by name of PHASES, [steps, n] each; typical_busy: the busy seconds [n] that the
    last rebalance used; partitioner: after this epoch, for its time model and what follows from it.
    """
    clean = plan.clean_steps()
    sizes = plan.batch_sizes[clean[0]]
    # Where no batch was full, times and T* would be of different batches.
    full = sizes.sum() == partitioner.batch_size
    best = partitioner.optimum() if full else None
    left_out = partitioner.left_out() if full else None
    fit = None if best is None else partitioner.time_model.fit()
    return {
        "epoch": plan.epoch,
        "steps": len(plan.starts),
        "left_out": plan.left_out,
        "shares": (sizes / sizes.sum()).tolist(),
        "batch_sizes": sizes.tolist(),
        "busy": _spread(phases["busy"][clean]) | {"typical": typical_busy.tolist()},
        "wait": _spread(phases["wait"][clean]),
        "phases": {
            name: seconds[clean].mean(0).tolist()
            for name, seconds in phases.items()
            if name != "busy"
        },
        "time_model": None if fit is None else {"a": fit[0].tolist(), "d": fit[1].tolist()},
        "optimum": None if best is None else best.seconds,
        "optimum_continuous": None if best is None else best.continuous_seconds,
        "optimum_batch_sizes": None if best is None else best.batch_sizes.tolist(),
        "imbalance": None if best is None else float(typical_busy.max() / best.seconds),
        "better_without": None
        if left_out is None
        else {"ranks": list(left_out.ranks), "seconds": left_out.seconds},
        "changes": [
            {"step": step, "batch_sizes": split}
            for step, split in plan.changes()
            if sum(split) == sizes.sum()  # not a short last batch
        ],
    }


def step_arrays(plan: EpochPlan, phases: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One epoch's part of steps.npz."""
    steps = len(plan.starts)
    return {
        "epoch": np.full(steps, plan.epoch),
        "step": np.arange(steps),
        "batch_sizes": plan.batch_sizes,
        "busy": phases["busy"],
        "wait": phases["wait"],
    }


def _spread(seconds: np.ndarray) -> dict[str, list[float]]:
    """Mean, median and 5th and 95th percentile over steps of [steps, n]."""
    p5, median, p95 = np.percentile(seconds, (5, 50, 95), axis=0)
    return {
        "mean": seconds.mean(0).tolist(),
        "median": median.tolist(),
        "p5": p5.tolist(),
        "p95": p95.tolist(),
    }


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run's records. steps: arrays by name, [steps of all epochs, …] each."""

    path: Path
    config: dict[str, Any]
    provenance: dict[str, Any]
    epochs: list[dict[str, Any]]
    steps: dict[str, np.ndarray]


def read_run(path: Path | str) -> Run:
    """Reads a run's folder, finished or not. Raises UserError that names a file and its fault."""
    path = Path(path)
    epochs = _epoch_lines(path)
    if not epochs:
        raise UserError(f"{path / EPOCHS} has no epoch yet")
    config, facts = read_mapping(path / CONFIG), _read_json(path / PROVENANCE)
    return Run(path, config, facts, epochs, _read_steps(path))


def is_finished(path: Path) -> bool:
    """Whether a run's folder holds all epochs: with its final weights, or shipped without them.

    A folder with a checkpoint is still being trained, however many epochs it has recorded.
    """
    if (path / FINAL).exists():
        return True
    if (path / CHECKPOINT).exists() or not (path / CONFIG).exists():
        return False
    config = from_mapping(read_mapping(path / CONFIG), where=str(path / CONFIG))
    return len(_epoch_lines(path)) >= config.epochs


def count_epochs(path: Path) -> int:
    """How many epochs a run's folder has recorded."""
    file = path / EPOCHS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def recorded_workers(path: Path) -> int | None:
    """The number of workers of the run in a folder; None where it has not got so far."""
    file = path / PROVENANCE
    return _read_json(file).get("world_size") if file.exists() else None


def batch_sizes_by_epoch(path: Path | str) -> list[list[list[int]]]:
    """The batch sizes of a run's every step: by epoch, step and worker. Raises UserError."""
    if not (Path(path) / EPOCHS).exists():
        raise UserError(f"partition.replay: {path} is no run's folder: it has no {EPOCHS}")
    steps = _read_steps(Path(path))
    epochs = range(int(steps["epoch"].max()) + 1)
    return [steps["batch_sizes"][steps["epoch"] == epoch].tolist() for epoch in epochs]


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """All run folders at or beneath `paths` that have records, sorted. Raises UserError if none."""
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: name a run's folder or one above it")
    found = {file.parent for path in paths for file in path.rglob(EPOCHS) if file.stat().st_size}
    if not found:
        raise UserError(f"no run in {', '.join(map(str, paths))}: no {EPOCHS} with an epoch in it")
    return sorted(found)


def _epoch_lines(path: Path) -> list[dict[str, Any]]:
    file = path / EPOCHS
    if not file.exists():
        return []
    lines = _text(file).split("\n")
    # What stands after the last line end was being written when the run was cut off.
    records = [_object(line, f"{file} line {n}") for n, line in enumerate(lines[:-1], 1)]
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("epoch"), int):
            raise UserError(f"{file} line {number} has no epoch number")
    return records


def _read_steps(path: Path) -> dict[str, np.ndarray]:
    file = path / STEPS
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in _STEP_ARRAYS}
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise UserError(f"{file} cannot be read: {_one_line(error)}") from error
    except Exception as error:  # zipfile and zlib raise types of their own for damaged files
        raise UserError(f"{file} is damaged: {_one_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return _object(_text(path), str(path))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


