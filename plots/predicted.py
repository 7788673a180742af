"""What the simulator says of own experiments, from nothing but their sync-sgd runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from configs.schema import ALGORITHMS, Config, for_workers, from_mapping, resolve
from plots.comparison import base_variant
from plots.estimates import Ratio, Spread
from plots.grouping import BASELINE, Experiment, Variant
from plots.records import last_half, workers
from plots.reference import Times
from reader import CONFIG
from simulation.model import Run
from simulation.training import Costs, costs_of_run, simulated


def predict(experiment: Experiment) -> dict[str, Times]:
    """Times of the algorithms that were run beside sync-sgd, means over its seeds.

    As with the authors' runs, busy times, what a step takes beyond them, jitter and evaluation are
    those of sync-sgd; nothing is taken from the runs that are predicted. Empty without sync-sgd.
    Raises UserError where a record or config is damaged, PlanError where bounds hold no batch.
    """
    sync = base_variant(experiment, BASELINE)
    if sync is None:
        return {}
    costs, equal = [costs_of_run(run) for run in sync.runs], _config(sync)
    found = {}
    for algorithm in ALGORITHMS:
        variant = base_variant(experiment, algorithm)
        if variant is None or variant is sync:
            continue
        times = _times(costs, replace(equal, epochs=variant.epochs), _config(variant))
        if times is not None:
            found[algorithm] = times
    return found


def _config(variant: Variant) -> Config:
    run = variant.runs[0]
    config = resolve(from_mapping(run.config, str(run.path / CONFIG)))
    config = for_workers(config, workers(run))
    return replace(config, epochs=variant.epochs)


def _times(costs: Sequence[Costs], equal: Config, config: Config) -> Times | None:
    """Times of `config`; None where the number of samples is unknown or shares are given."""
    runs = [simulated(one, config) for one in costs]
    bases = [simulated(one, equal) for one in costs]
    if None in runs or None in bases:
        return None

    def mean(of: Sequence[Run], value: Callable[[Run], float]) -> float:
        return float(np.mean([value(run) for run in of]))

    def over(seconds: Callable[[Run], float]) -> Ratio:
        return Ratio(mean(bases, seconds) / mean(runs, seconds), None, 0, False)

    train = mean(runs, _train_seconds)
    return Times(
        epochs=config.epochs,
        epoch_seconds=Spread(train / config.epochs, None),
        train_seconds=Spread(train, None),
        total_seconds=Spread(mean(runs, lambda run: run.seconds), None),
        busy_seconds=tuple(
            np.mean([last_half(run.busy_seconds).mean(0) for run in runs], axis=0).tolist()
        ),
        optimum=mean(runs, lambda run: run.optimum_seconds[-1]),
        train_speed_up=over(_train_seconds),
        total_speed_up=over(lambda run: run.seconds),
    )


def _train_seconds(run: Run) -> float:
    return float(run.step_seconds.sum())
