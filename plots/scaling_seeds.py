"""Numbers by seed: a run made twice is no second seed, and ratios are of pairs where they can."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from plots.estimates import Spread
from plots.records import setting
from reader import Run

Seeds = dict[int, float]


def by_seed(runs: Iterable[Run], number: Callable[[Run], Any]) -> dict[int, Any]:
    """The mean of `number` (a number or an array, None where there is none) of each seed's runs."""
    found: dict[int, list[Any]] = defaultdict(list)
    for run in runs:
        value = number(run)
        if value is not None:
            found[setting(run, "seed")].append(value)
    return {seed: np.mean(found[seed], axis=0) for seed in sorted(found)}


def spread(values: Mapping[int, float]) -> Spread:
    return Spread.of(list(values.values()))


def scaled(values: Spread, factor: float) -> Spread:
    return Spread(values.mean * factor, None if values.sd is None else values.sd * factor)


def quotient(over: Seeds, under: Seeds) -> Spread:
    """over / under: of pairs with the same seed where there are any, else of the means.

    The relative variances of means add; without one of them the deviation is unknown.
    """
    shared = sorted(over.keys() & under.keys())
    if shared:
        return Spread.of([over[seed] / under[seed] for seed in shared])
    top, bottom = spread(over), spread(under)
    value = top.mean / bottom.mean
    if top.sd is None or bottom.sd is None:
        return Spread(value, None)
    return Spread(value, value * math.hypot(top.sd / top.mean, bottom.sd / bottom.mean))
