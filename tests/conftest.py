"""Makes the project's modules importable from the tests and keeps threads from competing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# The server that workers are forked from (see processes.py) imports the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")
