"""Checkpoint files: rotation, damage of any kind, and a disk that is full."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_checkpoints import trainer_state, whole_state
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorder import Bomb, bomb, names, one_epoch, opened
from training import short_config

import checkpoint
import storage
from configs.errors import UserError
from configs.schema import from_mapping, resolve
from reader import read_run
from recorder import CONTINUES, RunFolder

__all__ = ["bomb"]  # a fixture

CPU = torch.device("cpu")


def numbers(folder: Path) -> dict[str, int]:
    """next_epoch by file name."""
    return {
        path.name: checkpoint.load(path.read_bytes(), path, CPU)["next_epoch"]
        for path in folder.glob("*.pt")
    }


def found(folder: Path) -> tuple[int, list[str]]:
    """next_epoch of the newest whole one, and the names of those passed over."""
    content, damaged = checkpoint.newest(folder, lambda state: None)
    assert all(fault.isprintable() for fault in damaged.values())
    return checkpoint.load(content, folder, CPU)["next_epoch"], [path.name for path in damaged]


# --- rotation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for number in range(1, 6):
        checkpoint.save(tmp_path, whole_state(next_epoch=number), keep)
    expected = {"checkpoint.pt": 5, "checkpoint-1.pt": 4, "checkpoint-2.pt": 3}
    assert numbers(tmp_path) == dict(list(expected.items())[:keep])
    checkpoint.save(tmp_path, whole_state(next_epoch=6), 1)
    assert numbers(tmp_path) == {"checkpoint.pt": 6}
    checkpoint.drop(tmp_path)
    assert not checkpoint.exists(tmp_path) and names(tmp_path) == set()


@pytest.mark.parametrize("call", range(5))
def test_one_is_always_there_wherever_the_writer_is_killed(tmp_path, monkeypatch, call):
    """It dies in the `call`-th renaming or deletion of a file."""
    for number in (1, 2):
        checkpoint.save(tmp_path, whole_state(next_epoch=number), 2)
    calls = [0]

    def deadly(whole_: Any) -> Any:
        def changed(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > call:
                raise KeyboardInterrupt
            return whole_(*arguments, **named)

        return changed

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for owner, name in ((Path, "unlink"), (os, "replace"), (os, "fsync")):
            patch.setattr(owner, name, deadly(getattr(owner, name)))
        checkpoint.save(tmp_path, whole_state(next_epoch=3), 2)
    assert found(tmp_path)[0] in (2, 3)
    checkpoint.save(tmp_path, whole_state(next_epoch=4), 2)
    assert found(tmp_path) == (4, [])


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("there", [{1}, {2}, {0, 2}, {1, 2}, {0, 1, 3}, {5, 7}])
def test_the_newest_are_kept_also_where_some_are_missing(tmp_path, monkeypatch, there, keep):
    for number in there:
        name = f"checkpoint-{number}.pt" if number else "checkpoint.pt"
        (tmp_path / name).write_bytes(checkpoint.packed(whole_state(next_epoch=8 - number)))
    newest, whole = 8 - min(there), os.replace

    def watched(*arguments: Any) -> None:
        assert found(tmp_path)[0] in (newest, 9)
        whole(*arguments)

    monkeypatch.setattr(os, "replace", watched)
    checkpoint.save(tmp_path, whole_state(next_epoch=9), keep)
    left = numbers(tmp_path)
    assert left["checkpoint.pt"] == 9 and len(left) <= keep
    assert keep == 1 or 0 not in there or left["checkpoint-1.pt"] == newest


# --- damage -----------------------------------------------------------------------------------


def test_a_damaged_one_is_reported_and_the_one_before_it_used(tmp_path):
    for number in (1, 2):
        checkpoint.save(tmp_path, whole_state(next_epoch=number), 2)
    file = tmp_path / "checkpoint.pt"
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(torch.arange(1000.0).numpy().tobytes()) + 400] ^= 1
    for damaged in (b"", content[:-1], content[: len(content) // 2], bytes(flipped)):
        file.write_bytes(damaged)
        assert found(tmp_path) == (1, ["checkpoint.pt"])
    (tmp_path / "checkpoint-1.pt").write_bytes(b"too")
    with pytest.raises(UserError, match=r"checkpoint\.pt, .*checkpoint-1\.pt.*--overwrite"):
        found(tmp_path)


def test_objects_in_a_checkpoint_are_never_unpickled(tmp_path, bomb):
    torch.save(whole_state(model={"weight": Bomb()}), tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint\.pt"):
        found(tmp_path)
    assert not bomb.exists()


def test_another_run_s_checkpoint_ends_the_search(tmp_path):
    for number in (1, 2):
        checkpoint.save(tmp_path, whole_state(next_epoch=number), 2)

    def check(state: Any) -> None:
        raise UserError("another seed")

    with pytest.raises(UserError, match="another seed"):
        checkpoint.newest(tmp_path, check)


@pytest.mark.parametrize(
    "changes", [{"format": 1}, {"steps": None}, {"config": {"name": "y"}}, {"config": {1: CPU}}]
)
def test_what_is_not_of_this_version_is_named(tmp_path, changes):
    with pytest.raises(UserError, match=r"a\.pt is"):
        checkpoint.load(bytes(checkpoint.packed(whole_state(**changes))), tmp_path / "a.pt", CPU)


WHOLE = bytes(checkpoint.packed(whole_state()))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.floats(0, 1), st.binary(max_size=8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_is_nothing_but_a_line(place, noise, cut):
    at = int(place * len(WHOLE))
    check_loaded_or_refused(WHOLE[:at] + noise + (b"" if cut else WHOLE[at + len(noise) :]))


@given(st.binary(max_size=60))
@settings(max_examples=50, deadline=None)
def test_random_bytes_are_nothing_but_a_line(content):
    check_loaded_or_refused(content)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", content)
    check_loaded_or_refused(archive.getvalue())


@given(st.sampled_from(sorted(whole_state())), plain)
@settings(max_examples=100, deadline=None)
def test_another_type_anywhere_is_nothing_but_a_line(key, value):
    check_loaded_or_refused(bytes(checkpoint.packed({**whole_state(), key: value})))


def check_loaded_or_refused(content: bytes) -> None:
    try:
        checkpoint.load(content, Path("a.pt"), CPU)
    except UserError as error:
        assert str(error).isprintable() and "a.pt" in str(error)


# --- a full disk ------------------------------------------------------------------------------


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """From now on files that are opened for writing take `room` bytes more in all."""
    left = [room]

    class Limited(io.FileIO):
        def write(self, content: Any) -> int:
            fits = memoryview(content).cast("B")[: left[0]]
            if not len(fits):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left[0] -= len(fits)
            return super().write(fits)

    def limited_open(path: Path, mode: str, buffering: int = -1) -> Any:
        file = Limited(path, mode.replace("b", ""))
        return file if buffering == 0 else io.BufferedWriter(file)

    monkeypatch.setattr(storage, "open", limited_open, raising=False)


@pytest.mark.parametrize("room", [0, 1, 100, 1500, 5000])
@pytest.mark.parametrize("method", ["append_epoch", "save_checkpoint", "finish"])
def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path, method, room):
    folder = opened(tmp_path / "run")
    folder.write_provenance({"world_size": 1})
    folder.append_epoch(*one_epoch(0))
    folder.save_checkpoint(trainer_state(1))
    files = names(folder.path)
    what = {"append_epoch": one_epoch(1), "finish": ({"w": torch.ones(5000)},)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        fill_disk(monkeypatch, room)
        try:
            getattr(folder, method)(*what.get(method, (trainer_state(2),)))
        except UserError as error:
            assert "No space left" in str(error) and str(folder.path) in str(error)
            assert str(error).isprintable()
        else:
            assert room >= 1500
            return
    assert names(folder.path) == files
    run = read_run(folder.path)  # whole lines, whole arrays
    assert run.epochs[0]["epoch"] == 0 and run.steps["epoch"].tolist()[:2] == [0, 0]
    folder = RunFolder(folder.path)
    config = resolve(from_mapping(short_config()))
    assert folder.open(config, 1, "auto", overwrite=False) == CONTINUES
    assert folder.find_checkpoint(config, 1) == [] and folder.found is not None


def test_a_checkpoint_that_is_a_pipe_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match="damaged: .*checkpoint.pt"):
        checkpoint.newest(tmp_path, lambda state: None)
