"""A task: what is trained in a comparison, as a value that every way of training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A model, its data and its batch. The functions must be a module's own, so that a task pickles.

    `forward(*inputs)` of the model returns a tuple whose last element is the loss. An update sums the gradients
    of `micro_batches` and divides them by that number.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], tuple[Tensor, ...]]  # rows -> inputs of forward
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rows: int  # of a micro-batch
    micro_batches: int  # of a weight update
    updates: int  # in a unit of work
    blocks: Callable[[nn.Module], dict[str, nn.Module]]  # in the order of the data
    halves: Callable[[nn.Module], tuple[nn.Module, nn.Module]]  # for two processes: inputs[0] -> output
    loss: Callable[[Tensor, Tensor], Tensor]  # of the second half's output and the last input

    @property
    def update_rows(self) -> int:
        return self.rows * self.micro_batches

    @property
    def unit_rows(self) -> int:
        return self.update_rows * self.updates

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        return self.make().train()

    def inputs(self) -> tuple[Tensor, ...]:
        """A fixed batch for a unit of work, in memory, so that nobody waits for a loader."""
        return self.data(self.unit_rows, torch.Generator().manual_seed(1))

    def batches(self) -> list[tuple[Tensor, ...]]:
        """The inputs of each weight update."""
        return list(zip(*(part.split(self.update_rows) for part in self.inputs()), strict=True))
