"""Reading records that may be damaged, and writing them so that they never are by halves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_checkpoints import trainer_state
from fake_runs import fake_record, write_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import run_workers
from training import short_config

import checkpoint
from configs.errors import UserError
from configs.schema import from_mapping, resolve
from reader import count_epochs, find_runs, is_finished, read_run, recorded_workers
from recorder import CONTINUES, FINISHED, NEW, REPLACES, Job, RunFolder

FILES = ("config.yaml", "provenance.json", "epochs.jsonl", "steps.npz")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plausible run of 3 epochs; to be read or copied."""
    return write_run(tmp_path_factory.mktemp("whole"), epochs=3, steps=5)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def refusal(path: Path, name: str) -> str:
    """The message with which read_run refuses: one line that names the file."""
    with pytest.raises(UserError) as raised:
        read_run(path)
    message = str(raised.value)
    assert message.isprintable() and str(path / name) in message, message
    return message


# --- reading a run --------------------------------------------------------------------------------


def test_a_whole_run_is_read(whole):
    run = read_run(str(whole))
    assert run.path == whole and run.config["name"] == "lenet-low"
    assert run.provenance["world_size"] == 2
    assert [epoch["epoch"] for epoch in run.epochs] == [0, 1, 2]
    assert {name: array.shape for name, array in run.steps.items()} == {
        "epoch": (15,), "step": (15,), "batch_sizes": (15, 2), "busy": (15, 2), "wait": (15, 2)
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    refusal(run, name)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_a_file_s_place_is_named(run, name):
    (run / name).unlink()
    (run / name).mkdir()
    refusal(run, name)


def test_a_last_line_that_is_still_being_written_is_left_out(run):
    lines = (run / "epochs.jsonl").read_text()
    for cut in (1, 2, 40):
        (run / "epochs.jsonl").write_text(lines[:-cut])
        assert [epoch["epoch"] for epoch in read_run(run).epochs] == [0, 1]


@pytest.mark.parametrize("order", [[0, 2], [1], [0, 1, 1], [1, 0], [0, 0, 1, 2], [0, 1, 2, 0]])
def test_epochs_that_are_missing_or_there_twice_are_named(run, order):
    lines = (run / "epochs.jsonl").read_text().splitlines()
    (run / "epochs.jsonl").write_text("".join(f"{lines[number]}\n" for number in order))
    wrong = next(n for n, number in enumerate(order) if n != number)
    message = refusal(run, "epochs.jsonl")
    assert f"line {wrong + 1} is of epoch {order[wrong]}, not {wrong}" in message


@pytest.mark.parametrize("value", ["true", "0.0", "-1", "1e0", '"0"', "null", "[0]"])
def test_an_epoch_that_is_no_number_is_named(run, value):
    (run / "epochs.jsonl").write_text(f'{{"epoch": {value}}}\n')
    assert "line 1" in refusal(run, "epochs.jsonl")


def test_a_config_that_no_run_could_have_is_named(run):
    text = (run / "config.yaml").read_text()
    for right, wrong in (("epochs: 3\n", "epochs: many\n"), ("name: lenet-low\n", "")):
        assert right in text
        (run / "config.yaml").write_text(text.replace(right, wrong))
        refusal(run, "config.yaml")


def test_a_run_whose_first_epoch_is_still_being_written_is_refused(run):
    (run / "epochs.jsonl").write_text('{"epoch": 0, "train_loss": 2.')
    assert "no epoch yet" in refusal(run, "epochs.jsonl")


@pytest.mark.parametrize(
    "line", ['{"epoch": 1, "train_lo', "[1, 2]", "", '{"train_loss": 1}', '{"epoch": "1"}', "\x00"]
)
def test_a_damaged_line_in_the_middle_is_named_by_its_number(run, line):
    lines = (run / "epochs.jsonl").read_text().splitlines()
    (run / "epochs.jsonl").write_text("\n".join([lines[0], line, lines[2], ""]))
    assert "line 2" in refusal(run, "epochs.jsonl")


@pytest.mark.parametrize(
    "name, text",
    [
        ("provenance.json", "{'single': 'quotes'}"),
        ("provenance.json", "[]"),
        ("provenance.json", "[" * 100_000),
        ("config.yaml", "a: [1"),
        ("config.yaml", "- a\n- b"),
        ("config.yaml", "when: 2024-13-45"),
        ("config.yaml", "a: !!python/object/apply:os.system [ls]"),
        ("config.yaml", "a: !!int b"),
        ("config.yaml", "a: &a [*a]\n? *a\n: 1"),
    ],
)
def test_text_of_another_kind_is_named(run, name, text):
    (run / name).write_text(text)
    refusal(run, name)


def test_step_arrays_that_are_damaged_or_not_all_there_are_named(run):
    file = run / "steps.npz"
    content, arrays = file.read_bytes(), dict(np.load(file))
    for damaged in (content[:-30], content[: len(content) // 2], b"PK\3\4"):
        file.write_bytes(damaged)
        refusal(run, "steps.npz")
    middle = len(content) // 2
    file.write_bytes(content[:middle] + b"\xff" * 40 + content[middle + 40 :])
    refusal(run, "steps.npz")
    np.savez(file, **{name: array for name, array in arrays.items() if name != "wait"})
    assert "wait" in refusal(run, "steps.npz")
    with open(file, "wb") as single:
        np.save(single, arrays["busy"])
    refusal(run, "steps.npz")


class Bomb:
    """Something that does harm when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    return tmp_path / "exploded"


def test_objects_in_step_arrays_are_never_unpickled(run, bomb):
    arrays = dict(np.load(run / "steps.npz"))
    arrays["busy"] = np.array([Bomb()], dtype=object)
    np.savez(run / "steps.npz", **arrays)
    refusal(run, "steps.npz")
    assert not bomb.exists()


@given(name=st.sampled_from(FILES), content=st.binary(max_size=60))
@example("config.yaml", b"2024-13-45: 1")
@example("config.yaml", b"{? {} : 1}")
@example("config.yaml", b"a: 1e999999\nb: 0x")
@example("config.yaml", b"? 0b\n: 1")
@example("epochs.jsonl", b'{"epoch": 1e999}\n')
@example("provenance.json", b'{"a": ' + b"9" * 5000 + b"}")
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_raise_nothing_but_a_line_for_the_user(whole, name, content):
    damaged = whole.parent / "damaged"
    shutil.copytree(whole, damaged, dirs_exist_ok=True)
    (damaged / name).write_bytes(content)
    check_read_or_refused(damaged, name)


@given(st.sampled_from(FILES), st.floats(0, 1), st.binary(min_size=1, max_size=8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_raises_nothing_but_a_line_for_the_user(whole, name, place, noise, cut):
    damaged = whole.parent / "damaged"
    shutil.copytree(whole, damaged, dirs_exist_ok=True)
    content = (whole / name).read_bytes()
    at = int(place * len(content))
    rest = b"" if cut else content[at + len(noise) :]
    (damaged / name).write_bytes(content[:at] + noise + rest)
    check_read_or_refused(damaged, name)


def check_read_or_refused(path: Path, name: str) -> None:
    try:
        read_run(path)
    except UserError as error:
        assert str(error).isprintable() and str(path / name) in str(error)


# --- finding runs ---------------------------------------------------------------------------------


def test_runs_are_found_at_and_beneath_the_paths_given(tmp_path):
    first = write_run(tmp_path, epochs=1, steps=1)
    second = write_run(tmp_path, "other+epochs=1", epochs=1, steps=1, algorithm="dp-sgd")
    (tmp_path / "lenet-low" / "edp-sgd" / "seed-7").mkdir()
    empty = tmp_path / "lenet-low" / "edp-sgd" / "seed-8"
    empty.mkdir()
    (empty / "epochs.jsonl").touch()
    hidden = write_run(tmp_path / ".calibration-x", epochs=1, steps=1)
    assert find_runs([tmp_path]) == sorted([first, second])
    assert find_runs([hidden.parent]) == [hidden]  # which is asked for
    assert find_runs([str(second), first, tmp_path]) == sorted([first, second])
    assert find_runs([tmp_path / "other+epochs=1"]) == [second]


@pytest.mark.parametrize("made", [True, False])
def test_paths_without_runs_are_named(tmp_path, made):
    path = tmp_path / "runs"
    if made:
        path.mkdir()
    with pytest.raises(UserError) as raised:
        find_runs([path])
    assert str(path) in str(raised.value) and str(raised.value).isprintable()


# --- writing --------------------------------------------------------------------------------------


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path)
    assert folder.open(resolve(from_mapping(short_config())), 1, "auto", overwrite=False) == NEW
    assert folder.restore(None) == []
    return folder


def one_epoch(number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    steps = {"epoch": np.full(2, number), "step": np.arange(2), "batch_sizes": np.ones((2, 1)),
             "busy": np.ones((2, 1)), "wait": np.zeros((2, 1))}  # fmt: skip
    return fake_record(number, note="ü"), steps


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_nothing_temporary_is_left(tmp_path):
    folder = opened(tmp_path / "run")
    folder.write_provenance({"world_size": 1})
    for number in range(2):
        folder.append_epoch(*one_epoch(number))
        folder.save_checkpoint(trainer_state(number + 1))
    assert names(folder.path) == {*FILES, "checkpoint.pt", "checkpoint-1.pt", ".lock"}
    folder.finish({"weight": torch.ones(2)})
    assert names(folder.path) == {*FILES, "final.pt"}
    run = read_run(folder.path)
    assert run.epochs == [one_epoch(0)[0], one_epoch(1)[0]]
    assert run.steps["epoch"].tolist() == [0, 0, 1, 1]


def die_while_writing(path: str, method: str) -> None:
    """Writes one epoch, and is killed in the middle of the next one's `method`."""
    import storage

    folder = opened(Path(path))
    folder.write_provenance({"world_size": 1})
    folder.append_epoch(*one_epoch(0))
    folder.save_checkpoint(trainer_state(1))

    def half(target: Path, content: bytes) -> None:
        target.with_name(f".{target.name}.tmp").write_bytes(bytes(content)[: len(content) // 2])
        os._exit(9)

    storage.stage = half
    if method == "append_epoch":
        folder.append_epoch(*one_epoch(1))
    getattr(folder, method)(trainer_state(2))


@pytest.mark.parametrize("method", ["append_epoch", "save_checkpoint", "finish"])
def test_a_writer_that_is_killed_leaves_the_old_files_whole(tmp_path, method):
    path = tmp_path / "run"
    (outcome,) = run_workers(tmp_path, 1, die_while_writing, str(path), method)
    assert outcome.code == 9, outcome.output
    assert not (path / "final.pt").exists()
    run = read_run(path)
    assert run.steps["epoch"].tolist() == [0, 0] and run.epochs[0]["epoch"] == 0
    # Whoever goes on sees one epoch, and replaces what was left.
    config, folder = resolve(from_mapping(short_config())), RunFolder(path)
    assert folder.open(config, 1, "auto", overwrite=False) == CONTINUES
    assert not list(path.glob(".*.tmp"))
    assert folder.find_checkpoint(config, 1) == []
    saved = checkpoint.load(folder.found, path, torch.device("cpu"))
    assert saved["next_epoch"] == 1
    assert folder.restore(saved) == [one_epoch(0)[0]]
    folder.append_epoch(*one_epoch(1))
    folder.save_checkpoint(trainer_state(2))
    folder.finish({"weight": torch.ones(2)})
    assert names(path) == {*FILES, "final.pt"}
    assert read_run(path).steps["epoch"].tolist() == [0, 0, 1, 1]


def test_a_continued_run_keeps_what_its_first_start_said(tmp_path):
    folder = opened(tmp_path / "run")
    folder.write_provenance({"started": "first", "threads": 1})
    folder.write_provenance({"started": "second", "threads": 2})
    folder.write_provenance({"started": "third", "threads": 3})
    facts = json.loads((folder.path / "provenance.json").read_text())
    assert (facts["started"], facts["threads"]) == ("first", 1)
    assert [later["started"] for later in facts["continued"]] == ["second", "third"]


def test_only_the_first_start_of_a_job_overwrites(tmp_path):
    config, folder = resolve(from_mapping(short_config())), opened(tmp_path / "run")
    folder.write_provenance({"job": "a"})

    def found(job: str | None) -> str:
        folder = RunFolder(tmp_path / "run")
        return folder.open(config, 1, "never", overwrite=True, job=Job(job))

    folder.append_epoch(*one_epoch(0))
    folder.save_checkpoint(trainer_state(1))
    assert (found("a"), found("b"), found(None)) == (CONTINUES, REPLACES, REPLACES)
    folder.write_provenance({"job": "b"})  # by which it was continued
    assert found("b") == REPLACES
    folder.finish({"weight": torch.ones(2)})
    assert found("a") == REPLACES  # the command given again


def test_a_launcher_s_further_starts_go_on_with_what_its_first_one_has_begun(tmp_path):
    """Named by its process, whatever the command line says."""
    config, path = resolve(from_mapping(short_config())), tmp_path / "run"

    def start(launchers: str, resume: str = "never", overwrite: bool = False) -> RunFolder:
        folder = RunFolder(path)
        found.append(folder.open(config, 1, resume, overwrite, Job(launchers=tuple(launchers))))
        return folder

    found: list[str] = []
    old = opened(path)  # by no launcher
    old.append_epoch(*one_epoch(0))
    old.save_checkpoint(trainer_state(1))
    # Killed before they had come to the point of beginning, a start and its restart are alike.
    for _ in range(2):
        start("a", overwrite=True)
        with pytest.raises(UserError, match="unfinished run"):
            start("a", "never")
    folder = start("a", overwrite=True)
    folder.replace()
    folder.restore(None)
    folder.write_provenance({"launchers": ["a", "b"]})
    for overwrite in (True, False):  # there is no checkpoint yet
        folder = start("b", overwrite=overwrite)
        folder.restore(None)
        folder.write_provenance({"launchers": ["b"]})
    folder.append_epoch(*one_epoch(0))
    folder.save_checkpoint(trainer_state(1))
    start("b", overwrite=True)
    folder.write_provenance({"launchers": ["b", "c"]})
    start("c")
    assert found == [REPLACES] * 3 + [NEW] * 2 + [CONTINUES] * 2
    folder.finish({"weight": torch.ones(2)})
    for options in ({"overwrite": True}, {"resume": "never"}, {"resume": "auto"}):
        checkpoint.save(path, trainer_state(1), 1)  # killed before the checkpoint was dropped
        start("c", **options)
        assert found[-1] == FINISHED and names(path) == {*FILES, "final.pt"}
    with pytest.raises(UserError, match="finished run"):
        start("d")
    start("d", overwrite=True)
    assert found[-1] == REPLACES


@pytest.mark.parametrize(
    "epochs, files, finished",
    [
        (3, (), True),  # shipped without weights
        (3, (".lock",), False),  # killed before there was any checkpoint
        (3, ("checkpoint.pt",), False),  # the last epoch is written, the weights are not yet
        (3, ("checkpoint-1.pt",), False),  # killed between two renamings
        (2, ("checkpoint.pt",), False),
        (2, (), False),  # not even a checkpoint
        (0, (), False),
        (3, ("final.pt",), True),
        (3, ("final.pt", "checkpoint.pt"), True),  # killed before the checkpoint was dropped
    ],
)
def test_a_run_is_finished_by_its_weights_or_by_all_its_records(tmp_path, epochs, files, finished):
    path = tmp_path / "run"
    folder = opened(path)  # of three epochs
    folder.write_provenance({"world_size": 1})
    for number in range(epochs):
        folder.append_epoch(*one_epoch(number))
    (path / ".lock").unlink()
    for name in files:
        (path / name).write_text("there")
    assert is_finished(path) == finished
    assert (count_epochs(path), recorded_workers(path)) == (epochs, 1)
    config = resolve(from_mapping(short_config()))
    if finished:
        with pytest.raises(UserError, match="finished run: --overwrite"):
            RunFolder(path).open(config, 1, "auto", overwrite=False)
        assert count_epochs(path) == epochs


def test_a_folder_without_a_run_is_not_finished(tmp_path):
    assert not is_finished(tmp_path) and not is_finished(tmp_path / "none")
    assert (count_epochs(tmp_path), recorded_workers(tmp_path)) == (0, None)
