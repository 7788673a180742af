"""The learning rate over a run: a function of the config and the place in the run alone.

So it does not depend on shares, on rebalances, or on where a run was interrupted.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from configs.schema import Config


def scaled_rate(config: Config) -> float:
    """optimizer.lr, with `linear` times the global batch / schedule.reference_batch_size.

    The linear scaling rule: Goyal et al. 2017 (arXiv 1706.02677), section 2.1. config.batch_size
    must be known.
    """
    rate, schedule = config.optimizer.lr, config.schedule
    if schedule.scale_lr == "none":
        return rate
    return rate * config.batch_size / schedule.reference_batch_size


def learning_rate(config: Config, epoch: int, step: int = 0, steps: int = 1) -> float:
    """The learning rate of step `step` (from 0) of the `steps` in an epoch (from 0).

    During schedule.warmup_epochs it grows by the same amount in each step, from optimizer.lr in the
    run's first step to the scaled rate in the first step after the warm-up (Goyal et al. 2017,
    section 2.2); it never starts above the scaled rate. From then on it changes once an epoch:
    `cosine` falls from the scaled rate to 0 over the epochs that are left (Loshchilov and Hutter
    2017, equation 5, without restarts; the paper's), `step` is multiplied by schedule.factor at
    each milestone, `constant` stays. PyTorch's SGD keeps the rate out of its momentum, so a change
    needs no correction (Goyal et al. 2017, section 3).
    """
    schedule, peak = config.schedule, scaled_rate(config)
    warm_up, done = _warm_up_steps(config, steps), epoch * steps + step
    if done < warm_up:
        start = min(config.optimizer.lr, peak)
        return start + (peak - start) * done / warm_up
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "step":
        return peak * schedule.factor ** bisect_right(schedule.milestones, epoch)
    past = max(0.0, epoch - schedule.warmup_epochs)
    left = config.epochs - schedule.warmup_epochs
    return peak * 0.5 * (1.0 + math.cos(math.pi * past / left))


def warm_up_rates(config: Config, steps: int) -> list[float]:
    """The learning rate of each step of the run's warm-up, with `steps` in an epoch."""
    count = min(_warm_up_steps(config, steps), config.epochs * steps)
    return [learning_rate(config, *divmod(done, steps), steps) for done in range(count)]


def _warm_up_steps(config: Config, steps: int) -> int:
    return round(config.schedule.warmup_epochs * steps)
