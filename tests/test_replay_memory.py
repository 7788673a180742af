"""Replayed batch sizes, rebalances inside an epoch, and a worker that runs out of memory."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from processes import run_trainer
from training import launch, run_path, train

SLOW = [{"ranks": [1], "kind": "constant", "seconds": 0.03}]
LENET = {"precision": "fp64", "epochs": 2}


def test_affine_moves_shares_inside_an_epoch_and_replay_repeats_the_run(tmp_path):
    options = {**LENET, "partition__policy": "affine", "partition__every": 2}
    first = train(tmp_path / "first", 2, **options, stragglers=SLOW)
    assert any(len(epoch["changes"]) > 1 for epoch in first.epochs)
    again = train(
        tmp_path / "again", 2, **LENET, partition__policy="replay",
        partition__replay=str(first.path),
    )  # fmt: skip
    assert (again.steps["batch_sizes"] == first.steps["batch_sizes"]).all()
    assert np.array_equal(first.flat(), again.flat())
    # And, as it is edp-sgd, the shares have changed nothing but the rounding.
    whole = train(tmp_path / "whole", 1, **LENET)
    assert np.abs(whole.flat() - first.flat()).max() < 1e-9


def test_a_record_that_does_not_fit_is_refused(tmp_path):
    first = train(tmp_path / "first", 2, **LENET)
    for outcome in launch(
        tmp_path / "again", 3, **LENET, partition__policy="replay",
        partition__replay=str(first.path),
    ):  # fmt: skip
        assert outcome.code == 2 and "replay: epoch 0" in outcome.output


# --- memory -----------------------------------------------------------------------------------


def out_of_memory(rank: str, where: str, limit: int, *argv: str) -> None:
    """Trains on a device of worker `rank` that holds `limit` samples in the `where` pass."""
    import trainer

    forward = trainer.Trainer._forward

    hooks = []

    def limited(self, model, images, labels):
        while hooks:
            hooks.pop().remove()
        outputs, loss = forward(self, model, images, labels)
        if self.module.training and len(images) > limit and os.environ["RANK"] == rank:
            if where == "forward":
                raise torch.OutOfMemoryError("simulated")
            first_weight = next(self.module.parameters())
            hooks.append((loss if where == "backward" else first_weight).register_hook(_raise))
        return outputs, loss

    trainer.Trainer._forward = limited
    run_trainer(*argv)


def _raise(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("simulated")


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_worker_finishes_its_part_in_micro_batches_and_gets_less_from_then_on(
    tmp_path, exchange, where
):
    options = {**LENET, "exchange": exchange, "epochs": 3}
    run = train(
        tmp_path / "small", 2, target=out_of_memory, before=("1", where, 13), **options
    )
    whole = train(tmp_path / "whole", 1, **options)
    assert np.abs(run.flat() - whole.flat()).max() < 1e-9
    sizes = [epoch["batch_sizes"][1] for epoch in run.epochs]
    # Of 16, the rehearsal finds 14 to be less; 14 are still too many in the first epoch.
    assert sizes[0] == 14 and max(sizes[1:]) <= 12


def test_where_gradients_may_have_left_the_run_ends_and_goes_on_with_a_lower_cap(tmp_path):
    arguments = {**LENET, "exchange": "ddp", "partition__policy": "equal"}
    outcomes = launch(
        tmp_path, 2, target=out_of_memory, before=("1", "late", 13), **arguments
    )
    assert outcomes[1].code == 2 and "cannot be repeated" in outcomes[1].output
    assert outcomes[0].code != 0
    cap = json.loads((run_path(tmp_path) / "cap-1.json").read_text())["max_batch"]
    assert cap == 14
    run = train(tmp_path, 2, **arguments)
    assert all(epoch["batch_sizes"][1] <= cap for epoch in run.epochs)
