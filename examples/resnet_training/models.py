"""Residual networks, whose parts have torchvision's names, and the loss that trains them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

import poptorch

Norm = Callable[[int], nn.Module]
# Blocks of each stage. Those with three stages are for images of 28 to 32 pixels.
DEPTHS = {
    "resnet8": (1, 1, 1),
    "resnet20": (3, 3, 3),
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
SMALL = ("resnet8", "resnet20")


class Basic(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut around them."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), norm(width)
        self.conv2, self.bn2 = convolution(width, width, 3), norm(width)
        self.downsample = shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(inner)) + self.downsample(x)).relu()


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, and a shortcut around them."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), norm(4 * width)
        self.downsample = shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(x)).relu()
        inner = self.bn2(self.conv2(inner)).relu()
        return (self.bn3(self.conv3(inner)) + self.downsample(x)).relu()


class ResNet(nn.Module):
    """Scores [rows, classes] of images [rows, channels, height, width].

    Args:
        name:  a key of `DEPTHS`
        norm:  makes the normalisation of so many channels
        width: channels of the first stage
        small: images are of 32 pixels or less: the first layer keeps their size
    """

    def __init__(
        self, name: str, classes: int, channels: int, norm: Norm, width: int | None = None, small: bool = True
    ) -> None:
        super().__init__()
        width = width or (16 if name in SMALL else 64)
        block = Bottleneck if name in ("resnet50", "resnet101", "resnet152") else Basic
        self.conv1 = convolution(channels, width, 3) if small else convolution(channels, width, 7, 2)
        self.bn1 = norm(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        inputs = width
        for stage, count in enumerate(DEPTHS[name]):
            blocks = []
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(block(inputs, width << stage, stride, norm))
                inputs = (width << stage) * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        self.reset()

    def reset(self) -> None:
        """First weights; the last norm of each branch begins at 0, so that a block begins as its shortcut."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (Basic, Bottleneck)):
                last = module.bn2 if isinstance(module, Basic) else module.bn3
                if not isinstance(last, nn.Identity):
                    nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in (module for name, module in self.named_children() if name.startswith("layer")):
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), norm(outputs))


class Normalise(nn.Module):
    """Images of bytes, or of fractions of white, to mean 0 and deviation 1 a channel."""

    def __init__(self, mean: list[float], deviation: list[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        dtype = self.mean.dtype
        images = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
        return (images - self.mean) / self.deviation


class Classifier(nn.Module):
    """Scores; with labels also the loss and what makes it up, each a mean over the rows.

    The loss is (1 − ε)·nll(log p, y) − ε·mean(log p), in float32: `cross_entropy(label_smoothing=ε)` in two parts.

    Args:
        smoothing: ε
        first:     what images go through before the network
        casts:     products are computed in float16, weights are float32
    """

    def __init__(self, net: ResNet, smoothing: float, first: nn.Module, casts: bool = False) -> None:
        super().__init__()
        self.first, self.net, self.smoothing, self.casts = first, net, smoothing, casts

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        with poptorch.autocast(self.casts):
            scores = self.net(self.first(images))
        if labels is None:
            return scores
        log_p = scores.float().log_softmax(1)
        classification = (1 - self.smoothing) * nll_loss(log_p, labels)
        smoothing = -self.smoothing * log_p.mean()
        loss = poptorch.identity_loss(classification + smoothing, reduction="none")
        accuracy = (scores.argmax(1) == labels).float().mean()
        return loss, accuracy, classification, smoothing
