"""Starting trainer.py under its launcher, watching it, and ending it with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.command_line import parse
from configs.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
# torchrun gives its workers 30 s to end before it kills them.
GRACE_SECONDS = 40.0
_WATCH_SECONDS = 2.0
# Options of torchrun that reproduce.py takes and hands on; each has a value.
TORCHRUN_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint",
    "--rdzv-id", "--rdzv-conf", "--master-addr", "--master-port", "--local-addr",
    "--max-restarts", "--monitor-interval", "--signals-to-handle",
)  # fmt: skip
# Signals that ask this process to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Where one of these is given, the user decides how the workers find each other.
_MEETING = ("--nnodes", "--rdzv-", "--master-")


@dataclass(frozen=True)
class Launcher:
    """How runs are started. prefix: what stands before torchrun (srun …); options: torchrun's."""

    prefix: tuple[str, ...]
    options: tuple[str, ...]

    def on(self, per_node: str | int) -> Launcher:
        """The same with so many workers on each node."""
        return replace(self, options=(f"--nproc-per-node={per_node}", *self.options))

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line of `torchrun … trainer.py ARGUMENTS`; over Horovod, of `horovodrun …`.

        Raises UserError where there is no horovodrun, or the options say what it is not told here.
        """
        if parse(arguments).config.exchange == "horovod":
            return [*self.prefix, *self._horovodrun(), str(ROOT / "trainer.py"), *arguments]
        alone = not any(option.startswith(_MEETING) for option in self.options)
        return [
            *(*self.prefix, sys.executable, "-m", "torch.distributed.run"),
            *(["--standalone"] if alone else []),
            *(*self.options, str(ROOT / "trainer.py"), *arguments),
        ]

    def _horovodrun(self) -> list[str]:
        given = dict(option.split("=", 1) for option in self.options)
        workers = given.pop("--nproc-per-node", "1")
        if given.get("--nnodes") == "1":
            del given["--nnodes"]
        if given or not workers.isdecimal():
            wrong = ", ".join(given) or f"--nproc-per-node={workers}"
            raise UserError(
                "exchange: horovod is started on this machine alone, with a number of workers: "
                f"leave out {wrong}, or start its runs by hand with horovodrun"
            )
        program = Path(sys.executable).with_name("horovodrun")
        if not program.exists():
            raise UserError(
                f"exchange: horovod: there is no {program}: build it with "
                "scripts/install_horovod.sh, or set exchange to ddp"
            )
        return [str(program), "-np", workers, sys.executable]

    def run(
        self, arguments: Sequence[str], log: Path, watch: Callable[[], None] = lambda: None
    ) -> int:
        """Runs it to its end, its output appended to `log`; the exit code.

        watch is called every few seconds meanwhile. Whatever it or a signal raises ends
        the run's processes first.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the run.
            process = subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while (code := _ended_within(process, _WATCH_SECONDS)) is None:
                    watch()
            finally:
                if process.poll() is None:
                    end(process)
        return code


def end(process: subprocess.Popen) -> None:
    """Ends a launcher and all its descendants: politely first, since it ends its own workers."""
    # Impatience must not cut this short and leave workers behind.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        _end(process)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen) -> None:
    family = descendants(process.pid)
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        family |= descendants(process.pid)
        process.kill()
        process.wait()
    # The start time tells a process from a later one with its number.
    while left := family & _processes().keys():
        for pid, _ in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _ended_within(process: subprocess.Popen, seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def descendants(pid: int) -> set[tuple[int, int]]:
    """(process id, start time) of all children of `pid`, their children, and so on."""
    parents = _processes()
    found: set[tuple[int, int]] = set()
    wanted = {pid}
    while new := {key for key, parent in parents.items() if parent in wanted} - found:
        found |= new
        wanted = {key[0] for key in new}
    return found


def _processes() -> dict[tuple[int, int], int]:
    """The parent of every process on this machine, by (process id, start time)."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z":
            found[int(file.parent.name), int(fields[19])] = int(fields[1])
    return found
