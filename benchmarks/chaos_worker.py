"""One worker of the chaos run: trainer.py, with the faults of the plan in its steps.

    chaos_worker.py FOLDER ARGUMENTS OF TRAINER.PY…

FOLDER/faults.json has the plan, FOLDER/met a file for each fault that has been met: none is met
twice, however often its step is done again. chaos.py starts it under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trainer

SLOW_STEPS = 3


class Fate:
    """The faults of this worker that have not been met."""

    def __init__(self, folder: Path) -> None:
        self._met, rank = folder / "met", int(os.environ["RANK"])
        faults = enumerate(json.loads((folder / "faults.json").read_text()))
        self._left = {
            number: fault
            for number, fault in faults
            if fault["rank"] == rank and not self._file(number).exists()
        }
        self._slow, self._seconds = 0, 0.0
        (folder / "pids" / str(os.getpid())).touch()

    def meet(self, step: int) -> None:
        """What happens to this worker before `step`, counted over the run."""
        for number, fault in list(self._left.items()):
            # One that was passed by: another worker's death undid the step it was planned for.
            if fault["step"] <= step:
                del self._left[number]
                self._file(number).write_text(fault["kind"])
                self._strike(fault)
        if self._slow > 0:
            self._slow -= 1
            time.sleep(self._seconds)

    def _file(self, number: int) -> Path:
        return self._met / f"{number:04d}"

    def _strike(self, fault: Mapping[str, Any]) -> None:
        pid, seconds = os.getpid(), fault["seconds"]
        if fault["kind"] == "kill":
            timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
            timer.daemon = True
            timer.start()
        elif fault["kind"] == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {seconds:.3f}; kill -CONT {pid}"])
            os.kill(pid, signal.SIGSTOP)
        elif fault["kind"] == "preempt":
            os.kill(pid, getattr(signal, fault["signal"]))
        else:
            self._slow, self._seconds = SLOW_STEPS, seconds


def main() -> None:
    fate = Fate(Path(sys.argv.pop(1)))
    step = trainer.Trainer._step

    def fated(self: trainer.Trainer, images: Any, labels: Any, metrics: Any) -> None:
        plan = self.balancer.plan
        if metrics is self.metrics:  # not in a step that rehearses
            fate.meet(plan.epoch * len(plan.starts) + self.balancer.next_step)
        step(self, images, labels, metrics)

    trainer.Trainer._step = fated
    trainer.main()


if __name__ == "__main__":
    main()
