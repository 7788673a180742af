"""From an experiment file to its runs. The file is YAML; every combination is one run:

    name: cpu                   # output folder runs/cpu, unless --output says otherwise
    workers: 2                  # on each node, unless --nproc-per-node says otherwise
    set: {precision: bf16}      # optional: keys of trainer.py's configuration, for all runs
    grids:
      - configs: [lenet-low]    # files, or names of those in configs/
        name: lenet             # optional: instead of the config's own name
        algorithms: [sync-sgd, dp-sgd, edp-sgd]
        seeds: [42, 43, 44]
        set: {epochs: 15}       # optional: for all runs of this grid
        delays:                 # optional: name -> straggler rules, instead of the config's own
          "0.45": [{ranks: [1], kind: constant, fraction: 0.45}]
        workers: [1, 2, 4]      # optional: instead of the number above, one run for each
        policies: [null, affine]                # optional; null: as the algorithm has it
        vary: {partition.every: [null, 20]}     # optional: any key -> values; null: leave it

What is varied cannot be set on the command line at the same time.
A run's config is called <name>[-<delay>][-<n>w]; what `policies` and `vary` change is given to
trainer.py as key=value and so names the run's folder as always. A run that two grids ask for is
made once.
Runs of a first seed come before those of a second, and algorithms directly one after the other, so
that a change of the machine's speed meets all algorithms alike. Where the command line says how
many workers there are, only the runs of so many are made: one sitting for each size of a cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import models
from configs import files
from configs.command_line import Launch, parse, run_folder
from configs.errors import UserError
from configs.filling import fill, printable, setting
from configs.schema import ALGORITHMS, Config, for_workers, from_mapping, resolve

NAME = r"[A-Za-z0-9_+=-][A-Za-z0-9._+=-]{0,49}"
# Keys that have a place of their own in an experiment file.
_OWN_PLACE = {
    "name": "name", "algorithm": "algorithms", "seed": "seeds", "stragglers": "delays",
    "output": "the option --output",
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """One entry of `grids` but for set, delays, policies and vary, whose keys are free."""

    configs: tuple[str, ...] = setting(..., "Files or shipped names.", nonempty=True)
    algorithms: tuple[str, ...] = setting(
        tuple(ALGORITHMS), "What is compared.", choices=tuple(ALGORITHMS), nonempty=True
    )
    seeds: tuple[int, ...] = setting((42,), "One run each.", at_least=0, nonempty=True)
    name: str | None = setting(
        None, "Instead of the config's.", pattern=NAME, pattern_meaning="letters, digits, . _ + = -"
    )
    workers: tuple[int, ...] | None = setting(
        None, "Numbers of workers, one run each.", at_least=1, nonempty=True
    )


@dataclass(frozen=True)
class PlannedRun:
    """One run of trainer.py.

    base: the name of its config file; mapping: that file's content, without measured times; launch:
    what trainer.py will make of it; overrides: its key=value arguments; workers: on all nodes, None
    where only torchrun will know.
    """

    base: str
    mapping: Mapping[str, Any]
    overrides: tuple[str, ...]
    launch: Launch
    workers: int | None

    @property
    def config(self) -> Config:
        """The resolved configuration as the run will record it.

        With its global batch, unless torchrun alone will know how many workers that is of.
        """
        config = self.launch.config
        if config.batch_size is not None or self.workers is None:
            return config
        return dataclasses.replace(config, batch_size=config.batch_per_worker * self.workers)

    @property
    def base_config(self) -> Config:
        """As `config`, but of the config file alone, without the key=value arguments."""
        launch = dataclasses.replace(self.launch, config=resolve(from_mapping(self.mapping)))
        return dataclasses.replace(self, launch=launch).config

    @property
    def folder(self) -> Path:
        return run_folder(self.launch)

    @property
    def title(self) -> str:
        """The run's folder below the output: <config>[+<overrides>]/<algorithm>/seed-<n>."""
        return str(self.folder.relative_to(self.launch.config.output))

    def arguments(self, config_file: Path) -> list[str]:
        """trainer.py's arguments, where the file holds `mapping` or what calibration made of it."""
        config = self.launch.config
        return [
            *("--config", str(config_file), "--algorithm", config.algorithm),
            *("--seed", str(config.seed), "--output", config.output, *self.overrides),
        ]


@dataclass(frozen=True)
class Experiment:
    """All runs of an experiment file, in the order in which they are made.

    per_node: workers on each node, as torchrun takes it, None where each run has its own number;
    workers: on all nodes, None where each run has its own number or only torchrun will know.
    """

    name: str
    output: Path
    per_node: str | None
    workers: int | None
    runs: tuple[PlannedRun, ...]


def read_experiment(
    path: Path,
    output: Path | None = None,
    extra: Mapping[str, Any] | None = None,
    per_node: str | None = None,
    nodes: str | None = None,
) -> Experiment:
    """The checked runs of an experiment file.

    output, per_node (workers of a node) and the keys in `extra` win over what the file says; nodes:
    their number, both as torchrun takes them. Raises UserError that names the file and the place
    in it.
    """
    where, mapping = printable(str(path)), files.read_mapping(path)
    _check_keys(mapping, ("name", "workers", "set", "grids"), where)
    name = mapping.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise UserError(f"{where}: name must be given, of letters, digits, . _ + = -")
    grids = mapping.get("grids")
    if not isinstance(grids, list) or not grids:
        raise UserError(f"{where}: grids must be a non-empty list of mappings")
    given = per_node is not None or nodes is not None
    per_node = _per_node(mapping.get("workers"), where) if per_node is None else per_node
    counts = [per_node, nodes or "1"]
    workers = math.prod(map(int, counts)) if all(map(str.isdecimal, counts)) else None
    extra = _keys(extra, "command line")
    output = Path("runs") / name if output is None else output
    common = _keys(mapping.get("set"), f"{where}: set")
    found: list[tuple[int, PlannedRun]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, entry in enumerate(grids):
            place = f"{where}: grids.{number}"
            found += _expand(entry, place, output, common, extra, workers, Path(scratch))
    found.sort(key=lambda pair: pair[0])
    runs = _without_doubles([run for _, run in found], where)
    _check_runs(runs, where)
    if workers is None and any(run.workers is not None for run in runs):
        raise UserError(
            f"{where}: grids with workers of their own need to know how many there are: give "
            "--nproc-per-node and --nnodes as numbers"
        )
    if not given and any(run.workers != workers for run in runs):
        return Experiment(name, output, None, None, tuple(runs))
    return Experiment(name, output, per_node, workers, tuple(runs))


def set_keys(mapping: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested mapping in which dotted `keys` have the given values."""
    copy = dict(mapping)
    for key, value in keys.items():
        head, _, rest = key.partition(".")
        if rest:
            inner = copy.get(head)
            value = set_keys(inner if isinstance(inner, Mapping) else {}, {rest: value})
        copy[head] = value
    return copy


def _expand(
    entry: object,
    where: str,
    output: Path,
    common: Mapping[str, Any],
    extra: Mapping[str, Any],
    workers: int | None,
    scratch: Path,
) -> Iterator[tuple[int, PlannedRun]]:
    """The runs of one grid, each with its seed's place in the grid's list.

    workers: of a grid that has no numbers of its own.
    """
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be a mapping with configs, algorithms, seeds, …")
    known = ("configs", "algorithms", "seeds", "name", "workers", "set", "delays", "policies",
             "vary")  # fmt: skip
    _check_keys(entry, known, where)
    free = ("set", "delays", "policies", "vary")
    grid = fill(Grid, {k: v for k, v in entry.items() if k not in free}, where)
    fixed = {**common, **_keys(entry.get("set"), f"{where}.set"), **extra}
    if grid.name is not None and len(grid.configs) > 1:
        raise UserError(f"{where}.name would call several configs the same: give each its grid")
    bases = [
        sized
        for config in grid.configs
        for base in _delayed(config, grid.name, entry.get("delays"), where)
        for sized in _sized(set_keys(base, fixed), grid.workers, workers)
    ]
    variants = _variants(entry, extra.keys(), where)
    for (place, seed), (base, count), overrides, algorithm in itertools.product(
        enumerate(grid.seeds), bases, variants, grid.algorithms
    ):
        launch = _launch(base, overrides, algorithm, seed, output, scratch, where)
        yield place, PlannedRun(str(base["name"]), base, overrides, launch, count)


def _sized(
    base: dict[str, Any], numbers: Sequence[int] | None, workers: int | None
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The config file's mapping once per number of workers, or once for those of all grids."""
    if numbers is None:
        yield base, workers
    for number in numbers or ():
        yield {**base, "name": f"{base['name']}-{number}w"}, number


def _launch(
    base: Mapping[str, Any],
    overrides: tuple[str, ...],
    algorithm: str,
    seed: int,
    output: Path,
    scratch: Path,
    where: str,
) -> Launch:
    """What trainer.py itself would make of a file that holds `base`, and these arguments."""
    from_mapping(base, f"{where}: config {printable(str(base.get('name')))}")
    file = scratch / "config.yaml"
    file.write_text(yaml.safe_dump(dict(base)))
    own = ["--algorithm", algorithm, "--seed", str(seed), "--output", str(output)]
    try:
        return parse(["--config", str(file), *own, *overrides])
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _delayed(config: str, name: str | None, delays: object, where: str) -> Iterator[dict[str, Any]]:
    """The config file's mapping once per entry of `delays`, or once as it is."""
    mapping = files.read_mapping(files.find(config))
    mapping["name"] = mapping.get("name") if name is None else name
    if delays is None:
        yield mapping
        return
    if not isinstance(delays, dict) or not delays:
        raise UserError(f"{where}.delays must be a mapping of names to lists of straggler rules")
    for delay, rules in delays.items():
        if not re.fullmatch(NAME, str(delay)):
            raise UserError(f"{where}.delays: a name has letters, digits, . _ + = - alone")
        yield {**mapping, "name": f"{mapping['name']}-{delay}", "stragglers": rules or []}


def _variants(entry: Mapping[str, Any], given: Set[str], where: str) -> list[tuple[str, ...]]:
    """The key=value arguments of every combination of `policies` and `vary`.

    given: keys of the command line, which cannot be varied at the same time.
    """
    axes = _keys(entry.get("vary"), f"{where}.vary")
    if "policies" in entry:
        axes = {"partition.policy": entry["policies"], **axes}
    for key in axes.keys() & given:
        raise UserError(
            f"command line: {key} is varied in {where}: leave it out, and choose runs with --only"
        )
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            place = "policies" if key == "partition.policy" else f"vary.{key}"
            raise UserError(f"{where}.{place} must be a non-empty list of values")
    return [
        tuple(f"{key}={_text(value)}" for key, value in zip(axes, values) if value is not None)
        for values in itertools.product(*axes.values())
    ]


def _text(value: Any) -> str:
    """The value as key=value has it: YAML on one line, without quotes where they are not needed."""
    plain = isinstance(value, str) and value.strip() == value != ""
    return value if plain and _read(value) == value else json.dumps(value)


def _read(text: str) -> Any:
    try:
        return files.parse(text, "")
    except UserError:
        return None


def _without_doubles(runs: Sequence[PlannedRun], where: str) -> list[PlannedRun]:
    found: dict[Path, PlannedRun] = {}
    for run in runs:
        first = found.setdefault(run.folder, run)
        if (first.launch, first.workers) != (run.launch, run.workers):
            raise UserError(
                f"{where}: two different runs would be recorded in {run.folder}: give one of their "
                "grids another name"
            )
    bases: dict[str, PlannedRun] = {}
    for run in found.values():
        if bases.setdefault(run.base, run).mapping != run.mapping:
            raise UserError(
                f"{where}: two different configs are called {run.base}: give one of their grids "
                "another name"
            )
    return list(found.values())


def _check_runs(runs: Sequence[PlannedRun], where: str) -> None:
    """What a config's own checks cannot see: number of workers, models."""
    built = set()
    for run in runs:
        config = run.launch.config
        try:
            if run.workers is not None:
                for_workers(config, run.workers)
            elif config.batch_size is None:
                raise UserError(
                    "batch_per_worker needs to know how many workers there are: give "
                    "--nproc-per-node and --nnodes as numbers"
                )
            if config.model.name not in built:
                built.add(config.model.name)
                models.build(config.model.name, 10, config.data.image_size or 32)
        except UserError as error:
            raise UserError(f"{where}: {run.title}: {error}") from error


def _keys(mapping: object, where: str) -> dict[str, Any]:
    """A mapping of dotted keys, none of which has a place of its own."""
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UserError(f"{where} must be a mapping of keys of the configuration to values")
    for key in mapping:
        if not isinstance(key, str) or not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", key):
            raise UserError(f"{where}: {printable(key)} is no dotted key, e.g. optimizer.lr")
        if (head := key.partition(".")[0]) in _OWN_PLACE:
            raise UserError(f"{where}: {key} has a place of its own: {_OWN_PLACE[head]}")
    return mapping


def _per_node(value: object, where: str) -> str:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return str(value or 1)
    raise UserError(f"{where}: workers must be a whole number > 0, not {printable(value)}")


def _check_keys(mapping: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            raise UserError(
                f"{where}: unknown key {printable(key)}: the keys here are {', '.join(known)}"
            )
