"""A small training for tests of instances: each function here is run in every one of them."""

import torch
from torch import nn

import popdist
import poptorch


class Net(nn.Module):
    """A classifier whose labels can be out of range, so that a call can fail in one instance."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        with poptorch.Block("a"):
            x = self.first(x).relu()
        with poptorch.Block("b"):
            return self.loss(self.last(x), labels)


def executor(
    *,
    seed=0,
    width=6,
    accumulation=3,
    iterations=2,
    lr=0.1,
    random_seed=1,
    rule=poptorch.optim.SGD,
    shares_state=False,
    **more,
):
    """A training executor with an optimizer, which has momentum where it knows it."""
    opts = popdist.poptorch.Options().randomSeed(random_seed).showCompilationProgressBar(False)
    opts.deviceIterations(iterations).setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
    opts.Training.gradientAccumulation(accumulation)
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(shares_state)
    opts.TensorLocations.setOptimizerLocation(location)
    opts.Precision.enableFloatingPointExceptions(True)
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = rule(model.parameters(), lr=lr, **more)
    return poptorch.trainingModel(model, opts, optimizer), model, optimizer


def batch(call, accumulation=3, iterations=2):
    """One instance's rows of a call."""
    numbers = torch.Generator().manual_seed(100 * call + popdist.getInstanceIndex())
    rows = iterations * accumulation * popdist.getNumLocalReplicas() * 2
    return torch.randn(rows, 4, generator=numbers), torch.randint(3, (rows,), generator=numbers)


def weights(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()]).tolist()
