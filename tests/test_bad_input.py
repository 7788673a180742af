"""What is wrong ends all workers at once: in one line each for bad input, loudly for the rest."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import Outcome, run_trainer, run_workers, values
from training import launch

SOON = 30.0  # seconds; what hangs would do so for the 60 of the config's timeout


def refusals(outcomes: list[Outcome], *parts: str) -> None:
    """Each worker has ended with code 2 and printed one line, in which all `parts` are."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 2, outcome.output
        (line,) = outcome.output.splitlines()
        assert line.startswith(f"trainer.py: error: rank {rank}: ")
        for part in parts:
            assert part in line, line


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["optimizer.lrr=1"], ["unknown key optimizer.lrr", "did you mean optimizer.lr?"]),
        (["epochs=many"], ["epochs must be a whole number", "many"]),
        (["epochs=1", "partition.shares=[0.5, -0.5]"], ["partition.shares", "> 0"]),
        (["partition.shares=[1, 1, 1]"], ["partition.shares has 3 entries", "2 workers"]),
        (["stragglers=[{ranks: [2], kind: constant, seconds: 1}]"], ["rank 2", "2 workers"]),
        (["model.name=resnet51"], ["model.name", "resnet51", "torchvision/resnet50"]),
        (["model.name=torchvision/alexnet"], ["alexnet", "32x32", "data.image_size"]),
        (["data.name=image_folder", "data.root=/no/such"], ["data.root", "/no/such"]),
        (["data.train_samples=3"], ["3 training samples", "2 workers", "4 are needed"]),
        (["batch_size=3"], ["batch_size 3", "2 workers"]),
        (["partition.max_batch=4"], ["partition.max_batch 4", "batch_size 32"]),
        (["data.subset=1000"], ["data.subset", "1000", "104"]),
        (["partition.policy=replay", "partition.replay=/no/such"], ["partition.replay: /no/such"]),
        (["partition.min_batch=1", "model.name=torchvision/resnet18"],
         ["partition.min_batch", "resnet18", "32x32"]),
        pytest.param(
            ["--device", "cuda"], ["no GPU", "--device cpu"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--backend", "nccl"], ["nccl", "gloo"]),
        (["--config", "no-such"], ["command line", "--config"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_every_worker_in_one_line(tmp_path, arguments, parts):
    refusals(launch(tmp_path, 2, *arguments, limit=SOON), *parts)
    left = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert left <= {"config.yaml", ".lock"}


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "runs").write_text("a file")
    refusals(launch(tmp_path, 2, limit=SOON), str(tmp_path / "runs"), "output")
    line = ["--config", "demo", "stragglers=[]", "--output", "o" * 300]
    refusals(run_workers(tmp_path / "long", 1, run_trainer, *line, limit=SOON), "name too long")


def without(names: list[str], *argv: str) -> None:
    """The command line where the environment lacks the variables `names`."""
    for name in names:
        os.environ.pop(name, None)
    run_trainer(*argv)


def test_local_arguments_need_a_launcher(tmp_path):
    outcomes = launch(
        tmp_path, 1, "--local_world_size=2", target=without, before=(["RANK", "WORLD_SIZE"],),
        limit=SOON,
    )  # fmt: skip
    refusals(outcomes, "--local_world_size=2", "torchrun")


def test_half_of_a_launcher_s_environment_is_refused(tmp_path):
    outcomes = launch(tmp_path, 2, target=without, before=(["MASTER_ADDR"],), limit=SOON)
    refusals(outcomes, "MASTER_ADDR")


def test_an_environment_that_is_no_number_is_refused(tmp_path):
    outcomes = run_workers(
        tmp_path, 1, run_trainer, "--config", "demo", limit=SOON, environment={"WORLD_SIZE": "two"}
    )
    refusals(outcomes, "WORLD_SIZE", "two")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["partition.policy=replay", "partition.replay=/no/such"], ["partition.replay: /no/such"]),
        (["data.name=cifar10", "data.subset=50001"], ["data.subset", "50001", "1..50000"]),
        (["data.name=cifar10", "data.test_subset=10001"], ["data.test_subset", "1..10000"]),
        (["data.name=cifar10", "data.image_size=64"], ["data.image_size", "32"]),
        (["partition.min_batch=1", "model.name=torchvision/resnet18"], ["partition.min_batch"]),
    ],
)
def test_a_dry_run_refuses_it_too(tmp_path, arguments, parts):
    refusals(launch(tmp_path, 2, "--dry-run", *arguments, limit=SOON), *parts)


# --- a damaged image on one worker ----------------------------------------------------------------


def image_folder(root: Path, per_class: int) -> list[Path]:
    draw, paths = np.random.default_rng(0), []
    for split in ("train", "test"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for number in range(per_class):
                path = root / split / name / f"{number}.png"
                Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
                paths.append(path)
    return paths


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_image_damaged_since_it_was_listed_ends_all_workers(tmp_path, loader_workers):
    paths = image_folder(tmp_path / "images", per_class=12)
    options: dict[str, Any] = {
        "data__name": "image_folder", "data__root": str(tmp_path / "images"),
        "data__cache": str(tmp_path / "cache"), "data__memory_limit_gib": 1e-9,
        "data__placement": "loader", "data__loader_workers": loader_workers, "batch_size": 8,
    }  # fmt: skip
    values(launch(tmp_path, 2, "--dry-run", **options))
    # Unnoticed by the list of files: neither the size nor the time of change tells of it.
    before = paths[5].stat()
    paths[5].write_bytes(b"\0" * before.st_size)
    os.utime(paths[5], ns=(before.st_atime_ns, before.st_mtime_ns))
    outcomes = launch(tmp_path, 2, limit=SOON, **options)
    assert all(outcome.code not in (None, 0) for outcome in outcomes)
    (told,) = [outcome for outcome in outcomes if "cannot read image" in outcome.output]
    assert told.code == 2 and "Traceback" not in told.output
    assert str(paths[5]) in told.output.splitlines()[-1]


# --- a fault in the middle ------------------------------------------------------------------------


def fail_in(rank: int, call: int, method: str, *argv: str) -> None:
    """The command line, where one worker fails in its `call`-th call of a Trainer's method."""
    import trainer

    calls, whole = [0], getattr(trainer.Trainer, method)

    def failing(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and os.environ["RANK"] == str(rank):
            raise ZeroDivisionError("made for the test")
        return whole(*arguments, **named)

    setattr(trainer.Trainer, method, failing)
    run_trainer(*argv)


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize(
    "rank, method", [(0, "_step"), (1, "_step"), (2, "_step"), (1, "_evaluate")]
)
def test_a_fault_of_one_worker_ends_all_and_shows_where(tmp_path, rank, method, exchange):
    call = 5 if method == "_step" else 1  # after the two steps that rehearse
    begin = time.monotonic()
    outcomes = launch(
        tmp_path, 3, target=fail_in, before=(rank, call, method), limit=SOON, exchange=exchange
    )
    assert time.monotonic() - begin < SOON
    assert all(outcome.code not in (None, 0) for outcome in outcomes), outcomes
    assert "Traceback" in outcomes[rank].output
    assert "ZeroDivisionError: made for the test" in outcomes[rank].output
