"""What each worker alone holds inside an epoch: stored for each, and handed to those that go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from balancer import StepTimes
from metrics import Metrics

# Names the random stream of dropout, apart from every other consumer of the same seed.
_DROPOUT_STREAM = 0xD809


def seed_dropout(seed: int, epoch: int, rank: int) -> None:
    """Starts dropout's stream for an epoch. It alone draws from PyTorch's own generator."""
    key = np.random.SeedSequence([_DROPOUT_STREAM, seed, epoch, rank])
    torch.manual_seed(int(key.generate_state(1)[0]))


def own_part(
    module: nn.Module, device: torch.device, metrics: Metrics, times: StepTimes
) -> dict[str, Any]:
    """This worker's part of a checkpoint inside an epoch."""
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return {
        "buffers": dict(module.named_buffers()),
        "random": random,
        "metrics": metrics.state_dict(),
        "times": {name: seconds.tolist() for name, seconds in vars(times).items()},
    }


def restore_part(
    parts: Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    handled: np.ndarray,
    module: nn.Module,
    metrics: Metrics,
) -> None:
    """Sets buffers, random stream and sums of worker `rank` of `size` from all workers' parts.

    Where the parts are of another number of workers, all start from the mean of their buffers,
    weighted by the samples that each has `handled` in the epoch, and what those that are gone have
    counted is divided among the others. Raises ValueError for buffers of another model.
    """
    if len(parts) == size:
        buffers = parts[rank]["buffers"]
    else:
        buffers = _mean([part["buffers"] for part in parts], handled[: len(parts)])
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if buffers[name].shape != buffer.shape:
                raise ValueError(f"buffer {name} is {list(buffers[name].shape)}")
            buffer.copy_(buffers[name])
    if rank < len(parts):
        torch.set_rng_state(parts[rank]["random"]["cpu"].cpu())
        if "cuda" in parts[rank]["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(parts[rank]["random"]["cuda"].cpu())
    for part in parts[rank::size]:
        metrics.add_state(part["metrics"])


def _mean(buffers: Sequence[Mapping[str, Tensor]], weights: np.ndarray) -> dict[str, Tensor]:
    total = float(weights.sum())
    mean = dict(buffers[0])  # whole numbers, of which all have the same
    for name, first in mean.items():
        if first.is_floating_point():
            parts = [own[name].double() * (float(w) / total) for own, w in zip(buffers, weights)]
            mean[name] = torch.stack(parts).sum(0)
    return mean
