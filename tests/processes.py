"""Real worker processes for the tests, each with a hard time limit.

They are forked from a server that has imported PyTorch and the trainer once, so that a test with
four workers starts in well under a second; a launcher's environment is given to them as torchrun
would.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["processes", "trainer"])


@dataclass(frozen=True)
class Outcome:
    """How one worker ended: exit code (None: had to be killed), what it printed and returned."""

    code: int | None
    output: str
    value: Any


def run_workers(
    folder: Path,
    size: int,
    target: Callable[..., Any],
    *arguments: Any,
    limit: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Runs `target(*arguments)` on `size` workers; a worker past `limit` seconds is killed.

    target: a module-level function that returns something JSON-able.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The launcher's side of the rendezvous, as in torchrun: the port is taken before it is told.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(size):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            **(environment or {}),
        }  # fmt: skip
        inside = (folder, rank, variables, target, arguments)
        processes.append(_CONTEXT.Process(target=_work, args=inside))
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [
        Outcome(None if late[rank] else process.exitcode, *_read(folder, rank))
        for rank, process in enumerate(processes)
    ]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the workers returned; fails with their output where one did not end well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}:\n{outcome.output}"
    return [outcome.value for outcome in outcomes]


def _work(
    folder: Path, rank: int, variables: dict[str, str], target: Callable[..., Any], arguments: tuple
) -> None:
    with open(folder / f"output-{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(variables)
    # Not the inherited method: loader processes would each wait for a server of their own.
    multiprocessing.set_start_method("fork", force=True)
    try:
        value = target(*arguments)
        (folder / f"value-{rank}").write_text(json.dumps(value))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    finally:
        sys.stdout.flush()


def _read(folder: Path, rank: int) -> tuple[str, Any]:
    output, value = folder / f"output-{rank}", folder / f"value-{rank}"
    text = output.read_text(errors="replace") if output.exists() else ""
    return text, json.loads(value.read_text()) if value.exists() else None


def run_trainer(*argv: str) -> None:
    """The command line `trainer.py ARGV…`, inside a worker process."""
    import trainer

    sys.argv = ["trainer.py", *argv]
    trainer.main()


def still_running(mark: str) -> list[str]:
    """Command lines that hold `mark`, of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found
