"""Experiment files: which runs they stand for, in which order, under which names; bad ones."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.command_line import parse
from configs.errors import UserError
from configs.schema import ALGORITHMS, from_mapping, resolve, to_mapping
from experiments.grid import Experiment, PlannedRun, read_experiment, set_keys
from experiments.sitting import select

ROOT = Path(__file__).resolve().parent.parent
BASE: dict[str, Any] = {
    "name": "base",
    "epochs": 3,
    "model": {"name": "lenet"},
    "data": {"name": "synthetic", "train_samples": 512},
}
GRID = {"configs": ["base.yaml"], "algorithms": ["dp-sgd"], "seeds": [1]}


def read(folder: Path, document: dict[str, Any], **options: Any) -> Experiment:
    """The experiment of a document, in which base.yaml stands for a file with BASE."""
    base, file = folder / "base.yaml", folder / "set.yaml"
    base.write_text(yaml.safe_dump(BASE))
    for grid in document.get("grids", []):
        if isinstance(grid, dict) and grid.get("configs") == ["base.yaml"]:
            grid["configs"] = [str(base)]
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return read_experiment(file, **options)


def one(folder: Path, changes: dict[str, Any], **top: Any) -> Experiment:
    return read(folder, {"name": "set", "workers": 2, "grids": [{**GRID, **changes}], **top})


def delay(number: int) -> list[dict[str, Any]]:
    return [{"ranks": [1], "kind": "constant", "seconds": number / 100}]


def unique(values: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    return st.lists(values, min_size=1, max_size=most, unique=True)


GRIDS = st.fixed_dictionaries(
    {
        "algorithms": unique(st.sampled_from(sorted(ALGORITHMS))),
        "seeds": unique(st.integers(0, 99)),
        "delays": st.none() | unique(st.integers(0, 9)),
        "policies": unique(st.sampled_from([None, "equal", "affine"])),
        "every": unique(st.sampled_from([None, 5, 20])),
        "lr": unique(st.sampled_from([None, 0.5, 0.001, 1e-5]), 2),
        "epochs": st.integers(1, 9),
    }
)


def keys_of(grid: dict[str, Any]) -> dict[str, Any]:
    """A drawn grid as an experiment file has it."""
    entry = {
        "configs": ["base.yaml"],
        "algorithms": grid["algorithms"],
        "seeds": grid["seeds"],
        "set": {"epochs": grid["epochs"]},
        "policies": grid["policies"],
        "vary": {"partition.every": grid["every"], "optimizer.lr": grid["lr"]},
    }
    if grid["delays"] is not None:
        entry["delays"] = {f"d{number}": delay(number) for number in grid["delays"]}
    return entry


def asked_for(grid: dict[str, Any]) -> list[tuple[int, str, Any]]:
    """(seed, config name, resolved config without these) of each run, by nested loops."""
    runs = []
    for seed, number, policy, every, lr, algorithm in itertools.product(
        grid["seeds"], grid["delays"] or [None], grid["policies"], grid["every"], grid["lr"],
        grid["algorithms"],
    ):  # fmt: skip
        config = {**BASE, "epochs": grid["epochs"], "algorithm": algorithm, "seed": seed}
        config["name"] = "base" if number is None else f"base-d{number}"
        config["stragglers"] = [] if number is None else delay(number)
        config["partition"] = {"policy": policy} | ({} if every is None else {"every": every})
        config["optimizer"] = {} if lr is None else {"lr": lr}
        runs.append(to_mapping(resolve(from_mapping({**config, "output": "runs/set"}))))
    return runs


@settings(max_examples=12, deadline=None)
@given(GRIDS)
def test_a_grid_stands_for_every_combination_once_in_the_order_of_seeds(grid):
    with tempfile.TemporaryDirectory() as folder:
        runs = one(Path(folder), keys_of(grid)).runs
    assert [to_mapping(run.launch.config) for run in runs] == asked_for(grid)
    assert len({run.folder for run in runs}) == len(runs)
    places = [grid["seeds"].index(run.launch.config.seed) for run in runs]
    assert places == sorted(places)
    # Algorithms directly one after the other.
    width = len(grid["algorithms"])
    for start in range(0, len(runs), width):
        group = runs[start : start + width]
        assert [run.launch.config.algorithm for run in group] == grid["algorithms"]
        assert len({(run.base, run.overrides, run.launch.config.seed) for run in group}) == 1


@settings(max_examples=6, deadline=None)
@given(GRIDS, st.randoms(use_true_random=False))
def test_names_depend_on_the_run_alone(grid, random):
    """Not on the order of the file, nor on what else it asks for."""
    entry = keys_of(grid)
    mixed = {key: entry[key] for key in random.sample(sorted(entry), len(entry))}
    mixed["vary"] = dict(reversed(entry["vary"].items()))
    mixed["algorithms"], mixed["seeds"] = entry["algorithms"][::-1], entry["seeds"][:1]
    with tempfile.TemporaryDirectory() as folder:
        names = {run.title: run.launch.config for run in one(Path(folder), entry).runs}
        for run in one(Path(folder), mixed).runs:
            assert names[run.title] == run.launch.config


@settings(max_examples=6, deadline=None)
@given(GRIDS)
def test_trainer_s_command_line_makes_the_planned_run(grid):
    with tempfile.TemporaryDirectory() as folder:
        for run in one(Path(folder), keys_of(grid)).runs:
            file = Path(folder) / f"{run.base}.yaml"
            file.write_text(yaml.safe_dump(dict(run.mapping)))
            assert parse(run.arguments(file)) == run.launch


def test_a_run_that_two_grids_ask_for_is_made_once(tmp_path):
    grids = [
        {**GRID, "seeds": [1, 2], "delays": {"a": delay(1)}},
        {**GRID, "seeds": [2, 3], "delays": {"a": delay(1)}, "algorithms": ["edp-sgd", "dp-sgd"]},
    ]
    runs = read(tmp_path, {"name": "set", "workers": 2, "grids": grids}).runs
    assert [run.title for run in runs] == [
        "base-a/dp-sgd/seed-1", "base-a/edp-sgd/seed-2", "base-a/dp-sgd/seed-2",
        "base-a/edp-sgd/seed-3", "base-a/dp-sgd/seed-3",
    ]  # fmt: skip


def test_what_is_given_on_the_command_line_wins(tmp_path):
    document = {"name": "set", "set": {"epochs": 5, "batch_size": 64}, "grids": [
        {**GRID, "set": {"epochs": 6, "data.train_samples": 100}}
    ]}  # fmt: skip
    (run,) = read(tmp_path, document, extra={"data.train_samples": 99}, output=tmp_path / "o").runs
    config = run.launch.config
    assert (config.epochs, config.batch_size, config.data.train_samples) == (6, 64, 99)
    # Fixed keys are in the config file and not in the name.
    assert run.folder == tmp_path / "o" / "base" / "dp-sgd" / "seed-1"


@pytest.mark.parametrize("key", ["optimizer.lr", "partition.policy"])
def test_what_is_varied_is_not_given_on_the_command_line(tmp_path, key):
    varied = {"vary": {"optimizer.lr": [0.1, 0.2]}, "policies": [None, "affine"]}
    document = {"name": "set", "grids": [{**GRID, **varied}]}
    with pytest.raises(UserError, match=f"command line: {key} is varied"):
        read(tmp_path, document, extra={key: "x"})


@pytest.mark.parametrize(
    "per_node, nodes, workers",
    [(None, None, 2), (None, "3", 6), ("4", None, 4), ("gpu", "2", None), ("2", "1:2", None)],
)
def test_the_number_of_workers(tmp_path, per_node, nodes, workers):
    document = {"name": "set", "workers": 2, "grids": [dict(GRID)]}
    assert read(tmp_path, document, per_node=per_node, nodes=nodes).workers == workers


@pytest.mark.parametrize(
    "per_node, nodes, per_run",
    [(None, None, None), ("4", None, "4"), ("2", "2", "2"), (None, "2", "2")],
)
def test_grids_may_have_numbers_of_workers_of_their_own(tmp_path, per_node, nodes, per_run):
    grids = [{**GRID, "workers": [1, 4], "set": {"batch_size": None, "batch_per_worker": 8}},
             dict(GRID)]  # fmt: skip
    document = {"name": "set", "workers": 2, "grids": grids}
    experiment = read(tmp_path, document, per_node=per_node, nodes=nodes)
    others = 2 if per_node is None and nodes is None else 4
    assert [(run.base, run.workers) for run in experiment.runs] == [
        ("base-1w", 1), ("base-4w", 4), ("base", others)
    ]  # fmt: skip
    assert [run.config.batch_size for run in experiment.runs[:2]] == [8, 32]
    assert experiment.per_node == per_run
    made = {run.workers for run in select(experiment, None)}
    assert made == ({1, 2, 4} if per_run is None else {4})


def test_workers_that_only_torchrun_knows_do_not_go_with_numbers_of_their_own(tmp_path):
    document = {"name": "set", "grids": [{**GRID, "workers": [1, 4]}]}
    with pytest.raises(UserError, match="--nproc-per-node and --nnodes as numbers"):
        read(tmp_path, document, per_node="gpu")
    document = {"name": "set", "grids": [{**GRID, "set": {"batch_size": None,
                                                          "batch_per_worker": 8}}]}  # fmt: skip
    with pytest.raises(UserError, match="batch_per_worker needs to know"):
        read(tmp_path, document, per_node="gpu")
    with pytest.raises(UserError, match="no run is of 3 workers: there are those of 1, 4"):
        document = {"name": "set", "grids": [{**GRID, "workers": [1, 4]}]}
        select(read(tmp_path, document, per_node="3"), None)


dotted = st.from_regex(r"[a-c](\.[a-c]){0,2}", fullmatch=True)


@given(st.dictionaries(dotted, st.integers(), max_size=4))
def test_set_keys_sets_these_and_leaves_the_rest(keys):
    before = {"a": {"x": 1}, "y": {"z": 2}}
    names = sorted(keys)
    if any(b.startswith(f"{a}.") for a in names for b in names):
        return  # one inside the other: the last wins
    after = set_keys(before, keys)
    assert before == {"a": {"x": 1}, "y": {"z": 2}}
    for key, value in keys.items():
        place = after
        for part in key.split("."):
            place = place[part]
        assert place == value
    assert after["y"] == {"z": 2}
    assert ("a" in keys) or after["a"]["x"] == 1


@pytest.mark.parametrize(
    "changes, top, words",
    [
        ({}, {"grid": []}, ["unknown key grid", "grids"]),
        ({}, {"name": "a/b"}, ["name must be given"]),
        ({}, {"workers": 0}, ["workers must be a whole number > 0"]),
        ({}, {"grids": []}, ["grids must be a non-empty list"]),
        ({}, {"grids": ["x"]}, ["grids.0 must be a mapping"]),
        ({}, {"set": {"seed": 1}}, ["set: seed has a place of its own: seeds"]),
        ({"seed": [1]}, {}, ["grids.0: unknown key seed"]),
        ({"seeds": []}, {}, ["grids.0: seeds must be a non-empty list"]),
        ({"algorithms": ["sgd"]}, {}, ["grids.0: algorithms", "sync-sgd"]),
        ({"configs": ["lenet-lw"]}, {}, ["lenet-lw", "did you mean lenet-low?"]),
        ({"configs": ["demo", "lenet-low"], "name": "x"}, {}, ["grids.0.name"]),
        ({"set": {"epoch": 1}}, {}, ["grids.0", "unknown key epoch", "did you mean epochs?"]),
        ({"set": {"stragglers.0.seconds": 1}}, {}, ["grids.0.set", "delays"]),
        ({"vary": {"epochs": 3}}, {}, ["grids.0.vary.epochs", "list"]),
        ({"vary": {"optimizer.lrr": [1]}}, {}, ["grids.0", "unknown key optimizer.lrr"]),
        ({"policies": ["fast"]}, {}, ["grids.0", "partition.policy"]),
        ({"policies": "affine"}, {}, ["grids.0.policies", "list"]),
        ({"delays": [delay(1)]}, {}, ["grids.0.delays must be a mapping"]),
        ({"delays": {"a b": delay(1)}}, {}, ["grids.0.delays", "name"]),
        ({"delays": {"a": [{"ranks": [1]}]}}, {}, ["grids.0", "base-a", "stragglers.0.kind"]),
        ({"delays": {"a": [{"ranks": [2], "kind": "slowdown", "factor": 2}]}}, {},
         ["base-a/dp-sgd/seed-1", "rank 2", "2 workers"]),
        ({"set": {"model.name": "lenet7"}}, {}, ["base/dp-sgd/seed-1", "model.name", "lenet7"]),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line_that_names_the_place(tmp_path, changes, top, words):
    with pytest.raises(UserError) as error:
        one(tmp_path, changes, **top)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "set.yaml")) or "lenet-lw" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("key", ["epochs", "delays"])
def test_two_different_runs_never_share_a_name(tmp_path, key):
    changes = [{"set": {"epochs": 1}}, {"set": {"epochs": 2}}]
    if key == "delays":
        changes = [{"delays": {"a": delay(1)}}, {"delays": {"a": delay(2)}, "seeds": [7]}]
    with pytest.raises(UserError, match="give one of their grids another name"):
        grids = [{**GRID, **change} for change in changes]
        read(tmp_path, {"name": "set", "workers": 2, "grids": grids})


def runs_of(name: str) -> tuple[PlannedRun, ...]:
    return read_experiment(ROOT / "configs" / "experiments" / f"{name}.yaml").runs


def test_the_paper_s_set():
    runs = [run.launch.config for run in runs_of("paper")]
    assert {(c.model.name, c.stragglers[0].seconds, c.algorithm, c.seed) for c in runs} == set(
        itertools.product(["resnet50"], [0.1, 0.2], ALGORITHMS, range(42, 47))
    ) | set(itertools.product(["vgg16"], [0.01, 0.02], ALGORITHMS, range(42, 47)))
    assert len(runs) == 60 and {(c.epochs, c.batch_size) for c in runs} == {(150, 256)}


def test_the_set_for_cpus():
    runs = {run.title: run.launch.config for run in runs_of("cpu")}
    for fraction, algorithm, seed in itertools.product(
        ("0.28", "0.45", "0.56", "0.9"), ALGORITHMS, (42, 43, 44)
    ):
        (rule,) = runs[f"lenet-{fraction}/{algorithm}/seed-{seed}"].stragglers
        assert (rule.ranks, rule.fraction) == ((1,), float(fraction))
    for fraction, algorithm in itertools.product(("0.45", "0.9"), ALGORITHMS):
        assert runs[f"resnet20-{fraction}/{algorithm}/seed-42"].model.name == "resnet20"
    ablations = [c for c in runs.values() if c.model.name == "lenet"]
    assert {c.partition.every for c in ablations if c.partition.policy == "affine"} == {"epoch", 20}
    assert {c.gradient_weight for c in ablations} == {"uniform", "share", "share-over-n"}
    kinds = {rule.kind for c in ablations for rule in c.stragglers}
    assert kinds == {"constant", "gamma", "exponential"}
    assert any({rule.ranks for rule in c.stragglers} == {(0,), (1,)} for c in ablations)
