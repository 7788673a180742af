"""Random parts of files, and a training on a thousand classes of JPEG files of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_tree import config_for, opened, write_tree
from PIL import Image
from processes import run_trainer, run_workers, values
from training import launch, read, train

from data import make_pipeline
from data.augment import crop_seeds
from data.decoding import decode, decode_part

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
ROOT = Path(__file__).resolve().parent.parent


def make_tree(out: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "make_image_tree.py"), str(out), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


# --- random parts ---------------------------------------------------------------------------------

SIDE, SMALL = 240, 24


@pytest.fixture(scope="module")
def ramp(tmp_path_factory) -> Path:
    """A file whose pixels tell their place: red is x and green is y."""
    path = tmp_path_factory.mktemp("ramp") / "ramp.png"
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.uint8)
    Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=2)).save(path)
    return path


def box_of(part: np.ndarray) -> tuple[float, float, float, float]:
    """left, top, width and height of the part of the ramp that [3, SMALL, SMALL] pixels show."""
    found = []
    for line in (part[0].mean(0), part[1].mean(1)):  # along x, along y
        # Of the middle, as antialiasing bends the ends.
        middle = np.arange(3, SMALL - 3)
        slope, start = np.polyfit(middle + 0.5, line[3:-3] + 0.5, 1)
        found.append((start, slope * SMALL))
    (left, width), (top, height) = found
    return left, top, width, height


def test_parts_have_the_areas_and_shapes_of_the_inception_crop(ramp):
    areas, lefts = [], []
    for seed in range(300):
        left, top, width, height = box_of(decode_part(str(ramp), SMALL, seed))
        assert min(left, top) > -2 and max(left + width, top + height) < SIDE + 2
        assert 0.75 * 0.96 < width / height < 4 / 3 * 1.04
        areas.append(width * height / SIDE**2)
        lefts.append((left + 1) / (SIDE - width + 2))
    assert 0.06 < min(areas) < 0.2 and 0.8 < max(areas) < 1.04
    # Uniform in 0.08 … 1, but for the largest parts, whose shape often does not fit.
    assert np.mean(areas) == pytest.approx(0.5, abs=0.06)
    assert np.mean(lefts) == pytest.approx(0.5, abs=0.08)


def test_a_part_depends_on_its_seed_alone(ramp):
    state = torch.get_rng_state()
    first = decode_part(str(ramp), SMALL, 7)
    assert torch.equal(torch.get_rng_state(), state), "dropout's stream has moved"
    torch.manual_seed(123)
    assert np.array_equal(decode_part(str(ramp), SMALL, 7), first)
    assert not np.array_equal(decode_part(str(ramp), SMALL, 8), first)
    assert crop_seeds(5, 1, 2).tolist() == crop_seeds(9, 1, 2)[:5].tolist()
    assert len({*crop_seeds(9, 1, 2), *crop_seeds(9, 1, 3), *crop_seeds(9, 2, 2)}) == 27


def batches(data: Any, config: Any, sampler: list[np.ndarray], epoch: int) -> dict[int, Any]:
    """By sample, what a pipeline makes of it; labels must be those of the set."""
    cpu, layout = torch.device("cpu"), torch.contiguous_format
    pipeline = make_pipeline(data.train, sampler, config, data, cpu, torch.float32, layout, 5, True)
    made: dict[int, Any] = {}
    for indices, (images, labels) in zip(sampler, pipeline.batches(epoch), strict=True):
        assert labels.tolist() == data.train.labels[indices].tolist()
        made |= dict(zip(indices.tolist(), images))
    return made


@pytest.mark.parametrize("subset", [None, 7])
def test_a_sample_s_part_does_not_depend_on_who_reads_it_with_what(tmp_path, subset):
    root = write_tree(tmp_path / "tree", size=(40, 30))
    settings = {"image_size": 8, "crop": "resized", "subset": subset}
    made = []
    for loader_workers, parts in ((0, 1), (2, 3), (1, 7)):
        config = config_for(root, tmp_path, loader_workers=loader_workers, **settings)
        data = opened(config)
        sampler = np.array_split(np.random.default_rng(parts).permutation(len(data.train)), parts)
        made.append(batches(data, config, sampler, epoch=3))
    assert all(sorted(one) == list(range(subset or 12)) for one in made)
    for sample, image in made[0].items():
        assert torch.equal(image, made[1][sample]) and torch.equal(image, made[2][sample])
    other = batches(data, config, sampler, epoch=4)
    assert not any(torch.equal(image, made[0][sample]) for sample, image in other.items())


def test_test_images_are_the_centre_of_a_larger_one(tmp_path):
    root = write_tree(tmp_path / "tree", size=(60, 40))
    data = opened(config_for(root, tmp_path, image_size=16, test_resize=20))
    file = min((root / "test").rglob("*.png"))
    # 60 x 40 becomes 30 x 20, of which the middle 16 x 16 is taken; training images are 24 x 16.
    small = Image.open(file).resize((30, 20), Image.Resampling.BILINEAR).crop((7, 2, 23, 18))
    assert np.array_equal(data.test.read(np.array([0]))[0], np.asarray(small).transpose(2, 0, 1))
    file = min((root / "train").rglob("*.png"))
    small = Image.open(file).resize((24, 16), Image.Resampling.BILINEAR).crop((4, 0, 20, 16))
    assert np.array_equal(data.train.read(np.array([0]))[0], np.asarray(small).transpose(2, 0, 1))


# --- a thousand classes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("thousand") / "tree"
    make_tree(root, "--classes", "1000", "--train", "2", "--test", "1", "--sides", "24", "64")
    return root


def options(root: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    data = {"name": "image_folder", "root": str(root), "cache": str(cache), "image_size": 32,
            "crop": "resized", "test_resize": 36, "loader_workers": 1, **changes}  # fmt: skip
    return {"data": data, "epochs": 1, "batch_size": 250}


def test_the_tree_holds_files_of_all_kinds(thousand):
    files = sorted(thousand.rglob("*.jpg"))
    images = [Image.open(file) for file in files[:70]]
    assert len(files) == 3000 and {image.mode for image in images} == {"RGB", "L", "CMYK"}
    assert len({image.size for image in images}) > 50
    for file, image in zip(files, images):
        # Brought to RGB as Pillow does it, which knows that CMYK is stored inverted in JPEG.
        square = image.convert("RGB").resize((8, 8), Image.Resampling.BOX)
        ours = Image.fromarray(decode(str(file), 32, 32).transpose(1, 2, 0))
        difference = np.abs(np.asarray(square, int).mean((0, 1)) - np.asarray(ours).mean((0, 1)))
        assert difference.max() < 30


def test_a_thousand_classes_train_the_same_on_one_worker_and_on_two(thousand, tmp_path):
    shared = options(thousand, tmp_path / "cache")
    two = train(tmp_path / "two", 2, partition__shares=[1, 3], **shared)
    assert two.provenance["data"] == {"train_samples": 2000, "test_samples": 1000, "classes": 1000}
    (epoch,) = two.epochs
    assert (epoch["train_samples"], epoch["test_samples"], epoch["steps"]) == (2000, 1000, 8)
    one = train(tmp_path / "one", 1, **options(thousand, tmp_path / "cache", loader_workers=0))
    assert np.abs(one.flat() - two.flat()).max() < 1e-9
    assert two.column("test_loss") == pytest.approx(one.column("test_loss"), abs=1e-9)


def test_the_configuration_for_imagenet_trains(thousand, tmp_path):
    """ResNet50 in bf16, channels-last, with label smoothing and the warm-up; at a smaller size."""
    line = ["--config", "imagenet-resnet50", "--output", str(tmp_path / "runs"), "device=cpu",
            f"data.root={thousand}", f"data.cache={tmp_path / 'cache'}", "data.subset=16",
            "data.test_subset=8", "data.image_size=64", "data.test_resize=72", "threads=1",
            "data.loader_workers=1", "batch_per_worker=4", "accumulate=2", "epochs=1",
            "schedule.kind=constant", "schedule.milestones=null",
            "schedule.warmup_epochs=1"]  # fmt: skip
    values(run_workers(tmp_path, 2, run_trainer, *line, limit=120.0))
    run = read(tmp_path)
    (epoch,) = run.epochs
    assert (epoch["steps"], epoch["train_samples"], epoch["test_samples"]) == (2, 16, 8)
    assert run.weights["fc.weight"].shape == (1000, 2048)
    # The end of the warm-up: 0.1 for 256 samples, here of 8.
    assert epoch["learning_rate"] == pytest.approx(0.1 * 8 / 256)
    # Near that of guessing among a thousand: the smoothed loss starts there too.
    assert abs(epoch["train_loss"] - np.log(1000)) < 1.5


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_truncated_file_ends_the_run_with_its_name(tmp_path, split):
    """One of the training set is met when the set is first measured, one of the test set later."""
    tree = tmp_path / "tree"
    path = make_tree(tree, "--classes", "4", "--train", "8", "--truncate", split).strip()
    outcomes = launch(tmp_path, 2, **options(tree, tmp_path / "cache") | {"batch_size": 16})
    assert all(outcome.code not in (0, None) for outcome in outcomes)
    told = [line for one in outcomes for line in one.output.splitlines() if path in line]
    assert told and all("trainer.py: error" in line for line in told)
    assert all("cannot read image" in line for line in told)
    assert not any("Traceback" in outcome.output for outcome in outcomes if outcome.code == 2)


def test_a_file_that_is_damaged_during_the_run_ends_it_with_its_name(tmp_path):
    """What was good when the set was measured is overwritten before it is trained on."""
    tree = tmp_path / "tree"
    make_tree(tree, "--classes", "4", "--train", "8")
    path = min((tree / "train").rglob("*.jpg"))
    shared = options(tree, tmp_path / "cache") | {"batch_size": 16}
    values(launch(tmp_path / "whole", 2, **shared))
    status = path.stat()
    # Same size and time, so that the list in the cache still holds.
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcomes = launch(tmp_path / "damaged", 2, **shared)
    assert all(outcome.code not in (0, None) for outcome in outcomes)
    assert any(str(path) in outcome.output for outcome in outcomes)
