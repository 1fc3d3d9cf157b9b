"""A small model for tests of the engine's passes: captured without the face."""

import functools

import torch
from torch import nn
from torch.nn import functional

from popengine.compile.capture import capture
from popengine.compile.recording.current_capture import current
from popengine.settings import StagePlan, Strategy


def once(function):
    """Let a function compute once for equal arguments, which their `repr` tells apart. No caller changes a result."""
    results = {}

    @functools.wraps(function)
    def found(*args, **options):
        key = repr((args, options))
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return found


def enter(name, ipu=None):
    """Open a block, where a capture runs."""
    capture = current()
    if capture is not None:
        capture.enter_block(name, ipu)


class Net(nn.Module):
    """Blocks A to D, with BatchNorm in A, dropout in B, a weight of C used in D again, and a skip from A to D."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b, self.drop = nn.Linear(4, 4), nn.Dropout(dropout)
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        enter("A")
        a = self.norm(self.a(x))
        enter("B")
        b = self.drop(torch.relu(self.b(a)))
        enter("C")
        c = self.c(b)
        enter("D")
        output = self.d(functional.linear(c, self.c.weight) + a)
        return output, functional.cross_entropy(output, y)


def net(dropout=0.0):
    torch.manual_seed(0)
    return Net(dropout)


def graph_of(model=None, training=True):
    """The graph of a model. No pass changes a graph, so that of a net is captured once."""
    if model is None or type(model) is Net:
        return _graph_of_net(0.0 if model is None else model.drop.p, training)
    return captured(model, training)


@once
def _graph_of_net(dropout, training):
    return captured(net(dropout).train(training), training)


def captured(model, training=True):
    samples = [torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)]
    return capture(model, lambda inputs: model(*inputs), samples, training=training)


def stages(*ipus, order="1f1b"):
    """Blocks A, B, C and D as stages on these ipus."""
    plans = tuple(StagePlan((block,), ipu) for block, ipu in zip("ABCD", ipus, strict=True))
    return Strategy(order, None, plans)
