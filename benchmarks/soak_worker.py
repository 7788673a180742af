"""One worker of the soak: trainer.py, noting after each epoch what it holds.

    soak_worker.py FOLDER ARGUMENTS OF TRAINER.PY…

writes FOLDER/rank-R.jsonl, a line per epoch: resident bytes and open file descriptors of this
process, and of the loader processes that serve it. soak.py starts it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trainer


def held() -> dict[str, int]:
    """Resident bytes and open file descriptors of this process and its loader processes."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    page = os.sysconf("SC_PAGE_SIZE")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "processes": len(pids),
        "bytes": pages[0] * page,
        "of_them_files": 1024 * int(status["RssFile"].split()[0]),  # code and mapped data
        "loader_bytes": sum(pages[1:]) * page,
        "files": files[0],
        "loader_files": sum(files[1:]),
    }


def main() -> None:
    file = Path(sys.argv.pop(1)) / f"rank-{os.environ['RANK']}.jsonl"
    run_epoch = trainer.Trainer.run_epoch

    def noted(*arguments: Any) -> Any:
        result = run_epoch(*arguments)
        with open(file, "a") as lines:
            lines.write(json.dumps(held()) + "\n")
        return result

    trainer.Trainer.run_epoch = noted
    trainer.main()


if __name__ == "__main__":
    main()
