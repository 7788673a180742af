"""From a model's name to the model, and a check that it takes the images it will be given."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

from configs.errors import UserError
from models import small

OWN: dict[str, Callable[[int], nn.Module]] = {
    "lenet": small.lenet,
    "resnet20": small.resnet20,
    "resnet50": small.resnet50,
    "vgg16": small.vgg16,
}
PREFIX = "torchvision/"


def names() -> list[str]:
    """All names that `build` knows: own models first, then torchvision's."""
    return [*OWN, *(PREFIX + name for name in _torchvision_names())]


def build(name: str, classes: int, image_size: int = 32) -> nn.Module:
    """A new model: float images [b, 3, image_size, image_size] -> logits [b, classes].

    Weights are drawn from PyTorch's default generator: seed it first. Raises UserError for an
    unknown name or an image size that the model cannot take.
    """
    if name in OWN:
        model = OWN[name](classes)
    elif name.startswith(PREFIX) and name.removeprefix(PREFIX) in _torchvision_names():
        model = _build_torchvision(name, classes, image_size)
    else:
        raise UserError(_unknown(name))
    _check_image_size(model, name, classes, image_size)
    return model


def check_single_sample(model: nn.Module, name: str, image_size: int) -> None:
    """Raises UserError for a model that cannot be trained on one sample at a time.

    BatchNorm has nothing to normalise over where one sample's layer is down to one pixel.
    """
    try:
        _forward_without_data(model, 1, image_size, training=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"partition.min_batch: 1, but {name} cannot be trained on a single image of "
            f"{image_size}x{image_size} pixels ({reason}): set partition.min_batch to 2"
        ) from error


def _torchvision_names() -> list[str]:
    """torchvision's classification models (not its detection, video or quantized ones)."""
    return torchvision.models.list_models(module=torchvision.models)


def _build_torchvision(name: str, classes: int, image_size: int) -> nn.Module:
    short = name.removeprefix(PREFIX)
    arguments: dict[str, Any] = {}
    if short in ("googlenet", "inception_v3"):
        # Auxiliary heads would add outputs in training that no other model has.
        arguments = {"aux_logits": False, "init_weights": True}
    elif short.startswith("vit_"):
        arguments = {"image_size": image_size}
    elif short.startswith("maxvit_"):
        arguments = {"input_size": (image_size, image_size)}
    try:
        return torchvision.models.get_model(short, weights=None, num_classes=classes, **arguments)
    except (AssertionError, ValueError) as error:
        raise UserError(_unsuitable(name, image_size, error)) from error


def _check_image_size(model: nn.Module, name: str, classes: int, image_size: int) -> None:
    """One forward pass without data or arithmetic, to fail here and not in the first step."""
    try:
        logits = _forward_without_data(model, 2, image_size, training=False)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise UserError(_unsuitable(name, image_size, error)) from error
    if logits.shape != (2, classes):
        raise UserError(f"model.name: {name} returns {tuple(logits.shape)}, not logits per class")


def _forward_without_data(
    model: nn.Module, samples: int, image_size: int, training: bool
) -> torch.Tensor:
    # With parameters and buffers replaced in advance, the copy takes no memory.
    tensors = [*model.parameters(), *model.buffers()]
    without_data: dict[int, Any] = {id(tensor): tensor.to("meta") for tensor in tensors}
    probe = copy.deepcopy(model, without_data).train(training)
    with torch.no_grad():
        return probe(torch.empty(samples, 3, image_size, image_size, device="meta"))


def _unsuitable(name: str, image_size: int, error: Exception) -> str:
    wanted = "32" if name == "lenet" else "a size it takes"
    reason = " ".join(str(error).split())[:120]
    return (
        f"model {name} does not take images of {image_size}x{image_size} pixels: "
        f"set data.image_size to {wanted}, or choose another model.name ({reason})"
    )


def _unknown(name: str) -> str:
    own = ", ".join(OWN)
    known = _torchvision_names()
    near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=5, cutoff=0.0)
    nearest = ", ".join(PREFIX + other for other in near)
    return (
        f"model.name: unknown model {name!r}; own models: {own}; "
        f"the nearest of {len(known)} torchvision models: {nearest}"
    )
