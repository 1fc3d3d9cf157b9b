"""A training of a random model: through an executor in some layout, or in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import poptorch

from .layouts import UNSPLIT, Layout, Load, options
from .models import WIDTH, Net, Steps

CALLS = 3


@dataclass
class Run:
    """The losses of all micro-batches, by call, and the state at the end."""

    losses: list[Tensor]
    state: dict[str, Tensor]


def net(steps: Steps) -> Net:
    torch.manual_seed(0)
    return Net(steps)


# Functions of (rows, columns) that return inputs of all kinds of strides.
STRIDES: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": torch.randn,
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "sliced": lambda rows, columns: torch.randn(2 * rows, columns + 3)[::2, 1:-2],
    "expanded": lambda rows, columns: torch.randn(columns).expand(rows, columns),
}


def batches(load: Load) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    make, rows = STRIDES[load.strides], load.rows_of_a_call
    return [(make(rows, WIDTH), torch.randn(rows, WIDTH)) for _ in range(CALLS)]


def optimizer(model: nn.Module, load: Load) -> Any:
    if load.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def executor(steps: Steps, layout: Layout, load: Load) -> poptorch.PoplarExecutor:
    model = net(steps)
    return poptorch.trainingModel(model, options(len(steps), layout, load), optimizer(model, load))


def state_of(trainer: Any) -> dict[str, Tensor]:
    trainer.copyWeightsToHost()
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def trained(steps: Steps, layout: Layout, load: Load) -> Run:
    trainer = executor(steps, layout, load)
    losses = [trainer(*batch).reshape(-1) for batch in batches(load)]
    state = state_of(trainer)
    trainer.destroy()
    return Run(losses, state)


@functools.lru_cache(2)
def unsplit(steps: Steps, load: Load) -> Run:
    """In one piece."""
    return trained(steps, UNSPLIT, load)


@functools.lru_cache(2)
def plain(steps: Steps, load: Load) -> Run:
    """In plain PyTorch; for one replica, and with one thread: with more, torch adds up rows in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _plain(steps, load)
    finally:
        torch.set_num_threads(threads)


def _plain(steps: Steps, load: Load) -> Run:
    model = net(steps)
    step, losses = optimizer(model, load), []
    for batch in batches(load):
        of_call = []
        for update in zip(*(value.split(load.rows * load.accumulation) for value in batch), strict=True):
            step.zero_grad()
            for micro_batch in zip(*(value.split(load.rows) for value in update), strict=True):
                # Contiguous and aligned, as in the engine.
                loss = model(*(value.clone(memory_format=torch.contiguous_format) for value in micro_batch))
                loss.backward()
                of_call.append(loss.detach())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= load.accumulation
            step.step()
        losses.append(torch.stack(of_call))
    return Run(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def differences(one: Run, other: Run) -> list[str]:
    found = [
        f"losses of call {call}: {a.tolist()} and {b.tolist()}"
        for call, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))
        if not _same(a, b)
    ]
    return found + differing(one.state, other.state)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names whose bits differ (a NaN equals itself)."""
    return [name for name in one if not _same(one[name], other[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
