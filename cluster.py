"""The process group: who takes part, numbers summed over workers, things done once per node.

Tensors of the model travel over the backend of the device (NCCL or gloo, see balancer.py). All
else, a few numbers at a time, travels over a gloo group of its own between CPU buffers.

Under Horovod too: Horovod starts the workers, tells them where to meet, and sums the gradients. All
else goes the same way as without it, so that there is one implementation of it for all exchanges,
and groups with time limits of their own, which Horovod has not.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import horovod_library
from configs.errors import UserError

# Seconds between two signs of life while workers wait for work that may take hours.
_SIGN_OF_LIFE = 0.5
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Preempted(Exception):
    """All workers have agreed to stop here."""


class _Interrupted(BaseException):
    """Ends work on this worker; no Exception, so that it is not taken for a fault of that work."""


@dataclass(frozen=True)
class Workers:
    """This worker's place among all workers.

    rank, size: global; local_rank, local_size: within its node; control: the group for numbers.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    threads: int
    control: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """`cpu`, or the GPU's index and name."""
        if self.device.type != "cuda":
            return self.device.type
        return f"{self.device} {torch.cuda.get_device_name(self.device)}"

    @property
    def launcher(self) -> str:
        """The command words that start as many workers as there are, up to the script's name."""
        if "RANK" not in os.environ:
            alone = "HOROVOD_RANK" not in os.environ
            return "python " if alone else f"horovodrun -np {self.size} python "
        nodes = -(-self.size // self.local_size)
        where = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
        return f"torchrun {where} --nproc_per_node={self.local_size} "

    def gather(self, values: np.ndarray) -> np.ndarray:
        """One array of the same shape from each worker, as float64 [n, …], on every worker."""
        mine = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.control)
        return torch.stack(rows).numpy()

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum over workers in float64, the same bits on every worker: added up in rank order."""
        return self.gather(values).sum(axis=0)

    def start_maximum(self, numbers: list[int]) -> tuple[dist.Work, torch.Tensor]:
        """Starts an all-reduce: once the work is done, the tensor has each number's maximum."""
        tensor = torch.tensor(numbers)
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control, async_op=True), tensor

    def collect(self, content: bytes | memoryview) -> list[bytes]:
        """The bytes of each worker, in rank order, on rank 0; nothing on the others."""
        lengths = self.gather(np.array([len(content)]))[:, 0].astype(np.int64)
        mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in lengths] if self.is_first else None
        dist.gather(mine, rows, dst=0, group=self.control)
        return [row[:length].numpy().tobytes() for row, length in zip(rows or [], lengths)]

    def gather_json(self, value: Any) -> list[Any]:
        """A JSON-able value from each worker, in rank order, on every worker."""
        return [json.loads(text) for text in self._gather_bytes(json.dumps(value).encode())]

    def broadcast_bytes(self, content: bytes | None) -> bytes | None:
        """Rank 0's bytes (or None) on every worker."""
        length = torch.tensor([-1 if content is None else len(content)])
        dist.broadcast(length, src=0, group=self.control)
        if length.item() <= 0:
            return None if length.item() < 0 else b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_first:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self.control)
        return buffer.numpy().tobytes()

    def once_per_node(
        self, work: Callable[[], Any], asked_to_stop: Callable[[], bool] = lambda: False
    ) -> Any:
        """Runs `work` on one worker of each node while the others wait, however long it takes.

        Returns its JSON-able result on all workers of the node. A UserError on any node is raised
        on all workers, and Preempted where one was asked to stop; both end the work on the others.
        To be called in the main thread. A worker that is lost is an error within the timeout.
        """
        job = _WatchedWork(self, asked_to_stop)
        outcome = job.run(work) if self.local_rank == 0 else job.wait()
        return self._shared(outcome, self.rank - self.local_rank)

    def together(self, work: Callable[[], None]) -> None:
        """Runs `work` on every worker; a UserError of any of them reaches all."""
        self._shared(_outcome(work), self.rank)

    def once(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 alone; its JSON-able result, or its UserError, reaches all."""
        return self._shared(_outcome(work) if self.is_first else {}, 0)

    def check_replicas(self, module: nn.Module) -> None:
        """Raises RuntimeError naming the ranks whose parameters or buffers differ from rank 0's."""
        sums = self.gather(np.array([checksum(module)]))[:, 0]
        different = [rank for rank in range(self.size) if sums[rank] != sums[0]]
        if different:
            raise RuntimeError(f"the weights of ranks {different} differ from those of rank 0")

    def _shared(self, outcome: Mapping[str, Any], leader: int) -> Any:
        """The leader's value; raises what any worker's work has ended with."""
        outcomes = self.gather_json(outcome)
        for other in outcomes:
            if "error" in other:
                raise UserError(other["error"])
        return outcomes[leader]["value"]

    def _gather_bytes(self, content: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.control)
        longest = max(int(length) for length in lengths)
        mine = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.control)
        return [row.numpy().tobytes()[: int(n)] for row, n in zip(rows, lengths)]


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` returns, as `value`, or the text of its UserError."""
    try:
        return {"value": work()}
    except UserError as error:
        return {"error": str(error)}


class _WatchedWork:
    """Long work on some workers, all of which learn twice a second how the others fare.

    The signs of life go round in a thread of their own where the main thread works. It is the main
    thread that works, so that an exception, by way of a signal, can end what it does.
    """

    INTERRUPTION = signal.SIGUSR2

    def __init__(self, workers: Workers, asked_to_stop: Callable[[], bool]) -> None:
        self._workers, self._asked = workers, asked_to_stop
        self._done, self._failed, self._interrupted = threading.Event(), False, False
        self._lock = threading.Lock()
        self._end: BaseException | None = None

    def wait(self) -> dict[str, Any]:
        """On a worker that has no work; what `run` says, or raises, without an outcome."""
        self._done.set()
        self._watch()
        if self._end is not None:
            raise self._end
        return {}

    def run(self, work: Callable[[], Any]) -> dict[str, Any]:
        """The outcome of `work`; none where another worker's has failed. Raises Preempted."""
        before = signal.signal(self.INTERRUPTION, self._interrupt)
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        outcome: dict[str, Any] = {}
        try:
            outcome = self._guarded(work)
            watch.join()
        except _Interrupted:
            pass
        finally:
            with self._lock:
                self._done.set()  # whatever has ended the work: from here on no interruption
            signal.signal(self.INTERRUPTION, before)
        if self._end is not None:
            raise self._end
        return outcome

    def _guarded(self, work: Callable[[], Any]) -> dict[str, Any]:
        outcome = _outcome(work)
        with self._lock:
            self._failed = "error" in outcome
            if not self._interrupted:
                self._done.set()
        while self._interrupted:  # the signal is on its way, and must not arrive any later
            time.sleep(0.01)
        return outcome

    def _watch(self) -> None:
        """Goes round until all are done, or one has failed or was asked to stop."""
        try:
            done = asked = failed = np.zeros(1)
            while not (done.all() or asked.any() or failed.any()):
                self._done.wait(_SIGN_OF_LIFE)
                mine = np.array([self._done.is_set(), self._asked(), self._failed])
                done, asked, failed = self._workers.gather(mine).T
            if asked.any():
                self._end = Preempted()
        except Exception as error:  # of a lost peer: raised where the work is
            self._end = error
        with self._lock:
            if not self._done.is_set():
                self._interrupted = True
                signal.pthread_kill(threading.main_thread().ident, self.INTERRUPTION)

    def _interrupt(self, number: int, frame: Any) -> None:
        raise _Interrupted


def checksum(module: nn.Module) -> int:
    """CRC-32 over the bytes of all parameters and buffers."""
    total = 0
    for tensor in (*module.parameters(), *module.buffers()):
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        total = zlib.crc32(flat.numpy(), total)
    return total


@contextmanager
def join(
    backend: str | None,
    device: str | None,
    threads: int | None,
    timeout: float,
    local_rank: int | None = None,
    local_size: int | None = None,
    horovod: bool = False,
) -> Iterator[Workers]:
    """Joins the process group that the launcher describes, or makes one of a single process.

    backend, device: None for what the machine has; threads: PyTorch's on each worker, None for an
    even part of the cores; timeout: seconds until a collective that does not end is an error;
    local_rank, local_size: from the command line, used where the environment does not say;
    horovod: whether the launcher is horovodrun, and Horovod sums the gradients.
    Raises UserError for a set-up that cannot work.
    """
    place = horovod_library.start(timeout) if horovod else _place(local_rank, local_size)
    kind = _device_kind(device)
    backend = _backend(backend or ("gloo" if horovod else None), kind)
    here = torch.device("cpu")
    if kind == "cuda":
        here = torch.device("cuda", place["local_rank"] % torch.cuda.device_count())
        torch.cuda.set_device(here)
    torch.set_num_threads(_threads(threads, place["local_size"]))
    # Groups end, and gloo's threads with them, when nothing refers to them any more, and models
    # that do are garbage in cycles. A thread that lets go of a tensor while the interpreter is
    # taken apart would abort the process.
    atexit.register(gc.collect)
    limit = timedelta(seconds=timeout)
    store = _store_over_horovod(place, limit) if horovod else _store(limit)
    meeting = {"store": store, "rank": place["rank"], "world_size": place["size"]}
    dist.init_process_group(backend, timeout=limit, **({} if store is None else meeting))
    control = dist.new_group(backend="gloo", timeout=limit)
    # One that ended before the others are connected would fail their start, and hide its reason.
    dist.barrier(group=control)
    workers = Workers(
        **place, device=here, backend=backend, threads=torch.get_num_threads(), control=control
    )
    if backend == "nccl":
        # Only now: where each worker is shown one GPU alone, none can tell whose it is.
        refuse_shared(workers.gather_json(_device_id(here)))
    yield workers
    # Only after success: with a broken peer this would wait, and the process is ending anyway.
    dist.destroy_process_group()
    if horovod:
        horovod_library.stop()


class PeerLostError(RuntimeError):
    """An exchange failed through no fault of this worker."""


@contextmanager
def naming_lost_peers(timeout: float) -> Iterator[None]:
    """What a failed exchange raises within it becomes a PeerLostError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors are of no type of their own, but begin with the place in its source.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise PeerLostError(
            f"rank {environment_rank()}: an exchange with the other workers failed: most likely "
            f"one of them has ended, or did not answer within the timeout of {timeout:g} s. Its "
            "own output says why; the same command goes on from the last checkpoint"
        ) from error


def launcher_names() -> list[str]:
    """Names of the torchrun process behind this worker, which no other one has had; none without.

    They are the same for all workers of a node that one torchrun starts, also later: one by its
    process, which is the worker's parent unless there is a wrapper in between, and one by the
    folder of its workers' error files, which has a random name.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    parent, began = os.getppid(), ""
    with suppress(OSError):  # macOS has no such file
        # Numbers of processes are used again; their starts, in clock ticks, tell them apart.
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        began = fields[19]
    names = [f"{parent} {began}"]
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if file.parent.parent.name.startswith("attempt_"):  # FOLDER/attempt_<n>/<local rank>/error.json
        names.append(str(file.parents[2]))
    host = socket.gethostname()
    return [hashlib.blake2b(f"{host} {n}".encode(), digest_size=8).hexdigest() for n in names]


def environment_rank() -> str:
    """This worker's rank as its launcher's environment has it; 0 without a launcher."""
    return os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))


def _store_over_horovod(place: Mapping[str, int], limit: timedelta) -> dist.Store:
    """A store on rank 0, at a free port, whose address is told over Horovod."""
    if place["rank"] == 0:
        one_node = place["local_size"] == place["size"]
        host = "127.0.0.1" if one_node else horovod_library.host() or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        horovod_library.broadcast_text(f"{host}:{store.port}")
        return store
    host, _, port = horovod_library.broadcast_text("").rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=limit)


def _store(limit: timedelta) -> dist.Store | None:
    """Where the workers meet, where PyTorch's own choice will not do."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    # torchrun gives restarted workers the store of the dead ones, whose addresses are still in it.
    # (Of several nodes each counts its own restarts: there the launcher has to make a new store.)
    store, *_ = next(dist.rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    return dist.PrefixStore(f"restart-{restarts}", store)


def _place(local_rank: int | None, local_size: int | None) -> dict[str, int]:
    """rank, size, local_rank and local_size from the environment, which wins, or the arguments."""
    environment = os.environ
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        if (local_size or 1) > 1 or (local_rank or 0) > 0:
            raise UserError(
                f"--local_world_size={local_size or 1} --local_rank={local_rank or 0} but no "
                "launcher started this process: use torchrun --nproc_per_node=N trainer.py …"
            )
        if environment.get("HOROVOD_SIZE", "1") != "1":
            raise UserError(
                "horovodrun started this process, but exchange is not horovod: "
                "add --exchange horovod, or start with torchrun"
            )
        return {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
    missing = [name for name in _LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise UserError(
            f"the environment has RANK or WORLD_SIZE but not {', '.join(missing)}: "
            "start with torchrun, or unset them to run one process"
        )
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    local_size = _number("LOCAL_WORLD_SIZE", local_size or size)
    fallback = rank % local_size if local_rank is None else local_rank
    return {
        "rank": rank,
        "size": size,
        "local_rank": _number("LOCAL_RANK", fallback),
        "local_size": local_size,
    }


def _number(variable: str, fallback: int | None = None) -> int:
    text = os.environ.get(variable)
    if text is None and fallback is not None:
        return fallback
    try:
        number = int(text)
    except (TypeError, ValueError):
        number = -1
    if number < (1 if "SIZE" in variable else 0):
        raise UserError(f"the environment's {variable} is no number of workers or ranks: {text!r}")
    return number


def _device_kind(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, but PyTorch finds no GPU: use --device cpu")
    return device


def refuse_shared(devices: Sequence[str]) -> None:
    """Raises UserError where two workers have one GPU; devices: each worker's, by a unique name."""
    ranks: dict[str, list[str]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(str(rank))
    shared = [" and ".join(there) for there in ranks.values() if len(there) > 1]
    if shared:
        raise UserError(
            f"ranks {', ranks '.join(shared)} have the same GPU, but NCCL needs one GPU per "
            "worker: start fewer workers (--nproc_per_node), show each its own GPU "
            "(CUDA_VISIBLE_DEVICES), or share the GPUs with --backend gloo"
        )


def _device_id(device: torch.device) -> str:
    """A name that no two GPUs have, on whatever node and under whatever local number."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _backend(backend: str | None, kind: str) -> str:
    if backend is None:
        backend = "nccl" if kind == "cuda" and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and kind != "cuda":
        raise UserError("backend: nccl needs GPUs: use --backend gloo, or --device cuda")
    return backend


def _threads(threads: int | None, local_size: int) -> int:
    """Threads per worker: as asked for, else as the user's environment says, else an even part."""
    if threads is not None:
        return threads
    if _user_set_threads():
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_size)


def _user_set_threads() -> bool:
    """Whether OMP_NUM_THREADS comes from the user: torchrun sets it to 1 where it is missing."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return "OMP_NUM_THREADS" in os.environ
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as launcher:
            variables = launcher.read().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in variables)
