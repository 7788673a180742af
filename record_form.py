"""The form of records, as README.md names their fields: checked, as they may be anyone's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from configs.errors import UserError

# The parts of a step, by their names in balancer.StepTimes.
PHASES = ("data", "forward", "backward", "delay", "wait", "step")
SPREAD = ("mean", "median", "p5", "p95")

# What steps.npz holds: [steps of all epochs, …] each.
STEP_ARRAYS = {
    "epoch": np.int32,
    "step": np.int32,
    "batch_sizes": np.int32,
    "busy": np.float32,
    "wait": np.float32,
}

# Says whether a value is right, given the number of workers.
_Test = Callable[[Any, int], bool]


def check(record: Mapping[str, Any], where: str) -> None:
    """Raises UserError, beginning with `where`, that names the first field of another form."""
    sizes = record.get("batch_sizes")
    if not isinstance(sizes, list) or not sizes:
        raise UserError(f"{where}: 'batch_sizes' is missing, or no list of numbers")
    for name, test in _FIELDS.items():
        if name not in record or not test(record[name], len(sizes)):
            raise UserError(f"{where}: '{name}' is missing, or of another form")


def with_test_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record that lacks its evaluation, filled up with values that are right."""
    missing = ("test_samples", "test_loss", "test_top1", "test_top5", "total_seconds")
    return {**dict.fromkeys(missing, 0), **record}


def step_fault(steps: Mapping[str, np.ndarray], whole: bool = True) -> str | None:
    """What is wrong with the arrays of a run's steps, if anything is.

    They must be numbers of one length, with epochs in order; whole: from epoch 0 on.
    """
    epoch = steps["epoch"]
    for name, array in steps.items():
        number = "iu" if np.issubdtype(STEP_ARRAYS[name], np.integer) else "f"
        dimensions = 1 if name in ("epoch", "step") else 2
        if array.dtype.kind not in number or array.ndim != dimensions:
            return f"'{name}' is {array.dtype} {list(array.shape)}"
        if len(array) != len(epoch):
            return f"'{name}' has {len(array)} of {len(epoch)} steps"
    if not len(epoch):
        return None
    if (whole and epoch[0] != 0) or not np.isin(np.diff(epoch.astype(float)), (0, 1)).all():
        return "its epochs are not in order from 0"
    return None


def is_count(value: object, least: int = 1) -> bool:
    """Whether it is a whole number, and large enough."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(value: Any, workers: int) -> bool:
    return is_count(value, least=0) and value < 2**63


def _number(value: Any, workers: int) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < 1e300


def _maybe(test: _Test) -> _Test:
    return lambda value, workers: value is None or test(value, workers)


def _per_worker(test: _Test) -> _Test:
    return (
        lambda value, workers: isinstance(value, list)
        and len(value) == workers
        and all(test(one, workers) for one in value)
    )


def _listed(test: _Test) -> _Test:
    return lambda value, workers: isinstance(value, list) and all(test(v, workers) for v in value)


def _mapping(**tests: _Test) -> _Test:
    return lambda value, workers: isinstance(value, dict) and all(
        name in value and test(value[name], workers) for name, test in tests.items()
    )


_counts, _numbers = _per_worker(_count), _per_worker(_number)
_seconds = _per_worker(_maybe(_number))  # None for a worker that saw none of the steps
_FIELDS: dict[str, _Test] = {
    **dict.fromkeys(
        ("epoch", "steps", "left_out", "train_samples", "test_samples", "allreduce_bytes"), _count
    ),
    **dict.fromkeys(
        ("learning_rate", "train_loss", "train_top1", "train_top5", "test_loss", "test_top1",
         "test_top5", "samples_per_second", "epoch_seconds", "train_seconds", "total_seconds"),
        _number,
    ),
    "batch_sizes": _counts,
    "shares": _numbers,
    "busy": _mapping(**dict.fromkeys((*SPREAD, "typical"), _seconds)),
    "wait": _mapping(**dict.fromkeys(SPREAD, _seconds)),
    "phases": _mapping(**dict.fromkeys(PHASES, _seconds)),
    "time_model": _maybe(_mapping(a=_numbers, d=_numbers)),
    "optimum": _maybe(_number),
    "optimum_continuous": _maybe(_number),
    "optimum_batch_sizes": _maybe(_counts),
    "imbalance": _maybe(_number),
    "better_without": _maybe(_mapping(ranks=_listed(_count), seconds=_number)),
    "changes": _listed(_mapping(step=_count, batch_sizes=_listed(_count))),
}  # fmt: skip
