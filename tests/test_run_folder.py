"""A run's folder: what a finished one holds, field by field, and who may write into it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from processes import Outcome, run_trainer, run_workers, values
from test_bad_input import refusals
from test_resume import interrupt
from training import Trained, launch, read, run_path, short_config, train, work_per_sample

import models
from configs.errors import UserError
from configs.schema import from_mapping, resolve, to_mapping
from recorder import REPLACES, RunFolder

# Epochs are long enough for full steps behind the warm-up; worker 1's batches change.
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "data__train_samples": 169,
    "precision": "fp32",
    "stragglers": [
        {"ranks": [1], "kind": "slowdown", "factor": 3.0},
        {"ranks": [0], "kind": "constant", "fraction": 0.1},
    ],
}
WEIGHTS = 62_006


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above a finished run on two workers; to be read or copied."""
    folder = tmp_path_factory.mktemp("finished")
    values(launch(folder, 2, target=work_per_sample, before=(0.004,), **OPTIONS))
    return folder


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfinished")
    interrupt(folder, 2, "append_epoch", 2, **OPTIONS)
    return folder


@pytest.fixture(scope="module")
def run(finished: Path) -> Trained:
    return read(finished)


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder / "runs", target / "runs")
    return target


def content(folder: Path) -> dict[str, str]:
    """All files below `folder` by relative path, each with its hash and time of change."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        + f" {file.stat().st_mtime_ns}"
        for file in folder.rglob("*")
        if file.is_file()
    }


# --- what it holds --------------------------------------------------------------------------------


def test_a_finished_run_leaves_these_files_and_no_others(finished, run):
    assert run.path == finished / "runs" / "short" / "edp-sgd" / "seed-42"
    files = {str(f.relative_to(run.path)) for f in (finished / "runs").rglob("*") if f.is_file()}
    assert files == {"config.yaml", "provenance.json", "epochs.jsonl", "steps.npz", "final.pt"}


def test_config_yaml_is_the_resolved_config(finished, run):
    stored = yaml.safe_load((run.path / "config.yaml").read_text())
    asked = short_config(**OPTIONS, output=str(finished / "runs"))
    assert stored == to_mapping(resolve(from_mapping(asked)))
    assert (stored["partition"]["policy"], stored["gradient_weight"]) == ("proportional", "share")


def test_provenance(run):
    facts = run.provenance
    assert re.search(r"trainer\.py --config \S+ --output \S+$", facts["command"])
    assert facts["job"] is None
    assert facts["git_commit"] is None or re.fullmatch("[0-9a-f]{40}", facts["git_commit"])
    assert facts["git_dirty"] in (None, True, False)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["devices"] == ["cpu", "cpu"]
    assert (facts["world_size"], facts["backend"], facts["threads"]) == (2, "gloo", 1)
    assert datetime.fromisoformat(facts["started"]).tzinfo is not None
    assert facts["parameters"] == WEIGHTS
    assert facts["data"] == {"train_samples": 169, "test_samples": 31, "classes": 10}
    assert facts["allreduce_bytes_per_step"] == 4 * WEIGHTS
    (delay,) = facts["calibrated_delays"]
    assert (delay["rule"], delay["rank"]) == (1, 0) and 0 < delay["seconds"] < 1


SPREAD = ("mean", "median", "p5", "p95")
PHASES = ("data", "forward", "backward", "delay", "wait", "step")
INTEGERS = ("epoch", "steps", "left_out", "train_samples", "test_samples", "allreduce_bytes")
NUMBERS = (
    "learning_rate", "train_loss", "train_top1", "train_top5", "test_loss", "test_top1",
    "test_top5", "samples_per_second", "epoch_seconds", "train_seconds", "total_seconds",
)  # fmt: skip
OPTIMA = (
    "time_model", "optimum", "optimum_continuous", "optimum_batch_sizes", "imbalance",
    "better_without",
)  # fmt: skip
LISTS = ("shares", "batch_sizes", "busy", "wait", "phases", "changes")


def test_every_field_of_an_epoch_s_record(run):
    for number, epoch in enumerate(run.epochs):
        assert set(epoch) == {*INTEGERS, *NUMBERS, *OPTIMA, *LISTS}
        assert all(type(epoch[key]) is int for key in INTEGERS)
        assert all(type(epoch[key]) is float and epoch[key] >= 0 for key in NUMBERS)
        # 169 = 5 * 32 + 9, and nothing is left out of 9.
        told = (epoch["epoch"], epoch["steps"], epoch["left_out"], epoch["train_samples"])
        assert told == (number, 6, 0, 169)
        assert epoch["allreduce_bytes"] == 6 * 4 * WEIGHTS
        assert sum(epoch["batch_sizes"]) == 32 and sum(epoch["shares"]) == pytest.approx(1)
        assert epoch["shares"] == pytest.approx(np.array(epoch["batch_sizes"]) / 32)
        assert 0 <= epoch["test_top1"] <= epoch["test_top5"] <= 1
        assert set(epoch["busy"]) == {*SPREAD, "typical"} and set(epoch["wait"]) == {*SPREAD}
        assert set(epoch["phases"]) == {*PHASES}
        for times in (epoch["busy"], epoch["wait"], epoch["phases"]):
            assert all(len(column) == 2 and min(column) >= 0 for column in times.values())
        assert epoch["changes"] == [{"step": 0, "batch_sizes": epoch["batch_sizes"]}]
        rate = 169 / epoch["epoch_seconds"]
        assert epoch["samples_per_second"] == pytest.approx(rate)
    assert [epoch["left_out"] for epoch in run.epochs] == [0, 0]


def test_the_optimum_is_unknown_until_two_batch_sizes_are_seen(run):
    first, second = run.epochs
    assert all(first[key] is None for key in OPTIMA)
    a, d = (np.array(second["time_model"][key]) for key in "ad")
    sizes = np.array(second["optimum_batch_sizes"])
    assert sizes.sum() == 32 and (a > 0).all() and (d >= 0).all()
    assert second["optimum"] == pytest.approx((a * sizes + d).max())
    assert second["optimum_continuous"] <= second["optimum"]
    assert second["imbalance"] == pytest.approx(max(second["busy"]["typical"]) / second["optimum"])


def test_steps_npz_holds_every_step_and_the_records_summarise_it(run):
    steps = run.steps
    assert {k: (v.dtype.str, v.shape) for k, v in steps.items()} == {
        "epoch": ("<i4", (12,)), "step": ("<i4", (12,)), "batch_sizes": ("<i4", (12, 2)),
        "busy": ("<f4", (12, 2)), "wait": ("<f4", (12, 2)),
    }  # fmt: skip
    assert steps["epoch"].tolist() == [0] * 6 + [1] * 6
    assert steps["step"].tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert steps["batch_sizes"].sum(1).tolist() == [32, 32, 32, 32, 32, 9] * 2
    for number, epoch in enumerate(run.epochs):
        # Two of five steps warm up, as three would be most of them; the short one does not count.
        counted = slice(6 * number + 2, 6 * number + 5)
        assert (steps["batch_sizes"][counted] == epoch["batch_sizes"]).all()
        for name in ("busy", "wait"):
            seconds = steps[name][counted]
            assert epoch[name]["mean"] == pytest.approx(seconds.mean(0), rel=1e-5)
            assert epoch[name]["median"] == pytest.approx(np.median(seconds, 0), rel=1e-5)
            p95 = np.percentile(seconds, 95, 0)
            assert epoch[name]["p95"] == pytest.approx(p95, rel=1e-5)
        assert epoch["phases"]["wait"] == pytest.approx(epoch["wait"]["mean"])


def test_final_pt_is_a_plain_state_of_the_model(run):
    model = models.build("lenet", 10, 32)
    model.load_state_dict(torch.load(run.path / "final.pt", weights_only=True))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


# --- who may write into it ------------------------------------------------------------------------


def check_refused(folder: Path, outcomes: list[Outcome], before: dict[str, str], *parts: str):
    refusals(outcomes, str(run_path(folder)), *parts)
    assert content(folder / "runs") == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_finished_run_is_left_alone(tmp_path, finished, resume):
    folder = copied(finished, tmp_path)
    before = content(folder / "runs")
    for dry in ([], ["--dry-run"]):
        outcomes = launch(folder, 2, "--resume", resume, *dry, **OPTIONS)
        check_refused(folder, outcomes, before, "finished run", "--overwrite")
    told = launch(folder, 2, "--overwrite", "--dry-run", **OPTIONS)[0]
    assert told.code == 0 and "(what it holds is deleted)" in told.output
    assert content(folder / "runs") == before


def test_overwrite_does_a_finished_run_again(tmp_path, finished):
    folder = copied(finished, tmp_path)
    (run_path(folder) / "checkpoint.pt").write_text("left by someone")
    again = train(folder, 2, "--overwrite", **{**OPTIONS, "epochs": 1})
    assert again.column("epoch") == [0] and len(again.steps["epoch"]) == 6
    assert "continued" not in again.provenance
    assert not (again.path / "checkpoint.pt").exists()


def test_overwrite_does_an_unfinished_run_again(tmp_path, unfinished):
    folder = copied(unfinished, tmp_path)
    again = train(folder, 3, "--overwrite", **{**OPTIONS, "epochs": 1})
    assert again.column("epoch") == [0] and again.provenance["world_size"] == 3


def test_overwrite_deletes_nothing_but_runs(tmp_path, finished):
    path = tmp_path / "runs" / "short" / "edp-sgd" / "seed-42"
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    outcomes = launch(tmp_path, 2, "--overwrite", **OPTIONS)
    refusals(outcomes, str(path), "holds no run")
    assert (path / "thesis.tex").read_text() == "years of work"


def test_overwrite_takes_what_a_start_has_left_that_was_killed_at_once(tmp_path):
    path = tmp_path / "runs" / "short" / "edp-sgd" / "seed-42"
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / ".config.yaml.tmp").write_text("name: sh")
    assert train(tmp_path, 2, "--overwrite", **{**OPTIONS, "epochs": 1}).column("epoch") == [0]
    assert not list(path.glob(".*"))


def test_resume_never_leaves_an_unfinished_run_alone(tmp_path, unfinished):
    folder = copied(unfinished, tmp_path)
    before = content(folder / "runs")
    outcomes = launch(folder, 2, "--resume", "never", **OPTIONS)
    check_refused(folder, outcomes, before, "unfinished run", "--resume auto", "--overwrite")


def test_another_config_does_not_continue_an_unfinished_run(tmp_path, unfinished):
    folder = copied(unfinished, tmp_path)
    before = content(folder / "runs")
    changes = {**OPTIONS, "optimizer__lr": 0.01, "batch_size": 64, "threads": 2}
    outcomes = launch(folder, 2, **changes)
    check_refused(folder, outcomes, before, "another batch_size, optimizer.lr:")


def test_another_straggler_does_not_continue_an_unfinished_run(tmp_path, unfinished):
    folder = copied(unfinished, tmp_path)
    before = content(folder / "runs")
    rules = [{**OPTIONS["stragglers"][0], "factor": 3.5}, OPTIONS["stragglers"][1]]
    outcomes = launch(folder, 2, **{**OPTIONS, "stragglers": rules})
    check_refused(folder, outcomes, before, "another stragglers.0.factor:")


def test_algorithms_and_seeds_have_folders_of_their_own(tmp_path, finished):
    folder = copied(finished, tmp_path)
    before = content(folder / "runs")
    small = {**OPTIONS, "epochs": 1, "stragglers": []}
    for arguments in (["--algorithm", "dp-sgd"], ["--seed", "7"], ["optimizer.lr=0.01"]):
        values(launch(folder, 1, *arguments, **small))
    after = content(folder / "runs")
    assert {name: after[name] for name in before} == before
    runs = {str(path.parent.relative_to(folder / "runs")) for path in folder.rglob("final.pt")}
    assert runs == {
        "short/edp-sgd/seed-42", "short/dp-sgd/seed-42", "short/edp-sgd/seed-7",
        "short+optimizer.lr=0.01/edp-sgd/seed-42",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [".epochs.jsonl.tmp", "epochs.jsonl", "steps.npz", "preempted", ".lock", "provenance.json"],
)
def test_a_folder_in_a_file_s_place_is_named(tmp_path, unfinished, name):
    folder = copied(unfinished, tmp_path)
    file = run_path(folder) / name
    file.unlink(missing_ok=True)
    file.mkdir()
    kept = (run_path(folder) / "checkpoint.pt").read_bytes()
    outcomes = launch(folder, 2, limit=30.0, **OPTIONS)
    for outcome in outcomes:
        assert outcome.code == 2 and "Traceback" not in outcome.output, outcome.output
        assert name.removesuffix(".tmp").strip(".") in outcome.output.splitlines()[-1]
    assert (run_path(folder) / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_neither_waited_for_nor_followed(tmp_path, unfinished, kind):
    folder, victim = copied(unfinished, tmp_path), tmp_path / "victim"
    lock = run_path(folder) / ".lock"
    lock.unlink(missing_ok=True)
    victim.write_text("years of work")
    lock.symlink_to(victim) if kind == "link" else os.mkfifo(lock)
    for outcome in launch(folder, 2, limit=30.0, **OPTIONS):
        assert outcome.code == 2 and str(lock) in outcome.output
    assert victim.read_text() == "years of work"


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_whatever_is_called_final_pt_costs_no_checkpoint(tmp_path, unfinished, make):
    folder = copied(unfinished, tmp_path)
    make(run_path(folder) / "final.pt")
    before = content(folder / "runs")
    check_refused(folder, launch(folder, 2, **OPTIONS), before, "finished run", "--overwrite")
    final = run_path(folder) / "final.pt"
    final.rmdir() if make is Path.mkdir else final.unlink()
    assert train(folder, 2, **OPTIONS).column("epoch") == [0, 1]


def hold(path: str) -> None:
    """Opens a folder to overwrite it, says so, and waits for a second one to try."""
    config = resolve(from_mapping(short_config(**OPTIONS)))
    folder, rank = RunFolder(Path(path)), os.environ["RANK"]
    note = Path(path).parent / "held"
    while rank == "1" and not note.exists():
        time.sleep(0.05)
    try:
        found = folder.open(config, 2, "auto", overwrite=True)
    except UserError as error:
        assert rank == "1" and "is being written by another process" in str(error)
        (note.parent / "refused").touch()
        return
    assert (rank, found) == ("0", REPLACES)
    note.touch()
    while not (note.parent / "refused").exists():
        time.sleep(0.05)


def test_only_one_of_two_that_overwrite_has_the_folder(tmp_path, finished):
    folder = copied(finished, tmp_path)
    before = content(folder / "runs")
    values(run_workers(tmp_path / "two", 2, hold, str(run_path(folder)), limit=20.0))
    after = content(folder / "runs")
    assert {name: after[name] for name in before} == before


def on_two_nodes(blind: bool, *argv: str) -> None:
    """The command line on nodes of one worker each; blind: the second has a disk of its own."""
    import recorder

    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    if blind and rank == "1":
        recorder.RunFolder.sees = lambda self, name: False
    run_trainer(*argv)


@pytest.mark.parametrize("blind", [True, False])
def test_nodes_that_do_not_see_the_records_are_told(tmp_path, blind):
    options = {"epochs": 1, "target": on_two_nodes, "before": (blind,)}
    first, second = launch(tmp_path, 2, **options)
    assert (first.code, second.code) == (0, 0), first.output
    assert ("is not seen by the nodes of ranks 1:" in first.output) == blind
    assert not list(run_path(tmp_path).glob(".*"))
