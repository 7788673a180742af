"""Whole trainings: exact for any number of workers and any partition, against a loop by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_trainer, values
from torch.nn.functional import cross_entropy, one_hot, pad
from training import Trained, launch, train

import models
from data.augment import augmentation_table
from data.synthetic import synthetic_data
from partitioner import epoch_order

SEED, BATCH, RATE = 42, 32, 0.05


# --- the reference: one process, no part of the trainer -------------------------------------------


@dataclass
class Reference:
    """weights: [P]; per epoch: mean losses, and samples that the best and the five best hit."""

    weights: np.ndarray
    train_loss: list[float]
    train_hits: list[list[int]]
    test_loss: list[float]
    test_hits: list[list[int]]


def normalised(images: torch.Tensor, data: Any) -> torch.Tensor:
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    return (images.double() / 255 - mean) / std


def cropped_and_flipped(image: torch.Tensor, draw: list[int]) -> torch.Tensor:
    down, right, flip = draw
    image = pad(image, (4, 4, 4, 4))[:, down : down + 32, right : right + 32]
    return image.flip(2) if flip else image


def hits(outputs: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    rank = (outputs > outputs.gather(1, labels[:, None])).sum(1)
    return np.array([int((rank < 1).sum()), int((rank < 5).sum())])


def tensors(images: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels uint8 [N, 3, 32, 32] and labels [N] of a whole set."""
    pixels = images.read(np.arange(len(images)))
    return torch.from_numpy(pixels), torch.tensor(images.labels)


def flattened(parts: Iterable[torch.Tensor]) -> np.ndarray:
    return torch.cat([part.detach().flatten() for part in parts]).numpy()


def initial_model() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return models.build("lenet", 10, 32).double()


@lru_cache
def by_hand(
    train_samples: int = 104, test_samples: int = 31, epochs: int = 3, smoothing: float = 0.0
) -> Reference:
    """Plain SGD on full global batches; smoothing: of the training labels."""
    data = synthetic_data(train_samples, test_samples)
    images, labels = tensors(data.train)
    test_images, test_labels = tensors(data.test)
    model, told = initial_model(), Reference(np.empty(0), [], [], [], [])
    sgd = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs)
    for epoch in range(epochs):
        draws = augmentation_table(train_samples, SEED, epoch, 4, True).tolist()
        order, total, right = epoch_order(train_samples, SEED, epoch), 0.0, np.zeros(2, int)
        for start in range(0, train_samples, BATCH):
            index = order[start : start + BATCH]
            x = torch.stack([cropped_and_flipped(images[i], draws[i]) for i in index])
            outputs = model(normalised(x, data))
            # Smoothed labels are the given one and the mean of all, weighted.
            wanted = one_hot(labels[index], 10).double() * (1 - smoothing) + smoothing / 10
            loss = -(wanted * outputs.log_softmax(1)).sum(1).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            total += float(loss.detach()) * len(index)
            right += hits(outputs, labels[index])
        cosine.step()
        told.train_loss.append(total / train_samples)
        told.train_hits.append(right.tolist())
        with torch.no_grad():
            outputs = model(normalised(test_images, data))
        told.test_loss.append(float(cross_entropy(outputs, test_labels)))
        told.test_hits.append(hits(outputs, test_labels).tolist())
    told.weights = flattened(model.parameters())
    return told


def check_against(
    reference: Reference, run: Trained, train_samples: int, test_samples: int
) -> None:
    assert np.abs(run.flat() - reference.weights).max() < 1e-9
    for name, count in (("train", train_samples), ("test", test_samples)):
        losses, right = getattr(reference, f"{name}_loss"), getattr(reference, f"{name}_hits")
        assert np.abs(np.array(run.column(f"{name}_loss")) - losses).max() < 1e-9
        assert run.column(f"{name}_top1") == [one / count for one, _ in right]
        assert run.column(f"{name}_top5") == [five / count for _, five in right]
        assert run.column(f"{name}_samples") == [count] * len(right)


# --- the same trajectory whatever the partition ---------------------------------------------------

SLOW = [{"ranks": [0], "kind": "slowdown", "factor": 4.0}]
DELAYED = [{"ranks": [1], "kind": "constant", "seconds": 0.08}]
MEMORY = {"data__placement": "memory"}
READ_HERE = {"data__placement": "loader", "data__loader_workers": 0}
READ_AHEAD = {"data__placement": "loader", "data__loader_workers": 1}


@pytest.mark.parametrize(
    "size, exchange, changes",
    [
        (1, "ddp", MEMORY),
        (1, "flat", READ_HERE),
        (2, "ddp", {**MEMORY, "partition__shares": [1, 5]}),
        (2, "ddp", {**READ_AHEAD, "stragglers": SLOW}),
        (2, "flat", {**READ_HERE, "stragglers": DELAYED}),
        (3, "flat", {**READ_AHEAD, "partition__shares": [3, 1, 2]}),
        (3, "ddp", {**READ_HERE, "stragglers": DELAYED}),
        (4, "ddp", {**MEMORY, "partition__policy": "equal"}),
        (4, "flat", {**READ_AHEAD, "stragglers": SLOW}),
    ],
)
def test_edp_sgd_follows_the_loop_by_hand(tmp_path, size, exchange, changes):
    run = train(tmp_path, size, exchange=exchange, **changes)
    check_against(by_hand(), run, 104, 31)
    assert run.steps["batch_sizes"].sum(1).tolist() == [32, 32, 32, 8] * 3
    plans = run.column("batch_sizes")
    if "stragglers" in changes:
        assert plans[0] != plans[1], "the shares were to change while it trained"
    elif "partition__shares" in changes:
        shares = np.array(changes["partition__shares"]) / sum(changes["partition__shares"])
        assert np.abs(np.array(plans) - 32 * shares).max() < 1


def test_sync_sgd_with_equal_halves_follows_the_loop_by_hand(tmp_path):
    run = train(tmp_path, 2, algorithm="sync-sgd")
    check_against(by_hand(), run, 104, 31)
    assert run.column("batch_sizes") == [[16, 16]] * 3


def test_a_batch_too_small_for_all_workers_is_left_out_and_counted(tmp_path):
    """99 = 3 * 32 + 3, and two workers need two samples each."""
    (epoch,) = train(tmp_path, 2, epochs=1, data__train_samples=99, precision="fp32").epochs
    assert (epoch["steps"], epoch["train_samples"], epoch["left_out"]) == (3, 96, 3)


# --- how gradients are weighted -------------------------------------------------------------------


def first_gradients(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The initial weights [P], and the mean gradient of each part of the first batch [n, P]."""
    data = synthetic_data(BATCH, 1)
    images, labels = tensors(data.train)
    model, gradients = initial_model(), []
    for index in np.split(epoch_order(BATCH, SEED, 0), np.cumsum(sizes)[:-1]):
        model.zero_grad()
        cross_entropy(model(normalised(images[index], data)), labels[index]).backward()
        gradients.append(flattened(p.grad for p in model.parameters()))
    return flattened(model.parameters()), np.array(gradients)


@pytest.mark.parametrize(
    "changes, weight",
    [
        ({"algorithm": "edp-sgd"}, [0.25, 0.75]),
        ({"algorithm": "dp-sgd"}, [0.5, 0.5]),
        ({"algorithm": "dp-sgd", "gradient_weight": "share-over-n"}, [0.125, 0.375]),
    ],
)
def test_the_first_step_goes_down_the_gradient_that_the_algorithm_asks_for(
    tmp_path, changes, weight
):
    run = train(
        tmp_path, 2, epochs=1, data__train_samples=BATCH, partition__shares=[1, 3],
        data__crop_padding=0, data__flip=False, optimizer__momentum=0, optimizer__nesterov=False,
        optimizer__weight_decay=0, **changes,
    )  # fmt: skip
    start, gradients = first_gradients([8, 24])
    step = (start - run.flat()) / RATE
    assert np.abs(step - np.array(weight) @ gradients).max() < 1e-12
    # The biased one is another one: else the check above would say nothing.
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-3


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, test_samples, changes",
    [
        (1, 101, {}),
        (2, 101, {"partition__shares": [1, 3], "data__placement": "loader"}),
        (3, 101, {}),
        (4, 3, {"data__placement": "loader", "data__loader_workers": 1}),
    ],
)
def test_each_test_sample_counts_once_for_any_number_of_workers(
    tmp_path, size, test_samples, changes
):
    run = train(
        tmp_path, size, epochs=1, data__train_samples=32, data__test_samples=test_samples,
        evaluation_batch_size=7, **changes,
    )  # fmt: skip
    check_against(by_hand(32, test_samples, 1), run, 32, test_samples)


def running_statistics(*argv: str) -> dict[str, Any]:
    """BatchNorm's buffers before they are averaged, after it, and when evaluation begins."""
    import trainer

    seen: dict[str, Any] = {}
    average, evaluate = trainer.average_buffers, trainer.Trainer._evaluate

    def flat(module: torch.nn.Module) -> list[float]:
        floating = [b for b in module.buffers() if b.is_floating_point()]
        return torch.cat([b.flatten() for b in floating]).tolist()

    def watched_average(module: torch.nn.Module, share: float) -> None:
        seen["own"] = flat(module)
        average(module, share)
        seen["averaged"] = flat(module)

    def watched_evaluate(self: trainer.Trainer, epoch: int) -> dict[str, float | int]:
        seen["evaluated"] = flat(self.module)
        return evaluate(self, epoch)

    trainer.average_buffers, trainer.Trainer._evaluate = watched_average, watched_evaluate
    run_trainer(*argv)
    return seen


def test_evaluation_sees_running_statistics_averaged_by_samples(tmp_path):
    """Of 36 samples in parts of 4 + 12, 4 + 12 and (a short last batch) 2 + 2, 10 + 26 count."""
    got = values(
        launch(
            tmp_path, 2, target=running_statistics, epochs=1, batch_size=16, model__name="resnet20",
            data__train_samples=36, data__test_samples=4, partition__shares=[1, 3],
            precision="fp32",
        )
    )  # fmt: skip
    own = np.array([worker["own"] for worker in got])
    assert np.abs(own[0] - own[1]).max() > 1e-3
    expected = np.array([10, 26]) / 36 @ own
    assert got[0]["averaged"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert got[0]["averaged"] == got[1]["averaged"]
    assert got[0]["averaged"] == got[0]["evaluated"] == got[1]["evaluated"]


# --- random streams -------------------------------------------------------------------------------


def dropout_seeds(*argv: str) -> list[int]:
    """The seed of PyTorch's own generator in each step, those that rehearse included."""
    import trainer

    seeds, step = [], trainer.Trainer._step

    def watched(*arguments: Any, **named: Any) -> None:
        seeds.append(torch.initial_seed())
        step(*arguments, **named)

    trainer.Trainer._step = watched
    run_trainer(*argv)
    return seeds


def test_dropout_has_a_stream_for_each_epoch_worker_and_run(tmp_path):
    short = {"epochs": 2, "data__train_samples": 32, "precision": "fp32"}
    drawn = [
        seeds[2:]  # without the two steps that rehearse
        for seed in ("1", "2")
        for seeds in values(launch(tmp_path, 2, "--seed", seed, target=dropout_seeds, **short))
    ]
    assert [len(seeds) for seeds in drawn] == [2] * 4
    assert len({seed for seeds in drawn for seed in seeds}) == 8
