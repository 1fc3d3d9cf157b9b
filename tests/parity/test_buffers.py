"""Buffers that a forward writes, in all ways that programs use: each micro-batch reads what the one before has left."""

from typing import Any

import pytest
import torch
from parity_runs import cut, made, options
from torch import nn

import poptorch

WRITES = {
    "out, of a buffer": lambda s, x: torch.add(x.mean(0), s.u, out=s.v),
    "out, and then the operand": lambda s, x: (torch.add(x.mean(0), s.u, out=s.v), s.u.add_(1)),
    "out, of an input": lambda s, x: torch.mean(x, 0, out=s.v),
    "out, into a part": lambda s, x: torch.mean(x[:, :2], 0, out=s.v[1:3]),
    "normalize with out": lambda s, x: nn.functional.normalize(x.sum(0) + s.u, dim=0, out=s.v),
    "copy_": lambda s, x: s.v.copy_(x[0]),
    "copy_ of a row to all": lambda s, x: s.v.copy_(x[0, 0]),
    "fill_": lambda s, x: s.v.fill_(3),
    "add_": lambda s, x: s.v.add_(x.mean(0)),
    "an item": lambda s, x: s.v.__setitem__(1, x[0, 1]),
    "an item of both": lambda s, x: (s.v.__setitem__(1, s.u[0]), s.u.mul_(2)),
    "a slice": lambda s, x: s.v[:2].mul_(0.5).add_(x[0, :2]),
    "data": lambda s, x: setattr(s.v, "data", x.sum(0)),
    "lerp_": lambda s, x: s.v.lerp_(x.mean(0), 0.1),
    "a list": lambda s, x: torch._foreach_add_([s.u, s.v], 1.0),
    "lists": lambda s, x: torch._foreach_lerp_([s.u, s.v], [x[0], x[1]], 0.5),
    "a swap": lambda s, x: (lambda u: (s.u.copy_(s.v), s.v.copy_(u + x[0])))(s.u.clone()),
    "twice": lambda s, x: (s.v.copy_(x[0]), s.v.mul_(2)),
    "scatter_": lambda s, x: s.v.scatter_(0, torch.tensor([0, 2]), x[0]),
    "zero_": lambda s, x: s.v.zero_(),
    "a count": lambda s, x: s.count.add_(1),
}


class Writes(nn.Module):
    def __init__(self, write, read):
        super().__init__()
        self.a, self.b = (poptorch.BeginBlock(nn.Linear(4, 4), name) for name in "ab")
        self.write, self.read = WRITES[write], read
        self.u: Any
        self.v: Any
        self.count: Any
        self.register_buffer("u", torch.ones(4))
        self.register_buffer("v", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.a(x)
        if self.read == "before":
            h = h + self.v * 0.1 + self.u
        with torch.no_grad():
            self.write(self, x)
        if self.read == "after":
            h = h + self.v * 0.1 + self.count
        h = self.b(h.tanh())
        if self.read == "in the other stage":
            h = h * (self.v + self.count)
        return poptorch.identity_loss(h.square(), "mean")


class Normalized(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.a = poptorch.BeginBlock(wrap(nn.Linear(4, 4)), "a")
        self.b = poptorch.BeginBlock(wrap(nn.Linear(4, 4)), "b")

    def forward(self, x):
        return poptorch.identity_loss(self.b(self.a(x).tanh()).square(), "mean")


def assert_trains_as_plain_pytorch(make, accumulation, stages, updates=3):
    ours, plain = made(make), made(make)
    if not stages:
        poptorch.removeBlocks(ours)
    strategy = poptorch.PipelinedExecution("a", "b") if stages else None
    own = options(strategy, accumulation=accumulation, iterations=updates)
    x = torch.randn(2 * accumulation * updates, 4)
    executor = poptorch.trainingModel(ours, own, torch.optim.SGD(ours.parameters(), lr=0.5))
    losses, expected = executor(x).reshape(-1), []
    executor.copyWeightsToHost()
    step = torch.optim.SGD(plain.parameters(), lr=0.5)
    micro_batches = cut(2, x)
    for _ in range(updates):
        step.zero_grad()
        for _ in range(accumulation):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                loss = plain(*next(micro_batches))
                loss.backward()
            expected.append(loss.detach())
        for parameter in plain.parameters():
            parameter.grad /= accumulation
        step.step()
    assert torch.equal(losses, torch.stack(expected))
    for (name, value), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("read", ["never", "before", "after", "in the other stage"])
@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_that_is_written_is_that_of_plain_pytorch(write, read):
    for accumulation, stages in ((1, False), (3, False), (3, True)):
        assert_trains_as_plain_pytorch(lambda: Writes(write, read), accumulation, stages)


@pytest.mark.parametrize(
    "wrap",
    [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm],
)
def test_normalized_weights_are_those_of_plain_pytorch(wrap):
    for accumulation, stages in ((1, False), (3, False), (3, True)):
        assert_trains_as_plain_pytorch(lambda: Normalized(wrap), accumulation, stages)
