"""What the end-of-run summary says of a worker that only holds the others up."""

from __future__ import annotations

from training import train

from console import summary


def test_the_summary_says_what_a_worker_costs_that_sets_the_pace(tmp_path):
    run = train(
        tmp_path, 2, epochs=4, precision="fp32", partition__policy="affine",
        stragglers=[{"ranks": [1], "kind": "constant", "seconds": 0.3}],
    )  # fmt: skip
    # On a busy machine the other worker's times may change so much that its fit starts anew.
    last = [epoch for epoch in run.epochs if epoch["better_without"] is not None][-1]
    assert last["batch_sizes"][1] <= 6 and last["better_without"]["ranks"] == [1]
    assert last["better_without"]["seconds"] < 0.5 * last["optimum"]
    text = summary(run.epochs[: last["epoch"] + 1], ["cpu", "cpu"])
    assert "worker 1 sets the pace" in text and "times as fast" in text
    first = summary(run.epochs[:1], ["cpu", "cpu"])
    assert "sets the pace" not in first
