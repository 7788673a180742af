"""Makes the project's modules importable from the tests and keeps threads from competing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# The server that workers are forked from (see processes.py) imports the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a busy machine an example may take long for no reason of its own; whole tests have limits.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
