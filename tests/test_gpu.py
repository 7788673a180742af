"""Checks that need CUDA: run by `make test-gpu`, left out of `make test`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_trainer, run_workers, values
from test_balancer import backward, exchanged
from test_interruption import broken
from test_resume import interrupt
from torch import nn
from training import launch
from training import train as train_shortly

from balancer import Balancer
from cluster import join

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(600),
]

DATA = ["data.name=synthetic", "data.train_samples=2048", "data.test_samples=300"]


def train(folder: Path, workers: int, *arguments: str) -> list[dict]:
    """Trains through the command line and returns the epochs' records."""
    argv = [*DATA, "--output", str(folder / "runs"), *arguments]
    values(run_workers(folder, workers, run_trainer, *argv, limit=500))
    (path,) = (folder / "runs").rglob("epochs.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nccl_with_one_rank_per_gpu(tmp_path):
    workers = torch.cuda.device_count()
    records = train(tmp_path, workers, "--config", "demo", "stragglers=[]", "backend=nccl",
                    "device=cuda", "epochs=2")  # fmt: skip
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_more_nccl_ranks_than_gpus_is_an_early_error(tmp_path):
    workers = torch.cuda.device_count() + 1
    argv = ["--config", "demo", "backend=nccl", "device=cuda", "--output", str(tmp_path / "runs")]
    for outcome in run_workers(tmp_path, workers, run_trainer, *argv, limit=60):
        assert outcome.code == 2 and "--backend gloo" in outcome.output


def busy_times(exchange_name: str, sleeps: list[float]) -> dict[str, list[float]]:
    with join("gloo", "cuda", 1, 60.0) as workers:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        balancer = Balancer(12 * 128, 128, "equal", device=workers.device, peers=workers)
        model = exchanged(balancer, module.to(workers.device), exchange_name)
        balancer.before_ready = lambda: balancer.clock.sleep(sleeps[workers.rank])
        inputs = torch.randn(64, 512, device=workers.device)
        labels = torch.randint(0, 10, (64,), device=workers.device)
        for _ in balancer.steps(balancer.sampler, 0):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            balancer.clock.mark("forward")
            backward(balancer, model, loss, exchange_name)
        times = balancer.step_times()
        return {name: getattr(times, name)[4:].tolist() for name in ("busy", "wait", "delay")}


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
@pytest.mark.parametrize("delayed", [0, 1])
def test_event_times_hold_a_delay_where_it_belongs(tmp_path, exchange, delayed):
    """Two gloo ranks share one GPU, one of them sleeps: its busy time alone is longer."""
    sleeps = [0.0, 0.0]
    sleeps[delayed] = 0.2
    got = values(run_workers(tmp_path, 2, busy_times, exchange, sleeps, limit=150))
    slow, fast = got[delayed], got[1 - delayed]
    assert min(slow["busy"]) >= 0.199 and np.median(slow["busy"]) < 0.3
    assert np.median(fast["busy"]) < 0.1 and np.median(fast["wait"]) > 0.1


def test_two_gloo_ranks_share_one_gpu_and_are_balanced(tmp_path):
    rule = "stragglers=[{ranks: [1], kind: slowdown, factor: 3}]"
    records = train(tmp_path, 2, "--config", "demo", "device=cuda", "epochs=4", rule)
    assert records[-1]["batch_sizes"][1] < records[0]["batch_sizes"][1]


@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_one_gpu_follows_the_cpu(tmp_path, exchange):
    common = ["--config", "demo", "stragglers=[]", "precision=fp64", "epochs=2",
              f"exchange={exchange}"]  # fmt: skip
    cpu = train(tmp_path / "cpu", 1, *common)
    gpu = train(tmp_path / "gpu", 2, *common, "device=cuda", "backend=gloo")
    for before, after in zip(cpu, gpu):
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-6)


def test_bf16_and_channels_last(tmp_path):
    records = train(tmp_path, 1, "--config", "resnet20-low", "stragglers=[]", "precision=bf16",
                    "memory_format=channels-last", "epochs=3", "device=cuda")  # fmt: skip
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_one_epoch_of_resnet50(tmp_path):
    (record,) = train(tmp_path, 1, "--config", "resnet50-low", "stragglers=[]", "epochs=1",
                      "device=cuda")  # fmt: skip
    assert np.isfinite(record["train_loss"]) and record["test_samples"] == 300


def test_a_run_goes_on_on_another_device_from_inside_an_epoch(tmp_path):
    """Saved on the GPU, continued on the CPU, and the other way round."""
    options = {"model__name": "resnet20", "precision": "fp32", "checkpoint__every": 2}
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        folder = tmp_path / first
        interrupt(folder, 1, "save_checkpoint", 4, **options, device=first, limit=200.0)
        run = train_shortly(folder, 1, **options, device=second, limit=200.0)
        assert run.column("epoch") == [0, 1, 2] and np.isfinite(run.flat()).all()


def test_a_gradient_that_is_not_finite_is_named_on_a_gpu(tmp_path):
    outcomes = launch(
        tmp_path, 1, target=broken, before=("gradient", "0", 2 + 4 + 3), device="cuda", limit=200.0
    )
    assert outcomes[0].code == 2
    assert "epoch 1, step 2 (both from 0): the gradient of rank 0" in outcomes[0].output
