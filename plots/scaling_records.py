"""What scaling figures show: runs grouped by all but their seed, and numbers derived from records.

Throughputs and busy shares are of settled steps: full batches of the last half of the epochs,
without each epoch's first steps. Times and accuracies are of whole runs.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plots.estimates import Spread
from plots.records import column, is_finished, provenance, setting, workers
from reader import Run

_WARM_UP_STEPS = 3
RULES = ("none", "linear", "linear, warm-up")


@dataclass(frozen=True)
class Setting:
    """What the runs of one point have in common.

    batch: global; rule: one of RULES; factors: how many times slower each worker is made by
    `slowdown` rules, all 1 for equal workers; delayed: whether other delays are injected; speed,
    rest: JSON of what else tells runs apart, as to their speed and apart from it.
    """

    model: str
    data: str
    precision: str
    speed: str
    exchange: str
    algorithm: str
    workers: int
    batch: int
    rule: str
    factors: tuple[float, ...]
    delayed: bool
    epochs: int
    rest: str

    @property
    def batch_per_worker(self) -> float:
        return self.batch / self.workers

    @property
    def cluster(self) -> str:
        """`equal` workers, `mixed` ones (slowdown), or those with `other` delays."""
        if self.delayed:
            return "other"
        return "equal" if len(set(self.factors)) == 1 else "mixed"


@dataclass(frozen=True)
class Point:
    """The runs (one per seed) of a setting, and what they say.

    busy_share: [n] part of a settled step in which each worker works, mean over seeds, None where
    no full batch is behind the warm-up; diverged: seeds that did not finish or whose last loss is
    not finite.
    """

    setting: Setting
    runs: tuple[Run, ...]
    busy_share: np.ndarray | None
    diverged: int

    @property
    def top1(self) -> Spread:
        """Final test accuracy, 0..1, of the last recorded epoch."""
        return Spread.of([float(column(run, "test_top1")[-1]) for run in self.runs])


@dataclass(frozen=True)
class Steps:
    """Settled steps of a run: seconds of each worker, [S, n], of full batches alone."""

    busy: np.ndarray
    wait: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Length of each step, [S]: all workers' should agree; the longest counts."""
        return (self.busy + self.wait).max(axis=1)


def points(runs: Iterable[Run]) -> list[Point]:
    """One point per setting, sorted by it; the runs in order of seed."""
    found: dict[Setting, list[Run]] = defaultdict(list)
    for run in runs:
        found[_setting(run)].append(run)
    return [
        _point(key, sorted(found[key], key=lambda run: setting(run, "seed")))
        for key in sorted(found, key=_order)
    ]


@dataclass(frozen=True)
class Family:
    """All points of one model, data set, precision and way to compute: what one figure shows."""

    title: str
    slug: str
    points: tuple[Point, ...]

    def speeds(self, cluster: str, **wanted: str) -> dict[tuple[int, int], Spread]:
        """Settled samples/s by (workers, global batch) of all runs, whatever else sets them apart.

        wanted: the setting's exchange or algorithm.
        """
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for point in self.points:
            key = point.setting
            if key.cluster == cluster and all(getattr(key, k) == v for k, v in wanted.items()):
                found[key.workers, key.batch] += [
                    throughput for throughput in map(throughput_of, point.runs) if throughput
                ]
        return {key: Spread.of(values) for key, values in sorted(found.items()) if values}


def families(found: Sequence[Point]) -> list[Family]:
    """Points by what their speeds have in common, each family with a name of its own."""
    groups: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for point in found:
        key = point.setting
        groups[key.model, key.data, key.precision, key.speed].append(point)
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key[0]}-{key[2]}") for key in groups]
    return [
        Family(
            f"{model} on {data}, {precision}",
            f"{name}-{names[:place].count(name) + 1}" if names.count(name) > 1 else name,
            tuple(members),
        )
        for place, (name, ((model, data, precision, _), members)) in enumerate(
            zip(names, groups.items())
        )
    ]


def throughput_of(run: Run) -> float | None:
    """Settled samples per second, None where no full batch is behind the warm-up."""
    steps = settled_steps(run)
    return setting(run, "batch_size") / float(np.median(steps.seconds)) if len(steps.busy) else None


def settled_steps(run: Run) -> Steps:
    """The settled steps of a run; none where its epochs are too short."""
    epoch, sizes = run.steps["epoch"], run.steps["batch_sizes"].sum(axis=1)
    starts = np.flatnonzero(np.diff(epoch, prepend=-1))
    place = np.arange(len(epoch)) - np.repeat(starts, np.diff([*starts, len(epoch)]))
    kept = (place >= _WARM_UP_STEPS) & (sizes == setting(run, "batch_size"))
    kept &= epoch >= len(run.epochs) // 2
    return Steps(*(run.steps[name][kept].astype(float) for name in ("busy", "wait")))


def seconds_to(run: Run, accuracy: float) -> float | None:
    """Seconds of training until the test accuracy (0..1) was first reached, or None."""
    reached = np.flatnonzero(column(run, "test_top1") >= accuracy)
    return float(column(run, "train_seconds")[reached[0]]) if len(reached) else None


def cores(run: Run) -> int | None:
    """Cores of the first node, where the record knows them."""
    found = run.provenance.get("cores")
    return found if isinstance(found, int) else None


def on_one_machine(run: Run) -> bool:
    """Whether CPU workers share the cores of one machine, as far as the record tells."""
    return set(map(str, provenance(run, "devices", list))) == {"cpu"} and "--nnodes" not in str(
        run.provenance.get("command")
    )


def _setting(run: Run) -> Setting:
    factors, delayed = np.ones(workers(run)), False
    for rule in setting(run, "stragglers"):
        if rule["kind"] == "slowdown":
            factors[list(rule["ranks"])] *= rule["factor"]
        else:
            delayed = True
    schedule = setting(run, "schedule")
    rule = "linear" if schedule.get("scale_lr") == "linear" else "none"
    if schedule.get("warmup_epochs"):
        rule += ", warm-up"
    speed = {key: setting(run, key) for key in ("memory_format", "threads")}
    speed["accumulate"] = run.config.get("accumulate", 1)
    apart = ("data", "optimizer", "partition", "gradient_weight")
    rest: dict[str, Any] = {key: setting(run, key) for key in apart}
    rest["data"] = {k: v for k, v in rest["data"].items() if k not in ("root", "cache")}
    rest["kind"] = schedule["kind"]
    return Setting(
        model=setting(run, "model", "name"),
        data=setting(run, "data", "name"),
        precision=setting(run, "precision"),
        speed=json.dumps(speed, sort_keys=True),
        exchange=setting(run, "exchange"),
        algorithm=setting(run, "algorithm"),
        workers=workers(run),
        batch=setting(run, "batch_size"),
        rule=rule,
        factors=tuple(factors.tolist()),
        delayed=delayed,
        epochs=setting(run, "epochs"),
        rest=json.dumps(rest, sort_keys=True),
    )


def _order(key: Setting) -> tuple[Any, ...]:
    return (key.model, key.data, key.precision, key.speed, key.exchange, key.algorithm, key.rule,
            key.factors, key.batch, key.epochs, key.rest)  # fmt: skip


def _point(key: Setting, runs: Sequence[Run]) -> Point:
    steps = [one for one in map(settled_steps, runs) if len(one.busy)]
    shares = [np.median(one.busy / one.seconds[:, None], axis=0) for one in steps]
    busy_share = np.mean(shares, axis=0) if shares else None
    diverged = sum(
        not is_finished(run) or not np.isfinite(column(run, "train_loss")[-1]) for run in runs
    )
    return Point(key, tuple(runs), busy_share, diverged)
