"""The models that can be trained, by name: `build(name, classes, image_size)` and `names()`.

Own models are for small images (32 px): `lenet`, `resnet20`, `resnet50` and `vgg16`. Any
classification model of torchvision can be had as it is, by `torchvision/NAME`.
"""

from __future__ import annotations

from models.registry import build, check_single_sample, names

__all__ = ["build", "check_single_sample", "names"]
