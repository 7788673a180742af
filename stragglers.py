"""Injected delays: who is slowed down, how long, and when.

Every delay is drawn from (seed, rule, rank, epoch, step), so it depends neither on what else draws
random numbers nor on where a run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from configs.errors import UserError
from configs.schema import StragglerRule

# Names the random stream of the delays, apart from every other consumer of the same seed.
_DELAY_STREAM = 0xDE1A


class Clock(Protocol):
    def busy_so_far(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Stragglers:
    """The delays of one worker.

    rules: the config's; rank: global; calibrated: seconds by rule index, for this worker's rules
    whose delay is a fraction of its busy time.
    """

    def __init__(
        self,
        rules: Sequence[StragglerRule],
        rank: int,
        seed: int,
        calibrated: Mapping[int, float] | None = None,
    ) -> None:
        self._rules = [(i, rule) for i, rule in enumerate(rules) if rank in rule.ranks]
        self._rank, self._seed = rank, seed
        self._calibrated = dict(calibrated or {})

    def apply(self, clock: Clock, epoch: int, step: int) -> None:
        """Sleeps for all rules in force at this step together: none adds to another's busy time."""
        seconds = sum(
            self._seconds(index, rule, epoch, step, clock.busy_so_far)
            for index, rule in self._rules
            if rule.first_epoch <= epoch and (rule.last_epoch is None or epoch <= rule.last_epoch)
        )
        if seconds > 0:
            clock.sleep(seconds)

    def _seconds(
        self, index: int, rule: StragglerRule, epoch: int, step: int, busy: Callable[[], float]
    ) -> float:
        if rule.kind == "constant":
            return self._calibrated[index] if rule.seconds is None else rule.seconds
        if rule.kind == "slowdown":
            return (rule.factor - 1.0) * busy()
        draw = np.random.default_rng([_DELAY_STREAM, self._seed, index, self._rank, epoch, step])
        return float(draw.gamma(1.0 if rule.shape is None else rule.shape, rule.scale))


def must_measure(rules: Sequence[StragglerRule]) -> bool:
    """Whether `calibrate` needs busy times: some delay is a fraction of a time not given."""
    return any(rule.fraction is not None and rule.busy_seconds is None for rule in rules)


def calibrate(
    rules: Sequence[StragglerRule], busy: Sequence[float], timeout: float
) -> list[dict[str, float | int]]:
    """The seconds of every delay given as a fraction: [{"rule", "rank", "seconds"}, …].

    busy: each worker's undelayed busy time in seconds per step at an equal split, [n], for rules
    without busy_seconds; timeout: of the collectives. Raises UserError for a delay that would not
    be waited for.
    """
    delays = [
        {"rule": index, "rank": rank, "seconds": rule.fraction * float(own)}
        for index, rule in enumerate(rules)
        if rule.fraction is not None
        for rank, own in zip(rule.ranks, rule.busy_seconds or [busy[r] for r in rule.ranks])
    ]
    _refuse_long(delays, timeout)
    return delays


def check_calibrated(
    rules: Sequence[StragglerRule], delays: Sequence[Mapping[str, Any]], timeout: float
) -> None:
    """Raises UserError unless a checkpoint's `delays` are those that `calibrate` gives for `rules`.

    Also where one of them would not be waited for.
    """
    measured = [(index, rule) for index, rule in enumerate(rules) if rule.fraction is not None]
    wanted = [(index, rank) for index, rule in measured for rank in rule.ranks]
    if sorted((delay["rule"], delay["rank"]) for delay in delays) != sorted(wanted):
        raise UserError("the checkpoint's calibrated delays are not those of its stragglers")
    _refuse_long(delays, timeout)


def _refuse_long(delays: Sequence[Mapping[str, Any]], timeout: float) -> None:
    for delay in delays:
        if delay["seconds"] >= timeout:
            raise UserError(
                f"stragglers.{delay['rule']}.fraction makes a delay of {delay['seconds']:.3g} s on "
                f"rank {delay['rank']}, longer than the timeout of {timeout:g} s: lower the one or "
                "raise the other"
            )
