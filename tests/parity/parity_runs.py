"""Trains a model twice: through an executor, and in plain PyTorch with the same accumulation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import parity_models
import torch
from torch import Tensor, nn

import poptorch

ACCUMULATION, ROWS = 8, 2  # micro-batches of two rows, eight to a weight update

# The four parts of a model over stages and ipus.
LAYOUTS: dict[str, Callable[[], Any]] = {
    "two stages": lambda: poptorch.PipelinedExecution(["a", "b"], ["c", "d"]),
    "four stages": lambda: poptorch.PipelinedExecution("a", "b", "c", "d"),
    "sharded": lambda: poptorch.ShardedExecution("a", "b", "c", "d"),
    "wrapped around": lambda: poptorch.PipelinedExecution("a", "b", "c", poptorch.Stage("d").ipu(0)),
    "sharded, there and back": lambda: poptorch.ShardedExecution(
        *(poptorch.Stage(block).ipu(ipu) for block, ipu in zip("abcd", (0, 1, 0, 1), strict=True))
    ),
}


@dataclass
class Trained:
    """What a training leaves: the loss of every micro-batch in order, and parameters and buffers."""

    losses: Tensor
    weights: dict[str, Tensor]

    def differs_from(self, other: "Trained") -> list[str]:
        """The names of what is not equal, bit by bit."""
        found = [] if torch.equal(self.losses, other.losses) else ["losses"]
        assert self.weights.keys() == other.weights.keys()
        return found + [
            name for name, value in self.weights.items() if not torch.equal(value, other.weights[name])
        ]


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def batches(model: Any, updates: int, rows: int = ACCUMULATION * ROWS) -> list[list[Tensor]]:
    """The rows of every weight update, which begin 16 bytes after a multiple of 64: no bit may depend on that."""
    torch.manual_seed(1)
    return [[shifted(value) for value in model.data(rows)] for _ in range(updates)]


def shifted(value: Tensor) -> Tensor:
    """A copy that begins 16 bytes after a multiple of 64."""
    skipped = 16 // value.element_size()
    room = value.new_empty(skipped + value.numel())
    return room[skipped:].view_as(value).copy_(value)


def cut(size: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield `size` rows of each tensor at a time, as an executor reads them: contiguous copies at 64 bytes.

    A slice lies where its rows lie, and on some processors the bits of a product depend on that.
    """
    for rows in zip(*(value.split(size) for value in values), strict=True):
        yield tuple(value.clone(memory_format=torch.contiguous_format) for value in rows)


def options(
    strategy: Any = None, accumulation: int = ACCUMULATION, iterations: int = 1, replicas: int = 1
) -> poptorch.Options:
    """Options that return the loss of every micro-batch."""
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas).randomSeed(7)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    options.showCompilationProgressBar(False)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    return options


def trained(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], Any],
    strategy: Any = None,
    updates: int = 20,
    iterations: int = 2,
    **more: int,
) -> Trained:
    """Train through an executor, `iterations` weight updates a call."""
    user = made(model)
    data = batches(user, updates)
    if strategy is not None:
        parity_models.annotated(user)
    executor = poptorch.trainingModel(
        user, options(strategy, iterations=iterations, **more), optimizer(user.parameters())
    )
    losses = []
    for first in range(0, updates, iterations):
        call = [torch.cat(values) for values in zip(*data[first : first + iterations], strict=True)]
        losses.append(executor(*call)[1].reshape(-1))
    executor.destroy()
    return Trained(
        torch.cat(losses), {name: value.detach().clone() for name, value in user.state_dict().items()}
    )


def loss_of(outputs: Any) -> Tensor:
    """Return the only output, or of several the scalar, which is the last one if none is."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return next((value for value in outputs if value.dim() == 0), outputs[-1])


def plain_update(model: nn.Module, optimizer: Any, micro_batches: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Make one weight update in plain PyTorch, by the mean of the gradients. Return the losses of the micro-batches."""
    losses = []
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = loss_of(model(*micro_batch))
            loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(losses)
    optimizer.step()
    return losses


def differing(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers whose bits differ."""
    others = plain.state_dict()
    return [name for name, value in ours.state_dict().items() if not torch.equal(value, others[name])]


def assert_trains_as_plain_pytorch(
    make: Any,
    optimizer: Callable[[Any], Any],
    *rows: Tensor,
    strategy: Any = None,
    accumulation: int = ACCUMULATION,
    updates: int = 1,
) -> None:
    """Assert that one call of an executor has the bits of plain PyTorch: losses, parameters and buffers.

    rows: each input, of updates * accumulation micro-batches; by default those of `make.data`
    """
    torch.manual_seed(1)
    rows = rows or make.data(updates * accumulation * ROWS)
    ours, plain = made(make), made(make)
    if strategy is None:
        poptorch.removeBlocks(ours)
    own = options(strategy, accumulation, updates)
    losses = loss_of(poptorch.trainingModel(ours, own, optimizer(ours.parameters()))(*rows)).reshape(-1)
    step, size = optimizer(plain.parameters()), len(rows[0]) // updates
    expected = []
    for update in cut(size, *rows):
        expected += plain_update(plain, step, cut(size // accumulation, *update))
    assert torch.equal(losses, torch.stack(expected))
    assert differing(ours, plain) == []


def plain(model: Callable[[], nn.Module], optimizer: Callable[[Any], Any], updates: int = 20) -> Trained:
    """Train in plain PyTorch: gradients of the micro-batches are added up, then divided by their number."""
    user = made(model)
    step, losses = optimizer(user.parameters()), []
    for rows in batches(user, updates):
        losses += plain_update(user, step, cut(ROWS, *rows))
    return Trained(
        torch.stack(losses), {name: value.detach().clone() for name, value in user.state_dict().items()}
    )
