"""A small model for tests of the engine's passes: captured without the face."""

import functools

import torch
from torch import nn
from torch.nn import functional

from popengine.compile.capture import capture
from popengine.compile.recording.current_capture import current
from popengine.run.train_state import TrainState
from popengine.settings import Hyper, StagePlan, Strategy
from poptorch.optim import LAMB, LARS
from small_models import Signed


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


ADAM = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "adamw": functools.partial(torch.optim.AdamW, **ADAM),
    "lamb": functools.partial(LAMB, **ADAM, max_weight_norm=10.0),
    # As the executor names those of `torch.optim`.
    "SGD2": functools.partial(torch.optim.SGD, lr=0.05),
    "ADAM": functools.partial(torch.optim.Adam, lr=0.05),
}
# With loops over parameters: torch's loops over lists, which it prefers on accelerators, have other last bits.
OTHERS = {
    name: functools.partial(getattr(torch.optim, name), lr=0.01, foreach=False)
    for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
}
OTHERS |= {"LARS": functools.partial(LARS, lr=0.01), "Signed": functools.partial(Signed, lr=0.01)}
OPTIMIZERS |= OTHERS


def train_state_of(weights, parameters, kind="plain sgd", seed=0, replicas=1):
    """A `TrainState` of tensors by name, with an optimizer of those that are `parameters`; None: of an inference."""
    state = TrainState(weights.copy, seed, replicas)
    if kind is not None:
        held = {name: weights[name] for name in parameters if name in weights}
        # In a process, the optimizer has the parameters of other places, too.
        state.optimizer = OPTIMIZERS[kind]([*held.values()] or [torch.zeros(1)])
        state.parameters = lambda: held
    return state


def rates(kind="plain sgd", loss_scaling=1.0, **changed):
    """The rates of a call: those of an optimizer of this kind, but for the changed ones."""
    (group,) = OPTIMIZERS[kind]([torch.zeros(1)]).param_groups
    return Hyper(
        ({**{name: rate for name, rate in group.items() if name != "params"}, **changed},), loss_scaling
    )


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
