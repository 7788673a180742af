"""A run's folder: resolved config, provenance, records, checkpoints; and reading them.

Records are JSON lines and NPZ without objects, configs are YAML, checkpoints (checkpoint.py) load
with `weights_only=True`: nothing is read back with pickle. A crash or a full disk leaves a file's
old content or the new, never half (storage.py).
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
import yaml

import checkpoint
import storage
from balancer import EpochPlan
from configs.errors import UserError
from configs.files import JSON_BYTES, parse_json, read_mapping, read_text, refuse_compressed
from configs.filling import printable
from configs.schema import Config, differences, from_mapping, to_mapping
from partitioner import Partitioner

CONFIG, PROVENANCE, EPOCHS, STEPS = "config.yaml", "provenance.json", "epochs.jsonl", "steps.npz"
FINAL, LOCK, PREEMPTED = "final.pt", ".lock", "preempted"
# What a start finds: nothing that it uses, a run to go on with, a run that it is to delete.
NEW, CONTINUES, REPLACES = "new", "continues", "replaces"

# The parts of a step that are recorded, by their names in balancer.StepTimes.
PHASES = ("data", "forward", "backward", "delay", "wait", "step", "busy")

# Keys that may differ between a run and its continuation: they say where and how, not what.
MAY_DIFFER = frozenset(
    {"output", "data.root", "data.cache", "data.placement", "data.memory_limit_gib",
     "data.loader_workers", "backend", "device", "threads", "timeout", "checkpoint.every",
     "checkpoint.keep"}
)  # fmt: skip
# Further ones where the number of workers is another: they name single workers.
OF_WORKERS = ("partition.shares", "partition.min_batch", "partition.max_batch", "stragglers")

_STEP_ARRAYS = {
    "epoch": np.int32,
    "step": np.int32,
    "batch_sizes": np.int32,
    "busy": np.float32,
    "wait": np.float32,
}


# --- writing ----------------------------------------------------------------------------------


class RunFolder:
    """Writes one run, on rank 0 only. Raises UserError for another run there, and for a full disk.

    path: the folder; all ranks may ask for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: bytes | None = None
        self._lines: list[str] = []
        self._steps: list[dict[str, np.ndarray]] = []

    def open(self, config: Config, workers: int, resume: str, overwrite: bool) -> str:
        """Makes the folder ready, and says what it holds: NEW, CONTINUES or REPLACES.

        resume: `auto` continues an unfinished run, `never` refuses to touch it; overwrite: what the
        folder holds is to be deleted, which `replace` does.
        """
        self._config = to_mapping(config)
        try:
            replaces = overwrite and self.path.exists()
            if replaces and not (self.path / CONFIG).exists() and any(self.path.iterdir()):
                raise UserError(f"{self.path} holds no run: --overwrite does not delete it")
            continues = not replaces and self._continues(config, workers, resume)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise UserError(f"output: cannot make {self.path}: {error.strerror}") from error
        storage.drop_temporary(self.path)
        if not replaces and not continues:
            (self.path / PROVENANCE).unlink(missing_ok=True)
        if not replaces:
            self._write_config()
        return REPLACES if replaces else CONTINUES if continues else NEW

    def replace(self) -> None:
        """Deletes what --overwrite replaces: only now, as the new run has been found to start."""
        for file in self.path.iterdir():
            if file.name != LOCK:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._write_config()

    def find_checkpoint(self, config: Config, workers: int) -> list[str]:
        """Reads the newest whole checkpoint into `found`; a line for each one passed over."""

        def check(state: Mapping[str, Any]) -> None:
            earlier = from_mapping(state["config"], where=str(self.path / checkpoint.NEWEST))
            self._compare(earlier, config, state["world_size"] == workers)

        self.found, notes = checkpoint.newest(self.path, check)
        return notes

    def restore(self, state: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Sets the records to those of a checkpoint, or to none; returns them. The run begins."""
        text = "" if state is None else state["records"]
        self._lines = text.splitlines()
        records = [_object(line, f"{self.path}: a checkpoint's records") for line in self._lines]
        self._lock_file.write("not finished\n")
        self._lock_file.flush()
        storage.write(self.path / EPOCHS, text.encode())
        (self.path / STEPS).unlink(missing_ok=True)
        (self.path / PREEMPTED).unlink(missing_ok=True)
        if state is not None and state["steps"]:
            self._steps = [{name: tensor.cpu().numpy() for name, tensor in state["steps"].items()}]
            self._write_steps()
        return records

    def write_provenance(self, facts: Mapping[str, Any]) -> None:
        """Writes provenance.json; a continued run keeps the first start's facts and adds these."""
        path = self.path / PROVENANCE
        if path.exists():
            first = _read_json(path)
            later = first.get("continued", [])
            if not isinstance(later, list):
                raise UserError(f"{path}: its 'continued' is no list: put the file back")
            facts = {**first, "continued": [*later, facts]}
        self._write_json(path, facts)

    def append_epoch(self, record: Mapping[str, Any], steps: Mapping[str, np.ndarray]) -> None:
        """Adds a line to epochs.jsonl and this epoch's arrays, [steps, …] each, to steps.npz."""
        line = json.dumps(record, allow_nan=False)
        storage.append(self.path / EPOCHS, (line + "\n").encode())
        self._lines.append(line)
        self._steps.append({k: np.asarray(steps[k], kind) for k, kind in _STEP_ARRAYS.items()})
        self._write_steps()

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Writes the trainer's state with the config and the records so far."""
        steps = self._joined_steps() if self._steps else {}
        whole = {
            "format": checkpoint.FORMAT,
            "config": self._config,
            "config_hash": checkpoint.config_hash(self._config),
            "records": "".join(line + "\n" for line in self._lines),
            "steps": {name: torch.from_numpy(array) for name, array in steps.items()},
            **state,
        }
        checkpoint.save(self.path, whole, self._config["checkpoint"]["keep"])

    def mark_preempted(self, facts: Mapping[str, Any]) -> None:
        """Leaves the file `preempted`: the run was asked to stop, and the next start goes on."""
        self._write_json(self.path / PREEMPTED, facts)

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes final.pt, a plain state_dict, and drops the checkpoints: the run is done."""
        storage.write(self.path / FINAL, checkpoint.packed(weights))
        checkpoint.drop(self.path)
        (self.path / LOCK).unlink(missing_ok=True)

    def _continues(self, config: Config, workers: int, resume: str) -> bool:
        if (self.path / FINAL).exists():
            checkpoint.drop(self.path)  # killed between the two
        if is_finished(self.path):
            raise UserError(f"{self.path} holds a finished run: --overwrite to do it again")
        begun = checkpoint.exists(self.path)
        if resume == "never" and (begun or (self.path / EPOCHS).exists()):
            raise UserError(
                f"{self.path} holds an unfinished run: --resume auto continues it, "
                "--overwrite starts it again"
            )
        # Without a checkpoint nothing of an earlier start is used.
        if begun:
            earlier = from_mapping(read_mapping(self.path / CONFIG), where=str(self.path / CONFIG))
            self._compare(earlier, config, _last_workers(self.path) in (None, workers))
        return begun

    def _compare(self, earlier: Config, config: Config, same_workers: bool) -> None:
        changed = [key for key in differences(earlier, config) if key not in MAY_DIFFER]
        if not same_workers:
            changed = [key for key in changed if not key.startswith(OF_WORKERS)]
        if changed:
            raise UserError(
                f"{self.path} holds an unfinished run with another {', '.join(changed)}: "
                "set it back, choose another --output, or --overwrite"
            )

    def _lock(self) -> None:
        """Keeps other processes out of the folder until this one ends, however it ends."""
        self._lock_file = open(self.path / LOCK, "a")
        try:
            # Unlike flock's, this lock is not held on by loader processes that outlive a crash.
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"{self.path} is being written by another process: wait for it, or stop it"
            ) from None

    def _write_config(self) -> None:
        text = yaml.safe_dump(self._config, sort_keys=False)
        storage.write(self.path / CONFIG, text.encode())

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        storage.write(path, text.encode())

    def _joined_steps(self) -> dict[str, np.ndarray]:
        """All step arrays so far, each as wide as its widest part."""
        arrays = {name: _stacked([part[name] for part in self._steps]) for name in _STEP_ARRAYS}
        self._steps = [arrays]
        return arrays

    def _write_steps(self) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **self._joined_steps())
        storage.write(self.path / STEPS, buffer.getbuffer())


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array under the other; where there were fewer workers, 0 samples and NaN seconds."""
    width = max(part.shape[-1] for part in parts)
    filler = np.nan if parts[0].dtype.kind == "f" else 0
    if parts[0].ndim == 2:
        parts = [
            np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=filler)
            for part in parts
        ]
    return np.concatenate(parts)


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
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
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
    clean = plan.clean_steps(plan.joined())
    sizes = plan.batch_sizes[clean[0], : partitioner.workers]
    busy = phases["busy"][clean]
    # Unknown where the number of workers has changed since the last rebalance.
    typical_busy = np.where(np.isnan(typical_busy), busy.mean(0), typical_busy)
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
        "busy": _spread(busy) | {"typical": _listed(typical_busy)},
        "wait": _spread(phases["wait"][clean]),
        "phases": {
            name: _listed(seconds[clean].mean(0))
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


def _spread(seconds: np.ndarray) -> dict[str, list[float | None]]:
    """Mean, median and 5th and 95th percentile over steps of [steps, n]."""
    p5, median, p95 = np.percentile(seconds, (5, 50, 95), axis=0)
    return {
        "mean": _listed(seconds.mean(0)),
        "median": _listed(median),
        "p5": _listed(p5),
        "p95": _listed(p95),
    }


def _listed(seconds: np.ndarray) -> list[float | None]:
    """As a list, with None for a worker that saw none of these steps."""
    return [None if np.isnan(value) else value for value in seconds.tolist()]


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
    for number, record in enumerate(epochs):
        if record["epoch"] != number:
            raise UserError(
                f"{path / EPOCHS} line {number + 1} is of epoch {printable(record['epoch'])}, not "
                f"{number}: it must hold each epoch once and in order"
            )
    config, facts = read_mapping(path / CONFIG), _read_json(path / PROVENANCE)
    from_mapping(config, where=printable(str(path / CONFIG)))
    return Run(path, config, facts, epochs, _read_steps(path))


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
    workers = _read_json(file).get("world_size")
    if not _is_count(workers):
        raise UserError(f"{file} has no number of workers: put it back, or remove the folder")
    return workers


def _last_workers(path: Path) -> int | None:
    """The number of workers of a run's last start; None where it has not got so far."""
    file = path / PROVENANCE
    if not file.exists():
        return None
    facts = _read_json(file)
    return [facts, *facts.get("continued", [])][-1].get("world_size")


def batch_sizes_by_epoch(path: Path | str) -> list[list[list[int]]]:
    """The batch sizes of a run's every step: by epoch, step and worker. Raises UserError."""
    if not (Path(path) / EPOCHS).exists():
        raise UserError(f"partition.replay: {path} is no run's folder: it has no {EPOCHS}")
    steps = _read_steps(Path(path))
    epochs = range(int(steps["epoch"][-1]) + 1 if len(steps["epoch"]) else 0)
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
    lines = read_text(file, JSON_BYTES).split("\n")
    # What stands after the last line end was being written when the run was cut off.
    records = [_object(line, f"{file} line {n}") for n, line in enumerate(lines[:-1], 1)]
    for number, record in enumerate(records, 1):
        if not _is_count(record.get("epoch"), least=0):
            raise UserError(f"{file} line {number} has no epoch number")
    return records


def _read_steps(path: Path) -> dict[str, np.ndarray]:
    file = path / STEPS
    if not file.is_file():  # reading a pipe might never end
        raise UserError(f"{file} cannot be read: there is no such file")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            refuse_compressed(arrays.zip)
            steps = {name: arrays[name] for name in _STEP_ARRAYS}
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise UserError(f"{file} cannot be read: {_one_line(error)}") from error
    except Exception as error:  # zipfile and zlib raise types of their own for damaged files
        raise UserError(f"{file} is damaged: {_one_line(error)}") from error
    _check_steps(steps, file)
    return steps


def _check_steps(steps: Mapping[str, np.ndarray], file: Path) -> None:
    """Raises UserError unless the arrays are numbers of one length and epochs come in order."""
    epoch = steps["epoch"]
    for name, array in steps.items():
        number = "iu" if np.issubdtype(_STEP_ARRAYS[name], np.integer) else "f"
        dimensions = 1 if name in ("epoch", "step") else 2
        if array.dtype.kind not in number or array.ndim != dimensions:
            raise UserError(f"{file} is damaged: '{name}' is {array.dtype} {list(array.shape)}")
        if len(array) != len(epoch):
            raise UserError(f"{file} is damaged: '{name}' has {len(array)} of {len(epoch)} steps")
    if len(epoch) and (epoch[0] != 0 or not np.isin(np.diff(epoch.astype(float)), (0, 1)).all()):
        raise UserError(f"{file} is damaged: its epochs are not in order from 0")


def _read_json(path: Path) -> dict[str, Any]:
    return _object(read_text(path, JSON_BYTES), str(path))


def _object(text: str, where: str) -> dict[str, Any]:
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object")
    return value


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()) or type(error).__name__)
