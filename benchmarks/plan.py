"""How long planning takes, and how much memory, for up to 10,000 workers.

    python benchmarks/plan.py --out results/plan.json

Timed are `partitioner.optimum` alone and a whole rebalance with the policy `affine`: booking one
busy time per worker, fitting the time model, the optimum, and moving the shares. Every worker does
the same at every rebalance, so these times count once, whatever the number of workers.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import arguments, finish, table
from partitioner import Partitioner, optimum

WORKERS = (2, 10, 100, 1_000, 10_000)
QUICK_WORKERS = (2, 1_000, 10_000)
SAMPLES_PER_WORKER = 128
NOISE = 0.01  # relative deviation of a worker's busy time from rebalance to rebalance

TARGET_WORKERS, TARGET_MS = 10_000, 10.0
# Memory of order n: bytes per worker do not grow from a thousand workers on.
MEMORY_GROWTH = 1.25


class Cluster:
    """Workers of unlike speeds and fixed costs: float64 [n] each, log-normal and uniform."""

    def __init__(self, workers: int) -> None:
        self.draw = np.random.default_rng(workers)
        self.batch_size = SAMPLES_PER_WORKER * workers
        self.a = 1e-3 * np.exp(self.draw.normal(0, 0.4, workers))
        self.d = self.draw.uniform(0, 0.05, workers)
        # Without a least gain every rebalance moves the shares: the longest way through.
        self.partitioner = Partitioner(workers, self.batch_size, "affine", min_gain=0.0)

    def measured(self) -> np.ndarray:
        """Busy times [n] with the present batch sizes, noise included."""
        noise = np.exp(self.draw.normal(0, NOISE, len(self.a)))
        return (self.a * self.partitioner.batch_sizes + self.d) * noise

    def rebalance(self, times: np.ndarray) -> None:
        self.partitioner.rebalance(self.partitioner.batch_sizes, times, NOISE * times)

    def optimum(self) -> None:
        bounds = self.partitioner.minimum, self.partitioner.maximum
        optimum(self.a, self.d, self.batch_size, *bounds)


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(workers: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` (ms) and, in a pass of its own, the peak memory of a rebalance."""
    cluster = Cluster(workers)
    rebalances = []
    # The first rebalance follows the paper's rule and needs no optimum.
    for number in range(repeats + 1):
        times = cluster.measured()
        rebalances.append(seconds(lambda: cluster.rebalance(times)))
    return {
        "workers": workers,
        "optimum_ms": 1e3 * float(np.median([seconds(cluster.optimum) for _ in range(repeats)])),
        "rebalance_ms": 1e3 * float(np.median(rebalances[1:])),
        "bytes_per_worker": peak_bytes(workers) / workers,
    }


def peak_bytes(workers: int) -> int:
    """Most memory that is in use at once, from an empty partitioner to its third rebalance."""
    times = [Cluster(workers).measured() for _ in range(3)]
    tracemalloc.start()
    cluster = Cluster(workers)
    for measured in times:
        cluster.rebalance(measured)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """One line per missed target."""
    by_workers = {row["workers"]: row for row in rows}
    last, smaller = by_workers[TARGET_WORKERS], by_workers[1_000]
    misses = []
    if last["optimum_ms"] > TARGET_MS:
        misses.append(
            f"the optimum of {TARGET_WORKERS} workers takes {last['optimum_ms']:.1f} ms, "
            f"not {TARGET_MS:.0f} ms"
        )
    if last["bytes_per_worker"] > MEMORY_GROWTH * smaller["bytes_per_worker"]:
        misses.append(
            f"memory grows faster than the workers: {smaller['bytes_per_worker']:.0f} bytes each "
            f"for 1000, {last['bytes_per_worker']:.0f} for {TARGET_WORKERS}"
        )
    return misses


def main() -> int:
    options = arguments("Time and memory of planning, by number of workers.")
    counts, repeats = (QUICK_WORKERS, 9) if options.quick else (WORKERS, 51)
    rows = [measure(workers, repeats) for workers in counts]
    table(rows)
    return finish("plan", {"repeats": repeats, "rows": rows}, missed(rows), options)


if __name__ == "__main__":
    sys.exit(main())
