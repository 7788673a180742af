"""From 2 to 4,096 workers of mixed GPU generations: how well they are used.

Workers are drawn at random, each generation being as likely as the other, with the measured
training throughput of data/reference/gpu_speeds.csv. What is assumed beside: FIXED seconds of a
step that no GPU shortens, JITTER, and a network for a ring all-reduce of ResNet50's gradients.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulation.authors import read_rows
from simulation.exchange import ring
from simulation.model import Cluster, Phase, Run, Strategy, simulate

WORKERS = tuple(2**power for power in range(1, 13))
POLICIES = ("equal", "proportional", "affine")
SAMPLES_PER_WORKER = 128
EPOCHS, EPOCH_STEPS = 20, 50
FIXED, JITTER = 0.005, 0.02
GRADIENT_BYTES = 4 * 25_557_032  # ResNet50 for 1,000 classes, fp32
BANDWIDTH, LATENCY = 12.5e9, 5e-6  # 100 Gbit/s per worker; seconds per message
# Few workers are a small sample of the generations: more clusters are drawn.
DRAWN_WORKERS, MOST_CLUSTERS = 1024, 32

TARGET_IMBALANCE = 1.03  # of affine from the second rebalance on, as in benchmarks/balance.py


def speeds() -> list[dict[str, Any]]:
    return read_rows("gpu_speeds.csv")


def drawn_cluster(workers: int, seed: int) -> Cluster:
    """A cluster of so many workers; busy time at 128 samples: 128 / throughput, FIXED included."""
    rates = np.array([row["images_per_second"] for row in speeds()])
    chosen = np.random.default_rng([workers, seed]).integers(len(rates), size=workers)
    a = 1 / rates[chosen] - FIXED / SAMPLES_PER_WORKER
    phase = Phase(0, a, np.full(workers, FIXED), np.full(workers, JITTER))
    batch = SAMPLES_PER_WORKER * workers
    exchange = ring(workers, GRADIENT_BYTES, BANDWIDTH, LATENCY, overlapped=True)
    bounds = np.ones(workers), np.full(workers, float(batch))
    return Cluster(batch, EPOCH_STEPS, (phase,), exchange, *bounds)


def perfect_efficiency(cluster: Cluster) -> float:
    """T* over T* and its exchange: what balance without jitter would reach."""
    best = cluster.optima[0]
    compute = (cluster.phases[0].a * best.batch_sizes).max()
    return best.seconds / (best.seconds + float(cluster.exchange.exposed(compute)))


def measure(workers: int) -> dict[str, Any]:
    """What each policy does on clusters of so many workers: mean, least, most over those drawn."""
    began = time.perf_counter()
    count = max(1, min(MOST_CLUSTERS, DRAWN_WORKERS // workers))
    clusters = [drawn_cluster(workers, seed) for seed in range(count)]
    runs = {
        policy: [simulate(cluster, Strategy(policy), EPOCHS) for cluster in clusters]
        for policy in POLICIES
    }
    return {
        "workers": workers,
        "clusters": count,
        "optimum_seconds": float(np.mean([cluster.optima[0].seconds for cluster in clusters])),
        "perfect_efficiency": float(np.mean([perfect_efficiency(c) for c in clusters])),
        "runs": [_facts(policy, runs[policy], runs["equal"]) for policy in POLICIES],
        "simulation_seconds": time.perf_counter() - began,
    }


def _facts(policy: str, runs: Sequence[Run], equal: Sequence[Run]) -> dict[str, Any]:
    efficiency = np.array([run.efficiency for run in runs])
    imbalance = np.array([run.by_epoch(run.imbalance).max(1) for run in runs])
    gains = [other.epoch_seconds[-1] / run.epoch_seconds[-1] for run, other in zip(runs, equal)]
    return {
        "policy": policy,
        "efficiency": efficiency.mean(0).tolist(),
        "least_efficiency": float(efficiency[:, -1].min()),
        "most_efficiency": float(efficiency[:, -1].max()),
        "imbalance": imbalance.mean(0).tolist(),
        "imbalance_after_two": float(imbalance[:, 2:].max()),
        "last_epoch_speed_up": float(np.mean(gains)),
    }


def scale_results() -> dict[str, Any]:
    return {
        "speeds": speeds(),
        "samples_per_worker": SAMPLES_PER_WORKER,
        "fixed_seconds": FIXED,
        "jitter": JITTER,
        "gradient_bytes": GRADIENT_BYTES,
        "bandwidth": BANDWIDTH,
        "latency": LATENCY,
        "epoch_steps": EPOCH_STEPS,
        "sizes": [measure(workers) for workers in WORKERS],
    }


def scale_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line of the table per number of workers; efficiencies are of the last epoch."""
    return [
        {
            "workers": size["workers"],
            "T* (ms)": 1e3 * size["optimum_seconds"],
            **{run["policy"]: run["efficiency"][-1] for run in size["runs"]},
            "perfect": size["perfect_efficiency"],
            "affine against equal": size["runs"][-1]["last_epoch_speed_up"],
            "simulated in (s)": size["simulation_seconds"],
        }
        for size in results["sizes"]
    ]


def scale_misses(results: Mapping[str, Any]) -> list[str]:
    """One line per number of workers that affine does not balance, or at which it does not pay."""
    misses = []
    for size in results["sizes"]:
        affine = size["runs"][-1]
        imbalance, gain = affine["imbalance_after_two"], affine["last_epoch_speed_up"]
        if imbalance > TARGET_IMBALANCE:
            misses.append(
                f"{size['workers']} workers: imbalance of affine {imbalance:.3f} two rebalances "
                f"after the start, not {TARGET_IMBALANCE}"
            )
        if gain < 1:
            misses.append(f"{size['workers']} workers: affine is {gain:.2f} times as fast as equal")
    return misses
