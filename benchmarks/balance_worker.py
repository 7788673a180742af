"""One worker of the balance benchmark: real DDP steps whose compute is modelled by a sleep.

    balance_worker.py JOB.json FOLDER

does every run of the job, one after the other, and writes FOLDER/rank-R.json; balance.py starts
it. In each step the worker sleeps until its own work has taken a * b + d seconds, its true cost,
with jitter. A training script's own work counts: a small model's forward and backward pass and the
optimizer. What the balancer does comes on top.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from balancer import Balancer, StepTimes, wrap
from cluster import join
from partitioner import TimeModel

FEATURES, CLASSES = 32, 10
# Seconds until a collective that does not end is an error; far longer than any step.
TIMEOUT = 60.0


class ModelledCompute:
    """Makes each step of this worker as long as its true cost says.

    phases: [{"first_step", "a": [n], "d": [n]}, …]; jitter: deviation of the log of a step's time.
    """

    def __init__(
        self, balancer: Balancer, phases: list[dict[str, Any]], jitter: float, seed: int
    ) -> None:
        self._balancer, self._phases, self._jitter = balancer, phases, jitter
        self._draw = np.random.default_rng([seed, balancer.rank])
        self._step, self._deadline, self._done = 0, 0.0, 0.0
        balancer.before_ready = self._sleep

    def begin(self, samples: int) -> None:
        """A step with that many samples begins now: its batch is there."""
        rank = self._balancer.rank
        phase = [phase for phase in self._phases if phase["first_step"] <= self._step][-1]
        cost = phase["a"][rank] * samples + phase["d"][rank]
        cost *= np.exp(self._draw.normal(0, self._jitter))
        self._deadline = time.perf_counter() + cost - self._done
        self._step += 1

    def end(self) -> None:
        """The step is over: what was done since its all-reduce is part of the next busy time."""
        self._done = self._balancer.clock.busy_so_far()

    def _sleep(self) -> None:
        self._balancer.clock.sleep(max(0.0, self._deadline - time.perf_counter()))


def train(run: dict[str, Any]) -> dict[str, Any]:
    """Trains for the run's epochs.

    Returns batch_sizes [S, n] as used, this worker's busy times [S] (s), the moments (s, of the
    machine's clock) at which its steps began and the last one ended, [S+1], its last bucket was
    ready, [S], and it had the sum, [S], and the time model's fits after each epoch.
    """
    size = run["batch_size"] * run["epoch_steps"]
    draw = torch.Generator().manual_seed(run["seed"])
    inputs = torch.randn(size, FEATURES, generator=draw)
    labels = torch.randint(CLASSES, (size,), generator=draw)
    balancer = Balancer(
        size, run["batch_size"], run["policy"], every=run["every"], seed=run["seed"],
        device=torch.device("cpu"),
    )  # fmt: skip
    model = wrap(nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)))
    balancer.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compute = ModelledCompute(balancer, run["phases"], run["jitter"], run["seed"])
    plans, parts, moments, fits = [], [], [], []
    dist.barrier()
    for epoch in range(run["epochs"]):
        for index in balancer.steps(balancer.sampler, epoch, run["lookahead"]):
            moments.append(time.perf_counter())
            compute.begin(len(index))
            nn.functional.cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            compute.end()
        plans.append(balancer.plan.batch_sizes)
        parts.append(balancer.step_times())
        fits.append(fit(balancer.partitioner.time_model))
    moments.append(time.perf_counter())
    times = StepTimes.joined(parts)
    ready = np.array(moments[:-1]) + times.forward + times.backward + times.delay
    return {
        "batch_sizes": np.concatenate(plans).tolist(),
        "busy": times.busy.tolist(),
        "moments": moments,
        "ready": ready.tolist(),
        "exchanged": (ready + times.wait).tolist(),
        "fits": fits,
    }


def fit(time_model: TimeModel) -> dict[str, Any]:
    """Seconds per sample and seconds, [n] each, and whether they rest on measurements alone."""
    a, d = time_model.fit()
    return {"known": time_model.known, "a": a.tolist(), "d": d.tolist()}


def main(job: Path, folder: Path) -> None:
    with join("gloo", "cpu", 1, TIMEOUT) as workers:
        records = [train(run) for run in json.loads(job.read_text())]
        (folder / f"rank-{workers.rank}.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
