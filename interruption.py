"""How all workers come to stop at the same step: preemption, and numbers that are not finite.

A worker is asked to stop by a signal. What it was asked travels in a small asynchronous all-reduce
every few steps, whose result is looked at when the next one is due: nobody waits for it, and all
learn of it at the same step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cluster import Preempted, Workers, environment_rank
from configs.errors import NotFiniteError

Item = TypeVar("Item")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds from the signal until a worker gives the others up. Launchers kill after 30.
PATIENCE = 18.0
# Seconds between two looks at the flag, and the most steps between them.
PERIOD, MOST_STEPS = 0.2, 16


# --- signals ----------------------------------------------------------------------------------


class Request:
    """Whether this process has been asked to stop, and by which signal.

    heard: set when the workers have agreed on a step, or there is nothing left to stop.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.heard = threading.Event()

    def ask(self, number: int) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number).name


@contextmanager
def listening() -> Iterator[Request]:
    """Within it, SIGNALS ask this process to stop instead of ending it.

    Once it is left without an error they are ignored: what is left to do is to end. If its request
    is not heard PATIENCE seconds after the first of them, it ends with exit code 1: the other
    workers are gone or hang, and there is no agreeing with them.
    """
    request = Request()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # A signal reaches the pipe at once, also while this thread is held up in a collective and
    # Python's own handlers have to wait.
    waker = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    after: dict[int, Any] = {
        number: signal.signal(number, lambda n, frame: request.ask(n)) for number in SIGNALS
    }
    watchdog = threading.Thread(target=_watch, args=(reader, request), daemon=True)
    watchdog.start()
    try:
        yield request
        # A signal would make a failure of a run that is saved or finished, to be started again.
        after = dict.fromkeys(SIGNALS, signal.SIG_IGN)
    finally:
        request.heard.set()
        for number, handler in after.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(waker)
        os.write(writer, b"\0")  # closing it is no sign: loader processes hold it too
        watchdog.join()
        os.close(reader)
        os.close(writer)


def _watch(reader: int, request: Request) -> None:
    """Ends the process when a signal has come and the time since is up."""
    while not set(os.read(reader, 64)) & set(SIGNALS):
        if request.heard.is_set():
            return
    if not request.heard.wait(PATIENCE):
        sys.stderr.write(
            f"trainer.py: error: rank {environment_rank()}: asked to stop, but not all workers "
            f"could agree on a step within {PATIENCE:.0f} s: ends without a checkpoint\n"
        )
        sys.stderr.flush()
        os._exit(1)


# --- numbers that are not finite --------------------------------------------------------------


class FiniteGuard:
    """Looks at each step's loss and gradient without waiting for the device.

    A gradient is looked at before it is summed over the workers, so that the worker can be named.
    place: the present epoch and step.
    """

    def __init__(
        self, workers: Workers, module: nn.Module, place: Callable[[], tuple[int, int]]
    ) -> None:
        self._workers, self._module, self._place = workers, module, place
        self._values: list[Tensor] = []  # largest magnitudes, 0-dim each, NaN for any NaN
        self._meanings: list[tuple[int, int, str]] = []
        self._latest: tuple[int, int] | None = None  # of the steps that were looked at
        self._reading: tuple[Tensor, Any, list[tuple[int, int, str]]] | None = None
        self._first: tuple[int, int, str] | None = None

    @property
    def found(self) -> bool:
        """Whether something was not finite, as far as it has been read."""
        return self._first is not None

    def add_loss(self, loss: Tensor) -> None:
        self._latest = self._place()
        self._values.append(loss)
        self._meanings.append((*self._latest, "loss"))

    def add_gradient(self, gradient: Tensor) -> None:
        """gradient: this worker's own, any part of it."""
        self._values.append(torch.linalg.vector_norm(gradient, ord=torch.inf))
        self._meanings.append((*self._place(), "gradient"))

    def look(self) -> None:
        """Reads what the last look has started, and starts reading what has come since."""
        self._read()
        if self._values and self._first is None:
            finite = torch.isfinite(torch.stack([value.double() for value in self._values]))
            event = None
            if finite.is_cuda:
                finite = finite.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._reading = (finite, event, self._meanings)
            if event is None:
                self._read()
        self._values, self._meanings = [], []

    def forget(self) -> None:
        """Drops what was added so far."""
        self._values, self._meanings, self._reading, self._first = [], [], None, None

    def settle(self) -> None:
        """Raises NotFiniteError on all workers, naming rank and step, if anything is not finite.

        All must call it. Also looks at the weights and buffers, which may be about to be stored.
        """
        self.look()
        self._read()
        if self._first is None:
            tensors = [t for t in self._module.state_dict().values() if t.is_floating_point()]
            largest = [torch.linalg.vector_norm(t.double(), ord=torch.inf) for t in tensors]
            if not bool(torch.isfinite(torch.stack(largest)).all()):
                self._first = (*(self._latest or self._place()), "model")
        if not self._workers.sum(np.array([float(self.found)]))[0]:
            return
        places = dict(enumerate(self._workers.gather_json(self._first)))
        found = {rank: place for rank, place in places.items() if place is not None}
        # A model is that of all, whose loss or gradient has made it what it is.
        causes = {rank: place for rank, place in found.items() if place[2] != "model"} or found
        epoch, step, _ = min(causes.values())
        first = [
            f"the {place[2]} of rank {rank}"
            for rank, place in causes.items()
            if place[:2] == [epoch, step]
        ]
        raise NotFiniteError(
            f"not finite in epoch {epoch}, step {step} (both from 0): {', '.join(first)}. Any "
            "checkpoint is from before: lower optimizer.lr, or look at the data of that step",
            epoch,
        )

    def _read(self) -> None:
        if self._reading is None:
            return
        finite, event, meanings = self._reading
        self._reading = None
        if event is not None:
            event.synchronize()  # a look ago: long done
        wrong = [meanings[number] for number in (~finite).nonzero().flatten().tolist()]
        if wrong and self._first is None:
            # A gradient follows its loss, though it is looked at before.
            self._first = min(wrong, key=lambda place: (*place[:2], place[2] != "loss"))


# --- agreeing ---------------------------------------------------------------------------------


class StopFlag:
    """Lets all workers agree to stop, at the cost of one small all-reduce every few steps.

    asked: whether this worker was asked to. How many steps lie between two all-reduces follows
    from the longest time that any worker took for the last ones, which travels along.
    """

    def __init__(self, workers: Workers, asked: Callable[[], bool], guard: FiniteGuard) -> None:
        self._workers, self._asked, self._guard = workers, asked, guard
        self._every, self._calls = 1, 0
        self._since = time.perf_counter()
        self._flying: tuple[Any, Tensor] | None = None

    def between(self, batches: Iterable[Item], rounds: int) -> Iterator[Item]:
        """Passes at most `rounds` batches through, and checks so often on all workers."""
        for batch in batches:
            yield batch
            self.check()
            rounds -= 1
        for _ in range(rounds):
            self.check()

    def check(self) -> None:
        """After each step, on all workers alike.

        Raises Preempted if one was asked to stop, and NotFiniteError if one has met a number that
        is not finite; on all workers at the same call.
        """
        self._calls += 1
        if self._calls < self._every:
            return
        asked, found = self._landed()
        if found:
            self._guard.settle()
        if asked:
            raise Preempted
        self._launch()

    def finish(self) -> None:
        """Waits for what is under way, so that the process group can end."""
        self._landed()

    def _launch(self) -> None:
        self._guard.look()
        now = time.perf_counter()
        microseconds = int(1e6 * (now - self._since) / self._calls)
        self._calls, self._since = 0, now
        mine = [int(self._asked()), int(self._guard.found), microseconds]
        self._flying = self._workers.start_maximum(mine)

    def _landed(self) -> tuple[bool, bool]:
        """What the last all-reduce says: whether one was asked to stop, or found something."""
        if self._flying is None:
            return False, False
        work, numbers = self._flying
        self._flying = None
        work.wait()
        asked, found, microseconds = numbers.tolist()
        steps = int(1e6 * PERIOD / max(1, microseconds))
        self._every = max(1, min(MOST_STEPS, steps))
        return bool(asked), bool(found)
