"""Models for images of about 32 x 32 pixels, built from torchvision's parts where it has them.

All take a float tensor [b, 3, H, W] and return logits [b, classes].
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vgg import cfgs, make_layers


def resnet50(classes: int) -> nn.Module:
    """ResNet50 (He et al. 2016, table 1) with the stem that is usual for CIFAR.

    The 7 x 7 convolution of stride 2 and the max pool would leave 1 x 1 pixel of a 32 x 32 image
    for the last stage, so a 3 x 3 convolution of stride 1 takes their place.
    23,520,842 parameters at 10 classes.
    """
    model = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    _initialise(model.conv1)
    return model


def vgg16(classes: int) -> nn.Module:
    """VGG16 (Simonyan & Zisserman 2015, column D) with BatchNorm and a single linear layer.

    Five max pools leave one pixel of 512 features of a 32 x 32 image; larger images are averaged.
    14,728,266 parameters at 10 classes.
    """
    classifier = nn.Linear(512, classes)
    model = nn.Sequential(
        OrderedDict(
            features=make_layers(cfgs["D"], batch_norm=True),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
    _initialise(model)
    nn.init.normal_(classifier.weight, 0.0, 0.01)
    nn.init.zeros_(classifier.bias)
    return model


def resnet20(classes: int) -> nn.Module:
    """ResNet20 for CIFAR: He et al. 2016, section 4.2 with n = 3 and shortcuts of option A.

    269,722 parameters at 10 classes.
    """
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(16)),
        ("relu", nn.ReLU(inplace=True)),
    ]
    for number, (channels, filters) in enumerate(((16, 16), (16, 32), (32, 64)), start=1):
        layers.append((f"layer{number}", _stage(channels, filters, blocks=3)))
    layers += [
        ("avgpool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(64, classes)),
    ]
    model = nn.Sequential(OrderedDict(layers))
    _initialise(model)
    return model


def lenet(classes: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) for colour images of 32 px, with ReLU and max pooling.

    It has no BatchNorm, so its gradient is a plain mean over samples. Takes 32 x 32 pixels only.
    62,006 parameters at 10 classes.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, kernel_size=5),
            relu1=nn.ReLU(inplace=True),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, kernel_size=5),
            relu2=nn.ReLU(inplace=True),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * 5 * 5, 120),
            relu3=nn.ReLU(inplace=True),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(inplace=True),
            fc3=nn.Linear(84, classes),
        )
    )


class ZeroPadShortcut(nn.Module):
    """Shortcut without parameters: every second pixel, and zeros for the added channels.

    Option A of He et al. 2016, section 3.3. [b, C, H, W] -> [b, C + added, ceil(H/2), ceil(W/2)].
    """

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))


def _stage(channels: int, filters: int, blocks: int) -> nn.Sequential:
    """Basic blocks of one width; the first halves the image if the width grows."""
    if filters == channels:
        first = BasicBlock(channels, filters)
    else:
        shortcut = ZeroPadShortcut(filters - channels)
        first = BasicBlock(channels, filters, stride=2, downsample=shortcut)
    return nn.Sequential(first, *(BasicBlock(filters, filters) for _ in range(blocks - 1)))


def _initialise(model: nn.Module) -> None:
    """He et al. 2015 for convolutions, as torchvision's ResNet and VGG do; biases start at 0.

    BatchNorm and linear layers keep PyTorch's defaults.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
