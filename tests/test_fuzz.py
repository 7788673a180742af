"""Configs and records from anyone: damaged, of the wrong kind, or made to do harm.

Each is read, or refused with the one line of a UserError; nothing else is raised, and pytest's own
time limit tells of what never ends.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damaged, damages, json_scalars
from fake_runs import write_run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs import files
from configs.command_line import parse
from configs.errors import UserError
from reader import batch_sizes_by_epoch, read_run, recorded_workers

FEW = settings(max_examples=100, deadline=None)


def one_line(error: UserError) -> None:
    assert str(error).isprintable(), str(error)


# --- configs --------------------------------------------------------------------------------------

TOKENS = (
    "name: x", "epochs: ", "optimizer:", "stragglers:", "partition: {min_batch: ", "data:", "&a ",
    "&b ", "*a", "*b", "<<: ", "<<: [*a, *a, *b]", "[", "]", "{", "}", ", ", ": ", "- ", "? ",
    "\n", "\n  ", "\n    ", "|", ">", "!!binary ", "!!set ", "!!omap ", "!!int ", "!!float ",
    "!!timestamp ", "!!python/name:os.system ", "!<tag:yaml.org,2002:merge> ", "0x",
    "1e999", ".inf", ".nan", "9" * 400, "-1", "1:59:59", "2024-99-99", "'", '"', "\\ud800",
    '"\\uD800"', "%YAML 9.9\n", "---", "...", "#", "\t", "\0", "\x85", "\u2028", "\ufeff", "ü",
    "\U0001f600",
)  # fmt: skip


def read_config(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        parse(["--config", str(path)])
    except UserError as error:
        one_line(error)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs") / "fuzzed.yaml"


@given(st.binary(max_size=80))
@example(b"\xff\xfe" + "name: x".encode("utf-16-le"))
@example(b"name: x\x00")
@example(b"")
@FEW
def test_any_bytes_as_a_config(config_file, content):
    read_config(config_file, content)


@given(st.lists(st.sampled_from(TOKENS), max_size=25).map("".join))
@settings(max_examples=250, deadline=None)
def test_any_pieces_of_yaml_as_a_config(config_file, text):
    read_config(config_file, text.encode("utf-8", "surrogatepass"))


@given(st.sampled_from(files.shipped()), st.lists(damages, min_size=1, max_size=3))
@FEW
def test_a_damaged_config(config_file, name, steps):
    content = (files.FOLDER / f"{name}.yaml").read_bytes()
    for step in steps:
        content = damaged(content, step)
    read_config(config_file, content)


# --- records --------------------------------------------------------------------------------------

json_values = st.recursive(
    json_scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["epoch", "busy", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole"), epochs=3, steps=5)


def read_records(path: Path) -> None:
    for read in (read_run, batch_sizes_by_epoch, recorded_workers):
        try:
            read(path)
        except UserError as error:
            one_line(error)


def copied(whole: Path) -> Path:
    return Path(shutil.copytree(whole, whole.parent / "copy", dirs_exist_ok=True))


@given(st.data(), json_values)
@FEW
def test_records_with_values_of_any_kind(whole, data, value):
    path = copied(whole)
    name = data.draw(st.sampled_from(["epochs.jsonl", "provenance.json"]))
    records = [json.loads(line) for line in (path / name).read_text().splitlines()]
    place: Any = data.draw(st.sampled_from(records))
    key = data.draw(st.sampled_from(sorted(place)))
    if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = value
    # With NaN and Infinity, which Python's writer lets through.
    (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    read_records(path)


@given(st.sampled_from(["name", "epochs", "data", "seed", "partition", "stragglers"]), json_values)
@FEW
def test_a_recorded_config_with_values_of_any_kind(whole, key, value):
    path = copied(whole)
    config = files.read_mapping(path / "config.yaml")
    # JSON is YAML, but for the text of these numbers.
    text = json.dumps({**config, key: value})
    (path / "config.yaml").write_text(text.replace("NaN", ".nan").replace("Infinity", ".inf"))
    read_records(path)


arrays = st.builds(
    lambda kind, shape, value: np.full(shape, value).astype(kind),
    st.sampled_from(["i4", "i8", "u1", "f4", "f8", "?", "c8", "U3", "S2", "M8[s]"]),
    st.sampled_from([(), (0,), (15,), (16,), (15, 2), (15, 0), (0, 2), (3, 5, 2)]),
    st.sampled_from([0, 1, 7]),
)


@given(
    st.dictionaries(st.sampled_from(["epoch", "step", "batch_sizes", "busy", "wait"]), arrays),
    st.sampled_from([np.savez, np.savez_compressed]),
)
@FEW
def test_step_arrays_of_any_kind(whole, changed, save):
    path = copied(whole)
    with np.load(whole / "steps.npz", allow_pickle=False) as kept:
        save(path / "steps.npz", **{**kept, **changed})
    read_records(path)
    (path / "steps.npz").unlink()
    read_records(path)


@pytest.mark.parametrize("epoch", [[0, 2**31 - 1], [-1, 0], [1, 1], [0, 0]])
def test_step_arrays_never_make_up_epochs(whole, epoch):
    path, steps = copied(whole), len(epoch)
    per_worker = np.ones((steps, 2))
    np.savez(
        path / "steps.npz", epoch=np.array(epoch, np.int32), step=np.arange(steps),
        batch_sizes=per_worker.astype(np.int32), busy=per_worker, wait=per_worker,
    )  # fmt: skip
    if epoch == [0, 0]:
        assert batch_sizes_by_epoch(path) == [[[1, 1], [1, 1]]]
    else:
        with pytest.raises(UserError, match="not in order"):
            batch_sizes_by_epoch(path)
