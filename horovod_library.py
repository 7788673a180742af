"""Horovod, an optional extra: nothing of it is imported before a run asks for it."""

from __future__ import annotations

import os
import time
from types import ModuleType

import torch

from configs.errors import UserError

# Seconds until a sum that does not come is an error: of the process, as is Horovod's own state.
_limit = float("inf")
_POLL_SECONDS = 1e-4
_LONGEST_TEXT = 300  # bytes


def load() -> ModuleType:
    """The module horovod.torch. Raises UserError where it is not installed or does not load."""
    try:
        import horovod.torch as horovod
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
    else:
        # Without its PyTorch part the module is there all the same, but empty.
        if hasattr(horovod, "init"):
            return horovod
        reason = "it was built without PyTorch"
    raise UserError(
        f"exchange: horovod cannot be used ({reason}): build it for this PyTorch with "
        "scripts/install_horovod.sh, or use --exchange ddp"
    )


def start(timeout: float) -> dict[str, int]:
    """Joins the workers that horovodrun has started, or starts a single one; returns its place.

    timeout: seconds until a worker that takes no part in a sum is an error. The place: rank, size,
    local_rank and local_size. Raises UserError where another launcher has started this process.
    """
    horovod = load()
    if "RANK" in os.environ and "HOROVOD_RANK" not in os.environ:
        raise UserError(
            "exchange: horovod needs its own launcher: horovodrun -np N python trainer.py …"
        )
    global _limit
    _limit = timeout
    # Of a worker that is gone or frozen as a whole; `wait` sees one whose training is stuck.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, round(timeout))))
    horovod.init()
    return {
        "rank": horovod.rank(),
        "size": horovod.size(),
        "local_rank": horovod.local_rank(),
        "local_size": horovod.local_size(),
    }


def broadcast_text(text: str) -> str:
    """Rank 0's text, at most 300 ASCII characters without spaces, on every worker."""
    letters = bytearray(text.encode("ascii").ljust(_LONGEST_TEXT))
    told = load().broadcast(torch.frombuffer(letters, dtype=torch.uint8), root_rank=0)
    return told.numpy().tobytes().decode("ascii").strip()


def wait(handle: int, name: str) -> None:
    """Waits for the sum of the gradient `name`. Raises RuntimeError where it does not come in time.

    Horovod's own wait takes a whole core from the others and knows no limit; its check for workers
    that are stuck (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS) did nothing in tests with 0.28.1 and gloo.
    """
    horovod, end = load(), time.monotonic() + _limit
    while not horovod.poll(handle):
        if time.monotonic() > end:
            raise RuntimeError(
                f"Horovod: no sum of the gradient {name} after {_limit:g} s: is a worker stuck?"
            )
        time.sleep(_POLL_SECONDS)
    horovod.synchronize(handle)


def host() -> str:
    """The name under which horovodrun knows this worker's machine; empty without it."""
    return os.environ.get("HOROVOD_HOSTNAME", "")


def stop() -> None:
    """Leaves the other workers."""
    load().shutdown()
