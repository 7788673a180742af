"""What a run is judged by: loss and accuracy as float64 sums and counts, and its two clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Metrics:
    """Running sums of one worker; adding never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        # Sum of losses, samples whose label is the best guess, among the five best, samples.
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, outputs: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        """Adds a batch: outputs [b, classes], labels int64 [b], loss the mean over the batch."""
        guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        hits = guesses == labels[:, None]
        self._sums[0] += loss.double() * len(labels)
        self._sums[1] += hits[:, 0].sum()
        self._sums[2] += hits.sum()
        self._sums[3] += len(labels)

    def total(self, add_up: Callable[[np.ndarray], np.ndarray]) -> dict[str, float | int]:
        """loss (mean), top1, top5 (fractions) and samples over all workers' sums.

        add_up: sums a float64 array over workers.
        """
        loss, top1, top5, samples = add_up(self._sums.cpu().numpy())
        return {
            "loss": float(loss / samples),
            "top1": float(top1 / samples),
            "top5": float(top5 / samples),
            "samples": int(samples),
        }


class Clocks:
    """Seconds spent so far: `train` in training alone, `total` in everything since the start."""

    def __init__(self, train: float = 0.0, total: float = 0.0) -> None:
        self.train = train
        self._total_before, self._start = total, time.perf_counter()

    @property
    def total(self) -> float:
        return self._total_before + time.perf_counter() - self._start

    @contextmanager
    def training(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.train += time.perf_counter() - start
