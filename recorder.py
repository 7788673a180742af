"""A run's folder, written: resolved config, provenance, records, checkpoints. reader.py reads it.

Records are JSON lines and NPZ without objects, configs are YAML, checkpoints (checkpoint.py) load
with `weights_only=True`: nothing is read back with pickle. A crash or a full disk leaves a file's
old content or the new, never half (storage.py).
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
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
import checkpoint_form
import storage
from balancer import EpochPlan
from configs.errors import UserError
from configs.files import read_mapping
from configs.schema import Config, differences, from_mapping, to_mapping
from partitioner import Partitioner
from reader import (
    CONFIG,
    DIVERGED,
    EPOCHS,
    FINAL,
    LOCK,
    PREEMPTED,
    PROVENANCE,
    STEPS,
    all_starts,
    count_epochs,
    is_finished,
    last_workers,
    parse_object,
)
from record_form import STEP_ARRAYS

# What a start finds: nothing that it uses, a run to go on with, a run that it is to delete, or one
# that an earlier start of the same job has finished.
NEW, CONTINUES, REPLACES, FINISHED = "new", "continues", "replaces", "finished"

# Keys that may differ between a run and its continuation: they say where and how, not what.
MAY_DIFFER = frozenset(
    {"output", "data.root", "data.cache", "data.placement", "data.memory_limit_gib",
     "data.loader_workers", "backend", "device", "threads", "timeout", "checkpoint.every",
     "checkpoint.keep"}
)  # fmt: skip
# Further ones where the number of workers is another: they name single workers.
OF_WORKERS = ("partition.shares", "partition.min_batch", "partition.max_batch", "stragglers")


@dataclass(frozen=True)
class Job:
    """What tells one launcher's job, whose workers may be started several times, from another.

    name: torchrun's --rdzv-id; None where it has none; launchers: the processes that have started
    the workers, on each node, by names that no two have.
    """

    name: str | None = None
    launchers: tuple[str, ...] = ()


class RunFolder:
    """Writes one run, on rank 0 only. Raises UserError for another run there, and for a full disk.

    path: the folder; all ranks may ask for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batch_size = 0
        self.found: bytes | None = None
        self._damaged: list[Path] = []
        self._lines: list[str] = []
        self._steps: list[dict[str, np.ndarray]] = []

    def look(
        self, config: Config, workers: int, resume: str, overwrite: bool, job: Job = Job()
    ) -> str:
        """What the folder holds for such a start: NEW, CONTINUES, REPLACES or FINISHED.

        resume: `auto` continues an unfinished run, `never` refuses to touch it; overwrite: what the
        folder holds is to be deleted. Both are for the first start of a job that begins a run here;
        its further ones go on. Changes nothing in the folder. Afterwards `batch_size` is the global
        batch to train with: a run of so many samples per worker goes on with its first start's.
        """
        if self._begun_by(job):
            resume, overwrite = "auto", False
            if (self.path / FINAL).exists():
                return FINISHED
        replaces = overwrite and self.path.exists()
        if replaces and not (self.path / CONFIG).exists() and self._holds_more_than_traces():
            raise UserError(f"{self.path} holds no run: --overwrite does not delete it")
        earlier = None if replaces else self._unfinished(resume)
        if earlier is not None:
            if config.batch_per_worker == earlier.batch_per_worker is not None:
                config = dataclasses.replace(config, batch_size=earlier.batch_size)
            self._compare(earlier, config, last_workers(self.path) in (None, workers))
        self._config, self.batch_size = to_mapping(config), config.batch_size
        return REPLACES if replaces else NEW if earlier is None else CONTINUES

    def open(
        self, config: Config, workers: int, resume: str, overwrite: bool, job: Job = Job()
    ) -> str:
        """Makes the folder ready, and says what it holds; as `look`.

        What is to be replaced `replace` deletes. The configuration of a run that goes on `restore`
        writes: where a start fails, that of the checkpoints stays.
        """
        try:
            found = self.look(config, workers, resume, overwrite, job)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if found == FINISHED:  # its last worker may have been killed before it did this
                self._clear()
                return found
        except OSError as error:
            place = error.filename or self.path
            raise UserError(f"output: cannot use {place}: {error.strerror}") from error
        storage.drop_temporary(self.path)
        if found == NEW:
            storage.remove(self.path / PROVENANCE)
            self._write_config()
        return found

    def show(self) -> str:
        """Puts a file into the folder, to be looked for by other nodes; its name."""
        name = f".{uuid.uuid4().hex}.tmp"
        storage.write(self.path / name, b"")
        return name

    def sees(self, name: str) -> bool:
        """Whether what `show` has put there is there on this node, too."""
        return (self.path / name).exists()

    def hide(self, name: str) -> None:
        """Deletes it."""
        storage.remove(self.path / name)

    def replace(self) -> None:
        """Deletes what --overwrite replaces: only now, as the new run has been found to start."""
        # The configuration is replaced: without it the folder would be taken for no run's.
        for file in self.path.iterdir():
            if file.name not in (LOCK, CONFIG):
                folder = file.is_dir() and not file.is_symlink()
                shutil.rmtree(file) if folder else file.unlink()
        self._write_config()

    def find_checkpoint(self, config: Config, workers: int) -> list[str]:
        """Reads the newest whole checkpoint into `found`; a line for each one passed over."""

        def check(state: Mapping[str, Any]) -> None:
            earlier = from_mapping(state["config"], where=str(self.path / checkpoint.NEWEST))
            self._compare(earlier, config, state["world_size"] == workers)

        self.found, damaged = checkpoint.newest(self.path, check)
        self._damaged = list(damaged)
        return [f"{path} is damaged ({fault}): passed over" for path, fault in damaged.items()]

    def restore(self, state: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Sets the records to those of a checkpoint, or to none; returns them. The run begins."""
        text = "" if state is None else state["records"]
        self._lines = text.splitlines()
        where = f"{self.path}: a checkpoint's records"
        records = [parse_object(line, where) for line in self._lines]
        self._lock_file.write("not finished\n")
        self._lock_file.flush()
        for path in self._damaged:
            checkpoint.set_aside(path)
        if state is not None:
            self._write_config()
        storage.write(self.path / EPOCHS, text.encode())
        for name in (STEPS, PREEMPTED, DIVERGED):
            storage.remove(self.path / name)
        if state is not None and state["steps"]:
            self._steps = [{name: tensor.cpu().numpy() for name, tensor in state["steps"].items()}]
            self._write_steps()
        return records

    def write_provenance(self, facts: Mapping[str, Any]) -> None:
        """Writes provenance.json; a continued run keeps the first start's facts and adds these."""
        path = self.path / PROVENANCE
        if path.exists():
            first, *later = all_starts(self.path)
            facts = {**first, "continued": [*later, facts]}
        self._write_json(path, facts)

    def append_epoch(self, record: Mapping[str, Any], steps: Mapping[str, np.ndarray]) -> None:
        """Adds a line to epochs.jsonl and this epoch's arrays, [steps, …] each, to steps.npz."""
        line = json.dumps(record, allow_nan=False)
        storage.append(self.path / EPOCHS, (line + "\n").encode())
        self._lines.append(line)
        self._steps.append({k: np.asarray(steps[k], kind) for k, kind in STEP_ARRAYS.items()})
        self._write_steps()

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Writes the trainer's state with the config and the records so far."""
        steps = self._joined_steps() if self._steps else {}
        whole = {
            "format": checkpoint_form.FORMAT,
            "config": self._config,
            "config_hash": checkpoint_form.config_hash(self._config),
            "records": "".join(line + "\n" for line in self._lines),
            "steps": {name: torch.from_numpy(array) for name, array in steps.items()},
            **state,
        }
        checkpoint.save(self.path, whole, self._config["checkpoint"]["keep"])

    def leave(self) -> None:
        """Gives a folder back in which nothing was begun."""
        storage.remove(self.path / LOCK)

    def mark_preempted(self, facts: Mapping[str, Any]) -> None:
        """Leaves the file `preempted`: the run was asked to stop, and the next start goes on."""
        self._write_json(self.path / PREEMPTED, facts)

    def mark_diverged(self, facts: Mapping[str, Any]) -> None:
        """Leaves the file `diverged`: the run has ended, with these facts (epoch, message)."""
        self._write_json(self.path / DIVERGED, facts)

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes final.pt, a plain state_dict, and drops the checkpoints: the run is done."""
        storage.write(self.path / FINAL, checkpoint.packed(weights))
        self._clear()

    def _clear(self) -> None:
        """Deletes what only an unfinished run needs."""
        checkpoint.drop(self.path)
        storage.remove(self.path / LOCK)

    def _unfinished(self, resume: str) -> Config | None:
        """The configuration of the run to go on with; None where there is no checkpoint.

        Without one nothing of an earlier start is used.
        """
        if is_finished(self.path):
            raise UserError(f"{self.path} holds a finished run: --overwrite to do it again")
        begun = checkpoint.exists(self.path)
        if resume == "never" and (begun or count_epochs(self.path)):
            raise UserError(
                f"{self.path} holds an unfinished run: --resume auto continues it, "
                "--overwrite starts it again"
            )
        if not begun:
            return None
        return from_mapping(read_mapping(self.path / CONFIG), where=str(self.path / CONFIG))

    def _begun_by(self, job: Job) -> bool:
        """Whether the folder's run was begun, or gone on with, by an earlier start of this job.

        By the launcher's name for the job alone it must have begun it, and not finished it: else
        the same command was given again, and is to be taken at its word.
        """
        try:
            starts = all_starts(self.path)
        except UserError:  # damaged: what --overwrite is for
            return False
        if any(launcher in job.launchers for start in starts for launcher in _launchers(start)):
            return True
        named = bool(starts) and starts[0].get("job") == job.name is not None
        return named and not (self.path / FINAL).exists()

    def _holds_more_than_traces(self) -> bool:
        """Whether it is more than what is left of a start that was killed as it began."""
        files = self.path.iterdir()
        return not all(file.match(LOCK) or file.match(storage.TEMPORARY) for file in files)

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
        held = f"{self.path} is being written by another process: wait for it, or stop it"
        self._lock_file = storage.lock(self.path / LOCK, held)

    def _write_config(self) -> None:
        text = yaml.safe_dump(self._config, sort_keys=False)
        storage.write(self.path / CONFIG, text.encode())

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        storage.write(path, text.encode())

    def _joined_steps(self) -> dict[str, np.ndarray]:
        """All step arrays so far, each as wide as its widest part."""
        arrays = {name: _stacked([part[name] for part in self._steps]) for name in STEP_ARRAYS}
        self._steps = [arrays]
        return arrays

    def _write_steps(self) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **self._joined_steps())
        storage.write(self.path / STEPS, buffer.getbuffer())


def _launchers(start: Mapping[str, Any]) -> list[Any]:
    launchers = start.get("launchers")
    return launchers if isinstance(launchers, list) else []


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

    phases: seconds by name of record_form.PHASES, and `busy`, [steps, n] each; typical_busy: the
    busy seconds [n] that the last rebalance used; partitioner: after this epoch, for its time model
    and what follows from it.
    """
    clean = plan.clean_steps(plan.joined())
    sizes = plan.batch_sizes[clean[0], : partitioner.workers]
    busy = phases["busy"][clean]
    # Unknown where the number of workers has changed since the last rebalance.
    typical_busy = np.where(np.isnan(typical_busy), busy.mean(0), typical_busy)
    # Where no batch was full, times and T* would be of different batches; and there are no times
    # where workers came when only a batch was to come that is too small for them.
    told = sizes.sum() == partitioner.batch_size and bool(np.isfinite(typical_busy).all())
    best = partitioner.optimum() if told else None
    left_out = partitioner.left_out() if told else None
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
