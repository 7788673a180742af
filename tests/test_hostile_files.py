"""Files made to do harm: to fill the memory, to never end, to run something, to write elsewhere."""

from __future__ import annotations

import gzip
import io
import os
import resource
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import write_run
from image_tree import config_for, opened, refusal, write_archive, write_tree
from PIL import Image

import data.decoding
from configs import files
from configs.command_line import parse, run_folder
from configs.errors import UserError
from data import archive
from data.augment import MAX_PADDING
from reader import read_run


def refused(function: Any, *arguments: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(UserError) as raised:
        function(*arguments)
    assert str(raised.value).isprintable()
    return str(raised.value)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """2 GiB more than there is: what wants far more fails at once, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# --- YAML and JSON --------------------------------------------------------------------------------


def nested(line: str, levels: int, first: str) -> str:
    """`line` once per level, with {a} the anchor of the last one and {b} its own."""
    lines = [f"x0: &x0 {first}"]
    lines += [line.format(a=f"x{n}", b=f"x{n + 1}") for n in range(levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text, part",
    [
        (nested("{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]", 30, "[1]"), "values"),
        (nested("{b}: &{b} {{<<: [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}]}}", 30, "{k: 1}"), "values"),
        (nested("{b}: &{b} {{p: *{a}, q: *{a}}}", 40, "{k: 1}"), "values"),
        (nested("{b}: &{b} [*{a}]", 5000, "[1]"), "nested too deeply"),
        ("a: &a [*a]", "alias inside"),
        ("a: &a {b: {<<: *a}}", "alias inside"),
        ("a: &a\n  ? *a\n  : 1", "alias inside"),
        ("a: [" + "1, " * 101_000 + "]", "is larger than"),
        ("[" * 90_000, "nested too deeply"),
        ("{" * 90_000, "nested too deeply"),
        ("- " * 60_000, "nested too deeply"),
    ],
)
def test_yaml_that_multiplies(tmp_path, little_memory, text, part):
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    message = refused(files.read_mapping, path)
    assert str(path) in message and part in message, message


def test_aliases_as_people_use_them_are_read():
    text = "rule: &r {ranks: [1], kind: slowdown}\nboth: [{<<: *r, factor: 2}, {<<: *r, factor: 3}]"
    both = files.parse(text, "FILE")["both"]
    assert both == [{"ranks": [1], "kind": "slowdown", "factor": factor} for factor in (2, 3)]


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "[" * 10**5])
def test_json_is_strict(tmp_path, text):
    path = tmp_path / "some.json"
    path.write_text(text)
    assert str(path) in refused(files.read_json, path)


def test_what_never_ends_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        assert "not a regular file" in refused(files.read_mapping, path)
        assert "not a regular file" in refused(files.read_json, path)


@pytest.mark.parametrize("name", ["config.yaml", "provenance.json", "epochs.jsonl", "steps.npz"])
def test_a_pipe_among_the_records_is_not_read(tmp_path, name):
    path = write_run(tmp_path, epochs=1, steps=4)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert name in refused(read_run, path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, little_memory):
    path = tmp_path / "large.yaml"
    with open(path, "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    assert "larger" in refused(files.read_mapping, path)


# --- names from configs ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a/../../x", ".", "~root", "a\0b", "a\n", ""])
def test_a_name_never_leads_out_of_the_output_folder(tmp_path, name):
    path = tmp_path / "named.yaml"
    path.write_text(files.yaml.safe_dump({"name": name}))
    assert "name" in refused(parse, ["--config", str(path)])


@pytest.mark.parametrize(
    "override", ["data.root=../../x", "model.name=../x", "data.cache=/x", "partition.shares=[1, 2]"]
)
def test_overrides_never_lead_out_of_the_output_folder(tmp_path, override):
    folder = run_folder(parse(["--output", str(tmp_path), override]))
    assert folder.resolve().relative_to(tmp_path.resolve()).parts[1:] == ("edp-sgd", "seed-42")


# --- records --------------------------------------------------------------------------------------


def test_compressed_records_are_not_unfolded(tmp_path, little_memory):
    path = write_run(tmp_path, epochs=1, steps=4)
    with np.load(path / "steps.npz", allow_pickle=False) as kept:
        names = kept.files
    with zipfile.ZipFile(path / "steps.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "<f4", "fortran_order": False, "shape": (2**26, 16)}
                )
                for _ in range(8):
                    member.write(b"\0" * 2**20)
    assert "compressed" in refused(read_run, path)


def test_step_arrays_that_claim_to_be_huge(tmp_path, little_memory):
    path = write_run(tmp_path, epochs=1, steps=4)
    with zipfile.ZipFile(path / "steps.npz", "w") as file:
        with file.open("epoch.npy", "w") as member:
            np.lib.format.write_array_header_1_0(
                member, {"descr": "<i4", "fortran_order": False, "shape": (2**50,)}
            )
    assert "steps.npz" in refused(read_run, path)


# --- archives -------------------------------------------------------------------------------------


def header(name: str, kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = b"%011o\0" % size if size >= 0 else (2**88 + size).to_bytes(12, "big")
    if size < 0:
        block[124] = 0xFF
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


HUGE = 8**11 - 1  # 8 GiB, the most that the field can say


@pytest.mark.parametrize(
    "blocks",
    [
        [header("x", tarfile.XHDTYPE, HUGE)],
        [header("x", tarfile.XGLTYPE, HUGE)],
        [header("x", tarfile.GNUTYPE_LONGNAME, HUGE)],
        [header("x", tarfile.GNUTYPE_LONGNAME, -512)],
        [header("x", tarfile.XHDTYPE, -512)],
        [header("train/a/x.png", tarfile.REGTYPE, -1024)],
        [header("x", tarfile.GNUTYPE_LONGNAME, 512), b"n" * 512] * 20_000,
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_archives_whose_headers_claim_what_is_not_so(tmp_path, little_memory, blocks, packed):
    path = tmp_path / ("bomb.tar.gz" if packed else "bomb.tar")
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        for block in blocks:
            file.write(block)
        for _ in range(64):
            file.write(b"\0" * 2**20)
    message = refusal(config_for(path, tmp_path))
    assert str(path) in message and message.isprintable()


def test_an_archive_with_many_attributes_for_all_members(tmp_path, little_memory):
    path = tmp_path / "bomb.tar.gz"
    attributes = {f"k{n}": "v" for n in range(2000)}
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, pax_headers=attributes) as tar:
        for number in range(3):
            tar.addfile(tarfile.TarInfo(f"train/{number}.png"))
    assert "damaged header" in refusal(config_for(path, tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "sparse", "nul"])
def test_members_that_are_no_plain_files(tmp_path, kind):
    path = tmp_path / "odd.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("train/a.png")
        if kind == "fifo":
            member.type = tarfile.FIFOTYPE
        elif kind == "sparse":
            member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.realsize": str(2**40)}
        else:
            member.pax_headers = {"path": "train/a\0b.png"}
        tar.addfile(member)
    assert str(path) in refusal(config_for(path, tmp_path))


@pytest.mark.parametrize("name", ["tree.tar.gz", "tree.tgz", "tree.tar"])
def test_a_good_archive_is_unpacked_whatever_its_name_says(tmp_path, name):
    packed = write_archive(tmp_path / "first.tar.gz", write_tree(tmp_path / "tree"))
    content = packed.read_bytes()
    plain = gzip.decompress(content)
    for number, data_ in enumerate((content, plain)):
        path = tmp_path / f"{number}" / name
        path.parent.mkdir()
        path.write_bytes(data_)
        assert len(opened(config_for(path, tmp_path)).train) == 12


def test_the_size_limit_is_that_of_what_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "SIZE_LIMIT", 2**20)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("train/a.png")
        member.size = 2**24
        tar.addfile(member, io.BytesIO(bytes(2**24)))
    assert path.stat().st_size < 2**20
    assert "GiB" in refusal(config_for(path, tmp_path))


# --- images ---------------------------------------------------------------------------------------


def test_an_image_of_very_many_pixels_is_not_decoded(tmp_path, little_memory):
    root = write_tree(tmp_path / "tree")
    Image.new("1", (9000, 9000)).save(root / "train" / "cat" / "00.png")
    message = refusal(config_for(root, tmp_path, image_size=8))
    assert "00.png" in message and "9000x9000" in message


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_a_long_thin_image_is_not_made_a_huge_one(tmp_path, little_memory, size):
    root = write_tree(tmp_path / "tree")
    Image.new("RGB", size).save(root / "train" / "cat" / "00.png")
    message = refusal(config_for(root, tmp_path, image_size=224))
    assert "00.png" in message and f"{size[0]}x{size[1]}" in message


def test_a_header_of_very_many_pixels_is_refused_before_there_is_room_for_them(tmp_path):
    root = write_tree(tmp_path / "tree")
    Image.new("1", (9000, 9000)).save(root / "train" / "cat" / "00.png")
    assert "9000x9000" in refusal(config_for(root, tmp_path))


def test_what_is_no_image_is_never_given_to_another_program(tmp_path, monkeypatch):
    """Pillow hands an EPS file, whatever it is called, to Ghostscript."""
    started = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **named: started.append(1))
    root = write_tree(tmp_path / "tree")
    evil = root / "train" / "cat" / "00.png"
    evil.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with Image.open(evil) as file:
        assert file.format == "EPS"
    assert "00.png" in refusal(config_for(root, tmp_path))
    assert not started


def test_all_listed_kinds_of_images_are_read(tmp_path):
    kinds = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
    assert set(data.folder.IMG_EXTENSIONS) == kinds
    for suffix in sorted(kinds):
        path = tmp_path / f"image{suffix}"
        Image.new("L" if suffix == ".pgm" else "RGB", (8, 8), 77).save(path)
        assert data.decoding.decode(str(path), 8, None).shape == (3, 8, 8)


def test_a_pipe_called_an_image_is_left_out(tmp_path):
    root = write_tree(tmp_path / "tree")
    os.mkfifo(root / "train" / "cat" / "pipe.png")
    assert len(opened(config_for(root, tmp_path)).train) == 12


def test_names_of_files_are_shown_without_what_a_terminal_obeys(tmp_path):
    root = write_tree(tmp_path / "tree")
    (root / "train" / "cat" / "\x1b[2Jline\nend.png").write_text("no image")
    message = refusal(config_for(root, tmp_path))
    assert message.isprintable() and r"\x1b[2Jline\nend.png" in message


def test_folders_linked_into_themselves(tmp_path):
    root = write_tree(tmp_path / "tree")
    for name in ("more", "yet-more"):
        (root / "train" / "cat" / name).symlink_to(root / "train" / "cat")
    assert "linked into itself" in refusal(config_for(root, tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an array"])
def test_a_damaged_cache_is_named(tmp_path, content):
    config = config_for(write_tree(tmp_path / "tree"), tmp_path)
    opened(config)
    (labels,) = Path(config.cache).glob("*/train-labels.npy")
    other = io.BytesIO()
    np.save(other, np.arange(3))
    for damaged in (content, other.getvalue()):
        labels.write_bytes(damaged)
        assert str(labels) in refused(lambda: opened(config).train.labels)


def test_the_config_s_largest_padding_is_the_augmentation_s():
    assert parse([f"data.crop_padding={MAX_PADDING}"]).config.data.crop_padding == MAX_PADDING
    assert "data.crop_padding" in refused(parse, [f"data.crop_padding={MAX_PADDING + 1}"])
