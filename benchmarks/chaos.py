"""A run that is killed, stopped, preempted and slowed again and again ends as an undisturbed one.

    python benchmarks/chaos.py --check --out results/reliability/chaos.json data.root=DIR
    python benchmarks/chaos.py --quick --check data.name=synthetic

Four gloo workers, each with a loader process, train LeNet on 2,048 images of CIFAR-10 with the
shares 4, 3, 2 and 1, under torchrun --max-restarts=3. From a seeded plan, at random steps and
workers: a worker is killed up to 0.3 s later (in a step, an evaluation or a write); stopped
(SIGSTOP) and continued up to 1.5 s later; asked to stop (SIGTERM or SIGUSR1); slowed down for some
steps. Whenever torchrun ends and the run is not finished, the same command is given again.

In the end the weights are to be those of the undisturbed run, to the bit, and so the records but
for their times; and no process, shared memory, temporary file or unfinished run is left. key=value
arguments are handed on to trainer.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, finish, make_folder, table
from experiments.launcher import end
from reader import read_run

WORKERS, EPOCHS, SAMPLES, BATCH_SIZE = 4, 25, 2048, 64
QUICK_EPOCHS, QUICK_FAULTS = 4, 8
STEPS = SAMPLES // BATCH_SIZE  # an epoch's
LIMIT = 600.0  # seconds for one start of torchrun
# Kinds of faults and how likely each is.
KINDS = {"kill": 0.35, "stop": 0.25, "preempt": 0.15, "slow": 0.25}
# What the clocks say differs from run to run; all else must not.
TIMES = frozenset(
    {"busy", "wait", "phases", "time_model", "optimum", "optimum_continuous",
     "optimum_batch_sizes", "imbalance", "better_without", "samples_per_second", "epoch_seconds",
     "train_seconds", "total_seconds"}
)  # fmt: skip


def main() -> int:
    options = _arguments()
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    faults = plan(options.faults, epochs * STEPS, options.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        undisturbed = Job(folder / "undisturbed", epochs, [], options.assignments)
        disturbed = Job(folder / "disturbed", epochs, faults, options.assignments)
        shared_before = set(_shared_memory())
        undisturbed.run()
        disturbed.run()
        shared = sorted(set(_shared_memory()) - shared_before)
        results = {
            "seed": options.seed,
            "epochs": epochs,
            "faults": dict(Counter(fault["kind"] for fault in faults)),
            "met": dict(Counter(disturbed.met())),
            "starts_of_torchrun": disturbed.starts,
            "starts_of_workers": disturbed.worker_starts(),
            "seconds": disturbed.seconds,
            "undisturbed_seconds": undisturbed.seconds,
        }
        left = {"processes": disturbed.left_over(), "shared memory": shared}
        misses = compare(undisturbed, disturbed, len(faults)) + [
            f"left: {what} {found}" for what, found in left.items() if found
        ]
    table([{"what": key, "value": json.dumps(value)} for key, value in results.items()])
    print("as undisturbed: " + ("no" if misses else "weights and records, to the bit"))
    return finish("chaos", results, misses, options)


def plan(faults: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """The faults, each at a step of its own: {"step", "rank", "kind", "seconds", "signal"}.

    step: counted over the run; no fault lies in the last tenth, so that all are met.
    """
    draw = np.random.default_rng([0xC4A0, seed])
    places = np.sort(draw.choice(np.arange(1, int(0.9 * steps)), faults, replace=False))
    kinds = draw.choice(list(KINDS), faults, p=list(KINDS.values()))
    longest = {"kill": 0.3, "stop": 1.5, "preempt": 0.0, "slow": 0.3}
    return [
        {
            "step": int(step),
            "rank": int(draw.integers(WORKERS)),
            "kind": str(kind),
            "seconds": float(draw.uniform(0.0, longest[kind])),
            "signal": str(draw.choice(["SIGTERM", "SIGUSR1"])),
        }
        for step, kind in zip(places, kinds)
    ]


class Job:
    """One run, started until it is finished. folder: for all that it leaves."""

    def __init__(
        self, folder: Path, epochs: int, faults: Sequence[Mapping[str, Any]], more: Sequence[str]
    ) -> None:
        folder.mkdir()
        self._folder, self._more = folder, more
        self.starts, self.seconds = 0, 0.0
        (folder / "faults.json").write_text(json.dumps(list(faults)))
        (folder / "met").mkdir()
        (folder / "pids").mkdir()
        config = {
            "name": "chaos", "algorithm": "edp-sgd", "epochs": epochs, "batch_size": BATCH_SIZE,
            "model": {"name": "lenet"}, "optimizer": {"lr": 0.02}, "evaluation_batch_size": 50,
            "data": {
                "name": "cifar10", "subset": SAMPLES, "test_subset": 500, "placement": "loader",
                "loader_workers": 1,
            },
            "partition": {"policy": "static", "shares": [4, 3, 2, 1]},
            "checkpoint": {"every": 5}, "device": "cpu", "threads": 1, "timeout": 60.0,
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    @property
    def path(self) -> Path:
        """The run's folder."""
        (found,) = (self._folder / "runs").rglob("config.yaml")
        return found.parent

    def run(self) -> None:
        """Starts torchrun again and again; RuntimeError where that leads nowhere."""
        begin = time.monotonic()
        while not self._finished():
            before = self._progress()
            self._start()
            if self._progress() == before and not self._finished():
                log = (self._folder / "log").read_text()
                raise RuntimeError(f"a start of torchrun led nowhere:\n{log[-5000:]}")
        self.seconds = time.monotonic() - begin

    def met(self) -> list[str]:
        """The kinds of the faults that were met."""
        return [file.read_text() for file in sorted((self._folder / "met").iterdir())]

    def worker_starts(self) -> int:
        return len(list((self._folder / "pids").iterdir()))

    def left_over(self) -> list[int]:
        """Ids of processes that still name this job's folder on their command lines."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = file.read_bytes()
            except OSError:
                continue
            if str(self._folder).encode() in line:
                found.append(int(file.parent.name))
        return found

    def _start(self) -> None:
        self.starts += 1
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={WORKERS}", "--max-restarts=3", "--monitor-interval=0.2"),
            str(ROOT / "benchmarks" / "chaos_worker.py"), str(self._folder),
            *("--config", str(self._folder / "config.yaml")),
            *("--output", str(self._folder / "runs"), *self._more),
        ]  # fmt: skip
        with open(self._folder / "log", "a") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                process.wait(LIMIT)
            finally:
                if process.poll() is None:
                    end(process)

    def _finished(self) -> bool:
        return bool(list(self._folder.rglob("final.pt")))

    def _progress(self) -> tuple[int, int]:
        files = list(self._folder.rglob("checkpoint.pt"))
        return len(self.met()), max((file.stat().st_mtime_ns for file in files), default=0)


def compare(undisturbed: Job, disturbed: Job, faults: int) -> list[str]:
    """A line for each way in which the two jobs' results differ."""
    misses = []
    first, second = read_run(undisturbed.path), read_run(disturbed.path)
    weights = [torch.load(run.path / "final.pt", weights_only=True) for run in (first, second)]
    if list(weights[0]) != list(weights[1]) or not all(
        torch.equal(weights[0][name], weights[1][name]) for name in weights[0]
    ):
        misses.append("the weights differ")
    if _timeless(first.epochs) != _timeless(second.epochs):
        misses.append("the records differ")
    for name in ("epoch", "step", "batch_sizes"):
        if not np.array_equal(first.steps[name], second.steps[name]):
            misses.append(f"the steps' {name} differ")
    expected = {"config.yaml", "provenance.json", "epochs.jsonl", "steps.npz", "final.pt"}
    files = {file.name for file in second.path.iterdir()}
    if files != expected:
        misses.append(f"files in the run's folder: {sorted(files ^ expected)}")
    if len(disturbed.met()) != faults:
        misses.append(f"{len(disturbed.met())} of {faults} faults were met")
    return misses


def _timeless(epochs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in e.items() if key not in TIMES} for e in epochs]


def _shared_memory() -> list[str]:
    folder = Path("/dev/shm")
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="for trainer.py")
    parser.add_argument("--faults", type=int, metavar="N", help="default 100; 8 with --quick")
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here (JSON)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is lost")
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    options = parser.parse_intermixed_args()
    steps = (QUICK_EPOCHS if options.quick else EPOCHS) * STEPS
    if options.faults is None:
        options.faults = QUICK_FAULTS if options.quick else 100
    if not 0 <= options.faults <= steps // 2:
        parser.error(f"--faults is 0 to {steps // 2}")
    make_folder(parser, options.out)
    return options


if __name__ == "__main__":
    sys.exit(main())
