"""exchange: horovod where there is no Horovod: how it is refused, and all around it but Horovod."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import fake_horovod
import numpy as np
import pytest
from processes import run_trainer, values
from test_bad_input import SOON, refusals
from test_replay_memory import out_of_memory
from test_trainer import by_hand, check_against
from training import launch, train

OVER_HOROVOD = {"exchange": "horovod"}


# --- refusals -----------------------------------------------------------------------------------


def horovod_modules(*argv: str) -> list[str]:
    run_trainer(*argv)
    return [name for name in sys.modules if name.partition(".")[0] == "horovod"]


def test_it_is_not_imported_unless_a_run_asks_for_it(tmp_path):
    assert values(launch(tmp_path, 1, "--dry-run", target=horovod_modules)) == [[]]


def without_horovod(what: str, *argv: str) -> None:
    """The command line where Horovod is missing, or there without its part for PyTorch."""
    fake_horovod.install()
    empty = ModuleType("horovod.torch")
    sys.modules["horovod.torch"] = None if what == "missing" else empty
    sys.modules["horovod"].torch = empty
    run_trainer(*argv)


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_without_horovod_one_line_says_how_to_get_it(tmp_path, what):
    outcomes = launch(
        tmp_path, 2, target=without_horovod, before=(what,), limit=SOON, **OVER_HOROVOD
    )
    refusals(outcomes, "exchange: horovod", "scripts/install_horovod.sh", "--exchange ddp")


def under_torchrun(*argv: str) -> None:
    fake_horovod.install()
    del os.environ["HOROVOD_RANK"]
    run_trainer(*argv)


def test_torchrun_is_not_its_launcher(tmp_path):
    outcomes = launch(tmp_path, 2, "--exchange", "horovod", target=under_torchrun, limit=SOON)
    refusals(outcomes, "horovodrun -np N python trainer.py")


def under_horovodrun_alone(*argv: str) -> None:
    fake_horovod.install()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    run_trainer(*argv)


def test_horovodrun_is_its_launcher_alone(tmp_path):
    outcomes = launch(tmp_path, 2, target=under_horovodrun_alone, limit=SOON)
    refusals(outcomes, "--exchange horovod", "torchrun")


# --- over a stand-in ----------------------------------------------------------------------------


def over_stand_in(*argv: str) -> None:
    fake_horovod.install()
    run_trainer(*argv)


@pytest.mark.parametrize(
    "size, changes",
    [
        (1, {}),
        (2, {"partition__shares": [1, 5], "memory_format": "channels-last"}),
        (2, {"partition__shares": [1, 2], "accumulate": 3}),
        (3, {"stragglers": [{"ranks": [0], "kind": "slowdown", "factor": 4.0}]}),
    ],
)
def test_edp_sgd_follows_the_loop_by_hand(tmp_path, size, changes):
    run = train(tmp_path, size, target=over_stand_in, **OVER_HOROVOD, **changes)
    check_against(by_hand(), run, 104, 31)
    assert run.provenance["backend"] == "gloo" and run.provenance["world_size"] == size


def test_a_delay_lengthens_its_own_worker_s_busy_time_alone(tmp_path):
    run = train(
        tmp_path, 2, target=over_stand_in, **OVER_HOROVOD, algorithm="sync-sgd", epochs=2,
        stragglers=[{"ranks": [1], "kind": "constant", "seconds": 0.15}],
    )  # fmt: skip
    fast, slow = run.steps["busy"].T
    assert slow.min() >= 0.15 and np.median(fast) < 0.1
    assert np.median(run.steps["wait"][:, 0]) > 0.05


def short_of_memory(*arguments: str) -> None:
    fake_horovod.install()
    out_of_memory(*arguments)


@pytest.mark.parametrize("where", ["forward", "backward", "late"])
def test_a_worker_without_memory_finishes_its_part_in_micro_batches(tmp_path, where):
    """Late: when all gradients but one have left."""
    run = train(
        tmp_path, 2, target=short_of_memory, before=("1", where, 13), limit=SOON, **OVER_HOROVOD
    )
    check_against(by_hand(), run, 104, 31)
    assert max(sizes[1] for sizes in run.column("batch_sizes")) <= 14
