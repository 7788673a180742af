"""An interrupted run that is continued does what an undisturbed one does, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_tree import write_tree
from processes import run_trainer
from training import Trained, launch, records, run_path, train

from metrics import Clocks
from partitioner import Partitioner

# What the clocks say differs from run to run; all else must not.
TIMES = {
    "busy", "wait", "phases", "time_model", "optimum", "optimum_continuous",
    "optimum_batch_sizes", "imbalance", "samples_per_second", "epoch_seconds", "train_seconds",
    "total_seconds",
}  # fmt: skip


def die_in(method: str, call: int, *argv: str) -> None:
    """The command line, whose rank 0 dies as if killed in the `call`-th call of a RunFolder."""
    import recorder

    calls, whole = [0], getattr(recorder.RunFolder, method)

    def deadly(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os._exit(9)
        return whole(*arguments)

    setattr(recorder.RunFolder, method, deadly)
    run_trainer(*argv)


def interrupt(folder: Path, size: int, method: str, call: int, **options: Any) -> None:
    outcomes = launch(folder, size, target=die_in, before=(method, call), **options)
    assert outcomes[0].code == 9, outcomes[0].output
    # The others notice at the next exchange, if there is another.
    assert all(outcome.code is not None for outcome in outcomes)


def without_times(run: Trained) -> list[dict[str, Any]]:
    return [{k: v for k, v in epoch.items() if k not in TIMES} for epoch in run.epochs]


def check_equal(continued: Trained, undisturbed: Trained) -> None:
    assert without_times(continued) == without_times(undisturbed)
    for name in ("epoch", "step", "batch_sizes"):
        assert np.array_equal(continued.steps[name], undisturbed.steps[name]), name
    assert continued.steps["busy"].shape == undisturbed.steps["busy"].shape
    assert list(continued.weights) == list(undisturbed.weights)
    for name, tensor in continued.weights.items():
        assert torch.equal(tensor, undisturbed.weights[name]), name


STATIC = {"epochs": 4, "precision": "fp32"}
LENET = {**STATIC, "partition__policy": "equal"}
RESNET = {
    "model__name": "resnet20", "precision": "fp32", "batch_size": 12, "data__train_samples": 30,
    "data__test_samples": 6,
}  # fmt: skip
DROPOUT = {**RESNET, "model__name": "torchvision/squeezenet1_1", "precision": "bf16"}
READ_AHEAD = {"data__placement": "loader", "data__loader_workers": 1}


@pytest.mark.parametrize(
    "size, method, call, options",
    [
        # After epoch 1 is trained, before anything of it is recorded.
        (2, "append_epoch", 2, {**LENET, "stragglers": [
            {"ranks": [1], "kind": "exponential", "scale": 0.005}]}),
        # Between the line of epoch 1 and its step arrays.
        (3, "_write_steps", 2, {**STATIC, **READ_AHEAD, "partition__shares": [3, 1, 2]}),
        # Between the records of epoch 2 and its checkpoint.
        (3, "save_checkpoint", 3, {**LENET, "exchange": "flat", "algorithm": "sync-sgd"}),
        # Before there is any checkpoint.
        (2, "save_checkpoint", 1, {**STATIC, "partition__shares": [1, 3]}),
        # After the last checkpoint.
        (2, "finish", 1, LENET),
        # BatchNorm's statistics, and more than one bucket for DDP to order anew.
        (3, "save_checkpoint", 2, {**RESNET, "partition__shares": [1, 2, 3]}),
        (2, "append_epoch", 3, {**RESNET, "partition__policy": "equal"}),
        # In the middle of a warm-up.
        (2, "append_epoch", 2, {**LENET, "schedule__scale_lr": "linear", "optimizer__lr": 0.01,
            "schedule__reference_batch_size": 8, "schedule__warmup_epochs": 3.5}),
        # Dropout, and autocast.
        (2, "save_checkpoint", 2, {**DROPOUT, "partition__shares": [1, 2]}),
    ],
)  # fmt: skip
def test_a_continued_run_is_the_twin_of_an_undisturbed_one(tmp_path, size, method, call, options):
    interrupt(tmp_path / "continued", size, method, call, **options)
    undisturbed = train(tmp_path / "undisturbed", size, **options)
    continued = train(tmp_path / "continued", size, "--resume", "auto", **options)
    check_equal(continued, undisturbed)
    assert continued.column("epoch") == list(range(len(undisturbed.epochs)))


def test_a_run_can_be_interrupted_again_and_again(tmp_path):
    for method in ("append_epoch", "save_checkpoint", "append_epoch"):
        interrupt(tmp_path / "continued", 2, method, 2, **LENET)
    continued = train(tmp_path / "continued", 2, **LENET)
    check_equal(continued, train(tmp_path / "undisturbed", 2, **LENET))


def test_where_to_run_may_change_between_start_and_continuation(tmp_path):
    interrupt(tmp_path / "continued", 2, "save_checkpoint", 2, **LENET)
    continued = train(tmp_path / "continued", 2, **LENET, **READ_AHEAD, timeout=50.0)
    check_equal(continued, train(tmp_path / "undisturbed", 2, **LENET))


def test_shares_and_time_model_go_on_from_the_checkpoint(tmp_path):
    """Were the shares forgotten, worker 0 would start again with a half."""
    options = {"epochs": 3, "stragglers": [{"ranks": [0], "kind": "slowdown", "factor": 8.0}]}
    interrupt(tmp_path, 2, "append_epoch", 3, **options)
    state = torch.load(run_path(tmp_path) / "checkpoint.pt", weights_only=True)
    kept = state["balancer"]["partition"]
    run = train(tmp_path, 2, **options)
    size = run.epochs[2]["batch_sizes"][0]
    assert abs(size - max(2, 32 * kept["shares"][0])) <= 1  # 2 is the least that is allowed
    assert size < 12
    fresh = Partitioner(2, 32)
    fresh.load_state_dict(kept)
    assert fresh.time_model.fit() is not None


# --- clocks ---------------------------------------------------------------------------------------


def test_clocks_go_on_from_the_checkpoint_and_leave_out_the_time_away(tmp_path):
    interrupt(tmp_path, 2, "save_checkpoint", 2, **LENET)
    at_checkpoint = torch.load(run_path(tmp_path) / "checkpoint.pt", weights_only=True)["clocks"]
    time.sleep(2.0)
    begin = time.monotonic()
    run = train(tmp_path, 2, **LENET)
    away_excluded = time.monotonic() - begin
    trained, total = run.column("train_seconds"), run.column("total_seconds")
    assert trained == sorted(trained) and total == sorted(total)
    assert all(a < b for a, b in zip(trained, total))
    assert np.diff(trained, prepend=0.0) == pytest.approx(run.column("epoch_seconds"))
    assert at_checkpoint["train"] == trained[0] and at_checkpoint["total"] >= total[0]
    assert total[-1] < at_checkpoint["total"] + away_excluded


def dawdle(*argv: str) -> None:
    """The command line, with 0.3 s more for each evaluation and each checkpoint."""
    import recorder
    import trainer

    for owner, method in ((trainer.Trainer, "_evaluate"), (recorder.RunFolder, "save_checkpoint")):
        whole = getattr(owner, method)

        def slower(*arguments: Any, whole: Any = whole) -> Any:
            time.sleep(0.3)
            return whole(*arguments)

        setattr(owner, method, slower)
    run_trainer(*argv)


def test_the_training_clock_stands_still_during_evaluation_and_checkpoints(tmp_path):
    run = train(tmp_path, 2, target=dawdle, **LENET)
    both = np.diff(run.column("total_seconds"))
    training = np.diff(run.column("train_seconds"))
    # In an epoch's time lie its own evaluation and the checkpoint of the one before.
    assert (both - training >= 0.6).all()


def test_clocks_start_where_they_are_told():
    clocks = Clocks(train=5.0, total=9.0)
    with clocks.training():
        time.sleep(0.02)
    time.sleep(0.02)
    assert 5.02 <= clocks.train < 6.0
    assert 9.04 <= clocks.total < 10.0 and clocks.total - 9.0 > clocks.train - 5.0


# --- calibrated delays ----------------------------------------------------------------------------


def test_calibrated_delays_are_kept(tmp_path):
    options = {**LENET, "stragglers": [{"ranks": [1], "kind": "constant", "fraction": 2.0}]}
    interrupt(tmp_path, 2, "append_epoch", 2, **options)
    (first,) = json.loads((run_path(tmp_path) / "provenance.json").read_text())["calibrated_delays"]
    run = train(tmp_path, 2, **options)
    assert run.provenance["calibrated_delays"] == [first]
    assert run.provenance["continued"][0]["calibrated_delays"] == [first]
    for epoch in run.epochs:
        assert first["seconds"] <= epoch["phases"]["delay"][1] < first["seconds"] + 0.2


def test_a_run_without_a_checkpoint_states_the_delays_of_its_second_start(tmp_path):
    """Nothing of the first start is left, so its calibration must not stand in the records."""
    options = {**LENET, "stragglers": [{"ranks": [1], "kind": "constant", "fraction": 2.0}]}
    interrupt(tmp_path, 2, "save_checkpoint", 1, **options)
    path = run_path(tmp_path)
    facts = json.loads((path / "provenance.json").read_text())
    facts["calibrated_delays"][0]["seconds"] = 123.0
    (path / "provenance.json").write_text(json.dumps(facts))
    run = train(tmp_path, 2, **options)
    (told,) = run.provenance["calibrated_delays"]
    for epoch in run.epochs:
        assert told["seconds"] <= epoch["phases"]["delay"][1] < told["seconds"] + 0.2


# --- damaged files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 epochs on 2 workers of which one epoch is done; to be copied."""
    folder = tmp_path_factory.mktemp("interrupted")
    interrupt(folder, 2, "append_epoch", 2, **LENET)
    return folder / "runs"


DELAYED = {**LENET, "stragglers": [
    {"ranks": [1], "kind": "constant", "fraction": 0.1, "busy_seconds": [0.01]}]}  # fmt: skip


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which an epoch and two steps are done; to be copied."""
    folder = tmp_path_factory.mktemp("preempted")
    interrupt(folder, 2, "save_checkpoint", 4, **DELAYED, checkpoint__every=2)
    return folder / "runs"


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.yaml", "provenance.json"])
@pytest.mark.parametrize("content", [b"", b"\xff no such thing\n"])
def test_a_damaged_file_of_an_unfinished_run_is_named_by_every_worker(
    tmp_path, interrupted, name, content
):
    shutil.copytree(interrupted, tmp_path / "runs")
    path = run_path(tmp_path)
    (path / name).write_bytes(content)
    outcomes = launch(tmp_path, 2, limit=30.0, **LENET)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 2, outcome.output
        assert outcome.output.startswith(f"trainer.py: error: rank {rank}: ")
        assert outcome.output.count("\n") == 1 and name in outcome.output


def _set(state: dict[str, Any], place: str, value: Any) -> None:
    *parents, key = place.split(".")
    for parent in parents:
        state = state[int(parent) if parent.isdecimal() else parent]
    state[int(key) if key.isdecimal() else key] = value


@pytest.mark.parametrize(
    "place, value",
    [
        ("optimizer.state.0.momentum_buffer", torch.zeros(3)),
        ("optimizer.state.0.more", torch.zeros(3)),
        ("optimizer.param_groups", []),
        ("model", {}),
        ("balancer.changes", [(0, [1, 2])]),
        ("balancer.partition.shares", [0.5, -0.5]),
        ("calibrated", []),
        ("calibrated.0.seconds", 1e5),
        ("workers.0.random.cpu", torch.zeros(3, dtype=torch.uint8)),
    ],
)
def test_a_state_of_another_model_or_plan_is_refused_before_anything_is_written(
    tmp_path, preempted, place, value
):
    shutil.copytree(preempted, tmp_path / "runs")
    path = run_path(tmp_path)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    _set(state, place, value)
    torch.save(state, path / "checkpoint.pt")
    files = [path / name for name in ("epochs.jsonl", "steps.npz", "provenance.json")]
    before = [file.read_bytes() for file in files]
    for outcome in launch(tmp_path, 2, limit=30.0, **DELAYED):
        assert outcome.code == 2, outcome.output
        assert "checkpoint" in outcome.output.splitlines()[-1] or "stragglers.0" in outcome.output
        assert "Traceback" not in outcome.output
    assert [file.read_bytes() for file in files] == before


def test_other_data_are_refused_and_named(tmp_path):
    root = write_tree(tmp_path / "tree", train=24, test=4, size=(32, 32))
    options = {**LENET, "batch_size": 16, "data": {
        "name": "image_folder", "root": str(root), "cache": str(tmp_path / "cache")}}
    interrupt(tmp_path, 2, "append_epoch", 2, **options)
    kept = (run_path(tmp_path) / "epochs.jsonl").read_bytes()
    image = root / "train" / "cat" / "00.png"
    image.rename(tmp_path / "aside.png")
    for outcome in launch(tmp_path, 2, limit=30.0, **options):
        assert outcome.code == 2 and "train_samples 48, now 47; labels; files" in outcome.output
        assert "Traceback" not in outcome.output and "--overwrite" in outcome.output
    assert (run_path(tmp_path) / "epochs.jsonl").read_bytes() == kept
    (tmp_path / "aside.png").rename(image)
    assert train(tmp_path, 2, **options).column("epoch") == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["steps.npz", "epochs.jsonl"])
def test_records_that_are_damaged_or_half_written_are_put_right(tmp_path, interrupted, name):
    shutil.copytree(interrupted, tmp_path / "runs")
    file = run_path(tmp_path) / name
    file.write_bytes(file.read_bytes()[:-7])
    continued = train(tmp_path, 2, **LENET)
    check_equal(continued, train(tmp_path / "undisturbed", 2, **LENET))


def test_a_half_written_last_line_is_dropped(tmp_path, interrupted):
    shutil.copytree(interrupted, tmp_path / "runs")
    path = run_path(tmp_path)
    with open(path / "epochs.jsonl", "a") as file:
        file.write('{"epoch": 1, "train_lo')
    continued = train(tmp_path, 2, **LENET)
    assert records(continued.path) == continued.epochs
    assert continued.column("epoch") == [0, 1, 2, 3]
