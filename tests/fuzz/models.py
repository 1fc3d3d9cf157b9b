"""Random models: a list of steps, each a construct that programs use, in a block of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import poptorch

WIDTH = 4


@dataclass(frozen=True)
class Step:
    """One block of a model; `other` is an earlier step that it refers to (-1: none)."""

    kind: str
    other: int = -1


Steps = tuple[Step, ...]


class Net(nn.Module):
    """The model of some steps. Every step maps [rows, WIDTH] to [rows, WIDTH]."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        self.norms: Any = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in steps)
        self.batch_norms: Any = nn.ModuleList(nn.BatchNorm1d(WIDTH, momentum=0.25) for _ in steps)
        for i, step in enumerate(steps):
            self.register_buffer(f"mean{i}", torch.zeros(WIDTH))
            if step.kind in ("frozen", "teacher"):
                self.layers[i].requires_grad_(False)
        # The same tensors in places that torch does not know of.
        self.weights = [layer.weight for layer in self.layers]
        self.by_name = {"bias": [layer.bias for layer in self.layers]}
        self.rows = [layer.weight[1] for layer in self.layers]
        self.means = [getattr(self, f"mean{i}") for i in range(len(steps))]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        seen = []
        for i, step in enumerate(self.steps):
            poptorch.Block.start(f"b{i}")
            x = KINDS[step.kind](self, i, step.other, x, seen)
            seen.append(x)
        return functional.mse_loss(x, target)


Kind = Callable[[Net, int, int, Tensor, list[Tensor]], Tensor]
KINDS: dict[str, Kind] = {
    "linear": lambda net, i, other, x, seen: net.layers[i](x),
    "tanh": lambda net, i, other, x, seen: torch.tanh(x),
    "norm": lambda net, i, other, x, seen: net.norms[i](x),
    "batch_norm": lambda net, i, other, x, seen: net.batch_norms[i](x),
    "dropout": lambda net, i, other, x, seen: functional.dropout(net.layers[i](x), 0.25, net.training),
    "skip": lambda net, i, other, x, seen: x + seen[other],
    "by_list": lambda net, i, other, x, seen: functional.linear(x, net.weights[i], net.by_name["bias"][i]),
    "tied": lambda net, i, other, x, seen: functional.linear(x, net.layers[other].weight),
    "tied_by_list": lambda net, i, other, x, seen: functional.linear(
        net.layers[i](x), net.weights[other].t()
    ),
    "view": lambda net, i, other, x, seen: net.layers[i](x) * net.rows[i],
    "detached": lambda net, i, other, x, seen: x * net.layers[other].weight.detach().abs().mean(),
    "frozen": lambda net, i, other, x, seen: net.layers[i](x),
    "function": lambda net, i, other, x, seen: Product.apply(net.layers[i](x), net.weights[i]),
}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


@kind
def in_place(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    x = net.layers[i](x)
    x[:, 0] += 1
    x[:, 1:3].mul_(0.5)
    return x.add_(0.25)


@kind
def buffer(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    mean = getattr(net, f"mean{i}")
    mean.mul_(0.5).add_(x.detach().mean(0))
    return net.layers[i](x) - mean


@kind
def buffer_by_list(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    net.means[i][0] = x.detach().mean()
    return x + net.means[i] * 0.5


@kind
def buffer_by_data(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    mean = getattr(net, f"mean{i}")
    mean.data = mean.data * 0.75 + x.detach().amax(0) * 0.25
    return net.layers[i](x + mean)


@kind
def teacher(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    with torch.no_grad():
        net.layers[i].weight.mul_(0.75).add_(net.norms[i].weight, alpha=0.25)
    return net.norms[i](x) + net.layers[i](x)


@kind
def constants(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    mask = torch.zeros(WIDTH)
    mask[torch.arange(WIDTH) % 2 == 0] = 1
    if bool((mask.sum() > 1).all()):
        x = x * torch.tensor([1.0, 0.5, 2.0, 1.0])
    return torch.cat([x[:, mask > 0], x[:, mask == 0] * mask.sum().item()], 1)


@kind
def writes(net: Net, i: int, other: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    mean = getattr(net, f"mean{i}")
    given = [net.layers[i](x), mean]
    y, now = poptorch.custom_op(given, "Follow", "tests.fuzz", 1, example_outputs=given)
    mean.copy_(now.detach())
    return y


_REFERRING = ("skip", "tied", "tied_by_list", "detached")


class Product(torch.autograd.Function):
    """x @ weight, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def _follow(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    now = mean * 0.5 + x.detach().mean(0) * 0.5
    return x * 2 - now, now


def _follow_back(gradients: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    return [gradients[0] * 2, None]


class _Follow(torch.autograd.Function):
    """What the custom operation is in plain PyTorch."""

    @staticmethod
    def forward(ctx, x, mean):
        return _follow(x, mean)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2, None


poptorch.registerCustomOp("Follow", "tests.fuzz", 1, _Follow.apply, _follow_back)


def random_steps(numbers: random.Random) -> Steps:
    """At least one of the steps has a weight of its own."""
    steps = [Step("linear")]
    for i in range(1, numbers.randint(3, 8)):
        kind = numbers.choice(list(KINDS))
        steps.append(Step(kind, numbers.randrange(i) if kind in _REFERRING else -1))
    return tuple(steps)
