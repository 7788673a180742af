"""Whole checkpoints that nobody trained for, for tests of what reads them."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import numpy as np
import torch
from fake_runs import fake_record
from training import short_config

import checkpoint_form
from configs.schema import from_mapping, resolve, to_mapping

STEPS = 2  # per epoch


def trainer_state(next_epoch: int, workers: int = 1) -> dict[str, Any]:
    """What a trainer gives to be saved at an epoch's end."""
    return {
        "world_size": workers,
        "data": {
            "train_samples": 10, "test_samples": 5, "classes": ["cat", "dog"], "labels": "ab",
            "files": "", "mean": [0.5] * 3, "std": [0.2] * 3,
        },
        "next_epoch": next_epoch,
        "epoch_began": 1.0,
        "trained": {},
        "model": {"weight": torch.arange(1000.0)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
        "balancer": {
            "epoch": max(0, next_epoch - 1), "next_step": 0, "segment": STEPS,
            "changes": [(0, [1] * workers)], "busy": [1.0] * workers, "left_out": 0,
            "partition": {"shares": [1 / workers] * workers},
        },
        "calibrated": [{"rule": 0, "rank": 0, "seconds": 0.5}],
        "clocks": {"train": 1.5, "total": 2.5},
        "workers": [],
    }  # fmt: skip


@cache
def config() -> dict[str, Any]:
    return to_mapping(resolve(from_mapping(short_config(epochs=9))))


def whole_state(next_epoch: int = 1, workers: int = 1, **changes: Any) -> dict[str, Any]:
    """A checkpoint's content at an epoch's end."""
    records = [fake_record(number, workers) for number in range(next_epoch)]
    return {
        "format": checkpoint_form.FORMAT,
        "config": config(),
        "config_hash": checkpoint_form.config_hash(config()),
        **trainer_state(next_epoch, workers),
        "records": "".join(json.dumps(record) + "\n" for record in records),
        "steps": fake_steps(range(next_epoch), workers) if next_epoch else {},
        **changes,
    }


def inside_state(next_epoch: int = 1, workers: int = 2) -> dict[str, Any]:
    """A checkpoint's content after the first step of an epoch."""
    state = whole_state(next_epoch, workers)
    names = ("data", "forward", "backward", "delay", "wait", "step", "busy")
    part = {
        "buffers": {"mean": torch.zeros(3)},
        "random": {"cpu": torch.zeros(8, dtype=torch.uint8)},
        "metrics": {
            "loss": torch.zeros((), dtype=torch.float64),
            "hits": torch.zeros(5, dtype=torch.int64),
            "samples": 4,
        },
        "times": {name: [0.5] for name in names},
    }
    balancer = {**state["balancer"], "epoch": next_epoch, "next_step": 1}
    return {**state, "balancer": balancer, "workers": [part] * workers}


def trained_state(next_epoch: int = 1, workers: int = 1) -> dict[str, Any]:
    """A checkpoint's content where an epoch lacks its evaluation alone."""
    state = whole_state(next_epoch, workers)
    record = {k: v for k, v in fake_record(next_epoch, workers).items() if "test" not in k}
    del record["total_seconds"]
    trained = {"record": record, "steps": fake_steps([next_epoch], workers)}
    balancer = {**state["balancer"], "epoch": next_epoch}
    return {**state, "balancer": balancer, "trained": trained}


def fake_steps(epochs: Any, workers: int) -> dict[str, torch.Tensor]:
    epochs = list(epochs)
    arrays = {
        "epoch": np.repeat(np.array(epochs, np.int32), STEPS),
        "step": np.tile(np.arange(STEPS, dtype=np.int32), len(epochs)),
        "batch_sizes": np.ones((STEPS * len(epochs), workers), np.int32),
        "busy": np.ones((STEPS * len(epochs), workers), np.float32),
        "wait": np.zeros((STEPS * len(epochs), workers), np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def saved(state: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(state, content, **options)
    return content.getvalue()
