"""What all benchmarks share: arguments, tables, JSON with machine and versions, missed targets.

A benchmark measures, prints a table, and ends with `finish`. `--check` makes a missed target an
error, so that a benchmark can stand in a test run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import storage
from recorder import provenance
from terminal import say

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str, *own: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line of every benchmark: `out` (a path or None), `check` and `quick` (bools).

    own: parsers of a benchmark's own options, without help.
    """
    parser = argparse.ArgumentParser(description=description, parents=own)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here (JSON)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    options = parser.parse_args()
    make_folder(parser, options.out)
    return options


def make_folder(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """The folder of a file to be written; ends the program where there can be no such file."""
    if out is None:
        return
    # Not after minutes of measuring.
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: cannot make its folder ({error.strerror})")
    if out.exists() and not out.is_file():
        parser.error(f"--out {out} is no regular file: name another")


def finish(
    name: str, results: Mapping[str, Any], misses: Sequence[str], options: argparse.Namespace
) -> int:
    """Writes the results of benchmark `name` to `--out`; the process's exit status.

    results: JSON-able; misses: one line per missed target. With `--check` they are printed and the
    status is 1 if there are any.
    """
    if options.out is not None:
        document = {
            "benchmark": name,
            "quick": options.quick,
            **_provenance(),
            "machine": machine(),
            "results": dict(results),
            "misses": list(misses),
        }
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        storage.write(options.out, text.encode())
    if not options.check:
        return 0
    for miss in misses:
        say(f"missed: {miss}")
    return 1 if misses else 0


def _provenance() -> dict[str, Any]:
    """As in a run's record, but it is the end that is known."""
    facts = provenance(ROOT)
    facts["ended"] = facts.pop("started")
    return facts


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows of the same keys under these keys as headings; numbers with four digits."""
    if not rows:
        return
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = [any(isinstance(row[key], str) for row in rows) for key in rows[0]]
    for line in lines:
        cells = [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts)
        ]
        say("  ".join(cells).rstrip())


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def launch(workers: int, script: str, *arguments: str, limit: float, threads: int = 1) -> str:
    """Runs `script` (a path from the root) on `workers` processes; what rank 0 printed.

    limit: seconds after which all are killed; threads: of each process. Their environment is the
    one that torchrun gives. Raises RuntimeError with a failed worker's output.
    """
    # The launcher's side of the rendezvous: the port is taken before the workers are told it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ, "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    command = [sys.executable, script, *arguments]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes = []
        for rank, output in enumerate(outputs):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        codes = _wait(processes, limit)
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    # A worker that failed explains the others' silence.
    for rank in sorted(range(workers), key=lambda rank: codes[rank] is None):
        if codes[rank] != 0:
            how = f"took over {limit:.0f} s" if codes[rank] is None else f"ended with {codes[rank]}"
            raise RuntimeError(f"{script}: rank {rank} of {workers} {how}:\n{texts[rank][-4000:]}")
    return texts[0]


def _wait(processes: Sequence[subprocess.Popen], limit: float) -> list[int | None]:
    """Exit codes, None for what still runs `limit` seconds from now, or when another failed."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    return [process.poll() for process in processes]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0].split(":", 1)[1].strip() if lines else "unknown"
