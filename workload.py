"""What a config asks to be trained: model, optimizer and balancer, built from it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

import models
from balancer import Balancer, Peers
from cluster import Workers
from configs.errors import UserError
from configs.schema import Config
from reader import batch_sizes_by_epoch

# Under bf16 the weights stay fp32: autocast rounds where it is safe.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels-last": torch.channels_last,
}


def build_module(config: Config, classes: int, image_size: int) -> nn.Module:
    """The model with its seeded initial weights, on the CPU."""
    torch.manual_seed(config.seed)
    module = models.build(config.model.name, classes, image_size)
    least = config.partition.min_batch
    if 1 in ([least] if isinstance(least, int) else least):
        models.check_single_sample(module, config.model.name, image_size)
    return module.to(
        dtype=DTYPES[config.precision], memory_format=MEMORY_FORMATS[config.memory_format]
    )


def build_optimizer(config: Config, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        module.parameters(),
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        nesterov=config.optimizer.nesterov,
        weight_decay=config.optimizer.weight_decay,
    )


def build_balancer(
    config: Config,
    size: int,
    peers: Peers,
    device: torch.device,
    replay: Mapping[int, np.ndarray] | None = None,
) -> Balancer:
    """The config's balancer for `size` training samples; replay: recorded batch sizes by epoch."""
    partition = config.partition
    return Balancer(
        size,
        config.batch_size,
        # Where batch sizes are replayed, nothing is left to decide.
        policy="equal" if partition.policy == "replay" else partition.policy,
        shares=partition.shares,
        min_batch=partition.min_batch,
        max_batch=partition.max_batch,
        min_gain=partition.min_gain,
        every=partition.every,
        gradient_weight=config.gradient_weight,
        seed=config.seed,
        device=device,
        peers=peers,
        replay=replay,
    )


def replayed(config: Config, workers: Workers) -> dict[int, np.ndarray] | None:
    """By epoch, the batch sizes [steps, n] of the run that partition.replay names."""
    path = config.partition.replay
    if path is None:
        return None
    recorded = workers.once(lambda: batch_sizes_by_epoch(path))
    if len(recorded) < config.epochs:
        raise UserError(
            f"partition.replay: {path} has {len(recorded)} epochs, not the {config.epochs} of "
            "this run: lower epochs, or finish that run first"
        )
    return {epoch: np.array(sizes) for epoch, sizes in enumerate(recorded)}


def check_steps(config: Config, size: int, workers: int) -> None:
    """Raises UserError where `size` training samples do not give every worker its minimum once."""
    least = config.partition.min_batch
    needed = workers * least if isinstance(least, int) else sum(least)
    if size < needed:
        raise UserError(
            f"{size} training samples are too few for {workers} workers with "
            f"partition.min_batch={config.partition.min_batch}: {needed} are needed; "
            "start fewer workers or use more data"
        )


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of all gradients: what one all-reduce takes from every worker."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
