"""The ResNet-20 of examples/resnet_training as a task, on noise."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples" / "resnet_training"))
from models import ResNet  # pyright: ignore[reportMissingImports]

CLASSES = 10


class Net(nn.Module):
    """Its parts, one after another; the first layers are one part, and so are the last ones."""

    def __init__(self) -> None:
        super().__init__()
        net = ResNet("resnet20", CLASSES, 1, nn.BatchNorm2d)
        self.stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU())
        self.layer1, self.layer2, self.layer3 = net.layer1, net.layer2, net.layer3
        self.head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = images
        for part in self.children():
            x = part(x)
        return x, nn.functional.cross_entropy(x, labels)


def data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(rows, 1, 28, 28, generator=random)
    return images, torch.randint(0, CLASSES, (rows,), generator=random)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_children())


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The cut that makes both cost about the same."""
    parts = list(model.children())
    return nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


TASK = Task(
    make=Net,
    data=data,
    optimizer=sgd,
    rows=16,
    micro_batches=16,
    updates=2,
    blocks=blocks,
    halves=halves,
    loss=nn.functional.cross_entropy,
)
