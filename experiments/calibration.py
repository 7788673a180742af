"""Delays given as fractions: measured once per workload and machine, kept beside the runs.

All runs of an experiment then sleep for the same seconds, also those that a later sitting makes.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import storage
from benchmarks.common import machine
from configs.errors import UserError
from configs.files import read_json
from configs.schema import Config, StragglerRule, to_mapping
from data.sources import outline
from experiments.grid import PlannedRun, set_keys
from experiments.launcher import Launcher
from plots.records import warm_steps
from reader import PREEMPTED, Run, read_run
from stragglers import must_measure

FILE = "calibration.json"
# Undelayed steps that are measured; the median bears a disturbed machine for under half of them.
STEPS = 100

_NUMBERS = ("exchange_seconds", "evaluation_seconds", "start_seconds", "train_samples")

# What a step's time depends on, besides the machine and the number of workers.
_WORKLOAD = (
    "model.name", "data.name", "data.image_size", "data.placement", "batch_size", "precision",
    "memory_format", "exchange", "backend", "device", "threads", "accumulate", "data.crop",
)  # fmt: skip


class CalibrationStopped(Exception):
    """The workers were asked to stop while they measured."""


class Calibrations:
    """The measurements in an output folder's calibration.json, one per workload."""

    def __init__(self, output: Path) -> None:
        self.path = output / FILE
        self.entries: list[dict[str, Any]] = []
        self.read()

    def read(self) -> None:
        """Takes in what the file holds by now."""
        self.entries = _read(self.path) if self.path.exists() else []

    def find(self, config: Config, workers: int | None) -> dict[str, Any] | None:
        """The measurement of a config's workload on this number of workers, or None."""
        own = workload(config)
        for entry in self.entries:
            if workers in (None, len(entry["busy_seconds"])) and entry["workload"] == own:
                return entry
        return None

    def elsewhere(self) -> bool:
        """Whether some of it was measured on another machine than this one."""
        return any(entry.get("machine") != machine() for entry in self.entries)

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.entries, indent=2, ensure_ascii=False) + "\n"
        storage.write(self.path, text.encode())

    def applied(
        self, mapping: Mapping[str, Any], config: Config, workers: int | None
    ) -> dict[str, Any]:
        """A config file's mapping with the measured times in its rules, where there are any yet."""
        entry = self.find(config, workers)
        if entry is None or not must_measure(config.stragglers):
            return dict(mapping)
        busy = entry["busy_seconds"]
        for rule in config.stragglers:
            if rule.fraction is not None and max(rule.ranks) >= len(busy):
                raise UserError(
                    f"{self.path} knows {len(busy)} workers, but a rule delays rank "
                    f"{max(rule.ranks)}: start {len(busy)}, or choose another --output"
                )
        rules = [
            _with_times(rule, given, busy)
            for rule, given in zip(config.stragglers, mapping["stragglers"])
        ]
        return {**mapping, "stragglers": rules}


def workload(config: Config) -> dict[str, Any]:
    """The keys of a config on which the time of an undelayed step depends."""
    nested = to_mapping(config)
    found = {}
    for key in _WORKLOAD:
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found


def measure(planned: PlannedRun, launcher: Launcher, output: Path, log: Path) -> dict[str, Any]:
    """Trains for a moment without delays at an equal split; the entry for calibration.json.

    planned: the run whose config file is taken, without its key=value arguments. Raises UserError
    where the measurement fails or says too little, CalibrationStopped where it was asked to stop.
    """
    config = planned.base_config
    samples = outline(config.data, config.seed, lambda prepare: prepare()).train_samples
    begin = time.monotonic()
    run = _undelayed_run(planned.mapping, config, samples, launcher, output, log)
    wall_seconds = time.monotonic() - begin
    return {
        "workload": workload(config),
        **_times(run, wall_seconds),
        "train_samples": samples,
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **{key: run.provenance[key] for key in ("git_commit", "git_dirty", "versions")},
        **{key: run.provenance[key] for key in ("devices", "backend", "threads", "world_size")},
    }


def _undelayed_run(
    mapping: Mapping[str, Any],
    config: Config,
    samples: int,
    launcher: Launcher,
    output: Path,
    log: Path,
) -> Run:
    """The records of at least STEPS steps; samples: of the config's training data."""
    used = min(STEPS * config.batch_size, samples)
    equal = {"partition.policy": "equal", "partition.shares": None, "partition.replay": None}
    short = set_keys(
        mapping,
        {
            "name": "calibration", "stragglers": [], "algorithm": "sync-sgd", "seed": 0, **equal,
            "schedule": {"kind": "constant"},
            "epochs": math.ceil(STEPS * config.batch_size / used), "data.subset": used,
        },
    )  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".calibration-", dir=output))
    try:
        file = scratch / "config.yaml"
        file.write_text(yaml.safe_dump(short, sort_keys=False))
        code = launcher.run(["--config", str(file), "--output", str(scratch)], log)
        folder = scratch / "calibration" / "sync-sgd" / "seed-0"
        if (folder / PREEMPTED).exists():  # then torchrun's exit code is not 0 either
            raise CalibrationStopped
        if code != 0:
            raise UserError(f"calibration failed with exit code {code}: see {log}")
        return read_run(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _times(run: Run, wall_seconds: float) -> dict[str, Any]:
    """The measured times in seconds; wall_seconds: from the run's launch to its end.

    busy_seconds: median per step of each worker, [n]; exchange_seconds: median of what a step takes
    beyond its slowest worker; start_seconds: from launch to the first epoch.
    """
    busy, wait = warm_steps([run], "busy"), warm_steps([run], "wait")
    if len(busy) == 0:
        raise UserError(
            "calibration: epochs of so few steps hold none behind the warm-up: lower batch_size, "
            "or give the delays in seconds"
        )
    last = run.epochs[-1]
    return {
        "busy_seconds": np.median(busy, axis=0).tolist(),
        "busy_seconds_p5": np.percentile(busy, 5, axis=0).tolist(),
        "busy_seconds_p95": np.percentile(busy, 95, axis=0).tolist(),
        "exchange_seconds": float(np.median((busy + wait).max(1) - busy.max(1))),
        "evaluation_seconds": (last["total_seconds"] - last["train_seconds"]) / len(run.epochs),
        "start_seconds": max(0.0, wall_seconds - last["total_seconds"]),
        "steps": len(busy),
    }


def _with_times(
    rule: StragglerRule, given: Mapping[str, Any], busy: list[float]
) -> Mapping[str, Any]:
    if rule.fraction is None or rule.busy_seconds is not None:
        return given
    return {**given, "busy_seconds": [busy[rank] for rank in rule.ranks]}


def _read(path: Path) -> list[dict[str, Any]]:
    entries = read_json(path)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise UserError(f"{path} is no list of calibrations: put it back, or use another --output")
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("workload"), dict):
        return False
    busy = entry.get("busy_seconds")
    others = [entry.get(key) for key in _NUMBERS]
    return (
        isinstance(busy, list)
        and bool(busy)
        and all(isinstance(number, (int, float)) for number in (*busy, *others))
        and all(0 < seconds < math.inf for seconds in busy)
    )
