"""Checkpoints from anyone are read or refused with the one line of a UserError; nothing else."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damaged, damages, json_scalars
from hypothesis import example, given, settings
from hypothesis import strategies as st

import checkpoint
from configs.errors import UserError

FEW = settings(max_examples=100, deadline=None)
STATE = {
    "format": checkpoint.FORMAT,
    "config": {"name": "x"},
    "config_hash": checkpoint.config_hash({"name": "x"}),
    "world_size": 2,
    "next_epoch": 2,
    "epoch_began": 1.0,
    "trained": {},
    "model": {"weight": torch.arange(12.0).view(3, 4), "bias": torch.zeros(3, dtype=torch.float64)},
    "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
    "balancer": {},
    "calibrated": [],
    "clocks": {"train": 1.5, "total": 2.5},
    "workers": [],
    "records": "",
    "steps": {},
}


def saved(state: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(state, content, **options)
    return content.getvalue()


def load(content: bytes) -> None:
    try:
        state = checkpoint.load(content, Path("folder/x.pt"), torch.device("cpu"))
    except UserError as error:
        assert str(error).isprintable()
        assert "folder/" in str(error)
    else:
        assert isinstance(state, dict)


def test_a_whole_checkpoint_is_read():
    state = checkpoint.load(saved(STATE), Path("folder/x.pt"), torch.device("cpu"))
    assert str(state) == str(STATE)


@given(st.binary(max_size=200))
@example(b"PK\3\4")
@example(b"\x80\x02.")
@FEW
def test_any_bytes_as_a_checkpoint(content):
    load(content)


@given(st.lists(damages, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_damaged_checkpoint(steps):
    content = saved(STATE)
    for step in steps:
        content = damaged(content, step)
    load(content)


@given(st.recursive(json_scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
@FEW
def test_a_checkpoint_of_another_kind(value):
    load(saved(value))
    load(saved({**STATE, "next_epoch": value}))
    load(saved({**STATE, "config": {"name": value}}))


def test_a_checkpoint_of_the_format_of_old_is_refused():
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(
            saved(STATE, _use_new_zipfile_serialization=False), Path("f"), torch.device("cpu")
        )


def test_a_compressed_checkpoint_is_not_unfolded():
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.zeros(2**20)}, plain)
    with zipfile.ZipFile(plain) as source:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
            for member in source.infolist():
                target.writestr(member.filename, source.read(member))
    assert len(packed.getvalue()) < len(plain.getvalue()) / 100
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(packed.getvalue(), Path("folder"), torch.device("cpu"))
