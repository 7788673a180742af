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
from functools import cached_property

import numpy as np

from plots.grouping import numbered
from plots.records import (
    column,
    diverged_in,
    is_finished,
    is_warm,
    provenance,
    setting,
    workers,
)
from plots.scaling_seeds import Seeds, by_seed
from plots.scaling_settings import Setting, in_words, names_apart, setting_of
from reader import Run


@dataclass(frozen=True)
class Point:
    """The runs of a setting, in order of seed, and what they say.

    Accuracies, and times to one, are of finished runs alone.
    """

    setting: Setting
    runs: tuple[Run, ...]

    @cached_property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if diverged_in(run) is None and is_finished(run)]

    @cached_property
    def unfinished(self) -> list[Run]:
        """Runs that were interrupted, or are still being made."""
        return [run for run in self.runs if diverged_in(run) is None and not is_finished(run)]

    @cached_property
    def diverged(self) -> dict[int, int]:
        """The epoch (from 0) that ended each seed of which no run finished."""
        ends = [(setting(run, "seed"), diverged_in(run)) for run in self.runs]
        return {seed: end for seed, end in ends if end is not None and seed not in self.top1}

    @property
    def seeds(self) -> list[int]:
        """Those that came to an end: finished or diverged."""
        return sorted({*self.top1, *self.diverged})

    @cached_property
    def top1(self) -> Seeds:
        """Final test accuracy, 0..1, of each seed that finished."""
        return by_seed(self.finished, lambda run: float(column(run, "test_top1")[-1]))

    @cached_property
    def busy_share(self) -> np.ndarray | None:
        return busy_share(self.runs)

    def seconds_to(self, accuracy: float) -> Seeds:
        """Seconds of training to a test accuracy (0..1), of each seed that reaches it."""
        return by_seed(self.finished, lambda run: seconds_to(run, accuracy))


@dataclass(frozen=True)
class Steps:
    """Settled steps of a run: seconds of each worker, [S, n], of full batches alone."""

    busy: np.ndarray
    wait: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Length of each step, [S]: all workers' should agree; the longest counts."""
        return (self.busy + self.wait).max(axis=1)


@dataclass(frozen=True)
class Family:
    """All points of one model, data set, precision and way to compute: what one figure shows."""

    title: str
    slug: str
    points: tuple[Point, ...]

    def speeds(self, **wanted: str | bool) -> dict[tuple[int, int], Seeds]:
        """Settled samples/s by (workers, global batch) and seed, whatever else sets runs apart.

        wanted: values of the setting's attributes; mix or plain keep unlike clusters apart.
        """
        found: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for point in self.points:
            key = point.setting
            if all(getattr(key, name) == value for name, value in wanted.items()):
                found[key.workers, key.batch] += point.runs
        speeds = {place: by_seed(found[place], throughput_of) for place in sorted(found)}
        return {place: seeds for place, seeds in speeds.items() if seeds}

    @cached_property
    def plain(self) -> dict[tuple[int, int], Seeds]:
        """The speeds of equal workers with sync-sgd under ddp."""
        return self.speeds(plain=True, exchange="ddp")

    @cached_property
    def cores(self) -> float | None:
        """For how many workers the machine has cores on which all runs of several were made.

        None where there were several machines, or GPUs, or the records do not tell.
        """
        runs = [run for point in self.points for run in point.runs]
        several = [run for run in runs if workers(run) > 1]
        counts = {cores(run) for run in several}
        if len(counts) != 1 or None in counts or not all(map(on_one_machine, several)):
            return None
        # Without a setting one worker alone takes all cores, and several divide them.
        return counts.pop() / max(provenance(run, "threads", int) for run in runs)


def points(runs: Iterable[Run]) -> list[Point]:
    """One point per setting, sorted by it; the runs in order of seed."""
    found: dict[Setting, list[Run]] = defaultdict(list)
    for run in runs:
        found[setting_of(run)].append(run)
    return [
        Point(key, tuple(sorted(found[key], key=lambda run: setting(run, "seed"))))
        for key in sorted(found)
    ]


def families(found: Sequence[Point]) -> list[Family]:
    """Points by what their speeds have in common, each family with a name of its own."""
    groups: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for point in found:
        key = point.setting
        groups[key.model, key.data, key.precision, key.speed].append(point)
    titles = names_apart(
        [f"{model} on {data}, {precision}" for model, data, precision, _ in groups],
        [in_words(json.loads(speed)) for *_, speed in groups],
    )
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key[0]}-{key[2]}") for key in groups]
    named = zip(titles, numbered(names), groups.values())
    return [Family(title, slug, tuple(own)) for title, slug, own in named]


def throughput_of(run: Run) -> float | None:
    """Settled samples per second, None where no full batch is behind the warm-up."""
    steps = settled_steps(run)
    return setting(run, "batch_size") / float(np.median(steps.seconds)) if len(steps.busy) else None


def busy_share(runs: Iterable[Run]) -> np.ndarray | None:
    """[n] part of a settled step in which each worker does not wait, mean over seeds.

    None where no full batch is behind the warm-up.
    """
    shares = by_seed(runs, _busy_share)
    return np.mean(list(shares.values()), axis=0) if shares else None


def _busy_share(run: Run) -> np.ndarray | None:
    steps = settled_steps(run)
    return np.median(steps.busy / steps.seconds[:, None], axis=0) if len(steps.busy) else None


def settled_steps(run: Run) -> Steps:
    """The settled steps of a run; none where its epochs are too short."""
    full = run.steps["batch_sizes"].sum(axis=1) == setting(run, "batch_size")
    kept = is_warm(run) & full & (run.steps["epoch"] >= len(run.epochs) // 2)
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
