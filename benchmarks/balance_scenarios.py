"""Which unequal workers the balance benchmark has, and what moves their shares.

Worker i's step of b samples lasts a_i * b + d_i seconds; the best possible step time T* follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partitioner import Optimum, optimum

SAMPLES_PER_WORKER = 128
# Seconds of an undelayed worker's step with an equal share, of which FIXED do not depend on it.
BUSY, FIXED = 0.032, 0.003
FREQUENT = 20
EPOCH_STEPS, QUICK_EPOCH_STEPS = 60, 40
# Both a rebalance an epoch and one every 20 steps have settled by the time the speeds change.
EPOCHS_BEFORE_CHANGE = 3
# The change amid an epoch comes so many steps later: amid a segment of FREQUENT steps, too.
AMID = 30


@dataclass(frozen=True)
class Phase:
    """True costs t_i(b) = a_i * b + d_i, float64 [n] each (s), from step `first_step` on."""

    first_step: int
    a: np.ndarray
    d: np.ndarray

    def times(self, batch_sizes: np.ndarray) -> np.ndarray:
        """Seconds [..., n] of steps with these batch sizes [..., n]."""
        return self.a * batch_sizes + self.d

    def optimum(self) -> Optimum:
        workers = len(self.a)
        total = SAMPLES_PER_WORKER * workers
        return optimum(self.a, self.d, total, np.ones(workers), np.full(workers, float(total)))

    def facts(self) -> dict[str, Any]:
        """The phase as JSON, with its optimum."""
        best = self.optimum()
        return {
            "first_step": self.first_step,
            "a": self.a.tolist(),
            "d": self.d.tolist(),
            "optimum_seconds": best.seconds,
            "optimum_batch_sizes": best.batch_sizes.tolist(),
        }


@dataclass(frozen=True)
class Strategy:
    """What moves the shares and when; `every` as in balancer.Balancer."""

    policy: str
    every: str | int

    @property
    def label(self) -> str:
        if self.policy == "equal":
            return self.policy
        return f"{self.policy}, every {'epoch' if self.every == 'epoch' else f'{self.every} steps'}"


EQUAL, PROPORTIONAL = Strategy("equal", "epoch"), Strategy("proportional", "epoch")
AFFINE, AFFINE_FREQUENT = Strategy("affine", "epoch"), Strategy("affine", FREQUENT)


@dataclass(frozen=True)
class Scenario:
    """Workers whose costs differ, and the strategies that are tried on them.

    aligned: whether speeds change at the border of two epochs, if they do.
    """

    name: str
    phases: tuple[Phase, ...]
    strategies: tuple[Strategy, ...] = (EQUAL, PROPORTIONAL, AFFINE, AFFINE_FREQUENT)
    aligned: bool = True

    @property
    def workers(self) -> int:
        return len(self.phases[0].a)

    @property
    def batch_size(self) -> int:
        return SAMPLES_PER_WORKER * self.workers

    def epochs(self, strategy: Strategy) -> int:
        """Enough for two rebalances after the start and the change, and for steps to judge them."""
        changes = len(self.phases) > 1
        if strategy is EQUAL:
            after = 1
        elif strategy is AFFINE_FREQUENT:
            after = 2
        else:
            after = 3 if self.aligned else 5
        return EPOCHS_BEFORE_CHANGE * changes + after


def base_costs(workers: int) -> tuple[np.ndarray, np.ndarray]:
    """(a, d) of workers of the same speed: BUSY seconds for an equal share."""
    a = (BUSY - FIXED) / SAMPLES_PER_WORKER
    return np.full(workers, a), np.full(workers, FIXED)


def delayed(part: float) -> Phase:
    """Of two workers the last sleeps `part` of its undelayed busy time in each step."""
    a, d = base_costs(2)
    d[1] += part * BUSY
    return Phase(0, a, d)


def slowed(factor: float, rank: int = 1, first_step: int = 0) -> Phase:
    """Of two workers one takes `factor` times as long."""
    a, d = base_costs(2)
    a[rank] *= factor
    d[rank] *= factor
    return Phase(first_step, a, d)


def mostly_fixed(part: float, workers: int) -> Phase:
    """The last worker's fixed cost is `part` of the best possible step time T.

    The others take (T - d) / a samples each and the last (1 - part) T / a; these add up to B.
    """
    a, d = base_costs(workers)
    others = workers - 1
    time = (a[0] * SAMPLES_PER_WORKER * workers + others * FIXED) / (others + 1 - part)
    d[-1] = part * time
    return Phase(0, a, d)


def changing(first_step: int) -> tuple[Phase, Phase]:
    """Two workers; the slow one is the last, and from `first_step` on the first."""
    return slowed(2.0), slowed(2.0, rank=0, first_step=first_step)


def scenarios(epoch_steps: int, quick: bool) -> Sequence[Scenario]:
    change = EPOCHS_BEFORE_CHANGE * epoch_steps
    fast_only = (AFFINE, AFFINE_FREQUENT)
    if quick:
        return [
            Scenario("delay: 0.9 of busy time", (delayed(0.9),)),
            Scenario("slow worker changes", changing(change), fast_only),
        ]
    return [
        Scenario("delay: 0.45 of busy time", (delayed(0.45),)),
        Scenario("delay: 0.9 of busy time", (delayed(0.9),)),
        Scenario("one takes twice as long", (slowed(2.0),)),
        # The mean step times of the authors' two kinds of GPU instances differ by 5.19.
        Scenario("one takes 5.2 times as long", (slowed(5.2),)),
        Scenario("one of four: fixed cost 0.85 T*", (mostly_fixed(0.85, 4),)),
        Scenario("slow worker changes", changing(change)),
        Scenario("it changes amid an epoch", changing(change + AMID), fast_only, aligned=False),
    ]
