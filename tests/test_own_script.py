"""The balancer in scripts that are not this project's: the examples, and scaled half precision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_workers, values
from torch import nn

from balancer import Balancer, wrap
from cluster import join

ROOT = Path(__file__).resolve().parent.parent


def seconds_of_epochs(*program: str) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", *program]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(lines) == 5 and "Warning" not in done.stderr
    return [float(line.split()[2]) for line in lines]


def test_the_balanced_example_is_faster_than_the_plain_one():
    """Worker 1 is four times slower: of 128 samples of 0.4 ms, 51 are left at the optimum."""
    examples = ROOT / "examples"
    # See balancer.py: what plain DDP imports too late may abort a process at its exit.
    code = "import runpy, sys, torch._dynamo; runpy.run_path(sys.argv[1], run_name='__main__')"
    plain = ("--no-python", sys.executable, "-c", code, str(examples / "plain_script.py"))
    balanced = str(examples / "own_script.py")
    assert min(seconds_of_epochs(balanced)) < 0.8 * min(seconds_of_epochs(*plain))


def scaled_training(kind: str) -> dict:
    """bf16 autocast and a gradient scaler whose first scale is too large for fp16's range."""
    with join("gloo", "cpu", 1, 30.0) as workers:
        torch.manual_seed(workers.rank)
        x, y = torch.randn(60, 8), torch.randint(0, 3, (60,))
        balancer = Balancer(60, 12, "static", [1, 2], device=workers.device)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        model = wrap(module)
        balancer.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if kind == "too large" else 64.0)
        for index in balancer.steps(balancer.sampler, 0):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x[index]).float(), y[index])
            scaler.scale(loss * 4).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        return {"weights": weights.tolist(), "scale": scaler.get_scale()}


@pytest.mark.parametrize("kind", ["fitting", "too large"])
def test_autocast_and_gradient_scaling_stay_the_same_on_all_workers(tmp_path, kind):
    first, second = values(run_workers(tmp_path, 2, scaled_training, kind))
    assert first == second
    assert torch.tensor(first["weights"]).isfinite().all()
    assert first["scale"] < 2.0**127


def test_the_two_modules_need_nothing_else_of_the_project():
    others = ["trainer", "configs", "cluster", "recorder", "reader", "checkpoint", "storage",
              "data", "models", "stragglers", "plots"]  # fmt: skip
    code = f"import balancer, sys; print(sorted(m for m in sys.modules if m in {others}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_readme_shows_the_real_difference():
    block = (ROOT / "README.md").read_text().split("```diff\n")[1].split("```")[0].splitlines()
    plain, own = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("plain_script.py", "own_script.py")
    )
    removed = [line[1:] for line in block if line.startswith("-")]
    added = [line[1:] for line in block if line.startswith("+")]
    docstring = plain.index('"""', 1) + 1
    assert [line for line in plain[docstring:] if line and line not in own] == removed
    docstring = own.index('"""', 1) + 1
    assert [line for line in own[docstring:] if line and line not in plain] == added
