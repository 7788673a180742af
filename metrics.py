"""What a run is judged by: loss and accuracy as float64 sums and counts, and its two clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


class Metrics:
    """Running sums of one worker; adding never waits for the device."""

    # Batches whose guesses are judged together: with a small model each operation is felt in the
    # step's time.
    TOGETHER = 16

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        # Samples whose label is the best guess, the second best, …
        self._hits = torch.zeros(5, dtype=torch.int64, device=device)
        self._samples = 0
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, outputs: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        """Adds a batch: outputs [b, classes], labels int64 [b], loss the mean over the batch.

        None of them may be changed or need a gradient any more.
        """
        self._waiting.append((outputs, labels, loss))
        if len(self._waiting) == self.TOGETHER:
            self._judge()

    def total(self, add_up: Callable[[np.ndarray], np.ndarray]) -> dict[str, float | int]:
        """loss (mean), top1, top5 (fractions) and samples over all workers' sums.

        add_up: sums a float64 array over workers.
        """
        self._judge()
        hits = self._hits.tolist()
        mine = np.array([self._loss.item(), hits[0], sum(hits), self._samples], np.float64)
        loss, top1, top5, samples = add_up(mine)
        return {
            "loss": float(loss / samples),
            "top1": float(top1 / samples),
            "top5": float(top5 / samples),
            "samples": int(samples),
        }

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        self._judge()
        return {"loss": self._loss, "hits": self._hits, "samples": self._samples}

    def add_state(self, state: Mapping[str, torch.Tensor | int]) -> None:
        """Adds what was counted before, by this worker or by one that is gone."""
        self._loss.add_(state["loss"].to(self._loss.device))
        self._hits.add_(state["hits"].to(self._hits.device))
        self._samples += state["samples"]

    def _judge(self) -> None:
        """Adds the waiting batches to the sums."""
        if not self._waiting:
            return
        outputs, labels, losses = zip(*self._waiting)
        self._waiting.clear()
        guessed, wanted = torch.cat(outputs), torch.cat(labels)
        best = min(len(self._hits), guessed.shape[1])
        guesses = guessed.topk(best, dim=1).indices
        self._hits[:best].add_((guesses == wanted[:, None]).sum(0))
        for loss, batch in zip(losses, labels):
            self._loss.add_(loss, alpha=len(batch))
        self._samples += len(wanted)


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
        try:
            yield
        finally:
            self.train += time.perf_counter() - start
