"""Models: sizes, shapes, initialisation, and what is refused."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import models
from configs.errors import UserError
from models import small

OWN = ("lenet", "resnet20", "resnet50", "vgg16")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lenet", 62_006), ("resnet20", 269_722), ("resnet50", 23_520_842), ("vgg16", 14_728_266)],
)
def test_number_of_parameters(name: str, expected: int) -> None:
    assert parameters(models.build(name, 10)) == expected


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 32) for name in OWN),
        ("resnet20", 48),
        ("vgg16", 64),
        ("torchvision/resnet18", 32),
        ("torchvision/mobilenet_v3_small", 32),
        ("torchvision/vit_b_32", 64),
        ("torchvision/googlenet", 64),
        ("torchvision/inception_v3", 96),
    ],
)
def test_forward_and_backward(name: str, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = models.build(name, 7, image_size=size)
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.square().mean().backward()
    # A parameter without gradient would hang or fail DistributedDataParallel.
    without = [key for key, value in model.named_parameters() if value.grad is None]
    assert without == []
    assert all(parameter.is_leaf and not parameter.is_meta for parameter in model.parameters())


def test_lenet_has_no_batch_norm() -> None:
    kinds = {type(module) for module in models.build("lenet", 10).modules()}
    assert not any("Norm" in kind.__name__ for kind in kinds)


def test_resnet50_keeps_resolution_in_its_stem() -> None:
    model = models.build("resnet50", 10)
    sizes = {}
    for name in ("layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: sizes.update({name: tuple(output.shape[1:])})
        )
    model(torch.zeros(2, 3, 32, 32))
    assert sizes == {
        "layer1": (256, 32, 32),
        "layer2": (512, 16, 16),
        "layer3": (1024, 8, 8),
        "layer4": (2048, 4, 4),
    }


def test_vgg16_layers() -> None:
    layers = list(models.build("vgg16", 10).modules())
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 13
    assert all(layer.bias is not None and not layer.bias.any() for layer in convolutions)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in layers) == 13
    assert [layer.in_features for layer in layers if isinstance(layer, nn.Linear)] == [512]


def test_zero_pad_shortcut() -> None:
    x = torch.randn(2, 3, 5, 4)
    y = small.ZeroPadShortcut(2)(x)
    assert y.shape == (2, 5, 3, 2)
    for row in range(3):
        for column in range(2):
            assert torch.equal(y[:, :3, row, column], x[:, :, 2 * row, 2 * column])
    assert not y[:, 3:].any()


@pytest.mark.parametrize("name", ["resnet20", "resnet50", "vgg16"])
def test_convolutions_start_as_he_et_al(name: str) -> None:
    for module in models.build(name, 10).modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach()
            fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
            # Five standard errors of a standard deviation measured on so many values.
            tolerance = 5 / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=tolerance)


def test_weights_follow_the_seed_and_the_check_draws_nothing() -> None:
    torch.manual_seed(3)
    first = models.build("lenet", 10)
    after = torch.rand(4)
    torch.manual_seed(3)
    second = small.lenet(10)
    assert torch.equal(after, torch.rand(4))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "size", "fits"),
    [
        ("lenet", 32, True),
        ("resnet20", 32, True),
        ("resnet50", 32, True),
        ("vgg16", 32, True),
        ("torchvision/resnet18", 64, True),
        ("torchvision/resnet18", 32, False),
        ("resnet50", 8, False),
    ],
)
def test_models_that_cannot_be_trained_on_a_single_sample(name: str, size: int, fits: bool) -> None:
    model = models.build(name, 10, image_size=size)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    image = torch.randn(1, 3, size, size)
    if fits:
        models.check_single_sample(model, name, size)
    else:
        with pytest.raises(UserError) as caught:
            models.check_single_sample(model, name, size)
        for part in ("partition.min_batch", name, f"{size}x{size}"):
            assert part in str(caught.value)
    # The check has left the model alone, and says what training itself does.
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    if fits:
        model.train()(image)
    else:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model.train()(image)


def test_names() -> None:
    names = models.names()
    assert names[:4] == list(OWN)
    assert "torchvision/resnet18" in names
    assert not any("fasterrcnn" in name or "quantized" in name for name in names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name", ["resnet5", "", "torchvision/resnt18", "torchvision/fasterrcnn_resnet50_fpn"]
)
def test_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(UserError) as caught:
        models.build(name, 10)
    message = str(caught.value)
    assert "\n" not in message
    assert "model.name" in message
    assert all(own in message for own in OWN)
    assert message.count("torchvision/") - name.count("torchvision/") == 5


def test_near_matches_come_first() -> None:
    with pytest.raises(UserError, match="models: torchvision/resnet18,"):
        models.build("torchvision/resnt18", 10)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("lenet", 28),
        ("lenet", 64),
        ("vgg16", 16),
        ("torchvision/alexnet", 32),
        ("torchvision/inception_v3", 32),
        ("torchvision/vit_b_16", 40),
        ("torchvision/maxvit_t", 32),
    ],
)
def test_unsuitable_image_size(name: str, size: int) -> None:
    with pytest.raises(UserError) as caught:
        models.build(name, 10, image_size=size)
    message = str(caught.value)
    assert "\n" not in message
    assert name in message and f"{size}x{size}" in message and "data.image_size" in message
