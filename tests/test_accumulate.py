"""Micro-batches and smoothed labels: the gradient of the whole part, sent once a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from processes import run_trainer, values
from test_replay_memory import out_of_memory
from test_trainer import by_hand, check_against
from training import launch, train, work_per_sample


@pytest.mark.parametrize(
    "size, exchange, changes",
    [
        (1, "ddp", {"accumulate": 4}),
        (1, "flat", {"accumulate": 3}),
        # A part of 5 samples makes two micro-batches, of 3 and 2; one of 27 makes three.
        (2, "ddp", {"accumulate": 3, "partition__shares": [1, 5]}),
        (2, "flat", {"accumulate": 2, "partition__shares": [3, 1]}),
        # More than a short last batch's parts have samples for.
        (3, "ddp", {"accumulate": 16}),
    ],
)
def test_micro_batches_follow_the_loop_by_hand(tmp_path, size, exchange, changes):
    """The loop takes whole batches of 32, and one of 8."""
    run = train(tmp_path, size, exchange=exchange, **changes)
    check_against(by_hand(), run, 104, 31)


def test_shares_that_move_between_steps_change_nothing(tmp_path):
    slow = [{"ranks": [1], "kind": "constant", "seconds": 0.03}]
    run = train(
        tmp_path, 2, accumulate=3, stragglers=slow, partition__policy="affine", partition__every=2
    )
    assert any(len(epoch["changes"]) > 1 for epoch in run.epochs)
    check_against(by_hand(), run, 104, 31)


def counted(*argv: str) -> list[tuple[int, int, int]]:
    """Samples, forward passes and all-reduces of each step that is not rehearsed."""
    import torch.distributed as dist

    import trainer

    steps: list[list[int]] = []
    step, forward, reduce = trainer.Trainer._step, trainer.Trainer._forward, dist.all_reduce

    def watched_step(self: Any, images: Any, *others: Any) -> None:
        steps.append([len(images), 0, 0])
        step(self, images, *others)

    def watched_forward(self: Any, *arguments: Any) -> Any:
        if self.module.training:
            steps[-1][1] += 1
        return forward(self, *arguments)

    def watched_reduce(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if steps and tensor.numel() > 1000:  # gradients, not the sums of metrics
            steps[-1][2] += 1
        return reduce(tensor, *arguments, **named)

    trainer.Trainer._step, trainer.Trainer._forward = watched_step, watched_forward
    dist.all_reduce = watched_reduce
    run_trainer(*argv)
    return [tuple(one) for one in steps[2:]]


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_a_step_makes_one_all_reduce_however_many_micro_batches(tmp_path, exchange):
    """LeNet's gradients fit into one of DDP's buckets."""
    options = {"exchange": exchange, "partition__shares": [1, 3], "epochs": 1, "accumulate": 4}
    for rank, steps in enumerate(values(launch(tmp_path, 2, target=counted, **options))):
        sizes = [(8, 4, 1), (24, 4, 1)][rank], [(2, 1, 1), (6, 3, 1)][rank]
        assert [tuple(step) for step in steps] == [sizes[0]] * 3 + [sizes[1]]


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_busy_time_holds_all_micro_batches_and_no_waiting(tmp_path, exchange):
    run = train(
        tmp_path, 2, target=work_per_sample, before=(0.01,), epochs=1, accumulate=4,
        exchange=exchange, partition__shares=[1, 3],
    )  # fmt: skip
    busy, wait, sizes = (run.steps[name] for name in ("busy", "wait", "batch_sizes"))
    assert (busy >= 0.0099 * sizes).all()
    # The worker with a third of the work waits for the other; neither wait is taken for work.
    assert (np.median(busy + wait, 0).max() >= 0.0099 * 24).all()
    assert np.median(busy[:3, 0]) < np.median(busy[:3, 1]) and wait[:3, 0].sum() > wait[:3, 1].sum()


@pytest.mark.parametrize(
    "exchange, where", [("ddp", "forward"), ("ddp", "backward"), ("ddp", "late"), ("flat", "late")]
)
def test_a_worker_without_memory_for_a_micro_batch_makes_smaller_ones(tmp_path, exchange, where):
    """Six samples at a time, of sixteen in two: nothing has left before the second begins."""
    options = {"exchange": exchange, "epochs": 3, "accumulate": 2}
    run = train(tmp_path, 2, target=out_of_memory, before=("1", where, 6), **options)
    check_against(by_hand(), run, 104, 31)
    sizes = [epoch["batch_sizes"][1] for epoch in run.epochs]
    assert sizes[0] == 14 and max(sizes[1:]) <= 12


def test_smoothed_labels_are_for_training_alone(tmp_path):
    run = train(tmp_path, 2, label_smoothing=0.1, partition__shares=[1, 2], accumulate=2)
    check_against(by_hand(smoothing=0.1), run, 104, 31)
    assert np.abs(run.flat() - by_hand().weights).max() > 1e-4
