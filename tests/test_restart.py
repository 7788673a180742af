"""torchrun: restarts after a kill, and a launcher that is asked to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import still_running
from test_resume import LENET, READ_AHEAD, check_equal, interrupt
from training import Trained, read, run_path, short_config, train

from experiments.launcher import end

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(500)  # the sum of the limits below


ALONE = ("--standalone", "--nproc-per-node=2")


def torchrun(
    folder: Path, *options: str, fates: Any, more: Sequence[str] = (), **changes: Any
) -> subprocess.Popen:
    """torchrun with mortal workers, in a session of its own; more: arguments of the workers."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(short_config(**changes)))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *options),
        *(str(TESTS / "mortal.py"), "--config", str(config), "--output", str(folder / "runs")),
        *more,
    ]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            command,
            # The last is what several nodes need: see README.md.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "FATES": json.dumps(fates),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(options[0] not in ALONE)),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


OPTIONS = {**LENET, **READ_AHEAD, "epochs": 3, "checkpoint__every": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("undisturbed"), 2, **OPTIONS)


def test_killed_workers_are_restarted_and_the_run_goes_on_by_itself(tmp_path, undisturbed):
    """Worker 1 in the first epoch's last step, then worker 0, which holds the folder's lock."""
    fates = {"0": [1, 2 + 4], "1": [0, 2 + 3]}
    restarted(tmp_path / "killed", fates, **OPTIONS)
    continued = read(tmp_path / "killed")
    check_equal(continued, undisturbed)
    # Each of the two restarts went on from a checkpoint.
    assert len(continued.provenance["continued"]) == 2
    assert {file.name for file in continued.path.iterdir()} == {
        "config.yaml", "provenance.json", "epochs.jsonl", "steps.npz", "final.pt"
    }  # fmt: skip
    assert still_running(str(tmp_path)) == []


def restarted(folder: Path, fates: Any, *arguments: str, **options: Any) -> str:
    """A run of which all fates are met, and what was said."""
    process = torchrun(
        folder, *ALONE, "--max-restarts=3", fates=fates, more=arguments, **options
    )
    try:
        assert process.wait(120) == 0, (folder / "log").read_text()[-3000:]
    finally:
        end(process)
    return (folder / "log").read_text()


def test_a_killed_start_has_not_overwritten_what_it_had_not_come_to(tmp_path, undisturbed):
    """The first start is killed while it rehearses, the second one in the second epoch."""
    folder, options = tmp_path / "run", {**OPTIONS, "checkpoint__every": "epoch"}
    interrupt(folder, 2, "append_epoch", 3, **options)  # two epochs of an older run
    before = (run_path(folder) / "epochs.jsonl").read_text()
    log = restarted(folder, {"0": [1, 1], "1": [1, 2 + 6]}, "--overwrite", **options)
    assert "--overwrite: done at the first start of this job, which goes on" in log
    run = read(folder)
    check_equal(run, undisturbed)
    (later,) = run.provenance["continued"]
    # By its process and by its folder.
    assert len(run.provenance["launchers"]) == 2
    assert later["launchers"] == run.provenance["launchers"]
    assert run.epochs[0]["train_seconds"] != json.loads(before.splitlines()[0])["train_seconds"]


def test_a_restart_goes_on_with_what_its_job_has_begun_although_it_says_never(tmp_path):
    folder, options = tmp_path / "run", {**OPTIONS, "checkpoint__every": "epoch"}
    restarted(folder, {"0": [0, 2 + 6]}, "--resume=never", **options)
    assert read(folder).column("epoch") == [0, 1, 2]


def test_a_worker_that_is_killed_after_the_run_s_end_does_not_make_it_fail(tmp_path):
    options = {**OPTIONS, "epochs": 1}
    log = restarted(tmp_path / "run", {"0": [0, "end"]}, "--overwrite", **options)
    assert "holds this job's run, which is finished: nothing is left to do" in log
    run = read(tmp_path / "run")
    assert run.column("epoch") == [0] and "continued" not in run.provenance
    assert sorted(file.name for file in run.path.iterdir()) == [
        "config.yaml", "epochs.jsonl", "final.pt", "provenance.json", "steps.npz"
    ]  # fmt: skip


def test_a_launcher_that_is_asked_to_end_leaves_a_run_to_go_on_with(tmp_path):
    options = {**OPTIONS, "epochs": 400}
    folder = tmp_path / "ended"
    process = torchrun(folder, *ALONE, fates={}, **options)
    try:
        deadline = time.monotonic() + 90
        while not list(folder.rglob("checkpoint.pt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        end(process)
    path = run_path(folder)
    marker = json.loads((path / "preempted").read_text())
    assert marker["signal"] == "SIGTERM" and still_running(str(tmp_path)) == []
    assert not (path / "final.pt").exists() and "Traceback" not in _workers_words(folder)


def _workers_words(folder: Path) -> str:
    """What the workers have said; torchrun itself tells of its signal in a traceback."""
    return (folder / "log").read_text().partition("closing signal SIGTERM")[0]
