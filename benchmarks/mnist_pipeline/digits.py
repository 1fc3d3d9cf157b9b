"""The MNIST example's network, on noise of the digits' shape."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "mnist_pipeline"))
from model import Network  # pyright: ignore[reportMissingImports]


def data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(rows, 1, 28, 28, generator=random)
    return images, torch.randint(0, 10, (rows,), generator=random)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for name in ("conv1", "conv2", "hidden", "head")}


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """conv1 alone costs as much as the others."""
    first, *others = blocks(model).values()
    return first, nn.Sequential(*others)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.001)


TASK = Task(
    make=Network,
    data=data,
    optimizer=adamw,
    rows=40,
    micro_batches=10,
    updates=10,
    blocks=blocks,
    halves=halves,
    loss=nn.functional.cross_entropy,
)
