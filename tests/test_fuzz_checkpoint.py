"""Checkpoints from anyone are read or refused with the one line of a UserError; nothing else."""

from __future__ import annotations

import copy
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damaged, damages, json_scalars
from fake_checkpoints import fake_steps, inside_state, saved, trained_state, whole_state
from fake_runs import fake_record
from hypothesis import example, given, settings
from hypothesis import strategies as st

import checkpoint
from configs.errors import UserError
from record_form import STEP_ARRAYS

CPU = torch.device("cpu")
FEW = settings(max_examples=100, deadline=None)
STATE = whole_state()


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


# --- what is inside -------------------------------------------------------------------------------


EARLIER = {"record": fake_record(0), "steps": fake_steps([0], 1)}
KINDS = {"end": whole_state, "inside": inside_state, "trained": trained_state}


@pytest.mark.parametrize("next_epoch", [0, 1, 3])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_whole_checkpoint_of_each_kind_is_read(kind, next_epoch):
    content = saved(KINDS[kind](next_epoch))
    assert checkpoint.load(content, Path("x.pt"), CPU)["next_epoch"] == next_epoch


@pytest.mark.parametrize(
    "kind, changes, key",
    [
        ("end", {"next_epoch": 99}, "next_epoch"),
        ("end", {"next_epoch": 0}, "balancer|records"),
        ("end", {"next_epoch": True}, "next_epoch"),
        ("end", {"world_size": 0}, "world_size"),
        ("end", {"records": ""}, "records"),
        ("end", {"records": "{}\n"}, "records"),
        ("end", {"records": "[1]\n"}, "records"),
        ("end", {"records": "[" * 9999}, "records"),
        ("end", {"steps": {}}, "steps"),
        ("end", {"steps": {"epoch": torch.zeros(2)}}, "steps"),
        ("end", {"steps": dict.fromkeys(STEP_ARRAYS, 1)}, "steps"),
        ("end", {"steps": fake_steps([1], 1)}, "steps"),
        ("end", {"workers": [{}]}, "workers"),
        ("end", {"trained": {"record": {}}}, "balancer|trained"),
        ("end", {"data": {}}, "data"),
        ("end", {"clocks": {"train": 1.0}}, "clocks"),
        ("end", {"clocks": {"train": float("nan"), "total": 1.0}}, "clocks"),
        ("end", {"epoch_began": float("inf")}, "epoch_began"),
        ("end", {"epoch_began": 2.0}, "epoch_began"),
        ("end", {"clocks": {"train": 1e17, "total": 1e17}}, "clocks"),
        ("end", {"steps": {k: v.bfloat16() for k, v in fake_steps([0], 1).items()}}, "steps"),
        ("end", {"calibrated": [{"rule": 0, "rank": 0}]}, "calibrated"),
        ("end", {"balancer": {}}, "balancer"),
        ("inside", {"workers": []}, "workers"),
        ("inside", {"workers": [{}, {}]}, "workers"),
        ("inside", {"world_size": 3}, "balancer"),
        ("trained", {"trained": {"record": {"epoch": 1}, "steps": fake_steps([1], 1)}}, "trained"),
        ("trained", {"trained": {"record": fake_record(1), "steps": {}}}, "trained"),
        ("trained", {"trained": EARLIER}, "trained"),
    ],
)  # fmt: skip
def test_contents_that_do_not_belong_together_are_named(kind, changes, key):
    with pytest.raises(UserError, match=f"x.pt is no checkpoint of this version: .*({key})"):
        checkpoint.load(saved({**KINDS[kind](), **changes}), Path("x.pt"), CPU)


@given(st.sampled_from(sorted(KINDS)), st.data())
@settings(max_examples=200, deadline=None)
def test_another_value_anywhere_inside(kind, data):
    """Whatever is put in the place of whatever is there, it is read or refused in one line."""
    state = copy.deepcopy(KINDS[kind]())
    place, depth = state, data.draw(st.integers(1, 5))
    while True:
        keys = sorted(place, key=str) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        depth -= 1
        if depth == 0 or not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place = place[key]
    place[key] = data.draw(json_scalars | st.sampled_from([[], {}, torch.zeros(0), (1, 2)]))
    load(saved(state))


def unfolding(depth: int) -> list[Any]:
    value: list[Any] = [1.0]
    for _ in range(depth):
        value = [value] * 10
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("key", ["config", "calibrated", "balancer", "trained", "optimizer"])
@pytest.mark.parametrize("value", [unfolding(30), itself(), ["a" * 9999] * 9999], ids=range(3))
@pytest.mark.timeout(20)
def test_what_would_unfold_to_fill_the_memory_is_refused(key, value):
    state = whole_state()
    place = state[key] if isinstance(state[key], dict) else state
    place = {**place, "name" if place is not state else key: value}
    state = {**state, key: place} if key != "calibrated" else {**state, key: value}
    with pytest.raises(UserError, match="no checkpoint of this version"):
        checkpoint.load(saved(state), Path("x.pt"), CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(2**40),
        torch.zeros(2, 2).to_sparse(),
        torch.empty(2**40, device="meta"),
    ],
    ids=["stride 0", "sparse", "meta"],
)
def test_tensors_without_their_elements_are_refused(tensor):
    for key in ("model", "optimizer"):
        with pytest.raises(UserError, match=r"x\.pt is"):
            checkpoint.load(saved({**whole_state(), key: {"w": tensor}}), Path("x.pt"), CPU)
