"""Data sources: what is read, what is cached, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from image_tree import config_for, opened, pixels_of, refusal, whole, write_archive, write_tree
from PIL import Image

import models
from configs.schema import DataConfig
from data import cache, decoding, identity, open_data, prepare
from data.augment import normalise
from data.images import CachedImages, FileImages

# --- synthetic ---


def synthetic(train: int, test: int, seed: int = 0, **changes: object):
    settings = {"name": "synthetic", "train_samples": train, "test_samples": test}
    return opened(dataclasses.replace(DataConfig(), **{**settings, **changes}), seed)


def test_synthetic_depends_neither_on_the_seed_nor_on_the_number_of_samples() -> None:
    first, again, longer, other = (
        synthetic(600, 100),
        synthetic(600, 100),
        synthetic(1300, 200),
        synthetic(600, 100, seed=1),
    )
    assert whole(first.train).shape == (600, 3, 32, 32)
    assert first.train.nbytes == 600 * 3 * 32 * 32 == whole(first.train).nbytes
    assert np.array_equal(whole(first.train), whole(again.train))
    assert np.array_equal(whole(first.train), longer.train.read(np.arange(600)))
    assert np.array_equal(whole(first.test), longer.test.read(np.arange(100)))
    assert np.array_equal(whole(first.train), whole(other.train))
    assert not np.array_equal(whole(first.train)[:100], whole(first.test))
    assert first.train.labels.dtype == np.int64
    assert sorted(set(first.train.labels)) == list(range(10)) and len(first.classes) == 10


def test_synthetic_is_learned_step_by_step() -> None:
    data = synthetic(4096, 1024)
    torch.manual_seed(0)
    model = models.build("lenet", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    pixels, labels = torch.from_numpy(whole(data.train)), torch.from_numpy(data.train.labels)
    inputs = normalise(pixels, data.mean, data.std)
    test = normalise(torch.from_numpy(whole(data.test)), data.mean, data.std)
    accuracy = []
    for _ in range(3):
        for batch in torch.randperm(len(labels)).split(128):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            hits = model(test).argmax(1).numpy() == data.test.labels
        accuracy.append(hits.mean())
    assert accuracy[0] < 0.65
    assert 0.55 < accuracy[-1] < 0.95


# --- image folders ---


def test_folder_as_written(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    data = opened(config_for(root, tmp_path))
    assert data.classes == ("cat", "dog") and data.image_size == 8
    assert isinstance(data.train, CachedImages) and data.train.in_memory
    for split, images in (("train", data.train), ("test", data.test)):
        pixels, labels = pixels_of(root, split)
        assert np.array_equal(whole(images), pixels)
        assert np.array_equal(images.labels, labels) and images.labels.dtype == np.int64
    pixels = pixels_of(root, "train")[0].astype(np.float64) / 255
    assert data.mean == pytest.approx(pixels.mean(axis=(0, 2, 3)), abs=1e-12)
    assert data.std == pytest.approx(pixels.std(axis=(0, 2, 3)), abs=1e-12)


def test_large_set_is_read_from_its_files(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    small = opened(config_for(root, tmp_path))
    large = opened(config_for(root, tmp_path, memory_limit_gib=1e-9))
    assert isinstance(large.train, FileImages) and not large.train.in_memory
    assert np.array_equal(whole(small.train), whole(large.train))
    assert np.array_equal(small.train.labels, large.train.labels)
    # Fewer than 10,000 images: all are measured.
    assert (small.mean, small.std) == (large.mean, large.std)


@pytest.mark.parametrize("limit", [4.0, 1e-9])
def test_sets_pickle_without_their_pixels(tmp_path: Path, limit: float) -> None:
    root = write_tree(tmp_path / "tree", train=50, size=(16, 16))
    data = opened(config_for(root, tmp_path, memory_limit_gib=limit, subset=30))
    before = whole(data.train)  # opens the files
    raw = pickle.dumps(data.train)
    assert len(raw) < 1000 + 8 * 30
    copy = pickle.loads(raw)
    assert np.array_equal(whole(copy), before)
    assert np.array_equal(copy.labels, data.train.labels)


def test_second_start_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tree(tmp_path / "tree")
    packed = write_archive(tmp_path / "tree.tar.gz", root)
    for config in (
        config_for(root, tmp_path),
        config_for(root, tmp_path, memory_limit_gib=1e-9),
        config_for(packed, tmp_path, image_size=4),
    ):
        first = prepare(config)
        with monkeypatch.context() as patched:
            patched.setattr("data.images.decode", None)
            patched.setattr("tarfile.open", None)
            assert prepare(config) == first


def test_changes_make_a_new_cache(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    config = config_for(root, tmp_path)
    first = prepare(config)
    assert prepare(dataclasses.replace(config, image_size=4)) != first
    file = root / "train" / "cat" / "00.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(file)
    os.utime(file, ns=(1, 1))
    second = prepare(config)
    assert second != first
    assert (open_data(config, 0, second).train.read(np.array([0]))[0, :, 0, 0] == (1, 2, 3)).all()


def test_grey_and_cmyk_and_upper_case(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", classes=("a",), train=1)
    Image.new("L", (8, 8), 77).save(root / "train" / "a" / "grey.PNG")
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(root / "train" / "a" / "print.JPG")
    (root / "train" / "a" / "notes.txt").write_text("not an image")
    (root / "train" / "a" / "._00.png").write_text("left by another system")
    images = whole(opened(config_for(root, tmp_path)).train)
    assert len(images) == 3
    assert (images[1] == 77).all()
    assert (images[2, 0] > 200).all() and (images[2, 1:] < 60).all()


def test_resize_keeps_proportions_and_cuts_the_centre(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", classes=("a",), train=1, size=(12, 6))
    for split in ("train", "test"):
        wide = np.zeros((20, 60, 3), np.uint8)
        wide[:, 20:40] = (10, 200, 90)  # the middle third
        Image.fromarray(wide).save(root / split / "a" / "00.png")
    data = opened(config_for(root, tmp_path, image_size=10))
    centre = whole(data.train)[0, :, :, 1:-1]
    assert data.image_size == 10
    assert (centre == np.array([10, 200, 90])[:, None, None]).all()


def test_val_folder_and_nested_folders(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", test_name="val", test=3)
    (root / "train" / "cat" / "more").mkdir()
    (root / "train" / "cat" / "00.png").rename(root / "train" / "cat" / "more" / "00.png")
    data = opened(config_for(root, tmp_path))
    assert (len(data.train), len(data.test)) == (12, 6)


@pytest.mark.parametrize("inside", ["", "top/"])
def test_archive(tmp_path: Path, inside: str) -> None:
    root = write_tree(tmp_path / "tree")
    packed = write_archive(tmp_path / "tree.tar.gz", root, inside)
    data = opened(config_for(packed, tmp_path))
    assert np.array_equal(whole(data.train), pixels_of(root, "train")[0])


def test_unequal_sizes_name_file_and_key(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    odd = root / "test" / "dog" / "01.png"
    Image.new("RGB", (9, 9)).save(odd)
    message = refusal(config_for(root, tmp_path))
    assert str(odd) in message and "9x9" in message and "data.image_size" in message
    assert opened(config_for(root, tmp_path, image_size=8)).image_size == 8


def test_images_that_are_not_square(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", size=(8, 6))
    assert "data.image_size" in refusal(config_for(root, tmp_path))


@pytest.mark.parametrize("limit", [4.0, 1e-9])
def test_damaged_image(tmp_path: Path, limit: float) -> None:
    root = write_tree(tmp_path / "tree", size=(16, 16))
    damaged = root / "train" / "dog" / "03.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    message = refusal(config_for(root, tmp_path, memory_limit_gib=limit))
    assert str(damaged) in message
    assert os.listdir(tmp_path / "cache") == []


def test_deep_pixels(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", classes=("a",))
    deep = root / "train" / "a" / "deep.png"
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(deep)
    assert str(deep) in refusal(config_for(root, tmp_path))


def break_tree(root: Path, how: str) -> str:
    """Damages a tree; returns what the message has to name."""
    names = {
        "no train": root / "train",
        "no test": root / "test",
        "class missing in test": root / "test" / "dog",
        "class missing in train": root / "train" / "dog",
    }
    if how in names:
        names[how].rename(root / "elsewhere")
        return "dog" if "class" in how else str(names[how])
    for image in (root / "train" / "dog").iterdir():
        image.unlink()
    return str(root / "train" / "dog")


@pytest.mark.parametrize(
    "how",
    ["no train", "no test", "class missing in test", "class missing in train", "no images"],
)
def test_incomplete_tree(tmp_path: Path, how: str) -> None:
    root = write_tree(tmp_path / "tree")
    assert break_tree(root, how) in refusal(config_for(root, tmp_path))


def test_root_that_is_nothing(tmp_path: Path) -> None:
    assert "data.root" in refusal(config_for(tmp_path / "absent", tmp_path))
    file = tmp_path / "tree.zip"
    file.write_text("")
    assert ".tar.gz" in refusal(config_for(file, tmp_path))
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    (empty / "test").mkdir()
    assert str(empty / "train") in refusal(config_for(empty, tmp_path))


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    (tmp_path / "file").write_text("")
    config = config_for(root, tmp_path, cache=str(tmp_path / "file" / "cache"))
    assert "data.cache" in refusal(config)


def test_the_quicker_process_fills_the_cache(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "set-0"
    with cache.new_folder(str(target)) as slower:
        Path(slower, "slower").touch()
        with cache.new_folder(str(target)) as quicker:
            Path(quicker, "quicker").touch()
    assert os.listdir(target.parent) == ["set-0"] and os.listdir(target) == ["quicker"]


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """Not so what one that is at work has there, nor another target's."""
    target, code = tmp_path / "cache" / "set-0", (
        "import os, sys; from data import cache\n"
        "with cache.new_folder(sys.argv[1]) as folder: open(folder + '/half', 'w'); os._exit(9)"
    )
    for name in ("set-0", "set-00"):
        command = [sys.executable, "-c", code, str(target.with_name(name))]
        assert subprocess.run(command, timeout=60, check=False).returncode == 9
    with cache.new_folder(str(target.with_name("set"))):
        assert len(os.listdir(target.parent)) == 2 * 2 + 2
    assert len(os.listdir(target.parent)) == 2 * 2 + 1
    with cache.new_folder(str(target)), cache.new_folder(str(target)):
        names = [name.split(".") for name in os.listdir(target.parent) if name[0] == "."]
        both = [("set-0", "lock"), ("set-0", "part")]
        other = [("set-00", "lock"), ("set-00", "part")]
        assert sorted((name[1], name[-1]) for name in names) == sorted([*both, *both, *other])
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~_umask()


def test_processes_that_remove_what_is_left_over_leave_each_other_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from data import cache\n"
        "for _ in range(1000):\n"
        "    with cache.temporary_folder(sys.argv[1], 'set') as folder: open(folder + '/half', 'w')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert errors == [""] * 3 and not os.listdir(tmp_path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("host", [None, "another"])
def test_a_folder_without_a_lock_of_this_machine_is_left_for_a_day(
    tmp_path: Path, host: str | None
) -> None:
    for name, age in (("new", 60), ("old", 25 * 3600)):
        folder = tmp_path / f".set.{name}.part"
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
        if host is not None:
            folder.with_name(f"{folder.name}.lock").write_text(host)
    with cache.new_folder(str(tmp_path / "set")):
        pass
    locks = [] if host is None else [".set.new.part.lock"]
    assert sorted(os.listdir(tmp_path)) == [".set.new.part", *locks, "set"]


# --- what data are known by ---


def test_copies_of_a_set_are_known_as_one_and_others_are_not(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree")
    first = identity.identity(opened(config_for(root, tmp_path)))
    copy = Path(shutil.copytree(root, tmp_path / "elsewhere", copy_function=shutil.copyfile))
    packed = write_archive(tmp_path / "tree.tgz", root)
    for source, changes in ((copy, {}), (packed, {}), (root, {"memory_limit_gib": 0.0})):
        data = opened(config_for(source, tmp_path, **changes))
        assert identity.changes(first, identity.identity(data)) == ""
    assert identity.is_one(json.loads(json.dumps(first))) and not identity.is_one({})
    subset = identity.identity(opened(config_for(root, tmp_path, subset=7)))
    assert identity.changes(first, subset) == "train_samples 12, now 7; labels"
    moved = {**first, "mean": [first["mean"][0] + 2e-4, *first["mean"][1:]]}
    assert identity.changes(first, moved) == "mean"
    shutil.copy(root / "train" / "cat" / "00.png", root / "train" / "cat" / "99.png")
    more = identity.identity(opened(config_for(root, tmp_path)))
    assert identity.changes(first, more).startswith("train_samples 12, now 13; labels; files; mean")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tree(tmp_path / "tree")
    packed = write_archive(tmp_path / "tree.tgz", root)
    usage = type(cache.shutil.disk_usage(tmp_path))(10, 9, 1)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    for source in (root, packed):
        assert "data.cache" in refusal(config_for(source, tmp_path))


# --- subsets and settings ---


def test_subset_is_drawn_from_the_seed(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", train=20, test=10)
    full = opened(config_for(root, tmp_path))
    smaller = opened(config_for(root, tmp_path, subset=7, test_subset=5))
    larger = opened(config_for(root, tmp_path, subset=40))
    other = opened(config_for(root, tmp_path, subset=7), seed=1)
    assert (len(smaller.train), len(smaller.test), len(larger.test)) == (7, 5, 20)
    assert np.array_equal(whole(smaller.train), larger.train.read(np.arange(7)))
    assert not np.array_equal(whole(smaller.train), whole(other.train))
    all_rows = {
        image.tobytes(): label for image, label in zip(whole(full.train), full.train.labels)
    }
    rows = {
        image.tobytes(): label for image, label in zip(whole(larger.train), larger.train.labels)
    }
    assert rows == all_rows  # 40 of 40: each sample once, with its own label
    assert smaller.train.nbytes == 7 * 3 * 8 * 8


@pytest.mark.parametrize(("key", "size"), [("subset", 41), ("test_subset", 21)])
def test_subset_that_is_too_large(tmp_path: Path, key: str, size: int) -> None:
    root = write_tree(tmp_path / "tree", train=20, test=10)
    assert f"data.{key}" in refusal(config_for(root, tmp_path, **{key: size}))


def test_mean_and_std_from_the_config() -> None:
    given = synthetic(600, 10, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert (given.mean, given.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_constant_channel_needs_a_deviation(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", classes=("a",), train=1)
    Image.new("RGB", (8, 8), (5, 5, 5)).save(root / "train" / "a" / "00.png")
    assert "data.std" in refusal(config_for(root, tmp_path))
    assert opened(config_for(root, tmp_path, std=(1.0, 1.0, 1.0))).std == (1.0, 1.0, 1.0)


def test_image_size_belongs_to_image_folders() -> None:
    config = dataclasses.replace(DataConfig(), name="synthetic", image_size=64)
    assert "data.image_size" in refusal(config)


def test_cache_that_was_tampered_with(tmp_path: Path) -> None:
    config = config_for(write_tree(tmp_path / "tree"), tmp_path)
    folder = prepare(config)
    Path(folder, "meta.json").write_text("{")
    assert folder in refusal(config)


def test_statistics_do_not_depend_on_the_order() -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 7, 7), dtype=np.uint8)
    parts = decoding.histogram(images[30:]) + decoding.histogram(images[:30])
    mean, std = decoding.mean_and_std(parts)
    values = images.astype(np.float64) / 255
    assert mean == pytest.approx(values.mean(axis=(0, 2, 3)), abs=1e-13)
    assert std == pytest.approx(values.std(axis=(0, 2, 3)), abs=1e-13)
