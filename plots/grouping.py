"""From single runs to experiments: which runs are drawn together, and what they are called.

An *experiment* is one config at one delay level on one number of workers. Its *variants* are what
is compared: the algorithms, and the same algorithm with another policy, gradient weight or
partition setting. The runs of a variant differ by seed alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.schema import ALGORITHMS
from plots.delays import delay_level, delay_size, largest_ratio
from plots.records import calibrated_delays, is_finished, read_runs, setting, workers
from reader import CONFIG, Run

BASELINE = "sync-sgd"

# Settings that say what is compared, or where files lie: they do not make another experiment.
_NOT_IDENTITY = (
    "algorithm", "seed", "partition", "gradient_weight", "output", "timeout", "checkpoint"
)  # fmt: skip
_DATA_PLACES = ("root", "cache", "memory_limit_gib")
_BOUNDS = ("every", "min_batch", "max_batch")
# The keys of `partition` that a policy looks at.
POLICY_KEYS = {
    "proportional": _BOUNDS, "affine": (*_BOUNDS, "min_gain"), "static": ("shares",),
    "replay": ("replay",),
}  # fmt: skip
# Calibrated delays that differ by a larger factor are worth a note.
_ALIKE = 1.05


@dataclass(frozen=True)
class Variant:
    """What one line in a figure shows: the runs (one per seed) of one algorithm and its settings.

    Where some seeds have finished, `runs` are those and `left_out` counts the unfinished ones.
    Where none has, `runs` are the unfinished ones, cut to the epochs that all of them have. So all
    runs of a variant hold the same number of epochs, and a mean is of the same seeds everywhere.
    """

    label: str
    algorithm: str
    policy: str
    runs: tuple[Run, ...]
    left_out: int

    @property
    def finished(self) -> bool:
        return is_finished(self.runs[0])

    @property
    def epochs(self) -> int:
        """Epochs recorded in each of the runs."""
        return len(self.runs[0].epochs)

    @property
    def caption(self) -> str:
        """Label for legends and panels, with the number of seeds and what is not complete."""
        text = f"{self.label}, n = {len(self.runs)}"
        if not self.finished:
            return f"{text} (unfinished)"
        return f"{text} ({self.left_out} unfinished left out)" if self.left_out else text


@dataclass(frozen=True)
class Experiment:
    """One config at one delay level; `slug` is unique and begins its figures' file names.

    identity: JSON of [the config without what tells variants apart, number of workers].
    """

    slug: str
    identity: str
    model: str
    data: str
    delay: str
    delay_size: float
    workers: int
    variants: tuple[Variant, ...]

    @property
    def title(self) -> str:
        return f"{self.model} on {self.data}, {count(self.workers, 'worker')}, {self.delay}"


@dataclass(frozen=True)
class Workload:
    """Experiments with one model and data set: what one comparison table holds."""

    slug: str
    title: str
    experiments: tuple[Experiment, ...]

    def delay_labels(self) -> list[str]:
        """A text per experiment: its delay level, and what else is needed to tell it apart."""
        labels = [experiment.delay for experiment in self.experiments]
        if len({experiment.workers for experiment in self.experiments}) > 1:
            labels = [f"{count(e.workers, 'worker')}, {e.delay}" for e in self.experiments]
        return [
            f"{text} ({experiment.slug})" if labels.count(text) > 1 else text
            for text, experiment in zip(labels, self.experiments)
        ]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def read_experiments(paths: Iterable[Path]) -> tuple[list[Experiment], list[str]]:
    """The experiments of all runs beneath `paths`; notes on runs that are not shown.

    Raises UserError when there are no runs, or a record is damaged.
    """
    runs, notes = read_runs(paths)
    experiments, doubles = group(runs)
    return experiments, notes + doubles


def group(runs: Sequence[Run]) -> tuple[list[Experiment], list[str]]:
    """Experiments in order of model, data, workers and delay; notes on runs that are not shown."""
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        families[_identity(run)].append(run)
    experiments, notes = [], []
    for slug, family in zip(_slugs(list(families.values())), families.values()):
        experiment, doubles = _experiment(slug, family)
        experiments.append(experiment)
        notes += doubles
    experiments.sort(key=lambda e: (e.model, e.data, e.workers, e.delay_size, e.slug))
    return experiments, notes


def workloads(experiments: Iterable[Experiment]) -> list[Workload]:
    """Experiments by model and data set, in their order."""
    found: dict[tuple[str, str], list[Experiment]] = defaultdict(list)
    for experiment in experiments:
        found[experiment.model, experiment.data].append(experiment)
    return [
        Workload(_file_name(f"{model}-{data}"), f"{model} on {data}", tuple(members))
        for (model, data), members in found.items()
    ]


def _identity(run: Run) -> str:
    config = {key: value for key, value in run.config.items() if key not in _NOT_IDENTITY}
    config["data"] = {k: v for k, v in setting(run, "data").items() if k not in _DATA_PLACES}
    return json.dumps([config, workers(run)], sort_keys=True, default=str)


def _slugs(families: list[list[Run]]) -> list[str]:
    """A distinct name per family: the shortest experiment folder, then workers, then a number."""
    names = [
        _file_name(min(map(_folder, family), key=lambda n: (len(n), n))) for family in families
    ]
    names = [
        f"{name}-{workers(family[0])}-workers" if names.count(name) > 1 else name
        for name, family in zip(names, families)
    ]
    return numbered(names)


def numbered(names: Sequence[str]) -> list[str]:
    """The names; those that several bear with a number behind them."""
    return [
        f"{name}-{names[:i].count(name) + 1}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def _folder(run: Run) -> str:
    """The experiment folder of runs/<experiment>/<algorithm>/seed-<n>; for moved runs, the name."""
    folder = run.path.resolve().parent.parent.name
    name = str(setting(run, "name"))
    return folder if folder.startswith(name) else name


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", text)


def _experiment(slug: str, runs: list[Run]) -> tuple[Experiment, list[str]]:
    variants, notes = _variants(runs)
    first = runs[0]
    stragglers = setting(first, "stragglers")
    calibrated = [calibrated_delays(run) for variant in variants for run in variant.runs]
    ratio = largest_ratio(calibrated)
    if ratio > _ALIKE:
        notes.append(
            f"{slug}: the delay in seconds differs between its runs by up to {ratio - 1:.0%}, "
            "so its times and speed-ups compare unlike delays"
        )
    experiment = Experiment(
        slug=slug,
        identity=_identity(first),
        model=setting(first, "model", "name"),
        data=setting(first, "data", "name"),
        delay=delay_level(stragglers, calibrated),
        delay_size=delay_size(stragglers),
        workers=workers(first),
        variants=variants,
    )
    return experiment, notes


def _variants(runs: list[Run]) -> tuple[tuple[Variant, ...], list[str]]:
    by_settings: dict[str, dict[int, Run]] = defaultdict(dict)
    notes = []
    for run in sorted(runs, key=lambda run: (len(_folder(run)), len(run.path.parts), run.path)):
        seeds = by_settings[json.dumps(_settings(run), sort_keys=True)]
        shown = seeds.setdefault(setting(run, "seed"), run)
        if shown is not run:
            notes.append(f"{run.path}: same experiment and seed as {shown.path}, left out")
    settings = [json.loads(text) for text in by_settings]
    variants = []
    for own, seeds in zip(settings, by_settings.values()):
        found = [seeds[seed] for seed in sorted(seeds)]
        shown = [run for run in found if is_finished(run)] or _cut(found)
        variants.append(
            Variant(
                label=_label(own, settings),
                algorithm=own["algorithm"],
                policy=own["policy"],
                runs=tuple(shown),
                left_out=len(found) - len(shown),
            )
        )
    variants.sort(
        key=lambda v: (list(ALGORITHMS).index(v.algorithm), v.label != v.algorithm, v.label)
    )
    return tuple(variants), notes


def _cut(runs: list[Run]) -> list[Run]:
    """The runs with as many epochs as the shortest has."""
    common = min(len(run.epochs) for run in runs)
    cut = []
    for run in runs:
        kept = run.steps["epoch"] < common
        steps = {name: array[kept] for name, array in run.steps.items()}
        cut.append(dataclasses.replace(run, epochs=run.epochs[:common], steps=steps))
    return cut


def _settings(run: Run) -> dict[str, Any]:
    """What makes a variant: algorithm, policy, gradient weight, and what its policy looks at."""
    algorithm = setting(run, "algorithm")
    if algorithm not in ALGORITHMS:
        raise UserError(f"{run.path / CONFIG}: unknown algorithm '{algorithm}'")
    policy = setting(run, "partition", "policy")
    return {
        "algorithm": algorithm,
        "policy": policy,
        "weight": setting(run, "gradient_weight"),
        **{key: setting(run, "partition", key) for key in POLICY_KEYS.get(policy, ())},
    }


def _label(own: dict[str, Any], all_settings: list[dict[str, Any]]) -> str:
    """The algorithm; in brackets what differs from its default or from its own other variants."""
    method = ("algorithm", "policy", "weight")
    policy, weight = ALGORITHMS[own["algorithm"]]
    parts = [own["policy"]] if own["policy"] != policy else []
    parts += [f"{own['weight']} weight"] if own["weight"] != weight else []
    alike = [other for other in all_settings if all(other[key] == own[key] for key in method)]
    for key in sorted(set(own) - set(method)):
        if any(other[key] != own[key] for other in alike):
            parts.append(f"{key.replace('_', ' ')} {_value(own[key])}")
    return own["algorithm"] + (f" ({', '.join(parts)})" if parts else "")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ":".join(f"{item:g}" for item in value)
    return str(value)
