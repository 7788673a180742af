"""Two jobs that are started at once on one machine, and the script that makes two hosts of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from image_tree import write_archive, write_tree
from training import records, short_config

from reader import is_finished, read_run

ROOT = Path(__file__).resolve().parent.parent


def start(*arguments: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "trainer.py", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def outputs(jobs: list[subprocess.Popen]) -> list[str]:
    try:
        return [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()  # it ends its workers
                job.communicate(timeout=40)


def test_two_jobs_at_once_do_not_collide(tmp_path):
    """They share the output folder, and both want to unpack and decode the same archive."""
    tree = write_tree(tmp_path / "tree", train=24, test=4, size=(32, 32))
    data = {"name": "image_folder", "root": str(write_archive(tmp_path / "tree.tar.gz", tree)),
            "cache": str(tmp_path / "cache")}  # fmt: skip
    config = tmp_path / "short.yaml"
    config.write_text(yaml.safe_dump(short_config(epochs=2, batch_size=16, data=data)))
    common = ("--config", str(config), "--output", str(tmp_path / "runs"))
    jobs = [start(*common, "--seed", str(seed)) for seed in (1, 2)]
    for job, output in zip(jobs, outputs(jobs)):
        assert job.returncode == 0, output
    for seed in (1, 2):
        path = tmp_path / "runs" / "short" / "edp-sgd" / f"seed-{seed}"
        assert is_finished(path) and len(read_run(path).epochs) == 2
        assert [record["train_samples"] for record in records(path)] == [48, 48]
    # One unpacked and one decoded copy, and nothing half-made beside them.
    kept = sorted(os.listdir(tmp_path / "cache"))
    assert [name.partition("-")[0] for name in kept] == ["image_folder", "tree"]


# --- scripts/two_hosts.sh -------------------------------------------------------------------------


def two_hosts(path: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [shutil.which("bash"), str(ROOT / "scripts" / "two_hosts.sh")],
        env={**os.environ, "PATH": str(path), "PYTHON": sys.executable, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def tools(folder: Path, **scripts: str) -> Path:
    """A folder for PATH with the tools that the script starts with, and `scripts` by name."""
    folder.mkdir()
    for name in ("uname", "dirname", "id", "rm", "sleep"):
        (folder / name).symlink_to(shutil.which(name))
    for name, line in scripts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def test_two_hosts_says_why_it_is_skipped(tmp_path):
    for number, (scripts, why) in enumerate(
        [
            ({"uname": "echo Darwin"}, "Linux"),
            ({}, "no command ip"),
            ({"ip": "exit 1"}, "no command tc"),
            ({"ip": "exit 1", "tc": "exit 1", "id": "echo 1000"}, "need root"),
            ({"ip": "exit 1", "tc": "exit 1", "id": "echo 0"}, "does not let root add"),
        ]
    ):
        done = two_hosts(tools(tmp_path / str(number), **scripts))
        assert done.returncode == 77, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("two_hosts.sh: skipped: ") and why in line
    done = two_hosts(
        tools(tmp_path / "python", ip="exit 1", tc="exit 1", id="echo 0"), PYTHON="/no/python"
    )
    assert done.returncode == 77 and "/no/python lacks the requirements" in done.stderr
