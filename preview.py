"""What a run would do, without training: the answer to --dry-run."""

from __future__ import annotations

from dataclasses import replace

import yaml

from balancer import Balancer
from cluster import Workers
from configs.command_line import Launch, run_folder
from configs.schema import Config, to_mapping
from data.sources import outline
from recorder import CONTINUES, NEW, REPLACES, RunFolder
from schedule import learning_rate, warm_up_rates
from workload import (
    build_balancer,
    build_module,
    check_steps,
    count_parameters,
    gradient_bytes,
    replayed,
)

_FOUND = {
    NEW: "a new run",
    CONTINUES: "holds an unfinished run, which goes on",
    REPLACES: "what it holds is deleted",
}


def preview(launch: Launch, workers: Workers) -> str:
    """The resolved config and what follows from it; needs the data only where nothing else tells.

    All workers must call it together. Raises UserError where the run could not start.
    """
    folder = RunFolder(run_folder(launch))
    arguments = (launch.config, workers.size, launch.resume, launch.overwrite)
    found, batch_size = workers.once(lambda: (folder.look(*arguments), folder.batch_size))
    config = replace(launch.config, batch_size=batch_size)
    data = outline(config.data, config.seed, workers.once_per_node)
    check_steps(config, data.train_samples, workers.size)
    replay = replayed(config, workers)
    balancer = build_balancer(config, data.train_samples, workers, workers.device, replay)
    module = build_module(config, data.classes, data.image_size)
    devices = workers.gather_json(workers.device_name)
    lines = [
        yaml.safe_dump(to_mapping(config), sort_keys=False, default_flow_style=None).rstrip(),
        "---",
        f"run folder: {folder.path} ({_FOUND[found]})",
        f"model: {config.model.name}, {count_parameters(module):,} parameters",
        f"workers: {workers.size} ({workers.backend}): {', '.join(devices)}",
        f"steps per epoch: {len(balancer.sampler)}, {data.train_samples:,} samples"
        + _last_batch(balancer, config),
        f"first plan: batch sizes {_first_plan(balancer, config)}",
        f"all-reduce: {gradient_bytes(module):,} bytes per step and worker",
        *_rates(config, len(balancer.sampler)),
        "dry run: nothing was trained or recorded",
    ]
    return "\n".join(lines)


def _last_batch(balancer: Balancer, config: Config) -> str:
    if balancer.plan.left_out:
        return f" (a last batch of {balancer.plan.left_out} is too small and left out)"
    last = balancer.plan.batch_sizes[-1]
    return "" if last.sum() == config.batch_size else f" (last batch: {_numbers(last)})"


def _first_plan(balancer: Balancer, config: Config) -> str:
    if config.partition.replay is not None:
        return f"of {config.partition.replay}"
    return _numbers(balancer.partitioner.batch_sizes)


def _rates(config: Config, steps: int) -> list[str]:
    """The learning rates: each step's of the warm-up, and each epoch's first one."""
    warm_up = warm_up_rates(config, steps)
    epochs = [learning_rate(config, epoch, 0, steps) for epoch in range(config.epochs)]
    lines = ["learning rate by step of the warm-up:", *_in_tens(warm_up)] if warm_up else []
    return [*lines, "learning rate by epoch, its first step:", *_in_tens(epochs)]


def _in_tens(rates: list[float]) -> list[str]:
    """Ten rates a line, after the number (from 0) of its first."""
    texts = [f"{rate:.6g}" for rate in rates]
    width = len(str(len(texts)))
    return [
        f"  {start:>{width}}: {' '.join(texts[start : start + 10])}"
        for start in range(0, len(texts), 10)
    ]


def _numbers(values: object) -> str:
    return " ".join(map(str, values))
