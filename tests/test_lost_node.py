"""torchrun on two nodes, of which one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import still_running
from test_launch import free_port
from test_restart import ALONE, OPTIONS, torchrun
from test_resume import check_equal
from training import read, run_path, train

from experiments.launcher import descendants, end

pytestmark = pytest.mark.timeout(500)  # the sum of the limits below


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
