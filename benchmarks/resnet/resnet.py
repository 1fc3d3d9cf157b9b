"""ResNet-18 for images of 64 x 64 in ten classes, written out; and noise of that shape."""

from __future__ import annotations

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

CLASSES = 10


class Residual(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.norm2(self.second(inner)) + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.layer1 = layer(64, 64, stride=1)  # [n, 64, 16, 16]
        self.layer2 = layer(64, 128, stride=2)  # [n, 128, 8, 8]
        self.layer3 = layer(128, 256, stride=2)  # [n, 256, 4, 4]
        self.layer4 = layer(256, 512, stride=2)  # [n, 512, 2, 2]
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = images
        for part in self.children():
            x = part(x)
        return x, nn.functional.cross_entropy(x, labels)


def layer(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Residual(channels_in, channels, stride), Residual(channels, channels, 1))


def data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(rows, 3, 64, 64, generator=random)
    return images, torch.randint(0, CLASSES, (rows,), generator=random)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_children())


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The cut that makes both cost about the same."""
    parts = list(model.children())
    return nn.Sequential(*parts[:3]), nn.Sequential(*parts[3:])


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


TASK = Task(
    make=ResNet18,
    data=data,
    optimizer=sgd,
    rows=8,
    micro_batches=8,
    updates=2,
    blocks=blocks,
    halves=halves,
    loss=nn.functional.cross_entropy,
)
