"""trainer.py whose workers meet a fate: started by torchrun in the tests of restarts.

The environment's FATES is JSON: by restart count, a rank, and which of its steps it dies in, those
of the rehearsal included; or "end", for when the final weights are written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import recorder
import trainer


def main() -> None:
    fates = json.loads(os.environ["FATES"])
    rank, number = fates.get(os.environ["TORCHELASTIC_RESTART_COUNT"], (None, None))
    step, calls = trainer.Trainer._step, [0]
    clear = recorder.RunFolder._clear

    def mortal(*arguments: Any) -> None:
        calls[0] += 1
        if os.environ["RANK"] == str(rank) and calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*arguments)

    def mortal_at_the_end(*arguments: Any) -> None:
        if os.environ["RANK"] == str(rank) and number == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        clear(*arguments)

    trainer.Trainer._step = mortal
    recorder.RunFolder._clear = mortal_at_the_end
    trainer.main()


if __name__ == "__main__":
    main()
