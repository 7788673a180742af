"""What a few seeds say about a mean or a ratio: standard deviations and confidence intervals.

A speed-up is a ratio of times. Its logarithm is a difference, for which Student's t holds; the
interval's ends are taken back by exp. Student, "The probable error of a mean", Biometrika 6 (1908);
for unpaired runs B. L. Welch, Biometrika 34 (1947).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
# Stands in tables for a number that is not known.
UNKNOWN = "–"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over n seeds; sd is None for one seed."""

    mean: float
    sd: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return Spread(float(np.mean(values)), sd)


@dataclass(frozen=True)
class Ratio:
    """A ratio of times and its confidence interval, which is None where no seed was repeated.

    n: the pairs of runs with the same seed, if `paired`; else the smaller number of runs, 0 for a
    ratio that is not of runs.
    """

    value: float
    interval: tuple[float, float] | None
    n: int
    paired: bool


def ratio(over: Mapping[int, float], under: Mapping[int, float]) -> Ratio:
    """The ratio over / under of positive times by seed, with its 95 % confidence interval.

    Runs of the same seed are pairs: the value is the geometric mean of their ratios. Where no seed
    is shared, it is the ratio of geometric means and the interval is Welch's.
    """
    shared = sorted(over.keys() & under.keys())
    if shared:
        logs = np.log([over[seed] / under[seed] for seed in shared])
        spread = Spread.of(logs)
        error = None if spread.sd is None else spread.sd / math.sqrt(len(logs))
        return Ratio(*_back(spread.mean, error, len(logs) - 1), len(logs), True)
    parts = [Spread.of(np.log(list(times.values()))) for times in (over, under)]
    return _unpaired(parts, [len(over), len(under)])


def ratio_of_means(over: Spread, under: Spread, runs: int) -> Ratio:
    """over / under where only mean and standard deviation of `runs` unpaired runs are known each.

    The deviation of a logarithm is taken as sd / mean, which holds for small ones.
    """
    parts = [
        Spread(math.log(part.mean), None if part.sd is None else part.sd / part.mean)
        for part in (over, under)
    ]
    return _unpaired(parts, [runs, runs])


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| ≤ t) = `confidence` for Student's distribution of `degrees` ≥ 1."""
    low, high = 0.0, 1.0
    while _inside(high, degrees) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < confidence else (low, middle)
    return high


def _inside(t: float, degrees: int) -> float:
    """P(|T| ≤ t): Abramowitz & Stegun 1964, 26.7.3 (odd degrees) and 26.7.4 (even)."""
    angle = math.atan2(t, math.sqrt(degrees))
    squared = math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for k in range(2 + odd, degrees - 1, 2):
        term *= squared * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _unpaired(logs: Sequence[Spread], runs: Sequence[int]) -> Ratio:
    """Welch's interval; his degrees of freedom rounded down, which errs on the wide side."""
    difference = logs[0].mean - logs[1].mean
    if min(runs) < 2:
        return Ratio(math.exp(difference), None, min(runs), False)
    parts = [part.sd**2 / n for part, n in zip(logs, runs)]
    squares = sum(part**2 / (n - 1) for part, n in zip(parts, runs))
    degrees = sum(parts) ** 2 / squares if squares else min(runs) - 1
    error = math.sqrt(sum(parts))
    return Ratio(*_back(difference, error, max(1, int(degrees + 1e-9))), min(runs), False)


def _back(
    log: float, error: float | None, degrees: int
) -> tuple[float, tuple[float, float] | None]:
    if error is None:
        return math.exp(log), None
    reach = student_t(degrees) * error
    return math.exp(log), (math.exp(log - reach), math.exp(log + reach))


def seconds_text(spread: Spread) -> str:
    """Seconds with about four digits and, where known, ± sd."""
    return _text(spread, _decimals(spread.mean))


def percent_text(spread: Spread) -> str:
    """A fraction 0..1 in %, without the unit."""
    return _text(Spread(100 * spread.mean, None if spread.sd is None else 100 * spread.sd), 2)


def loss_text(spread: Spread) -> str:
    return _text(spread, 4)


def ratio_text(found: Ratio) -> str:
    """For example "1.15× [1.12, 1.19]"."""
    if found.interval is None:
        return f"{found.value:.2f}×"
    low, high = found.interval
    return f"{found.value:.2f}× [{low:.2f}, {high:.2f}]"


def _decimals(mean: float) -> int:
    return 4 if mean < 1 else 3 if mean < 10 else 2 if mean < 100 else 1


def _text(spread: Spread, decimals: int) -> str:
    text = f"{spread.mean:.{decimals}f}"
    return text if spread.sd is None else f"{text} ± {spread.sd:.{decimals}f}"
