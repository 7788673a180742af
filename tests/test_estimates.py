"""Confidence intervals against integrals, printed tables, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plots.estimates import Ratio, Spread, ratio, ratio_of_means, ratio_text, student_t

seconds = st.floats(1e-3, 1e4)
seeds = st.dictionaries(st.integers(0, 9), seconds, min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("degrees", "t95", "t99"),
    # Printed in any table of Student's t (two-sided).
    [(1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604),
     (9, 2.262, 3.250), (30, 2.042, 2.750), (120, 1.980, 2.617)],
)  # fmt: skip
def test_quantiles_of_students_t_as_in_print(degrees: int, t95: float, t99: float) -> None:
    assert student_t(degrees) == pytest.approx(t95, abs=5.1e-4)
    assert student_t(degrees, 0.99) == pytest.approx(t99, abs=5.1e-4)


@given(st.integers(1, 40), st.floats(0.05, 0.99))
@settings(deadline=None, max_examples=60)
def test_the_density_integrates_to_the_confidence(degrees: int, confidence: float) -> None:
    t = student_t(degrees, confidence)
    grid = np.linspace(0, math.atan(t), 20001)  # x = tan(u): the tails get short
    x = np.tan(grid)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    density = scale / math.sqrt(degrees * math.pi) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    inside = 2 * np.trapezoid(density * (1 + x**2), grid)
    assert inside == pytest.approx(confidence, abs=1e-6)


@pytest.mark.parametrize(("paired", "n"), [(True, 2), (True, 3), (True, 5), (False, 3), (False, 5)])
def test_intervals_hold_the_true_ratio_as_often_as_they_say(paired: bool, n: int) -> None:
    draw = np.random.default_rng(n)
    trials, hits = 4000, 0
    for _ in range(trials):
        # Pairs share the state of the machine, which moves times more than the method's noise.
        state = draw.normal(0, 0.2 if paired else 0.0, n)
        over = 2.0 * np.exp(state + draw.normal(0, 0.03, n))
        under = 1.6 * np.exp(state + draw.normal(0, 0.05, n))
        shift = 0 if paired else 100
        found = ratio(dict(enumerate(over)), dict(enumerate(under, shift)))
        assert found.paired == paired and found.n == n
        low, high = found.interval
        hits += low <= 2.0 / 1.6 <= high
    rate, error = hits / trials, math.sqrt(0.95 * 0.05 / trials)
    assert rate > 0.95 - 4 * error
    # Exact for pairs; Welch's degrees of freedom are rounded down, so wider.
    assert rate < (0.95 + 4 * error if paired else 0.995)


def test_pairs_are_found_by_seed_and_not_by_order() -> None:
    over, under = {1: 2.0, 2: 4.0, 3: 8.0}, {3: 4.0, 2: 2.0, 1: 1.0, 9: 1e3}
    found = ratio(over, under)
    assert found.value == pytest.approx(2) and found.interval == pytest.approx((2, 2))
    assert (found.n, found.paired) == (3, True)


@given(seeds, seeds, seconds)
def test_ratios_keep_their_symmetries(
    over: dict[int, float], under: dict[int, float], scale: float
) -> None:
    found, inverse = ratio(over, under), ratio(under, over)
    assert found.value * inverse.value == pytest.approx(1)
    assert (found.n, found.paired) == (inverse.n, inverse.paired)
    scaled = ratio({seed: scale * value for seed, value in over.items()}, under)
    assert scaled.value == pytest.approx(scale * found.value)
    if found.interval is None:
        assert found.n == 1 and inverse.interval is None
    else:
        # Logarithms: two seeds of times that lie far apart give ends beyond all floats' product.
        low, high = map(math.log, np.clip(found.interval, 1e-300, 1e300))
        assert low <= math.log(found.value) + 1e-9 and math.log(found.value) - 1e-9 <= high
        if low > -600 and high < 600:
            back = [-math.log(end) for end in reversed(inverse.interval)]
            assert [low, high] == pytest.approx(back, abs=1e-6)


def test_one_seed_has_no_interval() -> None:
    assert ratio({1: 3.0}, {1: 2.0}) == Ratio(pytest.approx(1.5), None, 1, True)
    assert ratio({1: 3.0}, {2: 2.0}) == Ratio(pytest.approx(1.5), None, 1, False)
    assert ratio_text(Ratio(1.5, None, 1, True)) == "1.50×"
    assert ratio_text(Ratio(1.5, (1.25, 1.75), 3, True)) == "1.50× [1.25, 1.75]"


def test_means_and_deviations_alone_come_close_to_the_runs_themselves() -> None:
    draw = np.random.default_rng(0)
    over, under = draw.normal(12921.6, 40, 5), draw.normal(9976.2, 30, 5)
    known = ratio_of_means(Spread.of(over), Spread.of(under), 5)
    full = ratio(dict(enumerate(over)), dict(enumerate(under, 100)))
    assert known.value == pytest.approx(full.value, rel=1e-4)
    assert known.interval == pytest.approx(full.interval, rel=1e-4)
    assert (known.n, known.paired) == (5, False)
