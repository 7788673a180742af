"""A run that was interrupted inside an epoch does what an undisturbed one does, to the bit."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_trainer
from test_resume import (
    DROPOUT,
    LENET,
    READ_AHEAD,
    RESNET,
    STATIC,
    check_equal,
    interrupt,
    without_times,
)
from training import Trained, launch, read, run_path, train

EACH_STEP = {"checkpoint__every": 1, "checkpoint__keep": 99}


def stopped_after(folder: Path, whole: Path, steps: int) -> Path:
    """A copy of the run below `whole`, as if it had ended after so many steps of all its epochs."""
    shutil.copytree(whole / "runs", folder / "runs")
    path = run_path(folder)
    files = sorted(path.glob("checkpoint*.pt"), key=lambda f: f.stat().st_mtime_ns)
    kept = files[steps - 1].read_bytes()
    for file in files:
        file.unlink()
    (path / "checkpoint.pt").write_bytes(kept)
    return folder


def every_step(folder: Path, size: int, **options: Any) -> Path:
    """A run that is killed at its very end, with a checkpoint of each of its steps."""
    interrupt(folder, size, "finish", 1, **options, **EACH_STEP)
    return folder


@pytest.mark.parametrize(
    "size, options, places",
    [
        # Steps of 32, 32, 32 and 8 samples, three epochs of them.
        (2, {**LENET, **READ_AHEAD, "epochs": 3, "stragglers": [
            {"ranks": [1], "kind": "exponential", "scale": 0.002}]}, [1, 7, 11]),
        (4, {**STATIC, "epochs": 2, "exchange": "flat", "partition__shares": [1, 2, 3, 4]}, [3, 4]),
        # BatchNorm and several buckets; steps of 12, 12 and 6.
        (3, {**RESNET, "epochs": 2, "partition__shares": [1, 2, 3]}, [2, 4]),
        # Dropout and autocast.
        (2, {**DROPOUT, "epochs": 2, "partition__shares": [1, 2]}, [1, 5]),
    ],
)  # fmt: skip
def test_a_continued_run_is_the_twin_of_an_undisturbed_one(tmp_path, size, options, places):
    undisturbed = train(tmp_path / "undisturbed", size, **options)
    saved = every_step(tmp_path / "saved", size, **options)
    for place in places:
        folder = stopped_after(tmp_path / f"after-{place}", saved, place)
        continued = train(folder, size, **options)
        check_equal(continued, undisturbed)
        assert np.isfinite(continued.steps["busy"]).all()
        total, trained = continued.column("total_seconds"), continued.column("train_seconds")
        assert np.diff(trained, prepend=0.0) == pytest.approx(continued.column("epoch_seconds"))
        assert all(a < b for a, b in zip(trained, total))


def test_replayed_batch_sizes_are_repeated_to_the_bit_also_from_inside_an_epoch(tmp_path):
    options = {"epochs": 2, "precision": "fp32"}
    slow = [{"ranks": [1], "kind": "constant", "seconds": 0.02}]
    measured = {**options, "partition__policy": "affine", "partition__every": 2}
    first = train(tmp_path / "first", 2, **measured, stragglers=slow)
    again = {**options, "partition__policy": "replay", "partition__replay": str(first.path)}
    saved = every_step(tmp_path / "saved", 2, **again)
    continued = train(stopped_after(tmp_path / "after", saved, 6), 2, **again)
    assert (continued.steps["batch_sizes"] == first.steps["batch_sizes"]).all()
    assert np.array_equal(continued.flat(), first.flat())


# In double precision, without BatchNorm, neither shares nor workers change more than the rounding.
MEASURED = {
    "epochs": 3, "partition__policy": "affine", "partition__every": 2,
    "stragglers": [{"ranks": [0], "kind": "slowdown", "factor": 4.0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("undisturbed"), 2, **MEASURED)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_step(tmp_path_factory.mktemp("saved"), 2, **MEASURED)


def check_same_samples(continued: Trained, undisturbed: Trained) -> None:
    """The same global batches, augmentations and learning rates, each epoch once."""
    assert np.abs(continued.flat() - undisturbed.flat()).max() < 1e-9
    for key in ("epoch", "steps", "learning_rate", "train_samples", "test_samples"):
        assert continued.column(key) == undisturbed.column(key), key
    for key in ("train_loss", "test_loss", "train_top1"):
        assert continued.column(key) == pytest.approx(undisturbed.column(key), rel=1e-8), key
    totals = continued.steps["batch_sizes"].sum(1)
    assert (totals == undisturbed.steps["batch_sizes"].sum(1)).all()


def test_measured_shares_and_their_time_model_go_on(tmp_path, saved, undisturbed):
    folder = stopped_after(tmp_path, saved, 6)
    state = torch.load(run_path(folder) / "checkpoint.pt", weights_only=True)["balancer"]
    continued = train(folder, 2, **MEASURED)
    check_same_samples(continued, undisturbed)
    # The plan that was in force, or on its way, at the interruption.
    step, sizes = state["changes"][-1]
    assert state["next_step"] == 2
    assert (continued.steps["batch_sizes"][4 + step] == sizes).all()


@pytest.mark.parametrize("place", [5, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_workers_goes_on(tmp_path, saved, undisturbed, size, place):
    """Inside the second epoch, and at its end."""
    folder = stopped_after(tmp_path, saved, place)
    continued = train(folder, size, **MEASURED)
    check_same_samples(continued, undisturbed)
    assert continued.provenance["world_size"] == 2
    assert continued.provenance["continued"][-1]["world_size"] == size
    sizes = continued.steps["batch_sizes"]
    assert ((sizes[:place] > 0).sum(1) == 2).all() and ((sizes[place:] > 0).sum(1) == size).all()
    busy = continued.steps["busy"][place:, :size]
    assert np.isfinite(busy).all()
    second = size if place < 8 else 2
    assert [len(epoch["shares"]) for epoch in continued.epochs] == [2, second, size]


SHORT = {**LENET, "precision": "fp64", "epochs": 3, "partition__min_batch": 4}


@pytest.mark.parametrize("place", [2, 3, 4])
def test_more_workers_do_without_a_batch_that_is_too_small_for_them(tmp_path, place):
    """Of 8 samples, the fourth of an epoch: one step before it, just before it, and after it."""
    saved = every_step(tmp_path / "saved", 2, **SHORT)
    folder = stopped_after(tmp_path / "after", saved, place)
    outcomes = launch(folder, 3, **SHORT)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes
    assert "of 8 samples, is too small for 3 workers: left out from here on" in outcomes[0].output
    continued = read(folder)
    assert continued.column("steps") == [4 if place == 4 else 3, 3, 3]
    assert continued.column("train_samples") == [104 if place == 4 else 96, 96, 96]
    again = stopped_after(tmp_path / "again", saved, place)
    interrupt(again, 3, "append_epoch", 2, **SHORT)
    check_same_samples(train(again, 2, **SHORT), continued)


def test_fewer_workers_do_without_it_too(tmp_path):
    saved = every_step(tmp_path / "saved", 3, **SHORT)
    undisturbed = train(tmp_path / "undisturbed", 3, **SHORT)
    assert undisturbed.column("left_out") == [8, 8, 8]
    for place in (2, 3):
        folder = stopped_after(tmp_path / f"after-{place}", saved, place)
        check_same_samples(train(folder, 1, **SHORT), undisturbed)


def test_a_start_that_fails_leaves_the_run_to_those_who_began_it(tmp_path):
    options = {**SHORT, "partition__policy": "static", "partition__shares": [1, 2]}
    interrupt(tmp_path, 2, "append_epoch", 2, **options)
    others = {**options, "partition__shares": [1, 1, 1]}
    killed = launch(tmp_path, 3, target=killed_as_it_rehearses, **others)
    assert killed[1].code == -9 and all(outcome.code for outcome in killed), killed
    check_equal(train(tmp_path, 2, **options), train(tmp_path / "undisturbed", 2, **options))


def killed_as_it_rehearses(*argv: str) -> None:
    import trainer

    if os.environ["RANK"] == "1":
        trainer.Trainer._rehearse = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    run_trainer(*argv)


def test_what_names_single_workers_may_change_with_their_number(tmp_path):
    options = {**STATIC, "partition__shares": [1, 3]}
    interrupt(tmp_path, 2, "append_epoch", 2, **options)
    changed = {**options, "partition__shares": [1, 3, 4]}
    for refused in launch(tmp_path, 3, **{**changed, "batch_size": 16}):
        assert refused.code == 2 and "another batch_size:" in refused.output
    for outcome in launch(tmp_path, 3, **changed):
        assert outcome.code == 0, outcome.output


def test_batches_per_worker_keep_their_sum_when_workers_leave(tmp_path):
    options = {**STATIC, "epochs": 6, "batch_size": None, "batch_per_worker": 8}
    interrupt(tmp_path, 3, "append_epoch", 2, **options)
    interrupt(tmp_path, 2, "append_epoch", 2, **options)
    told = launch(tmp_path, 2, "--dry-run", **options)[0].output
    assert "holds an unfinished run, which goes on" in told and "\nbatch_size: 24\n" in told
    assert "steps per epoch: 5, 104 samples (last batch: 4 4)" in told
    outcomes = launch(tmp_path, 2, **options)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    kept = "with its global batch of 24 (of this start it would be 16)"
    assert f"goes on from epoch 3, step 0, {kept}" in outcomes[0].output
    continued = read(tmp_path)
    assert len(continued.provenance["continued"]) == 2
    # Of 104 samples in batches of 24 the last batch has 8.
    totals = continued.steps["batch_sizes"].sum(1)
    assert totals.tolist() == [24, 24, 24, 24, 8] * 6


def test_a_run_without_a_checkpoint_is_begun_anew_whatever_it_was(tmp_path):
    interrupt(tmp_path, 2, "save_checkpoint", 1, **LENET)
    run = train(tmp_path, 3, **{**LENET, "optimizer__lr": 0.01, "epochs": 2})
    assert run.provenance["world_size"] == 3 and "continued" not in run.provenance
    assert run.column("epoch") == [0, 1]


def test_checkpoints_of_several_epochs(tmp_path):
    options = {**LENET, "checkpoint__every": "3 epochs"}
    interrupt(tmp_path, 2, "append_epoch", 4, **options)
    state = torch.load(run_path(tmp_path) / "checkpoint.pt", weights_only=True)
    assert state["next_epoch"] == 3 and state["records"].count("\n") == 3
    assert not (run_path(tmp_path) / "checkpoint-1.pt").exists()
    continued = train(tmp_path, 2, **options)
    check_equal(continued, train(tmp_path / "undisturbed", 2, **LENET))


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path):
    interrupt(tmp_path, 2, "append_epoch", 4, **LENET)
    file = run_path(tmp_path) / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-100])
    outcomes = launch(tmp_path, 2, **LENET)
    assert f"{file} is damaged" in outcomes[0].output and outcomes[1].output == ""
    continued, undisturbed = read(tmp_path), train(tmp_path / "undisturbed", 2, **LENET)
    assert not list(run_path(tmp_path).glob("checkpoint*"))
    check_equal(continued, undisturbed)
    assert without_times(continued) == without_times(undisturbed)


def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(tmp_path):
    """Whoever is killed as it saves the next one leaves the last whole one."""
    interrupt(tmp_path, 2, "append_epoch", 4, **LENET)
    file = run_path(tmp_path) / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-100])
    launch(tmp_path, 2, target=killed_as_it_puts_in_place, **LENET)
    names = {path.name for path in run_path(tmp_path).glob("checkpoint*")}
    assert names == {"checkpoint.pt.damaged", "checkpoint-1.pt"}
    check_equal(train(tmp_path, 2, **LENET), train(tmp_path / "undisturbed", 2, **LENET))


def killed_as_it_puts_in_place(*argv: str) -> None:
    import storage

    whole = storage.replace

    def replace(temporary: Path, path: Path) -> None:
        if path.name == "checkpoint.pt":
            os._exit(9)
        whole(temporary, path)

    storage.replace = replace
    run_trainer(*argv)


def test_a_checkpoint_of_another_run_is_refused_with_the_keys_that_differ(tmp_path):
    interrupt(tmp_path / "a", 2, "append_epoch", 2, **LENET)
    other = {**LENET, "optimizer__lr": 0.01, "batch_size": 16}
    interrupt(tmp_path / "b", 2, "append_epoch", 2, **other)
    shutil.copy(run_path(tmp_path / "b") / "checkpoint.pt", run_path(tmp_path / "a"))
    for outcome in launch(tmp_path / "a", 2, **LENET):
        assert outcome.code == 2 and "another batch_size, optimizer.lr:" in outcome.output
