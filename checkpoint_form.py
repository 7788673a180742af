"""The form of a checkpoint's contents: checked before any of it is used, as it may be anyone's.

What only the model, the optimizer and the plan can tell is left to those who load them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

import record_form
from balancer import StepTimes
from configs.errors import UserError
from configs.files import MOST_VALUES, parse_json
from configs.schema import Config, from_mapping
from data import identity
from record_form import is_count

FORMAT = 3
_KINDS = {
    "format": int, "config": dict, "config_hash": str, "world_size": int, "data": dict,
    "next_epoch": int, "epoch_began": float, "trained": dict, "model": dict, "optimizer": dict,
    "balancer": dict, "calibrated": list, "clocks": dict, "workers": list, "records": str,
    "steps": dict,
}  # fmt: skip
# A file may stand for many more values than it has bytes: lists of one list, and so on.
_LEAST_LIMIT, _TIMES_BYTES = 10**6, 10
_LONGEST = 1e10  # seconds: three hundred years


class FormError(Exception):
    """Names the key that is wrong."""


def check(state: Any, size: int) -> None:
    """Raises FormError unless `state`, from a file of `size` bytes, is what a trainer saves."""
    if not isinstance(state, dict):
        raise FormError("no mapping")
    _refuse_unfolding(state, size)
    for key, kind in _KINDS.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            raise FormError(f"{key} is missing or of another type")
    if state["format"] != FORMAT:
        raise FormError(f"format {state['format']}, not {FORMAT}")
    config = _config(state)
    _require(state["world_size"] >= 1, "world_size")
    _require(0 <= state["next_epoch"] <= config.epochs, "next_epoch")
    _require(set(state["clocks"]) == {"train", "total"}, "clocks")
    _require(all(_is_seconds(value) for value in state["clocks"].values()), "clocks")
    _require(0 <= state["epoch_began"] <= state["clocks"]["train"], "epoch_began")
    _require(all(map(_is_delay, state["calibrated"])), "calibrated")
    _require(identity.is_one(state["data"]), "data")
    _check_balancer(state, config.epochs)
    _check_records(state)
    _check_trained(state)
    _check_workers(state)


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 over a plain configuration, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _require(right: bool, key: str) -> None:
    if not right:
        raise FormError(f"{key} is of another form")


def _config(state: Mapping[str, Any]) -> Config:
    try:
        if _count(state["config"], {}) > MOST_VALUES:
            raise FormError("config has too many values")
        if state["config_hash"] != config_hash(state["config"]):
            raise FormError("config_hash does not belong to its config")
        return from_mapping(state["config"], where="config")
    except (TypeError, ValueError, UserError) as error:  # not plain, or no config
        raise FormError("config is none that a run could have") from error


def _check_balancer(state: Mapping[str, Any], epochs: int) -> None:
    """Epoch and step fit the rest; what else it holds is for the balancer to tell."""
    balancer, next_epoch = state["balancer"], state["next_epoch"]
    step, partition = balancer.get("next_step"), balancer.get("partition")
    _require(is_count(step, 0) and isinstance(partition, dict), "balancer")
    shares = partition.get("shares")
    _require(isinstance(shares, list) and len(shares) == state["world_size"], "balancer")
    _require(is_count(balancer.get("left_out"), 0), "balancer")
    inside = step > 0 or bool(state["trained"])
    _require(not inside or next_epoch < epochs, "next_epoch")
    epoch = next_epoch if inside else max(0, next_epoch - 1)
    _require(balancer.get("epoch") == epoch, "balancer")


def _check_records(state: Mapping[str, Any]) -> None:
    lines = state["records"].splitlines()
    _require(len(lines) == state["next_epoch"], "records")
    for number, line in enumerate(lines):
        _check_record(_parsed(line), number, "records")
    steps = state["steps"]
    if lines:
        _check_steps(steps, range(len(lines)), "steps")
    else:
        _require(not steps, "steps")


def _parsed(line: str) -> Any:
    try:
        return parse_json(line, "records")
    except UserError as error:
        raise FormError("records is of another form") from error


def _check_record(record: Any, epoch: int, key: str) -> None:
    _require(isinstance(record, dict) and record.get("epoch") == epoch, key)
    try:
        record_form.check(record, key)
    except UserError as error:
        raise FormError(str(error)) from error


def _check_steps(steps: Any, epochs: Sequence[int], key: str) -> None:
    """Step arrays of just these epochs, as tensors by name."""
    _require(isinstance(steps, dict) and set(steps) == set(record_form.STEP_ARRAYS), key)
    kinds = (torch.int32, torch.int64, torch.float32, torch.float64)
    _require(all(_is_tensor(steps[name]) and steps[name].dtype in kinds for name in steps), key)
    arrays = {name: tensor.cpu().numpy() for name, tensor in steps.items()}
    fault = record_form.step_fault(arrays, whole=False)
    _require(fault is None and np.array_equal(np.unique(arrays["epoch"]), epochs), key)


def _check_trained(state: Mapping[str, Any]) -> None:
    """An epoch's record and step arrays but for what the evaluation adds."""
    trained = state["trained"]
    if not trained:
        return
    record, epoch = trained.get("record"), state["next_epoch"]
    _require(set(trained) == {"record", "steps"} and isinstance(record, dict), "trained")
    _check_record(record_form.with_test_fields(record), epoch, "trained")
    _check_steps(trained["steps"], [epoch], "trained")


def _check_workers(state: Mapping[str, Any]) -> None:
    """Inside an epoch a part for each worker, otherwise none."""
    parts, inside = state["workers"], state["balancer"]["next_step"] > 0
    _require(len(parts) == (state["world_size"] if inside else 0), "workers")
    for part in parts:
        _require(isinstance(part, dict), "workers")
        kinds = {"buffers": dict, "random": dict, "metrics": dict, "times": dict}
        _require(all(isinstance(part.get(key), kind) for key, kind in kinds.items()), "workers")
        _require(all(map(_is_tensor, part["buffers"].values())), "workers")
        _require(_is_tensor(part["random"].get("cpu")), "workers")
        _require(all(_is_tensor(v, torch.uint8) for v in part["random"].values()), "workers")
        metrics, times = part["metrics"], part["times"]
        _require(_is_tensor(metrics.get("loss"), torch.float64, 0), "workers")
        _require(bool(torch.isfinite(metrics["loss"])), "workers")
        _require(_is_tensor(metrics.get("hits"), torch.int64, 1), "workers")
        _require(is_count(metrics.get("samples"), 0), "workers")
        _require(metrics["samples"] < 2**53, "workers")
        _require(set(times) == {field.name for field in fields(StepTimes)}, "workers")
        done = state["balancer"]["next_step"]
        _require(all(_are_times(seconds, done) for seconds in times.values()), "workers")


def _is_tensor(
    value: object, dtype: torch.dtype | None = None, dimensions: int | None = None
) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and dtype in (None, value.dtype)
        and dimensions in (None, value.ndim)
    )


def _are_times(value: object, count: int) -> bool:
    """So many numbers; NaN for steps that a worker did not see."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, float) and not abs(one) >= _LONGEST for one in value)
    )


def _is_seconds(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < _LONGEST


def _is_delay(value: object) -> bool:
    return (
        isinstance(value, dict)
        and is_count(value.get("rule"), 0)
        and is_count(value.get("rank"), 0)
        and _is_seconds(value.get("seconds"))
    )


def _refuse_unfolding(state: Mapping[str, Any], size: int) -> None:
    if _count(state, {}) > max(_LEAST_LIMIT, _TIMES_BYTES * size):
        raise FormError("it stands for more values than fit into its size")


def _count(value: Any, known: dict[int, int | None]) -> int:
    """How many values (of a text, characters) it stands for, each as often as it is named.

    known: of the containers seen before, by identity; None for those around this one. Raises
    FormError for one that holds itself, for another kind of value, and for a tensor whose elements
    are not all in the file.
    """
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, (dict, list, tuple)):
        if id(value) not in known:
            known[id(value)] = None
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known[id(value)] = 1 + sum(_count(part, known) for part in parts)
        if (count := known[id(value)]) is None:
            raise FormError("a part of it holds itself")
        return count
    if isinstance(value, torch.Tensor):
        _check_tensor(value)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise FormError(f"a value of type {type(value).__name__}")
    return 1


def _check_tensor(tensor: torch.Tensor) -> None:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise FormError("a tensor that is not plain")
