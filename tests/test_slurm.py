"""scripts/slurm.sbatch, with stand-ins for Slurm's commands and the interpreter."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "slurm.sbatch"
SAYS_WHAT_IT_GOT = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1:] == ["-m", "torch.distributed.run", "--help"]:
    sys.exit(print(os.environ.get("TORCHRUN_KNOWS", "--signals-to-handle SIGNALS_TO_HANDLE")))
names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SRUN_CPUS_PER_TASK")
print(json.dumps([sys.argv, os.getcwd(), [os.environ.get(name) for name in names]]))
"""
JOB = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_GPUS_ON_NODE": "4",
}


def submit(folder: Path, *arguments: str, **job: str | None) -> subprocess.CompletedProcess:
    """Runs the script as Slurm would, on the nodes n1, n2 and n3; None removes a variable."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n'
    )
    for name in ("python", "srun"):
        (commands / name).write_text(SAYS_WHAT_IT_GOT)
    for file in commands.iterdir():
        file.chmod(0o755)
    variables = {**JOB, "SLURM_SUBMIT_DIR": str(folder), "PATH": f"{commands}:/usr/bin:/bin", **job}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def got(done: subprocess.CompletedProcess) -> tuple[list[str], str, list[str | None]]:
    assert done.returncode == 0, done.stderr
    (program, *words), place, variables = json.loads(done.stdout)
    return [Path(program).name, *words], place, variables


MEETING = [
    "--rdzv-backend=c10d", "--rdzv-endpoint=n1:24567", "--rdzv-id=1234567",
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
]  # fmt: skip


def test_a_set_is_made_by_one_reproduce_py_that_starts_each_run_on_all_nodes(tmp_path):
    words, place, variables = got(submit(tmp_path, "some set.yaml", "--only", "a b/*"))
    assert words == [
        "python", "reproduce.py", "--nnodes=3", "--nproc-per-node=4", *MEETING,
        "--launch-prefix", "srun --ntasks-per-node=1 --kill-on-bad-exit=1",
        "some set.yaml", "--only", "a b/*",
    ]  # fmt: skip
    assert place == str(tmp_path)
    assert variables == [None, None, "1"]


def test_an_older_torchrun_is_not_given_what_it_does_not_know(tmp_path):
    done = submit(tmp_path, "set.yaml", TORCHRUN_KNOWS="--nnodes NNODES")
    words, _, _ = got(done)
    assert not any(word.startswith("--signals") for word in words)
    assert "checkpoint.every" in done.stderr


def test_a_single_run(tmp_path):
    words, _, _ = got(submit(tmp_path, "trainer.py", "--config", "demo", "stragglers=[]"))
    assert words == [
        "srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "python", "-m",
        "torch.distributed.run", "--nnodes=3", "--nproc-per-node=4", *MEETING,
        "trainer.py", "--config", "demo", "stragglers=[]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "job, part",
    [
        ({"WORKERS_PER_NODE": "2"}, "--nproc-per-node=2"),
        ({"SLURM_GPUS_ON_NODE": None}, "--nproc-per-node=1"),
        ({"PORT": "29500"}, "--rdzv-endpoint=n1:29500"),
        ({"SLURM_JOB_ID": "39999"}, "--rdzv-endpoint=n1:29999"),
        ({"SLURM_JOB_ID": "40000"}, "--rdzv-endpoint=n1:20000"),
    ],
)
def test_variables(tmp_path, job, part):
    assert part in got(submit(tmp_path, "set.yaml", **job))[0]


def test_one_interface_for_both_libraries_and_the_job_s_cores(tmp_path):
    variables = got(submit(tmp_path, "set.yaml", INTERFACE="ib0", SLURM_CPUS_PER_TASK="8"))[2]
    assert variables == ["ib0", "ib0", "8"]


def test_reproduce_py_takes_what_the_script_gives_it(tmp_path):
    """The options are spelled as reproduce.py has them."""
    import reproduce

    words, _, _ = got(submit(tmp_path, "set.yaml"))
    options = reproduce._parse(words[2:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == ("3", "4", "1234567")
    assert options.launch_prefix.startswith("srun ")
    # What the user says wins.
    words, _, _ = got(submit(tmp_path, "set.yaml", "--nproc-per-node=2", "--launch-prefix", "mine"))
    options = reproduce._parse(words[2:])
    assert (options.nproc_per_node, options.launch_prefix) == ("2", "mine")


@pytest.mark.parametrize(
    "arguments, job, part",
    [
        ([], {}, "give an experiment file"),
        (["set.yaml"], {"SLURM_JOB_ID": None}, "start this with sbatch"),
        (["set.yaml"], {"SLURM_SUBMIT_DIR": "/no/such"}, "/no/such"),
    ],
)
def test_what_is_missing_is_said(tmp_path, arguments, job, part):
    done = submit(tmp_path, *arguments, **job)
    assert done.returncode != 0 and done.stdout == ""
    assert part in done.stderr


def test_the_script_is_clean_shell():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True, timeout=60)


def test_nothing_in_it_belongs_to_one_site():
    lines = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert lines
    for option in ("partition", "account", "mail", "qos", "reservation", "constraint"):
        assert not any(option in line for line in lines)
