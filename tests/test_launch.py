"""The ways to start a run: launchers, one process, and a dry run that trains nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from processes import run_workers, values
from training import launch, read, short_config

from configs.schema import from_mapping, resolve

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Call:
    code: int
    output: str
    errors: str


def call(*command: str) -> Call:
    """`python COMMAND…` in the repository; after 90 seconds it is told to end its workers."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        # Not killed: workers have sessions of their own, and only the launcher knows them.
        process.terminate()
        process.communicate(timeout=40)
        raise
    return Call(process.returncode, output, errors)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- real launchers -------------------------------------------------------------------------------


def test_torchrun_trains_on_two_workers(tmp_path):
    config = tmp_path / "short.yaml"
    config.write_text(yaml.safe_dump(short_config(epochs=2)))
    done = call(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "trainer.py",
        "--config", str(config), "--output", str(tmp_path / "runs"), "--algorithm", "dp-sgd",
    )  # fmt: skip
    assert done.code == 0, done.errors
    run = read(tmp_path)
    assert run.path == tmp_path / "runs" / "short" / "dp-sgd" / "seed-42"
    assert run.column("epoch") == [0, 1]
    assert (run.provenance["world_size"], run.provenance["backend"]) == (2, "gloo")
    assert run.provenance["command"].startswith(
        "torchrun --standalone --nproc_per_node=2 trainer.py --config "
    )
    # The console: what is trained, a line per epoch, a table with a row per worker. Once.
    lines = done.output.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert sum(line.startswith("short: dp-sgd") for line in lines) == 1
    assert [line.split()[0] for line in lines[-4:-1]] == ["worker", "0", "1"]
    assert "Traceback" not in done.errors


def test_the_authors_launch_line_starts_their_experiment(tmp_path):
    done = call(
        "-m", "torch.distributed.launch", "--nnodes=1", "--node_rank=0", "--nproc_per_node=2",
        f"--master_port={free_port()}", "trainer.py", "--local_world_size=2",
        "--dry-run", "--device", "cpu", "--output", str(tmp_path / "runs"),
    )  # fmt: skip
    assert done.code == 0, done.errors
    config, _, plan = done.output.partition("\n---\n")
    told = yaml.safe_load(config)
    assert (told["name"], told["algorithm"], told["batch_size"]) == ("resnet50-low", "edp-sgd", 256)
    assert told["stragglers"][0]["ranks"] == [1] and told["stragglers"][0]["seconds"] == 0.1
    assert "resnet50, 23,520,842 parameters" in plan
    assert "steps per epoch: 196" in plan and "batch sizes 128 128" in plan
    assert not (tmp_path / "runs").exists()


def test_python_alone_trains_in_one_process(tmp_path):
    small = ["data.train_samples=64", "data.test_samples=10", "epochs=1", "stragglers=[]"]
    done = call(
        "trainer.py", "--config", "configs/demo.yaml", *small, "--output", str(tmp_path / "runs")
    )
    assert done.code == 0, done.errors
    run = read(tmp_path)
    assert run.path.parent.parent.name.startswith("demo+")
    assert run.provenance["world_size"] == 1 and run.column("shares") == [[1.0]]
    assert run.provenance["command"].startswith("python trainer.py --config configs/demo.yaml ")


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_no_thread_of_a_process_group_is_left_when_the_interpreter_ends(tmp_path, exchange):
    """One that let go of a tensor then would abort the process of a finished run."""
    code = (
        "import atexit, pathlib, sys\n"
        "def show(when):\n"
        "    names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "    print(when, sum('pt_gloo_runloop' in name for name in names))\n"
        "atexit.register(show, 'threads at the end')\n"
        "import trainer\n"
        "make = trainer.Trainer.__init__\n"
        "def shown(self, *given): show('threads during the run'); make(self, *given)\n"
        "trainer.Trainer.__init__ = shown\n"
        "trainer.main()"
    )
    small = ["data.train_samples=64", "data.test_samples=10", "epochs=1", "stragglers=[]"]
    done = call(
        "-c", code, "--config", "configs/demo.yaml", *small, f"exchange={exchange}",
        "--output", str(tmp_path / "runs"),
    )  # fmt: skip
    assert done.code == 0, done.errors
    assert {"threads during the run 4", "threads at the end 0"} <= set(done.output.splitlines())


# --- launchers' arguments -------------------------------------------------------------------------


def local_places(variables: list[str], *argv: str) -> list[int]:
    """The place of this worker where the environment lacks `variables`."""
    from cluster import join
    from configs.command_line import parse

    for name in variables:
        del os.environ[name]
    launch_ = parse([argument.format(os.environ.get("RANK")) for argument in argv])
    with join("gloo", "cpu", 1, 30.0, launch_.local_rank, launch_.local_world_size) as workers:
        return [workers.rank, workers.size, workers.local_rank, workers.local_size]


@pytest.mark.parametrize(
    "missing, argv, expected",
    [
        ([], ["--local_rank=7", "--local-world-size=9"], [[0, 2, 0, 2], [1, 2, 1, 2]]),
        (["LOCAL_RANK"], ["--local_rank={}"], [[0, 2, 0, 2], [1, 2, 1, 2]]),
        (["LOCAL_RANK"], ["--local-rank={}"], [[0, 2, 0, 2], [1, 2, 1, 2]]),
        (["LOCAL_RANK", "LOCAL_WORLD_SIZE"], [], [[0, 2, 0, 2], [1, 2, 1, 2]]),
        (
            ["LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            ["--local_world_size=1", "--local-rank=0"],
            [[0, 2, 0, 1], [1, 2, 0, 1]],
        ),
    ],
)
def test_the_environment_wins_over_both_spellings_of_the_arguments(
    tmp_path, missing, argv, expected
):
    assert values(run_workers(tmp_path, 2, local_places, missing, *argv)) == expected


# --- dry run --------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path):
    changes = {"partition__shares": [1, 3], "epochs": 4, "data__train_samples": 99}
    outcomes = launch(tmp_path, 2, "--dry-run", "optimizer.lr=0.2", **changes)
    values(outcomes)
    config, _, plan = outcomes[0].output.partition("\n---\n")
    asked = from_mapping(short_config(optimizer__lr=0.2, output=str(tmp_path / "runs"), **changes))
    assert from_mapping(yaml.safe_load(config)) == resolve(asked)
    assert outcomes[1].output == ""
    lines = plan.splitlines()
    run = f"{tmp_path}/runs/short+optimizer.lr=0.2/edp-sgd/seed-42"
    # LeNet-5 has (75+1)*6 + (150+1)*16 + (400+1)*120 + (120+1)*84 + (84+1)*10 weights, of 8 bytes.
    weights = 76 * 6 + 151 * 16 + 401 * 120 + 121 * 84 + 85 * 10
    assert lines[:6] == [
        f"run folder: {run} (a new run)",
        f"model: lenet, {weights:,} parameters",
        "workers: 2 (gloo): cpu, cpu",
        # 32 + 32 + 32 + 3: a worker's minimum is 2, so that 3 do not do for two.
        "steps per epoch: 3, 99 samples (a last batch of 3 is too small and left out)",
        "first plan: batch sizes 8 24",
        f"all-reduce: {weights * 8:,} bytes per step and worker",
    ]
    # 0.2 * (1 + cos(pi * e / 4)) / 2
    assert lines[7].split() == ["0:", "0.2", "0.170711", "0.1", "0.0292893"]
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_refuses_what_a_run_would(tmp_path):
    for rank, outcome in enumerate(launch(tmp_path, 2, "--dry-run", model__name="lenet5")):
        assert outcome.code == 2
        assert outcome.output.startswith(f"trainer.py: error: rank {rank}: model.name: unknown")
