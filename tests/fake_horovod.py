"""A stand-in for Horovod, so that what is built around it is tested where Horovod is not.

It sums over the process group and holds its caller to what Horovod asks for. What Horovod
itself does is tested by test_horovod.py.
"""

from __future__ import annotations

import itertools
import os
import sys
from types import ModuleType

import torch
import torch.distributed as dist

Sum = "sum"
_numbers = itertools.count(1)
_pending: dict[int, tuple[str, torch.Tensor]] = {}
_done: dict[int, tuple[str, torch.Tensor]] = {}


def install() -> None:
    """Puts it in Horovod's place, and this worker into the environment that horovodrun makes."""
    sys.modules["horovod"] = package = ModuleType("horovod")
    sys.modules["horovod.torch"] = package.torch = sys.modules[__name__]
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[f"HOROVOD_{name}"] = os.environ[name]
    os.environ["HOROVOD_SIZE"] = os.environ["WORLD_SIZE"]
    os.environ["HOROVOD_LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]


def init() -> None:
    assert int(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > 0


def shutdown() -> None:
    assert not _pending and not _done


def cuda_built() -> bool:
    return False


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def size() -> int:
    return int(os.environ["HOROVOD_SIZE"])


def local_rank() -> int:
    return int(os.environ["HOROVOD_LOCAL_RANK"])


def local_size() -> int:
    return int(os.environ["HOROVOD_LOCAL_SIZE"])


def broadcast(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Over the store of the test's own launcher: there is no process group yet."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)
    if rank() == root_rank:
        store.set("broadcast", tensor.numpy().tobytes())
    return torch.frombuffer(bytearray(store.get("broadcast")), dtype=tensor.dtype)


def allreduce_async_(tensor: torch.Tensor, name: str, op: str) -> int:
    assert tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64)
    assert op == Sum and name not in [other for other, _ in _pending.values()]
    handle = next(_numbers)
    _pending[handle] = name, tensor
    return handle


def poll(handle: int) -> bool:
    return handle in _pending or handle in _done


def synchronize(handle: int) -> None:
    # Workers may send in any order: as Horovod does, tensors are matched by name.
    for _, tensor in sorted(_pending.values(), key=lambda pair: pair[0]):
        dist.all_reduce(tensor)
    _done.update(_pending)
    _pending.clear()
    del _done[handle]
