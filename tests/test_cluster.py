"""What workers tell each other, and how many threads each may use."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_workers, values

import cluster
from cluster import Preempted, checksum, join
from configs.errors import UserError


def numbers() -> dict[str, Any]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        mine = np.array([[workers.rank, 0.1], [2.0**60, 1.0]])
        parts = np.array([0.1 * (workers.rank + 1), 1e16, float(workers.rank)])
        return {
            "gathered": workers.gather(mine).tolist(),
            "sum": workers.sum(parts).tolist(),
            "integers": workers.gather(np.array([workers.rank])).tolist(),
            "transposed": workers.gather(np.arange(6).reshape(2, 3).T).tolist(),
            "json": workers.gather_json({"rank": workers.rank, "text": "ü" * workers.rank}),
            "first": workers.is_first,
        }


def test_gathered_and_summed_numbers_are_the_same_on_all_workers(tmp_path):
    got = values(run_workers(tmp_path, 3, numbers))
    assert [worker.pop("first") for worker in got] == [True, False, False]
    assert got[0] == got[1] == got[2]
    first = got[0]
    assert first["gathered"] == [[[rank, 0.1], [2.0**60, 1.0]] for rank in range(3)]
    # Added up in rank order, in float64.
    assert first["sum"] == [0.1 * 1 + 0.1 * 2 + 0.1 * 3, 3e16, 3.0]
    assert first["integers"] == [[0.0], [1.0], [2.0]]
    assert first["transposed"] == [[[0, 3], [1, 4], [2, 5]]] * 3
    assert first["json"] == [{"rank": rank, "text": "ü" * rank} for rank in range(3)]


def broadcasts() -> list[Any]:
    with join("gloo", "cpu", 1, 30.0) as workers:
        contents = [bytes(range(256)) * 9, b"", None]
        got = [workers.broadcast_bytes(c if workers.is_first else b"not this") for c in contents]
        return [None if content is None else list(content) for content in got]


def test_all_get_the_bytes_of_rank_0(tmp_path):
    got = values(run_workers(tmp_path, 3, broadcasts))
    assert got == [[list(range(256)) * 9, [], None]] * 3


# --- work that one worker does for others ---------------------------------------------------------


def elected(method: str, per_node: int, failing: list[int]) -> dict[str, Any]:
    """Calls `method` with work that fails on the ranks `failing`, as one of nodes of `per_node`."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    worked = []

    def work() -> str:
        worked.append(rank)
        if rank in failing:
            raise UserError(f"rank {rank} cannot")
        return f"by {rank}"

    with join("gloo", "cpu", 1, 30.0) as workers:
        try:
            answer = getattr(workers, method)(work)
        except UserError as error:
            answer = f"error: {error}"
        # All are still able to talk.
        together = workers.gather(np.array([rank]))[:, 0].tolist()
    return {"answer": answer, "worked": bool(worked), "together": together}


@pytest.mark.parametrize(
    "method, per_node, failing, answers, leaders",
    [
        ("once", 4, [], ["by 0"] * 4, [0]),
        ("once", 2, [], ["by 0"] * 4, [0]),
        ("once", 4, [0], ["error: rank 0 cannot"] * 4, [0]),
        ("once_per_node", 4, [], ["by 0"] * 4, [0]),
        ("once_per_node", 2, [], ["by 0", "by 0", "by 2", "by 2"], [0, 2]),
        ("once_per_node", 1, [], ["by 0", "by 1", "by 2", "by 3"], [0, 1, 2, 3]),
        ("once_per_node", 2, [2], ["error: rank 2 cannot"] * 4, [0, 2]),
    ],
)
def test_one_works_and_all_get_its_answer_or_its_error(
    tmp_path, method, per_node, failing, answers, leaders
):
    got = values(run_workers(tmp_path, 4, elected, method, per_node, failing))
    assert [worker["answer"] for worker in got] == answers
    assert [rank for rank in range(4) if got[rank]["worked"]] == leaders
    assert all(worker["together"] == [0, 1, 2, 3] for worker in got)


def slow_preparation() -> str:
    with join("gloo", "cpu", 1, 1.0) as workers:
        return workers.once_per_node(lambda: time.sleep(2.5) or "prepared")


def test_preparation_may_take_longer_than_a_step(tmp_path):
    assert values(run_workers(tmp_path, 2, slow_preparation)) == ["prepared"] * 2


def long_preparation(fate: str) -> dict[str, Any]:
    """Two nodes of two workers, whose first ones would work for long; rank 3 or 2 has a fate."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank % 2), "2"
    cleaned, began = [], time.monotonic()

    def work() -> None:
        if fate == "fails" and rank == 2:
            raise UserError("rank 2 cannot")
        try:
            while True:
                try:
                    time.sleep(60)
                except Exception:  # as code does that takes any file to be damaged
                    pass
        finally:
            cleaned.append(rank)

    def asked() -> bool:
        late = rank == 3 and time.monotonic() > began + 1
        if fate == "dies" and late:
            os._exit(9)
        if fate == "hangs" and late:
            time.sleep(100)
        return fate == "asked" and late

    with join("gloo", "cpu", 1, 2.0) as workers:
        end = ""
        try:
            workers.once_per_node(work, asked)
        except (RuntimeError, UserError, Preempted) as error:
            end = type(error).__name__
            if fate in ("dies", "hangs"):  # there is no end of the group without rank 3
                Path(os.environ["NOTE"], str(rank)).write_text(json.dumps([end, cleaned]))
                os._exit(7)
        return {"end": end, "cleaned": cleaned, "seconds": time.monotonic() - began}


@pytest.mark.parametrize(
    "fate, end, cleaned",
    [("asked", "Preempted", [[0], [], [2], []]), ("fails", "UserError", [[0], [], [], []])],
)
def test_long_preparation_ends_everywhere_when_it_is_to_end_anywhere(tmp_path, fate, end, cleaned):
    got = values(run_workers(tmp_path, 4, long_preparation, fate, limit=30.0))
    assert [worker["end"] for worker in got] == [end] * 4
    assert [worker["cleaned"] for worker in got] == cleaned
    assert max(worker["seconds"] for worker in got) < 20


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_long_preparation_ends_when_a_worker_is_lost(tmp_path, fate):
    where = {"NOTE": str(tmp_path)}
    outcomes = run_workers(
        tmp_path, 4, long_preparation, fate, limit=20.0, environment=where
    )
    assert [outcome.code for outcome in outcomes] == [7, 7, 7, 9 if fate == "dies" else None]
    notes = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [cleaned for _, cleaned in notes] == [[0], [], [2]]


def test_a_launcher_s_names_are_its_own(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert cluster.launcher_names() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (ours,) = cluster.launcher_names()
    assert [ours] == cluster.launcher_names()
    for _ in range(2):
        (one,), (other,) = in_a_child(names_of_two_children)
        assert one == other != ours
        ours = one


def in_a_child(call: Callable[[], Any]) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(call).result(timeout=30)


def names_of_two_children() -> list[list[str]]:
    return [in_a_child(cluster.launcher_names) for _ in range(2)]


def test_a_launcher_behind_a_wrapper_is_known_by_its_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    found = []
    for file in ("a/none_x/attempt_0/0", "a/none_x/attempt_1/3", "a/none_y/attempt_0/0"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{file}/error.json")
        found.append(cluster.launcher_names()[1])
    assert found[0] == found[1] != found[2]


# --- one process ----------------------------------------------------------------------------------


def alone() -> list[Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    with join(None, "cpu", 1, 30.0) as workers:
        workers.check_replicas(torch.nn.Linear(2, 2))
        place = [workers.rank, workers.size, workers.local_rank, workers.backend, workers.launcher]
        return [*place, workers.device_name, workers.sum(np.array([2.5])).tolist()]


def test_one_process_needs_no_launcher(tmp_path):
    got = values(run_workers(tmp_path, 1, alone))
    assert got == [[0, 1, 0, "gloo", "python ", "cpu", [2.5]]]


# --- replicas -------------------------------------------------------------------------------------


def replicas(different: list[int]) -> str:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with join("gloo", "cpu", 1, 30.0) as workers:
        workers.check_replicas(module)
        if workers.rank in different:
            module[1].running_mean[2] += 1e-6
        try:
            workers.check_replicas(module)
        except RuntimeError as error:
            return str(error)
    return "equal"


@pytest.mark.parametrize(
    "different, answer",
    [([], "equal"), ([1], "ranks [1]"), ([1, 2], "ranks [1, 2]"), ([0], "ranks [1, 2]")],
)
def test_replicas_that_differ_are_named_to_all(tmp_path, different, answer):
    for told in values(run_workers(tmp_path, 3, replicas, different)):
        assert answer in told


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checksum_sees_each_bit_of_parameters_and_buffers(kind):
    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        built = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).to(kind)
        return built.to(memory_format=torch.channels_last)

    reference = checksum(module())
    assert checksum(module()) == reference and 0 <= reference < 2**32
    for name in module().state_dict():
        changed = module()
        with torch.no_grad():
            changed.state_dict()[name].view(-1)[-1:].add_(1)
        assert checksum(changed) != reference, name


# --- threads --------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)


@pytest.mark.parametrize("workers, threads", [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_workers_share_the_cores_evenly(cores, workers, threads):
    assert cluster._threads(None, workers) == threads


def test_what_was_asked_for_wins(cores, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cluster._threads(7, 2) == 7


@pytest.mark.parametrize("launcher", [True, False])
def test_the_user_s_environment_wins_over_the_even_part(cores, monkeypatch, launcher):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cluster._threads(None, 2) == 5  # PyTorch has read the variable at its start


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a process with an environment; all are killed at the end."""
    processes = []

    def started(environment: dict[str, str]) -> int:
        processes.append(
            subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        )  # fmt: skip
        processes[-1].stdout.readline()  # it runs: the environment is its own by now
        return processes[-1].pid

    yield started
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "environment, threads",
    [({}, 4), ({"OMP_NUM_THREADS": "1"}, 5), ({"X_OMP_NUM_THREADS": "1"}, 4)],
)
def test_a_one_that_torchrun_set_is_not_the_user_s(cores, monkeypatch, start, environment, threads):
    """torchrun sets OMP_NUM_THREADS=1 for its workers where its own environment has none."""
    launcher = start(environment)
    monkeypatch.setattr(os, "getppid", lambda: launcher)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cluster._threads(None, 2) == threads


# --- set-ups that cannot work ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend, device, parts",
    [(None, "cuda", ["device", "--device cpu"]), ("nccl", None, ["nccl", "--backend gloo"])],
)
def test_a_set_up_that_cannot_work_is_refused(monkeypatch, backend, device, parts):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as raised:
        cluster._backend(backend, cluster._device_kind(device))
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "devices, named",
    [
        (["a"], None),
        (["a", "b", "c"], None),
        (["a", "a"], ["ranks 0 and 1 "]),
        (["a", "b", "a", "c", "b", "a"], ["ranks 0 and 2 and 5,", "ranks 1 and 4 "]),
    ],
)
def test_two_workers_on_one_gpu_are_named(devices, named):
    if named is None:
        return cluster.refuse_shared(devices)
    with pytest.raises(UserError) as raised:
        cluster.refuse_shared(devices)
    for part in [*named, "--backend gloo", "CUDA_VISIBLE_DEVICES"]:
        assert part in str(raised.value)


def joined_with(devices: list[str]) -> str:
    """Joins with GPUs as told, and with gloo in NCCL's place; the refusal, or how many there are.

    As with CUDA_VISIBLE_DEVICES set for each worker, every one sees a single GPU.
    """
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    cluster._device_id = lambda device: devices[int(os.environ["RANK"])]
    make = cluster.dist.init_process_group
    cluster.dist.init_process_group = lambda backend, **options: make("gloo", **options)
    try:
        with join("nccl", "cuda", 1, 30.0) as workers:
            return f"{workers.size} on {workers.device}"
    except UserError as error:
        return str(error)


def test_nccl_takes_one_visible_gpu_per_worker_unless_it_is_the_same_one(tmp_path):
    got = values(run_workers(tmp_path / "own", 3, joined_with, ["a", "b", "c"]))
    assert got == ["3 on cuda:0"] * 3
    got = values(run_workers(tmp_path / "shared", 3, joined_with, ["a", "b", "b"]))
    assert all("ranks 1 and 2 have the same GPU" in told for told in got), got


def test_gpus_are_shared_over_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cluster._backend("gloo", cluster._device_kind(None)) == "gloo"
