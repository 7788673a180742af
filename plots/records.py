"""What is read out of runs' records: the runs themselves, entries, columns over epochs, steps.

A config or provenance that lacks what is asked for raises UserError with the file's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import reader
from configs.errors import UserError
from reader import CONFIG, DIVERGED, PROVENANCE, STEPS, Run

Kind = TypeVar("Kind")

_WARM_UP_STEPS = 3


def read_runs(paths: Iterable[Path | str], diverged: bool = False) -> tuple[list[Run], list[str]]:
    """All runs beneath `paths`, but those whose number of workers changed: a note on each of them.

    diverged: also those that diverged, on which there is a note otherwise; such a run may have no
    epoch. Raises UserError where no run is left, or a record is damaged.
    """
    runs, notes = [], []
    for path in reader.find_runs(paths):
        run = reader.read_run(path)
        fault = _change_of_workers(run)
        if fault is None and not diverged and (epoch := diverged_in(run)) is not None:
            fault = f"it diverged in epoch {epoch} (from 0)"
        if fault is None:
            runs.append(run)
        else:
            notes.append(f"{path}: left out, {fault}")
    if not runs:
        raise UserError(f"no run that can be shown: {'; '.join(notes)}")
    return runs, notes


def _change_of_workers(run: Run) -> str | None:
    """How the number of workers changed between epochs; None if it did not."""
    numbers = [workers(run), *(len(epoch["shares"]) for epoch in run.epochs)]
    if len(set(numbers)) == 1:
        return None
    seen = [str(n) for n, before in zip(numbers, [None, *numbers]) if n != before]
    return f"its number of workers changed: {', then '.join(seen)}"


def is_finished(run: Run) -> bool:
    """Whether all epochs that the config asks for are recorded."""
    return len(run.epochs) >= setting(run, "epochs")


def diverged_in(run: Run) -> int | None:
    """The epoch (from 0) that a number that is not finite ended the run in; None if none did."""
    if not reader.has_diverged(run.path):
        return None
    file = run.path / DIVERGED
    epoch = _entry(reader.read_object(file), ("epoch",), file)
    if not isinstance(epoch, int) or isinstance(epoch, bool):
        raise UserError(f"{file}: 'epoch' is no whole number: damaged, run this seed again")
    return epoch


def setting(run: Run, *keys: str) -> Any:
    """The config's value at nested `keys`; UserError where the file lacks it."""
    return _entry(run.config, keys, run.path / CONFIG)


def provenance(run: Run, key: str, kind: type[Kind]) -> Kind:
    """The provenance's value of `key`; UserError where the file has none of this kind."""
    value = _entry(run.provenance, (key,), run.path / PROVENANCE)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = {int: "whole number", dict: "mapping"}.get(kind, kind.__name__)
        raise UserError(f"{run.path / PROVENANCE}: '{key}' is no {what}: run this again")
    return value


def workers(run: Run) -> int:
    """The number of workers."""
    return provenance(run, "world_size", int)


def calibrated_delays(run: Run) -> list[dict[str, Any]]:
    """The provenance's [{rule, rank, seconds}] of delays that the run has measured itself."""
    found = provenance(run, "calibrated_delays", list)
    kinds = {"rule": int, "rank": int, "seconds": float}
    for entry in found:
        if not isinstance(entry, dict) or any(
            not isinstance(entry.get(key), kind) for key, kind in kinds.items()
        ):
            file = run.path / PROVENANCE
            raise UserError(f"{file}: 'calibrated_delays' holds no delays: run this again")
    return found


def column(run: Run, *keys: str) -> np.ndarray:
    """[E] floats of one entry of each epoch record, nested `keys`; null becomes NaN."""
    return np.array([_nested(record, keys) for record in run.epochs], dtype=float)


def per_worker(run: Run, *keys: str) -> np.ndarray:
    """[E, n] floats of an entry that has a value of each worker; null becomes NaN.

    Raises UserError where the number of workers has changed.
    """
    rows = [_nested(record, keys) for record in run.epochs]
    if fault := _change_of_workers(run):
        raise UserError(f"{run.path}: {fault}")
    return np.array(rows, dtype=float)


def _nested(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        record = record[key]
    return record


def _entry(mapping: Any, keys: Sequence[str], where: Path | str) -> Any:
    for key in keys:
        if not isinstance(mapping, dict) or key not in mapping:
            raise UserError(f"{where} has no '{'.'.join(keys)}': damaged, run this seed again")
        mapping = mapping[key]
    return mapping


def warm_steps(runs: Iterable[Run], name: str) -> np.ndarray:
    """[S, n] float64 seconds: steps.npz's array `name` of all runs, without warm-up steps.

    The first steps of an epoch hold kernel selection and cold caches, not the method.
    """
    parts = []
    for run in runs:
        values = run.steps[name]
        if values.shape != (len(run.steps["epoch"]), workers(run)):
            raise UserError(f"{run.path / STEPS}: '{name}' is not [steps, workers]: run this again")
        parts.append(values[is_warm(run)].astype(float))
    return np.concatenate(parts)


def is_warm(run: Run) -> np.ndarray:
    """[S] of each step whether it is behind its epoch's warm-up."""
    epoch = run.steps["epoch"]
    starts = np.flatnonzero(np.diff(epoch, prepend=-1))
    place = np.arange(len(epoch)) - np.repeat(starts, np.diff([*starts, len(epoch)]))
    return place >= _WARM_UP_STEPS


def last_half(values: np.ndarray) -> np.ndarray:
    """The last half (rounded up) of `values` [E, ...]: the epochs in which shares have settled."""
    return values[len(values) // 2 :]
