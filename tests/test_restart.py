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
from test_launch import free_port
from test_resume import LENET, READ_AHEAD, check_equal, interrupt
from training import read, run_path, short_config, train

from experiments.launcher import descendants, end

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


def test_killed_workers_are_restarted_and_the_run_goes_on_by_itself(tmp_path):
    """Worker 1 in the first epoch's last step, then worker 0, which holds the folder's lock."""
    fates = {"0": [1, 2 + 4], "1": [0, 2 + 3]}
    process = torchrun(tmp_path / "killed", *ALONE, "--max-restarts=3", fates=fates, **OPTIONS)
    try:
        assert process.wait(120) == 0, (tmp_path / "killed" / "log").read_text()[-3000:]
    finally:
        end(process)
    continued = read(tmp_path / "killed")
    check_equal(continued, train(tmp_path / "undisturbed", 2, **OPTIONS))
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


def test_a_killed_start_has_not_overwritten_what_it_had_not_come_to(tmp_path):
    """The first start is killed while it rehearses, the second one in the second epoch."""
    folder, options = tmp_path / "run", {**OPTIONS, "checkpoint__every": "epoch"}
    interrupt(folder, 2, "append_epoch", 3, **options)  # two epochs of an older run
    before = (run_path(folder) / "epochs.jsonl").read_text()
    log = restarted(folder, {"0": [1, 1], "1": [1, 2 + 6]}, "--overwrite", **options)
    assert "--overwrite: done at the first start of this job, which goes on" in log
    run = read(folder)
    check_equal(run, train(tmp_path / "undisturbed", 2, **options))
    (later,) = run.provenance["continued"]
    # By its process and by its folder.
    assert len(run.provenance["launchers"]) == 2
    assert later["launchers"] == run.provenance["launchers"]
    assert run.epochs[0]["train_seconds"] != json.loads(before.splitlines()[0])["train_seconds"]


def test_a_restart_does_not_make_never_mean_auto(tmp_path):
    """Killed before anything is begun, it refuses at each start; begun by it, the run goes on."""
    folder, options = tmp_path / "run", {**OPTIONS, "checkpoint__every": "epoch"}
    restarted(folder, {"0": [0, 2 + 6]}, "--resume=never", **options)
    assert read(folder).column("epoch") == [0, 1, 2]
    other = tmp_path / "other"
    interrupt(other, 2, "append_epoch", 2, **options)
    before = (run_path(other) / "epochs.jsonl").read_text()
    more = ["--resume=never"]
    process = torchrun(other, *ALONE, "--max-restarts=1", fates={}, more=more, **options)
    try:
        assert process.wait(120) == 1
    finally:
        end(process)
    assert (other / "log").read_text().count("rank 0: ") == 2
    assert "holds an unfinished run: --resume auto" in (other / "log").read_text()
    assert (run_path(other) / "epochs.jsonl").read_text() == before


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume=never"]])
def test_a_worker_that_is_killed_after_the_run_s_end_does_not_make_it_fail(tmp_path, more):
    log = restarted(tmp_path / "run", {"0": [0, "end"]}, *more, **{**OPTIONS, "epochs": 1})
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


def test_when_a_node_is_lost_the_rest_goes_on(tmp_path):
    """Two launchers, of which the one that does not host the rendezvous is killed.

    It was told to overwrite: that holds for its first start, not for the one after the loss.
    """
    options = {**OPTIONS, "precision": "fp64", "epochs": 100, "data__loader_workers": 0}
    folder = tmp_path / "elastic"
    nodes, port = two_nodes(folder, "1:2", more=["--overwrite"], **options)
    try:
        host, lost = _host_and_other(nodes, port, folder)
        _kill(lost)
        assert host.wait(120) == 0, (folder / "log").read_text()[-3000:]
    finally:
        for node in nodes:
            end(node)
    run = read(folder)
    assert run.column("epoch") == list(range(100))
    # It may have begun with one of them, before the other had joined.
    assert 2 in _workers(folder) and _workers(folder)[-1] == 1
    whole = train(tmp_path / "undisturbed", 1, **options)
    assert abs(run.flat() - whole.flat()).max() < 1e-9
    assert still_running(str(tmp_path)) == []


def test_when_the_rendezvous_host_is_lost_the_job_ends_and_goes_on_when_started_again(tmp_path):
    options, folder = {**OPTIONS, "epochs": 120, "data__loader_workers": 0}, tmp_path / "hostless"
    nodes, port = two_nodes(folder, "2", **options)
    try:
        host, left = _host_and_other(nodes, port, folder)
        _kill(host)
        assert left.wait(120) != 0
    finally:
        for node in nodes:
            end(node)
    assert "an exchange with the other workers failed" in (folder / "log").read_text()
    assert (run_path(folder) / "checkpoint.pt").exists()
    assert still_running(str(tmp_path)) == []
    again = torchrun(folder, *ALONE, fates={}, **options)
    try:
        assert again.wait(120) == 0, (folder / "log").read_text()[-3000:]
    finally:
        end(again)
    check_equal(read(folder), train(tmp_path / "undisturbed", 2, **options))


def two_nodes(folder: Path, nodes: str, **options: Any) -> tuple[list[subprocess.Popen], int]:
    """Two launchers of one worker each, and the port of their rendezvous; nodes: how many to be."""
    port = free_port()
    elastic = [
        f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=12,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]  # fmt: skip
    return [torchrun(folder, *elastic, fates={}, **options) for _ in range(2)], port


def _host_and_other(
    nodes: Sequence[subprocess.Popen], port: int, folder: Path
) -> tuple[subprocess.Popen, subprocess.Popen]:
    """The launcher that hosts the rendezvous and the other one, once both train."""
    deadline = time.monotonic() + 90
    # The last checkpoint may be older than the last record.
    while _workers(folder).count(2) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    host = next(node for node in nodes if _listens(node.pid, port))
    (other,) = (node for node in nodes if node is not host)
    return host, other


def _kill(launcher: subprocess.Popen) -> None:
    """Kills a launcher and its workers, as the loss of a node does."""
    for pid in [*(pid for pid, _ in descendants(launcher.pid)), launcher.pid]:
        os.kill(pid, signal.SIGKILL)


def _workers(folder: Path) -> list[int]:
    """How many workers each recorded epoch had."""
    lines = [line for file in folder.rglob("epochs.jsonl") for line in file.read_text().split("\n")]
    return [len(json.loads(line)["shares"]) for line in lines[:-1]]


def _listens(pid: int, port: int) -> bool:
    """Whether it is this process that listens at the port."""
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    fields = [line.split() for line in lines.splitlines()]
    listening = {
        f"socket:[{f[9]}]" for f in fields if f[3] == "0A" and f[1].endswith(f":{port:04X}")
    }
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return bool(listening & set(links))


def _workers_words(folder: Path) -> str:
    """What the workers have said; torchrun itself tells of its signal in a traceback."""
    return (folder / "log").read_text().partition("closing signal SIGTERM")[0]
