"""Makes the project's modules importable from the tests and keeps threads from competing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# The server that workers are forked from (see processes.py) imports the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a busy machine an example may take long for no reason of its own; whole tests have limits.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# Runs that are killed and started again and again. Where two files are tested at a time, one of
# these that is left to the end would be waited for alone.
SLOWEST = (
    "test_restart.py", "test_lost_node.py", "test_reproduce.py", "test_own_script.py",
    "test_two_jobs.py", "test_interruption.py", "test_resume.py", "test_resume_inside.py",
    "test_cluster.py", "test_launch.py", "test_many_classes.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, all else as it was."""
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(SLOWEST)))
