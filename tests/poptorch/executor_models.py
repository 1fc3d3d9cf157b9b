"""Small models and wrappers that the executor's tests share. Importable, so that they can be pickled."""

import contextlib

import torch
from torch import nn

import poptorch


class Trained(nn.Module):
    """A linear layer with a loss; gives (output, loss), or the output alone without a target."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, target=None):
        output = self.layer(x)
        if target is None:
            return output
        return output, nn.functional.mse_loss(output, target)


class Counting(nn.Module):
    """Counts its micro-batches in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return x + self.seen


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return poptorch.identity_loss(nn.functional.dropout(self.layer(x), 0.5), "mean")


class Applied(nn.Module):
    """A layer, and a function of the model, the layer's output and the other arguments; attributes by their names."""

    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(2, 2), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *values, **named):
        return self.function(self, self.layer(x), *values, **named)


class Outer(nn.Module):
    """A wrapper of a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@contextlib.contextmanager
def recordings():
    """A list that grows with each recording of a forward."""
    found = []
    handle = poptorch.registerPreCompileHook(lambda: found.append(1))
    yield found
    handle.remove()


def options(*, iterations=1, accumulation=1, replicas=1, mode=None):
    found = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    found.showCompilationProgressBar(False)
    found.Training.gradientAccumulation(accumulation)
    if mode is not None:
        found.outputMode(mode)
    return found


def trainer(model=None, opts=None, lr=0.1):
    """A training wrapper with SGD, and its model."""
    torch.manual_seed(1)
    model = Trained() if model is None else model
    optimizer = poptorch.optim.SGD(model.parameters(), lr=lr)
    return poptorch.trainingModel(model, opts or options(), optimizer), model


def batch(rows=2):
    torch.manual_seed(2)
    return torch.randn(rows, 3), torch.randn(rows, 2)
