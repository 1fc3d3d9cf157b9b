"""One instance of a run with several. Its test trains the same with all replicas in one process."""

import os

import torch
from torch import Tensor, nn

import popdist
import poptorch


class Net(nn.Module):
    """Two stages with dropout, so that every replica has to draw its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with poptorch.Block("a"):
            x = self.dropout(self.a(x).relu())
        with poptorch.Block("b"):
            return nn.functional.mse_loss(self.b(x), targets)


ITERATIONS, ACCUMULATION, ROWS, CALLS = 2, 4, 2, 3


def trained(
    opts: poptorch.Options, instances: int, instance: int, calls: int = CALLS
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights after some calls with dropout, momentum and clipping over two stages."""
    replicas = opts.replication_factor
    opts.deviceIterations(ITERATIONS).randomSeed(7).showCompilationProgressBar(False)
    opts.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
    opts.Training.gradientAccumulation(ACCUMULATION)
    torch.manual_seed(0)
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=0.2)
    executor = poptorch.trainingModel(model, opts, optimizer)
    losses = []
    for _ in range(calls):
        rows = ITERATIONS * ACCUMULATION * instances * replicas * ROWS
        data = torch.randn(rows, 5), torch.randn(rows, 3)
        shards = [
            value.unflatten(0, (ITERATIONS * ACCUMULATION, instances, -1))[:, instance].flatten(0, 1)
            for value in data
        ]
        losses.append(executor(*shards))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def place() -> tuple[int, int]:
    popdist.init()
    return popdist.getNumInstances(), popdist.getInstanceIndex()


def in_one() -> tuple[list[list[float]], dict[str, list[float]]]:
    """Losses and weights, as lists."""
    losses, weights = trained(popdist.poptorch.Options(), *place())
    popdist.synchronize()
    return [value.tolist() for value in losses], {name: value.tolist() for name, value in weights.items()}


def until_the_second_leaves() -> str:
    """What the first instance says when the second has ended after a call less, as if it were killed."""
    instances, instance = place()
    try:
        trained(popdist.poptorch.Options(), instances, instance, CALLS - instance)
    except poptorch.UnrecoverableError as error:
        return str(error)
    os._exit(0)
