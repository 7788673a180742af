"""The learning rate of every step: by tables worked out by hand, by PyTorch, and in real runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml
from processes import run_trainer, values
from training import launch, run_path, short_config, train

from configs.errors import UserError
from configs.schema import Config, check_workers, for_workers, from_mapping
from schedule import learning_rate, warm_up_rates

# The rule for a batch of 1,024 where 0.1 is meant for 256: four times as much.
LINEAR = {"batch_size": 1024, "schedule__scale_lr": "linear", "schedule__kind": "constant"}
HALF = 0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))


def configured(**changes: Any) -> Config:
    return from_mapping(short_config(optimizer__lr=0.1, **changes))


def rates(config: Config, steps: int) -> list[float]:
    return [
        learning_rate(config, epoch, step, steps)
        for epoch in range(config.epochs)
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    "changes, steps, expected",
    [
        ({"epochs": 3, "schedule__kind": "constant"}, 2, [0.1] * 6),
        ({"epochs": 4}, 2, [0.1, 0.1, 0.1 * HALF[0], 0.1 * HALF[0], 0.05, 0.05,
                            0.1 * HALF[1], 0.1 * HALF[1]]),
        ({"epochs": 4, "schedule__kind": "step", "schedule__milestones": [1, 3],
          "schedule__factor": 0.5}, 2, [0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.025, 0.025]),
        ({**LINEAR, "epochs": 2}, 2, [0.4] * 4),
        ({**LINEAR, "epochs": 4, "schedule__warmup_epochs": 2}, 3,
         [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, *[0.4] * 6]),
        # A milestone counts from the start of the run, the warm-up included.
        ({**LINEAR, "epochs": 4, "schedule__warmup_epochs": 1, "schedule__kind": "step",
          "schedule__milestones": [2, 3]}, 3,
         [0.1, 0.2, 0.3, *[0.4] * 3, *[0.04] * 3, *[0.004] * 3]),
        # The cosine has the epochs that the warm-up leaves, from its peak on.
        ({**LINEAR, "epochs": 5, "schedule__warmup_epochs": 1, "schedule__kind": "cosine"}, 2,
         [0.1, 0.25, 0.4, 0.4, 0.4 * HALF[0], 0.4 * HALF[0], 0.2, 0.2,
          0.4 * HALF[1], 0.4 * HALF[1]]),
        # Half an epoch of four steps; and more epochs than the run has.
        ({**LINEAR, "epochs": 2, "schedule__warmup_epochs": 0.5}, 4, [0.1, 0.25, *[0.4] * 6]),
        ({**LINEAR, "epochs": 2, "schedule__warmup_epochs": 3}, 1, [0.1, 0.2]),
        # A smaller batch than the reference: less from the start.
        ({**LINEAR, "batch_size": 128, "epochs": 2, "schedule__warmup_epochs": 1}, 2, [0.05] * 4),
        ({**LINEAR, "schedule__reference_batch_size": 512, "epochs": 1}, 2, [0.2] * 2),
    ],
)  # fmt: skip
def test_the_rate_of_every_step(changes, steps, expected):
    config = configured(**changes)
    assert rates(config, steps) == pytest.approx(expected, rel=1e-12)
    warm_up = min(round(config.schedule.warmup_epochs * steps), len(expected))
    assert warm_up_rates(config, steps) == pytest.approx(expected[:warm_up], rel=1e-12)
    # What comes once an epoch does not depend on how many steps there are.
    for epoch in range(math.ceil(config.schedule.warmup_epochs), config.epochs):
        assert learning_rate(config, epoch) == learning_rate(config, epoch, steps - 1, steps)


@pytest.mark.parametrize(
    "batch, warm_up, epochs, steps", [(8192, 5, 90, 3), (512, 1, 2, 7), (320, 3, 4, 1)]
)
def test_warm_up_and_cosine_are_pytorch_s_schedulers(batch, warm_up, epochs, steps):
    config = configured(
        batch_size=batch, epochs=epochs, schedule__scale_lr="linear",
        schedule__warmup_epochs=warm_up,
    )  # fmt: skip
    peak = 0.1 * batch / 256
    scheduler = torch.optim.lr_scheduler
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    linear = scheduler.LinearLR(sgd, start_factor=0.1 / peak, total_iters=warm_up * steps)
    ours = rates(config, steps)
    for rate in ours[: warm_up * steps]:
        assert rate == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-12)
        sgd.step()
        linear.step()
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    cosine = scheduler.CosineAnnealingLR(sgd, epochs - warm_up)
    for rate in ours[warm_up * steps :: steps]:
        assert rate == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        sgd.step()
        cosine.step()
    assert ours[warm_up * steps] == peak == max(ours) and min(ours[: warm_up * steps]) > 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"schedule__kind": "step"}, ["schedule.kind step", "schedule.milestones"]),
        ({"schedule__milestones": [3]}, ["schedule.kind step", "schedule.milestones"]),
        ({"schedule__warmup_epochs": 2}, ["schedule.warmup_epochs", "schedule.scale_lr linear"]),
        ({**LINEAR, "schedule__kind": "step", "schedule__milestones": [4, 4]},
         ["schedule.milestones [4, 4]", "rise"]),
        ({**LINEAR, "schedule__kind": "step", "schedule__milestones": [5],
          "schedule__warmup_epochs": 5}, ["schedule.milestones [5]", "warmup_epochs"]),
        ({"schedule__warmup_epochs": -1}, ["schedule.warmup_epochs", ">= 0"]),
        ({"schedule__reference_batch_size": 0}, ["schedule.reference_batch_size", ">= 1"]),
        ({"schedule__factor": 0}, ["schedule.factor", "> 0"]),
        ({"label_smoothing": 1}, ["label_smoothing", "< 1"]),
        ({"accumulate": 0}, ["accumulate", ">= 1"]),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_one_line(changes, words):
    with pytest.raises(UserError) as error:
        configured(**changes)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# --- the global batch -----------------------------------------------------------------------------


def test_the_global_batch_grows_with_the_workers():
    config = configured(batch_size=None, batch_per_worker=48)
    assert [for_workers(config, n).batch_size for n in (1, 2, 32)] == [48, 96, 1536]
    scaled = configured(
        **{**LINEAR, "batch_size": None, "batch_per_worker": 128}, schedule__warmup_epochs=1
    )
    assert [learning_rate(for_workers(scaled, n), 1) for n in (1, 2, 8)] == [0.05, 0.1, 0.4]
    # What was recorded for so many workers is read again for as many, and for no others.
    again = for_workers(config, 2)
    assert for_workers(again, 2) == again
    with pytest.raises(UserError, match="batch_size 96 is not batch_per_worker 48 times 3 workers"):
        check_workers(again, 3)


def test_a_batch_per_worker_is_a_run_with_the_product_as_its_batch(tmp_path):
    by_worker = train(tmp_path / "a", 2, epochs=2, batch_size=None, batch_per_worker=16)
    whole = train(tmp_path / "b", 1, epochs=2, batch_size=32)
    assert abs(by_worker.flat() - whole.flat()).max() < 1e-9
    recorded = yaml.safe_load((run_path(tmp_path / "a") / "config.yaml").read_text())
    assert (recorded["batch_size"], recorded["batch_per_worker"]) == (32, 16)
    for outcome in launch(tmp_path / "c", 3, batch_size=32, batch_per_worker=16):
        assert outcome.code == 2 and "set one of the two to null" in outcome.output


# --- in real runs ---------------------------------------------------------------------------------

# 104 samples in batches of 32: four steps an epoch, of which six belong to the warm-up.
WARM_UP = {
    "optimizer__lr": 0.01, "schedule__scale_lr": "linear", "schedule__reference_batch_size": 8,
    "schedule__warmup_epochs": 1.5, "epochs": 3,
}  # fmt: skip


def used_rates(*argv: str) -> list[float]:
    """The learning rate of each step that the optimizer makes after the rehearsal's two."""
    used, step = [], torch.optim.SGD.step

    def watched(self: Any, *arguments: Any) -> Any:
        used.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    torch.optim.SGD.step = watched
    run_trainer(*argv)
    return used[2:]


def test_a_run_uses_the_schedule_s_rates_whatever_the_shares(tmp_path):
    moving = {
        "partition__policy": "affine", "partition__every": 2,
        "stragglers": [{"ranks": [1], "kind": "constant", "seconds": 0.02}],
    }  # fmt: skip
    peak = 0.01 * 32 / 8
    warm_up = [0.01 + (peak - 0.01) * step / 6 for step in range(6)]
    # Over 1.5 epochs; epoch 2 is a third of the way down.
    expected = [*warm_up, peak, peak, *[peak * 0.5 * (1 + math.cos(math.pi / 3))] * 4]
    for folder, size, changes in (("one", 1, {}), ("two", 2, moving)):
        outcomes = launch(tmp_path / folder, size, target=used_rates, **WARM_UP, **changes)
        for used in values(outcomes):
            assert used == pytest.approx(expected, rel=1e-12)


def test_a_dry_run_shows_each_step_of_the_warm_up(tmp_path):
    outcomes = launch(tmp_path, 2, "--dry-run", **WARM_UP)
    values(outcomes)
    lines = outcomes[0].output.splitlines()
    start = lines.index("learning rate by step of the warm-up:")
    assert lines[start + 1 : start + 4] == [
        "  0: 0.01 0.015 0.02 0.025 0.03 0.035",
        "learning rate by epoch, its first step:",
        "  0: 0.01 0.03 0.03",
    ]
