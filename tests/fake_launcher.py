"""Stands before torchrun in tests of reproduce.py: notes the command, and leaves plausible records.

The environment says what happens: FAKE_NOTES (file that gets each command line as JSON), FAKE_FAIL
(runs with this text in their folder end with 3 after one epoch), FAKE_DIVERGE (they diverge then).
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_runs import write_records

from configs.command_line import parse, run_folder
from configs.schema import for_workers, to_mapping


def main(command: list[str]) -> int:
    with open(os.environ["FAKE_NOTES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(command) + "\n")
    (script,) = (i for i, word in enumerate(command) if word.endswith("trainer.py"))
    launch = parse(command[script + 1 :])
    folder = run_folder(launch)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = ("--nproc-per-node=", "--nnodes=")
    workers = math.prod(int(w.partition("=")[2]) for w in command if w.startswith(sizes))
    config = to_mapping(for_workers(launch.config, workers))
    fails, diverges = (
        os.environ.get(name, " ") in str(folder) for name in ("FAKE_FAIL", "FAKE_DIVERGE")
    )
    calibrated = [
        {"rule": index, "rank": rank, "seconds": rule["fraction"] * seconds}
        for index, rule in enumerate(config["stragglers"])
        for rank, seconds in zip(rule["ranks"], rule.get("busy_seconds", []))
    ]
    epochs = 1 if fails or diverges else config["epochs"]
    write_records(folder, config, workers, epochs, 12, calibrated)
    if fails:
        (folder / "checkpoint.pt").write_bytes(b"")
        print("it broke")
        return 3
    if diverges:
        (folder / "diverged").write_text('{"epoch": 1, "message": "not finite"}')
        return 2
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
