"""Nothing is read back with pickle, and no text is run as code."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_checkpoints import saved, whole_state
from fake_runs import write_run
from image_tree import config_for, opened, refusal, write_tree

import checkpoint
from configs.errors import UserError
from data import cifar10
from reader import read_run

ROOT = Path(__file__).resolve().parent.parent


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def test_a_cifar10_file_of_another_is_never_unpickled(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "_download", lambda *given: (_ for _ in ()).throw(OSError))
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refusal(config_for(folder.parent, tmp_path, name="cifar10"))
    assert not (tmp_path / "exploded").exists()


def test_a_cache_with_objects_is_never_unpickled(tmp_path):
    config = config_for(write_tree(tmp_path / "tree"), tmp_path)
    opened(config)
    (labels,) = Path(config.cache).glob("*/train-labels.npy")
    np.save(labels, np.array([Bomb(tmp_path / "exploded")], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="train-labels.npy"):
        opened(config).train.labels.sum()
    assert not (tmp_path / "exploded").exists()


def sources() -> list[Path]:
    """All of the project's own modules but the tests."""
    found = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]
    return [path for path in found if path.parent.name not in ("tests", "build")]


# What unpickles or believes an archive, as a module, a function or a method; and bare functions.
FORBIDDEN = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "Unpickler", "extractall", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
FORBIDDEN_CALLS = FORBIDDEN | {"eval", "exec"}
# A call's keyword that must be there with this value.
DEMANDED = {
    ("np", "load"): ("allow_pickle", "False"),
    ("np", "save"): ("allow_pickle", "False"),
    ("torch", "load"): ("weights_only", "True"),
    ("yaml", "load"): ("Loader", "_StrictLoader"),
}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names, unwanted = [], FORBIDDEN
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0], *(a.name for a in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names, unwanted = [node.func.id], FORBIDDEN_CALLS
        yield from (f"{name} in line {node.lineno}" for name in names if name in unwanted)
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            owner, _, name = ast.unparse(node.func).rpartition(".")
            key, value = DEMANDED.get((owner, name), (None, None))
            if key is not None and given.get(key) != value:
                yield f"{owner}.{name} without {key}={value} in line {node.lineno}"
            if given.get("shell", "False") != "False" or given.get("allow_pickle") == "True":
                yield f"{ast.unparse(node)} in line {node.lineno}"


@pytest.mark.parametrize(
    "text, count",
    [
        ("import pickle", 1), ("from pickle import load", 1), ("import os.path", 0),
        ("np.load(f)", 1), ("np.load(f, allow_pickle=False)", 0), ("np.load(f, allow_pickle=x)", 1),
        ("torch.load(f)", 1), ("torch.load(f, weights_only=True)", 0), ("yaml.load(t)", 1),
        ("yaml.load(t, Loader=yaml.Loader)", 1), ("yaml.safe_load(t)", 0), ("model.eval()", 0),
        ("eval(t)", 1), ("tar.extractall(x)", 1), ("run(c, shell=True)", 1), ("exec('1')", 1),
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(text, count):
    assert len(list(faults(ast.parse(text)))) == count


def test_nothing_unpickles_or_runs_text_as_code():
    modules = sources()
    assert {"recorder.py", "trainer.py", "images.py", "files.py"} <= {path.name for path in modules}
    for path in modules:
        assert list(faults(ast.parse(path.read_text()))) == [], path


def test_reading_everything_needs_no_unpickler(tmp_path, monkeypatch):
    run = write_run(tmp_path, epochs=2, steps=4)
    config = config_for(write_tree(tmp_path / "tree"), tmp_path)
    content = saved(whole_state())

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert len(read_run(run).epochs) == 2
    assert checkpoint.load(content, tmp_path, torch.device("cpu"))["next_epoch"] == 1
    assert opened(config).train.labels.shape == (12,)
