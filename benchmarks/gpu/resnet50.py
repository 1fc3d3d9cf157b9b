"""ResNet-50 on images of 224 x 224 in a thousand classes, in bfloat16 where torch.autocast says so."""

from __future__ import annotations

from dataclasses import replace

import torch
from resnet import TASK  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

CLASSES = 1000


def convolution(channels_in: int, channels: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(channels))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, the last four times as wide, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.narrow = convolution(channels_in, channels, 1)
        self.inner = convolution(channels, channels, 3, stride)
        self.wide = convolution(channels, 4 * channels, 1)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != 4 * channels:
            self.shortcut = convolution(channels_in, 4 * channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.inner(torch.relu(self.narrow(x))))
        return torch.relu(self.wide(inner) + self.shortcut(x))


class ResNet(nn.Module):
    """Four layers of so many bottlenecks each; channels last in memory, as convolutions in bfloat16 want it."""

    def __init__(self, depths: tuple[int, int, int, int], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        channels_in = width
        for number, depth in enumerate(depths):
            channels, blocks = width << number, []
            for position in range(depth):
                blocks.append(Bottleneck(channels_in, channels, 2 if number and not position else 1))
                channels_in = 4 * channels
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES))
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = images.contiguous(memory_format=torch.channels_last)
        # A model is captured on the CPU, wherever it runs: its own tensors say which device's rules hold.
        with torch.autocast(images.device.type, torch.bfloat16):
            for part in self.children():
                x = part(x)
        return (nn.functional.cross_entropy(x.float(), labels),)


def resnet50() -> nn.Module:
    return ResNet((3, 4, 6, 3), 64)


def tiny() -> nn.Module:
    """To try the program."""
    return ResNet((1, 1, 1, 1), 8)


def data(rows: int, random: torch.Generator, size: int = 224) -> tuple[Tensor, Tensor]:
    images = torch.randn(rows, 3, size, size, generator=random)
    return images, torch.randint(0, CLASSES, (rows,), generator=random)


def tiny_data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return data(rows, random, 64)


RESNET: Task = replace(TASK, make=resnet50, data=data, rows=64, micro_batches=8, updates=3)
TINY: Task = replace(RESNET, make=tiny, data=tiny_data, rows=2, updates=1)
