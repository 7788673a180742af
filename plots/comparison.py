"""What the report sets side by side: own runs, the authors' numbers, predictions; and ablations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.schema import ALGORITHMS, PartitionConfig
from plots.delays import delay_seconds, is_steady
from plots.estimates import Ratio
from plots.grouping import BASELINE, Experiment, Variant
from plots.records import calibrated_delays, column, last_half, per_worker, setting
from plots.reference import PaperKey, Times
from plots.summary import epoch_seconds, speed_up, spread, total_seconds
from reader import Run


@dataclass(frozen=True)
class Comparison:
    """One experiment: `own` is None where it was not run, `paper` where the authors did not."""

    own: Experiment | None
    paper: PaperKey | None

    def base(self, algorithm: str) -> Variant | None:
        """The own runs of an algorithm as it is, None where there are none."""
        return None if self.own is None else base_variant(self.own, algorithm)


@dataclass(frozen=True)
class Ablation:
    """One line of an ablation table: a variant, and what its times and accuracies are held to.

    over_base: the base's training time over the variant's; None for the base itself.
    """

    experiment: Experiment
    variant: Variant
    is_base: bool
    over_base: Ratio | None
    over_sync: Ratio | None


def comparisons(experiments: Sequence[Experiment], known: Sequence[PaperKey]) -> list[Comparison]:
    """The own experiments in their order, then those of the paper that none of them repeats."""
    own = [Comparison(experiment, paper_key(experiment, known)) for experiment in experiments]
    repeated = {comparison.paper for comparison in own}
    return [*own, *(Comparison(None, key) for key in known if key not in repeated)]


def paper_key(experiment: Experiment, known: Sequence[PaperKey]) -> PaperKey | None:
    """The paper's experiment that this one repeats, down to batch, precision and delay.

    The number of epochs may differ; times per epoch and per step can still be compared.
    """
    run = experiment.variants[0].runs[0]
    rules = setting(run, "stragglers")
    whole = setting(run, "data", "name") == "cifar10" and setting(run, "data", "subset") is None
    if not whole or experiment.workers != 2 or setting(run, "batch_size") != 256:
        return None
    if setting(run, "precision") != "fp32" or run.config.get("accumulate", 1) != 1:
        return None
    if len(rules) != 1 or rules[0]["ranks"] != [1] or not is_steady(rules):
        return None
    seconds = rules[0].get("seconds")
    for key in known:
        if key.model == experiment.model and seconds is not None:
            if np.isclose(key.delay_seconds, seconds, rtol=1e-6):
                return key
    return None


def base_variant(experiment: Experiment, algorithm: str) -> Variant | None:
    """The variant of an algorithm with its own policy and weight, nearest to the defaults."""
    plain = [
        variant
        for variant in experiment.variants
        if variant.algorithm == algorithm and _method(variant) == ALGORITHMS[algorithm]
    ]
    return min(plain, key=_unlike_default, default=None)


def own_times(experiment: Experiment, algorithm: str) -> Times | None:
    """What was measured for an algorithm as it is; None where it was not run."""
    variant, sync = (base_variant(experiment, name) for name in (algorithm, BASELINE))
    if variant is None:
        return None

    def over_sync(seconds: Callable[[Run], float]) -> Ratio | None:
        compared = sync is not None and sync is not variant and sync.epochs == variant.epochs
        return speed_up(variant, sync, seconds) if compared else None

    return Times(
        runs=len(variant.runs),
        epochs=variant.epochs,
        epochs_planned=setting(variant.runs[0], "epochs"),
        epoch_seconds=spread(variant, epoch_seconds),
        train_seconds=spread(variant, lambda run: float(column(run, "train_seconds")[-1])),
        total_seconds=spread(variant, total_seconds),
        busy_seconds=balanced_busy(variant),
        optimum=last_known(variant, "optimum"),
        train_speed_up=over_sync(epoch_seconds),
        total_speed_up=over_sync(total_seconds),
    )


def balanced_busy(variant: Variant) -> tuple[float, ...]:
    """Busy seconds per step and worker: medians of steps, averaged over the last half and seeds."""
    busy = [last_half(per_worker(run, "busy", "median")).mean(axis=0) for run in variant.runs]
    return tuple(map(float, np.mean(busy, axis=0)))


def last_known(variant: Variant, key: str) -> float | None:
    """Mean over seeds of an entry of the last epoch's record; None where no seed has it."""
    values = [column(run, key)[-1] for run in variant.runs]
    known = [float(value) for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None


def delay_ratio(experiment: Experiment) -> float | None:
    """The longest delay per step over the same worker's undelayed busy time, in equal shares.

    From the sync-sgd runs; None without them or without a delay.
    """
    sync = base_variant(experiment, BASELINE)
    if sync is None or not setting(sync.runs[0], "stragglers"):
        return None
    busy = np.mean([per_worker(run, "busy", "mean").mean(axis=0) for run in sync.runs], axis=0)
    delay = np.mean([per_worker(run, "phases", "delay").mean(axis=0) for run in sync.runs], axis=0)
    return float(np.max(delay / (busy - delay)))


def plain(experiment: Experiment) -> Experiment:
    """The experiment with the algorithms as they are alone; all variants where there are none."""
    found = [base_variant(experiment, algorithm) for algorithm in ALGORITHMS]
    kept = tuple(variant for variant in found if variant is not None)
    return replace(experiment, variants=kept) if kept else experiment


# --- ablations --------------------------------------------------------------------------------


def split(experiments: Sequence[Experiment]) -> tuple[list[Experiment], dict[str, list[Ablation]]]:
    """The main experiments, and the lines of the ablation table of each that has any, by slug.

    An experiment with random or passing delays is an ablation of the one that differs from it in
    nothing but a steady delay, the nearest in mean seconds; without such a one it is a main one.
    """
    bases = {experiment.slug: _steady_base(experiment, experiments) for experiment in experiments}
    main = [experiment for experiment in experiments if bases[experiment.slug] is None]
    tables: dict[str, list[Ablation]] = {}
    for experiment in main:
        others = [e for e in experiments if bases[e.slug] is experiment]
        lines = _ablations(experiment, others)
        if lines:
            tables[experiment.slug] = lines
    return main, tables


def _ablations(base: Experiment, others: Sequence[Experiment]) -> list[Ablation]:
    """Per algorithm: the base's line, then its variants and those under other delays."""
    lines = []
    for algorithm in ALGORITHMS:
        plain = base_variant(base, algorithm)
        pairs = [(base, variant) for variant in base.variants]
        pairs += [(other, variant) for other in others for variant in other.variants]
        shown = [
            _line(experiment, variant, plain)
            for experiment, variant in pairs
            if variant.algorithm == algorithm and variant is not plain
        ]
        if shown:
            lines += [_line(base, plain, plain)] if plain else []
            lines += shown
    return lines


def _line(experiment: Experiment, variant: Variant, base: Variant | None) -> Ablation:
    def over(other: Variant | None) -> Ratio | None:
        if other is None or other is variant or other.epochs != variant.epochs:
            return None
        return speed_up(variant, other, epoch_seconds)

    return Ablation(
        experiment=experiment,
        variant=variant,
        is_base=variant is base,
        over_base=over(base),
        over_sync=over(base_variant(experiment, BASELINE)),
    )


def _steady_base(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    if is_steady(_rules(experiment)):
        return None
    own = _mean_delay(experiment)
    alike = [
        (abs(seconds - own), other)
        for other in experiments
        if _rules(other) and is_steady(_rules(other))
        and _all_but_delay(other) == _all_but_delay(experiment)
        and (seconds := _mean_delay(other)) is not None and own is not None
    ]  # fmt: skip
    return min(alike, key=lambda pair: pair[0])[1] if alike else None


def _all_but_delay(experiment: Experiment) -> str:
    identity = json.loads(experiment.identity)
    for key in ("name", "stragglers"):
        identity[0].pop(key, None)
    return json.dumps(identity, sort_keys=True)


def _rules(experiment: Experiment) -> Sequence[Mapping[str, object]]:
    return setting(experiment.variants[0].runs[0], "stragglers")


def _mean_delay(experiment: Experiment) -> float | None:
    calibrated = [calibrated_delays(run) for v in experiment.variants for run in v.runs]
    return delay_seconds(_rules(experiment), calibrated)


def _method(variant: Variant) -> tuple[str, str]:
    return variant.policy, setting(variant.runs[0], "gradient_weight")


def _unlike_default(variant: Variant) -> int:
    given, default = setting(variant.runs[0], "partition"), PartitionConfig()
    keys = ("every", "min_batch", "max_batch")
    return sum(given.get(key) != getattr(default, key) for key in keys)
