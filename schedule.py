"""The learning rate over a run."""

from __future__ import annotations

import math

from configs.schema import Config


def learning_rate(config: Config, epoch: int) -> float:
    """The learning rate of an epoch (from 0).

    `cosine` falls from optimizer.lr to 0 over config.epochs, as in the paper (Loshchilov and Hutter
    2017, equation 5, without restarts); `constant` stays.
    """
    if config.schedule.kind == "constant":
        return config.optimizer.lr
    return config.optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / config.epochs))
