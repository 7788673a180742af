"""Augmentation against a plain loop, and the two pipelines against each other."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_tree import opened, write_tree
from torch.utils.data._utils import signal_handling
from torchvision.transforms import Normalize
from torchvision.transforms import functional as transforms

from configs.errors import UserError
from configs.schema import DataConfig
from data import make_pipeline
from data.augment import augment, augmentation_table, normalise
from data.images import FileImages
from data.pipeline import LoaderPipeline, MemoryPipeline, Transform

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def random_images(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# --- augmentation ---


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 9),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_augment_does_what_torchvision_does_one_by_one(
    count: int, height: int, width: int, padding: int, flip: bool, seed: int
) -> None:
    images = random_images(count, height, width)
    table = augmentation_table(count, seed, 3, padding, flip)
    result = augment(images, table, padding)
    assert result.shape == images.shape and result.dtype == torch.uint8
    for image, (dy, dx, flipped), found in zip(images, table.tolist(), result, strict=True):
        expected = transforms.pad(image, [padding])
        expected = transforms.crop(expected, dy, dx, height, width)
        assert torch.equal(found, transforms.hflip(expected) if flipped else expected)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_batches_do_not_change_samples(
    sizes: list[int], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    count = sum(sizes)
    images = random_images(count, 11, 7)
    table = augmentation_table(count, 1, 2, 4, True)

    def prepared(rows: slice) -> torch.Tensor:
        cropped = augment(images[rows], table[rows], 4)
        return normalise(cropped, MEAN, STD, dtype, memory_format)

    whole = prepared(slice(0, count))
    ends = np.cumsum([0, *sizes])
    parts = [prepared(slice(a, b)) for a, b in itertools.pairwise(ends)]
    assert whole.dtype == dtype
    assert whole.is_contiguous(memory_format=memory_format)
    assert torch.equal(torch.cat(parts), whole)


def test_normalise_as_torchvision() -> None:
    images = random_images(5, 8, 8)
    for dtype in (torch.float32, torch.float64):
        expected = Normalize(MEAN, STD)(images.to(dtype) / 255)
        assert torch.equal(normalise(images, MEAN, STD, dtype), expected)
    rounded = normalise(images, MEAN, STD, torch.bfloat16)
    assert torch.equal(rounded, normalise(images, MEAN, STD).bfloat16())


@given(
    count=st.integers(0, 50),
    more=st.integers(0, 50),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_a_row_does_not_depend_on_the_number_of_rows(
    count: int, more: int, seed: int, epoch: int
) -> None:
    table = augmentation_table(count, seed, epoch, 4, True)
    longer = augmentation_table(count + more, seed, epoch, 4, True)
    assert torch.equal(table, longer[:count])


def test_draws_are_uniform_and_independent() -> None:
    count = 90_000
    table = augmentation_table(count, 42, 0, 4, True).numpy().astype(np.int64)
    cells = table[:, 0] * 18 + table[:, 1] * 2 + table[:, 2]
    observed = np.bincount(cells, minlength=162)
    chi_squared = ((observed - count / 162) ** 2 / (count / 162)).sum()
    # 161 degrees of freedom: mean 161, standard deviation 18.
    assert len(observed) == 162 and 161 - 5 * 18 < chi_squared < 161 + 5 * 18


def test_draws_differ_between_seeds_epochs_and_samples() -> None:
    tables = {
        (seed, epoch): augmentation_table(500, seed, epoch, 4, True)
        for seed in range(4)
        for epoch in range(4)
    }
    assert len({table.numpy().tobytes() for table in tables.values()}) == 16
    shifted = augmentation_table(501, 0, 0, 4, True)[1:]
    for other in [*tables.values(), shifted]:
        if other is not tables[0, 0]:
            agreement = (other == tables[0, 0]).all(dim=1).double().mean().item()
            assert agreement < 0.05  # by chance 1 in 162
    assert torch.equal(tables[1, 2], augmentation_table(500, 1, 2, 4, True))


def test_draws_that_are_switched_off() -> None:
    assert not augmentation_table(100, 0, 0, 4, False)[:, 2].any()
    assert not augmentation_table(100, 0, 0, 0, True)[:, :2].any()
    with pytest.raises(UserError, match="data.crop_padding"):
        augmentation_table(1, 0, 0, 128, True)


# --- pipelines ---


class Shards:
    """The parts that one of the workers gets of each global batch; sizes can be changed."""

    def __init__(self, samples: int, sizes: list[int], rank: int) -> None:
        self.samples, self.sizes, self.rank = samples, sizes, rank
        self.epoch = self.drawn = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.random.default_rng(self.epoch).permutation(self.samples)
        start = sum(self.sizes[: self.rank])
        for first in range(0, self.samples, sum(self.sizes)):
            self.drawn += 1
            part = order[first : first + sum(self.sizes)]
            yield part[start : start + self.sizes[self.rank]]

    def __len__(self) -> int:
        return math.ceil(self.samples / sum(self.sizes))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    root = write_tree(tmp_path / "tree", train=23, test=4)
    return dataclasses.replace(
        DataConfig(),
        name="image_folder",
        root=str(root),
        cache=str(tmp_path / "cache"),
        crop_padding=2,
        loader_workers=1,
    )


def pipeline_for(config: DataConfig, sampler, train: bool = True, dtype=torch.float32):
    data = opened(config, 5)
    images = data.train if train else data.test
    device, layout = torch.device("cpu"), torch.contiguous_format
    return make_pipeline(images, sampler, config, data, device, dtype, layout, 5, train)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def same(one: Batches, other: Batches) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def test_batches_against_a_plain_loop(config: DataConfig) -> None:
    data = opened(config, 5)
    sampler = Shards(46, [7], 0)
    sampler.epoch = 3
    table = augmentation_table(46, 5, 3, 2, True).tolist()
    batches = list(pipeline_for(config, sampler).batches(3))
    assert [len(labels) for _, labels in batches] == [7] * 6 + [4]
    for indices, (inputs, labels) in zip(sampler, batches, strict=True):
        assert labels.tolist() == data.train.labels[indices].tolist()
        for index, found in zip(indices, inputs, strict=True):
            dy, dx, flipped = table[index]
            image = torch.from_numpy(data.train.read(np.array([index])))[0]
            image = transforms.crop(transforms.pad(image, [2]), dy, dx, 8, 8)
            image = transforms.hflip(image) if flipped else image
            assert torch.equal(found, Normalize(data.mean, data.std)(image.float() / 255))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [4.0, 1e-9], ids=["cached", "files"])
def test_both_pipelines_while_shares_change(config: DataConfig, workers: int, limit: float) -> None:
    memory_sampler, loader_sampler = Shards(46, [5, 5], 1), Shards(46, [5, 5], 1)
    memory = pipeline_for(config, memory_sampler)
    loader = pipeline_for(
        dataclasses.replace(
            config, placement="loader", loader_workers=workers, memory_limit_gib=limit
        ),
        loader_sampler,
    )
    assert isinstance(memory, MemoryPipeline) and isinstance(loader, LoaderPipeline)
    for epoch, sizes in enumerate(([5, 5], [2, 8], [9, 1], [10, 0])):
        memory_sampler.epoch = loader_sampler.epoch = epoch
        memory_sampler.sizes = loader_sampler.sizes = sizes
        expected = list(memory.batches(epoch))
        assert [len(labels) for _, labels in expected[:4]] == [sizes[1]] * 4
        assert same(list(loader.batches(epoch)), expected)


def test_a_global_batch_does_not_depend_on_the_partition(config: DataConfig) -> None:
    alone = list(pipeline_for(config, Shards(46, [10], 0)).batches(0))
    parts = [
        list(pipeline_for(config, Shards(46, [2, 5, 3], rank)).batches(0)) for rank in range(3)
    ]
    together = [
        (torch.cat([inputs for inputs, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]
    assert same(together, alone)


def test_test_set_is_not_augmented(config: DataConfig) -> None:
    data = opened(config, 5)
    batches = list(pipeline_for(config, [np.arange(8)], train=False).batches(0))
    pixels = torch.from_numpy(data.test.read(np.arange(8)))
    assert torch.equal(batches[0][0], normalise(pixels, data.mean, data.std))
    assert batches[0][1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("placement", ["memory", "loader"])
def test_worker_without_samples_gets_empty_batches(config: DataConfig, placement: str) -> None:
    config = dataclasses.replace(config, placement=placement)
    nothing = np.array([], dtype=np.int64)
    for train in (True, False):
        pipeline = pipeline_for(config, [nothing, np.array([1]), nothing], train=train)
        shapes = [(tuple(x.shape), tuple(y.shape)) for x, y in pipeline.batches(0)]
        assert shapes == [((0, 3, 8, 8), (0,)), ((1, 3, 8, 8), (1,)), ((0, 3, 8, 8), (0,))]


def test_batches_keep_precision_and_layout(config: DataConfig) -> None:
    data = opened(config, 5)
    for dtype in (torch.float64, torch.bfloat16):
        pipeline = make_pipeline(
            data.train, [np.arange(3)], config, data, torch.device("cpu"), dtype,
            torch.channels_last, 5, True,
        )  # fmt: skip
        ((inputs, labels),) = pipeline.batches(0)
        assert inputs.dtype == dtype and labels.dtype == torch.int64
        assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_lookahead_bounds_what_is_drawn(config: DataConfig) -> None:
    for workers in (0, 1, 2):
        sampler = Shards(46, [2], 0)
        loading = dataclasses.replace(config, placement="loader", loader_workers=workers)
        pipeline = pipeline_for(loading, sampler)
        for epoch in range(2):
            sampler.drawn = 0
            for step, _ in enumerate(pipeline.batches(epoch)):
                assert sampler.drawn <= step + 1 + 2 * workers


def test_epoch_that_was_broken_off(config: DataConfig) -> None:
    sampler = Shards(46, [3], 0)
    loading = dataclasses.replace(config, placement="loader")
    loader, memory = pipeline_for(loading, sampler), pipeline_for(config, sampler)
    abandoned = loader.batches(0)
    next(abandoned)
    sampler.epoch = 1
    assert same(list(loader.batches(1)), list(memory.batches(1)))


def test_file_descriptors_stay_flat(config: DataConfig) -> None:
    sampler = Shards(46, [4, 4], 0)
    pipeline = pipeline_for(dataclasses.replace(config, placement="loader"), sampler)
    counts = []
    for epoch in range(20):
        sampler.epoch, sampler.sizes = epoch, [1 + epoch % 7, 7 - epoch % 7]
        for _ in pipeline.batches(epoch):
            pass
        counts.append(len(os.listdir("/proc/self/fd")))
    # A few belong to batches on their way; none may pile up.
    assert max(counts[10:]) <= max(counts[1:10])


def same_as_from_memory(config: DataConfig, start_method: str) -> bool:
    data = opened(config, 5)
    cpu, plain = torch.device("cpu"), torch.contiguous_format
    transform = Transform(data.mean, data.std, cpu, torch.float32, plain, 5, 2, True)
    sampler = Shards(46, [9], 0)
    loader = LoaderPipeline(data.train, sampler, transform, 1, 2, start_method)
    memory = MemoryPipeline(data.train, sampler, transform)
    return same(list(loader.batches(0)), list(memory.batches(0)))


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_other_ways_to_start_loader_processes(config: DataConfig, start_method: str) -> None:
    assert same_as_from_memory(config, start_method)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_that_comes_as_one_starts(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A launcher sends it to the whole group: the loader's process goes on until it is told."""
    begin = signal_handling._set_worker_signal_handlers

    def asked_to_end() -> None:
        begin()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", asked_to_end)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert same_as_from_memory(config, "fork")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_loading_leaves_the_random_state_alone(config: DataConfig) -> None:
    for placement in ("memory", "loader"):
        pipeline = pipeline_for(
            dataclasses.replace(config, placement=placement), Shards(46, [9], 0)
        )
        torch.manual_seed(1)
        for epoch in range(2):
            for _ in pipeline.batches(epoch):
                pass
        drawn = torch.rand(1)
        torch.manual_seed(1)
        assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize("workers", [0, 1])
def test_image_damaged_after_the_start(config: DataConfig, workers: int) -> None:
    config = dataclasses.replace(config, memory_limit_gib=1e-9, loader_workers=workers)
    pipeline = pipeline_for(config, Shards(46, [9], 0))
    damaged = Path(config.root, "train", "dog", "05.png")
    damaged.write_bytes(b"")
    try:  # pytest.raises would keep the pipeline and its process alive beyond the test
        list(pipeline.batches(0))
        message = ""
    except UserError as error:
        message = str(error)
    assert str(damaged) in message and "\n" not in message


def test_placement(config: DataConfig) -> None:
    nothing: list[np.ndarray] = []
    change = dataclasses.replace
    assert isinstance(pipeline_for(config, nothing), MemoryPipeline)
    assert isinstance(pipeline_for(change(config, placement="memory"), nothing), MemoryPipeline)
    assert isinstance(pipeline_for(change(config, placement="loader"), nothing), LoaderPipeline)
    small = change(config, memory_limit_gib=1e-9)
    assert isinstance(pipeline_for(small, nothing), LoaderPipeline)
    with pytest.raises(UserError, match="data.placement: memory.*data.memory_limit_gib"):
        pipeline_for(change(small, placement="memory"), nothing)


def test_files_held_in_memory(config: DataConfig) -> None:
    # The whole set is above the limit, so its files are listed; the subset is below it.
    config = dataclasses.replace(
        config, memory_limit_gib=30 * 192 / 2**30, subset=20, test_subset=4, placement="memory"
    )
    data = opened(config, 5)
    assert isinstance(data.train._base, FileImages)
    sampler = Shards(20, [6], 0)
    memory = pipeline_for(config, sampler)
    loader = pipeline_for(dataclasses.replace(config, placement="auto"), sampler)
    assert isinstance(memory, MemoryPipeline) and isinstance(loader, LoaderPipeline)
    assert same(list(memory.batches(0)), list(loader.batches(0)))
