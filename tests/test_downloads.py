"""Archives that must not be unpacked, and CIFAR-10 without a network."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from image_tree import config_for, opened, refusal, whole, write_archive, write_tree
from torchvision.datasets import CIFAR10

from data import archive, cifar10, prepare

# --- archives that must not be unpacked ---


def evil_archive(path: Path, kind: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        if kind in ("../outside", "/tmp/outside", "train/../../outside"):
            member = tarfile.TarInfo(kind)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        else:
            member = tarfile.TarInfo("train")
            types = {"symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
            member.type = types[kind]
            member.linkname = "../.."
            tar.addfile(member)
    return path


@pytest.mark.parametrize(
    "kind",
    ["../outside", "/tmp/outside", "train/../../outside", "symlink", "link", "device"],
)
def test_hostile_archive(tmp_path: Path, kind: str) -> None:
    packed = evil_archive(tmp_path / "evil.tar.gz", kind)
    before = set(tmp_path.rglob("*"))
    assert str(packed) in refusal(config_for(packed, tmp_path))
    assert set(tmp_path.rglob("*")) == before


def test_archive_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_archive(tmp_path / "tree.tar.gz", write_tree(tmp_path / "tree"))
    monkeypatch.setattr(archive, "SIZE_LIMIT", 5 * archive.BLOCK)
    assert str(packed) in refusal(config_for(packed, tmp_path))


@pytest.mark.parametrize("keep", [0, 30, 1000])
def test_damaged_archive(tmp_path: Path, keep: int) -> None:
    packed = write_archive(tmp_path / "tree.tar.gz", write_tree(tmp_path / "tree"))
    packed.write_bytes(packed.read_bytes()[:keep])
    assert str(packed) in refusal(config_for(packed, tmp_path))


# --- CIFAR-10 ---


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """An archive in CIFAR-10's form with four images per file, which torchvision then accepts."""
    generator = np.random.default_rng(0)
    contents: dict[str, dict] = {"batches.meta": {"label_names": [f"class {n}" for n in range(10)]}}
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        pixels = generator.integers(0, 256, (4, 3072), dtype=np.uint8)
        contents[name] = {"data": pixels, "labels": generator.integers(0, 10, 4).tolist()}
    root.mkdir()
    sums = {}
    with tarfile.open(root / CIFAR10.filename, "w:gz") as tar:
        for name, content in contents.items():
            raw = pickle.dumps(content)
            sums[name] = hashlib.md5(raw).hexdigest()
            member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    for listing in ("train_list", "test_list"):
        accepted = [[name, sums[name]] for name, _ in getattr(CIFAR10, listing)]
        monkeypatch.setattr(CIFAR10, listing, accepted)
    monkeypatch.setitem(CIFAR10.meta, "md5", sums["batches.meta"])
    packed = (root / CIFAR10.filename).read_bytes()
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(packed).hexdigest())
    return contents


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_cifar10_from_an_archive_put_there_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None, capfd
) -> None:
    root = tmp_path / "cifar"
    contents = write_cifar10(root, monkeypatch)
    config = config_for(root, tmp_path, name="cifar10")
    data = opened(config)
    assert data.mean == (0.4914, 0.4822, 0.4465) and data.std == (0.2470, 0.2435, 0.2616)
    assert (len(data.train), len(data.test), data.image_size) == (20, 4, 32)
    assert data.classes[3] == "class 3"
    assert np.array_equal(whole(data.test), contents["test_batch"]["data"].reshape(4, 3, 32, 32))
    assert data.test.labels.tolist() == contents["test_batch"]["labels"]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(cifar10, "CIFAR10", type("Absent", (), {"tgz_md5": CIFAR10.tgz_md5}))
    assert prepare(config)  # from the cache alone


@pytest.mark.parametrize("by_hand", [None, b"cut off"])
def test_cifar10_without_network(tmp_path: Path, no_network: None, by_hand: bytes | None) -> None:
    root = tmp_path / "cifar"
    if by_hand is not None:
        root.mkdir()
        (root / CIFAR10.filename).write_bytes(by_hand)
    message = refusal(config_for(root, tmp_path, name="cifar10"))
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in message
    assert str(root / "cifar-10-python.tar.gz") in message
    assert ("damaged" in message) == (by_hand is not None)


def test_cifar10_download_that_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    def break_off(url: str, folder: str, filename: str, md5: str) -> None:
        print("a progress bar")
        Path(folder, filename).write_bytes(b"half of it")
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(cifar10, "download_url", break_off)
    root = tmp_path / "cifar"
    assert "peer went away" in refusal(config_for(root, tmp_path, name="cifar10"))
    assert os.listdir(root) == []
    assert capfd.readouterr() == ("", "")
