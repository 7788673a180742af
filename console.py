"""What a run says on the terminal: a progress bar, one line per epoch, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from configs.schema import Config
from record_form import PHASES
from terminal import say

Item = TypeVar("Item")


class Console:
    """Speaks for the whole run; silent where `active` is false (all ranks but the first)."""

    def __init__(self, active: bool) -> None:
        self._active = active
        self._bar: tqdm | None = None

    def say(self, text: str) -> None:
        if self._active:
            say(text)

    def start(self, steps: int, done: int) -> None:
        """Shows a bar with the time left, where the error output is a terminal."""
        if self._active and sys.stderr.isatty():
            self._bar = tqdm(
                total=steps,
                initial=done,
                unit="step",
                leave=False,
                dynamic_ncols=True,
            )

    def steps(self, batches: Iterable[Item], title: str) -> Iterator[Item]:
        """Passes `batches` through and moves the bar by one for each."""
        if self._bar is not None:
            self._bar.set_description(title)
        for batch in batches:
            yield batch
            if self._bar is not None:
                self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def headline(config: Config, facts: Mapping[str, Any], path: Path) -> str:
    """What is about to be trained, where, and where the records go."""
    data, devices = facts["data"], facts["devices"]
    where = devices[0] if len(set(devices)) == 1 else ", ".join(devices)
    delays = "".join(
        f"\nstraggler: rank {delay['rank']} sleeps {1000 * delay['seconds']:.1f} ms a step"
        for delay in facts["calibrated_delays"]
    )
    return (
        f"{config.name}: {config.algorithm} ({config.partition.policy} shares, gradient weight "
        f"{config.gradient_weight}), {facts['world_size']} worker(s) on {where}, "
        f"{facts['backend']}, {facts['threads']} thread(s) each\n"
        f"{config.model.name} with {facts['parameters']:,} parameters; {config.data.name} with "
        f"{data['train_samples']:,} + {data['test_samples']:,} images; records in {path}{delays}"
    )


def epoch_line(record: Mapping[str, Any], epochs: int) -> str:
    """One epoch's record in one line; busy times are means in milliseconds per step, by worker."""
    busy = " ".join(_milliseconds(seconds, 1) for seconds in record["busy"]["mean"])
    sizes = " ".join(map(str, record["batch_sizes"]))
    imbalance = "" if record["imbalance"] is None else f"  imbalance {record['imbalance']:.3f}"
    return (
        f"epoch {record['epoch'] + 1:>{len(str(epochs))}}/{epochs}"
        f"  loss {record['train_loss']:.4f}"
        f"  top-1 train {100 * record['train_top1']:.1f} % test {100 * record['test_top1']:.1f} %"
        f"  lr {record['learning_rate']:.4g}"
        f"  batch {sizes}  busy {busy} ms{imbalance}"
        f"  {record['epoch_seconds']:.2f} s  {record['samples_per_second']:,.0f} samples/s"
    )


def _milliseconds(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"


def _phase(record: Mapping[str, Any], phase: str, rank: int) -> str:
    seconds = record["phases"][phase][rank]
    # With micro-batches the forward passes are not told from the backward ones.
    return _milliseconds(None if phase == "forward" and seconds == 0 else seconds, 2)


def summary(records: Sequence[Mapping[str, Any]], devices: Sequence[str]) -> str:
    """The run's table: each worker's phases in milliseconds per step, in the last epoch."""
    last = records[-1]
    head = ["worker", "device", "batch", "share", "busy", *PHASES]
    rows = [
        [str(rank), device, str(last["batch_sizes"][rank]), f"{last['shares'][rank]:.3f}"]
        + [_milliseconds(last["busy"]["mean"][rank], 2)]
        + [_phase(last, phase, rank) for phase in PHASES]
        # Those of the last epoch, if the run's end has seen another number of workers.
        for rank, device in enumerate(devices[: len(last["shares"])])
    ]
    best = max(record["test_top1"] for record in records)
    lines = [f"last epoch, milliseconds per step{_optimum(last)}", *table([head, *rows])]
    lines += _better_without(last)
    lines.append(
        f"test top-1 {100 * last['test_top1']:.2f} % (best epoch {100 * best:.2f} %), "
        f"top-5 {100 * last['test_top5']:.2f} %, loss {last['test_loss']:.4f}; "
        f"{last['train_seconds']:.1f} s of training, {last['total_seconds']:.1f} s with evaluation"
    )
    return "\n".join(lines)


def _better_without(record: Mapping[str, Any]) -> list[str]:
    without, best = record["better_without"], record["optimum"]
    if without is None:
        return []
    ranks = ", ".join(map(str, without["ranks"]))
    return [
        f"worker {ranks} sets the pace with the least batch it may have: without it a step would "
        f"take {1000 * without['seconds']:.2f} ms instead of {1000 * best:.2f}, "
        f"{best / without['seconds']:.2f} times as fast"
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _optimum(record: Mapping[str, Any]) -> str:
    if record["optimum"] is None:
        return ""
    sizes = " ".join(map(str, record["optimum_batch_sizes"]))
    return (
        f"; best possible busy time T* {1000 * record['optimum']:.2f} with batches {sizes}, "
        f"imbalance {record['imbalance']:.3f}"
    )
