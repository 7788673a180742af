"""Real Horovod under its own launcher: run by `make test-horovod`, skipped where it is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_trainer import by_hand, check_against
from training import Trained, read, run_path, short_config, train

from experiments.launcher import end

ROOT = Path(__file__).resolve().parent.parent
HOROVODRUN = Path(sys.executable).with_name("horovodrun")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod: make test-horovod"
)

# What each algorithm is told, so that its trajectory does not depend on times.
FIXED = {
    "sync-sgd": {},
    "dp-sgd": {"partition__shares": [1, 3]},
    "edp-sgd": {"partition__shares": [1, 3]},
}


def run(
    folder: Path, size: int, *arguments: str, program: tuple[str, ...] = ("trainer.py",),
    limit: float = 150.0, **changes: Any,
) -> tuple[int, str]:  # fmt: skip
    """`horovodrun -np SIZE python PROGRAM` with a config and arguments: exit code and output."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(short_config(**changes)))
    line = ["--config", str(config), "--output", str(folder / "runs"), "--exchange", "horovod"]
    command = [HOROVODRUN, "-np", str(size), sys.executable, *program, *line, *arguments]
    return ended([str(word) for word in command], folder / "output", limit)


def ended(command: list[str], file: Path, limit: float) -> tuple[int, str]:
    with open(file, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        finally:
            if process.poll() is None:
                end(process)
    return code, file.read_text()


def trained(folder: Path, size: int, **changes: Any) -> Trained:
    code, output = run(folder, size, **changes)
    assert code == 0, output
    return read(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], Trained]:
    """Runs of two workers, each made once: undisturbed("edp-sgd")."""
    made: dict[str, Trained] = {}

    def of(algorithm: str) -> Trained:
        if algorithm not in made:
            folder = tmp_path_factory.mktemp(algorithm)
            made[algorithm] = trained(folder, 2, algorithm=algorithm, **FIXED[algorithm])
        return made[algorithm]

    return of


# --- the same training as over DistributedDataParallel ------------------------------------------


@pytest.mark.parametrize("algorithm", list(FIXED))
def test_it_follows_ddp_and_records_the_same(tmp_path, undisturbed, algorithm):
    over_horovod = undisturbed(algorithm)
    over_ddp = train(tmp_path, 2, algorithm=algorithm, **FIXED[algorithm])
    assert np.abs(over_horovod.flat() - over_ddp.flat()).max() < 1e-9
    for one, other in zip(over_horovod.epochs, over_ddp.epochs, strict=True):
        assert one.keys() == other.keys()
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-9)
        assert one["test_top1"] == other["test_top1"]
        assert one["batch_sizes"] == other["batch_sizes"]
        assert one["allreduce_bytes"] == other["allreduce_bytes"]
    assert over_horovod.steps.keys() == over_ddp.steps.keys()
    assert over_horovod.provenance.keys() == over_ddp.provenance.keys()
    assert over_horovod.provenance["command"].startswith("horovodrun -np 2 python trainer.py ")
    assert over_horovod.provenance["versions"]["horovod"]


def test_three_workers_whose_shares_move_follow_the_loop_by_hand(tmp_path):
    """And a delay lengthens its own worker's busy time alone: waits are not in it."""
    delay = [{"ranks": [1], "kind": "constant", "seconds": 0.3}]
    three = trained(tmp_path, 3, stragglers=delay)
    check_against(by_hand(), three, 104, 31)
    plans = three.column("batch_sizes")
    assert plans[0] != plans[1] and plans[-1][1] == min(plans[-1])
    busy, wait = three.steps["busy"], three.steps["wait"]
    assert busy[:, 1].min() >= 0.3 and np.median(busy[:, 0]) < 0.2 > np.median(busy[:, 2])
    assert np.median(wait[:, 0]) > 0.1 < np.median(wait[:, 2])


def test_batch_norm_and_channels_last_follow_ddp(tmp_path):
    changes = {
        "model__name": "resnet20", "memory_format": "channels-last", "epochs": 1,
        "partition__shares": [1, 3], "data__train_samples": 64,
    }  # fmt: skip
    over_horovod = trained(tmp_path / "horovod", 2, **changes)
    over_ddp = train(tmp_path / "ddp", 2, **changes)
    assert np.abs(over_horovod.flat() - over_ddp.flat()).max() < 1e-9


def test_micro_batches_leave_together(tmp_path):
    accumulated = trained(tmp_path, 2, accumulate=3, partition__shares=[1, 3])
    check_against(by_hand(), accumulated, 104, 31)


def test_one_process_needs_no_launcher(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(short_config(exchange="horovod")))
    command = [sys.executable, "trainer.py", "--config", str(config),
               "--output", str(tmp_path / "runs")]  # fmt: skip
    code, output = ended(command, tmp_path / "output", 100.0)
    assert code == 0, output
    check_against(by_hand(), read(tmp_path), 104, 31)


# --- what goes wrong ----------------------------------------------------------------------------


def worker(statement: str) -> tuple[str, ...]:
    """A program that runs a statement of which argv is trainer.py's command line."""
    modules = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]"
    names = "from test_horovod import fail_on, hang_on; argv = sys.argv[1:]"
    return ("-c", f"{modules}; {names}; {statement}")


def fail_on(rank: int, call: int, argv: list[str]) -> None:
    """The command line, where one worker fails in its `call`-th step."""
    _step_on(rank, call, argv, _fail)


def hang_on(rank: int, call: int, argv: list[str]) -> None:
    """The command line, where one worker does not come to its `call`-th step."""
    _step_on(rank, call, argv, lambda: time.sleep(1000))


def _fail() -> None:
    raise ZeroDivisionError("made for the test")


def _step_on(rank: int, call: int, argv: list[str], fault: Callable[[], None]) -> None:
    import trainer

    calls, step = [0], trainer.Trainer._step

    def watched(self: Any, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == call and self.workers.rank == rank:
            fault()
        step(self, *arguments)

    trainer.Trainer._step = watched
    sys.argv = ["trainer.py", *argv]
    trainer.main()


def test_a_fault_of_one_worker_ends_all_and_the_same_command_goes_on(tmp_path, undisturbed):
    options = {"algorithm": "edp-sgd", **FIXED["edp-sgd"]}
    # Two steps that rehearse and an epoch of four: the fault lies in the second epoch.
    code, output = run(tmp_path, 2, program=worker("fail_on(1, 8, argv)"), **options)
    assert code != 0 and "ZeroDivisionError: made for the test" in output
    assert (run_path(tmp_path) / "checkpoint.pt").exists()
    continued = trained(tmp_path, 2, **options)
    assert len(continued.provenance["continued"]) == 1
    assert np.array_equal(continued.flat(), undisturbed("edp-sgd").flat())


def test_a_worker_that_hangs_ends_all_after_the_time_limit(tmp_path):
    code, output = run(tmp_path, 2, program=worker("hang_on(1, 8, argv)"), timeout=4.0)
    assert code != 0 and "no sum of the gradient" in output


def test_bad_input_is_one_line_of_each_worker(tmp_path):
    code, output = run(tmp_path, 2, "partition.shares=[1, 1, 1]")
    assert code != 0 and "Traceback" not in output.partition("Process ")[0]
    for rank in range(2):
        assert f"trainer.py: error: rank {rank}: partition.shares has 3 entries" in output
