"""Buffers that a forward writes, in all ways that programs use: each micro-batch reads what the one before has left."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, options
from torch import nn

import poptorch

WRITES = {
    "out, of a buffer": lambda s, x: torch.add(x.mean(0), s.u, out=s.v),
    "out, and then the operand": lambda s, x: (torch.add(x.mean(0), s.u, out=s.v), s.u.add_(1)),
    "out, of an input": lambda s, x: torch.mean(x, 0, out=s.v),
    "out, into a part": lambda s, x: torch.mean(x[:, :2], 0, out=s.v[1:3]),
    "normalize with out": lambda s, x: nn.functional.normalize(x.sum(0) + s.u, dim=0, out=s.v),
    "copy_": lambda s, x: s.v.copy_(x[0]),
    "add_": lambda s, x: s.v.add_(x.mean(0)),
    "an item": lambda s, x: s.v.__setitem__(1, x[0, 1]),
    "an item of both": lambda s, x: (s.v.__setitem__(1, s.u[0]), s.u.mul_(2)),
    "a slice": lambda s, x: s.v[:2].mul_(0.5).add_(x[0, :2]),
    "data": lambda s, x: setattr(s.v, "data", x.sum(0)),
    "a list": lambda s, x: torch._foreach_add_([s.u, s.v], 1.0),
    "lists": lambda s, x: torch._foreach_lerp_([s.u, s.v], [x[0], x[1]], 0.5),
    "a swap": lambda s, x: (lambda u: (s.u.copy_(s.v), s.v.copy_(u + x[0])))(s.u.clone()),
    "a count": lambda s, x: s.count.add_(1),
    "assigned": lambda s, x: setattr(s, "v", s.v * 0.9 + x.mean(0)),
    "assigned, without a read": lambda s, x: setattr(s, "v", x.mean(0)),
    "assigned an operand in place": lambda s, x: (s.v.add_(1), setattr(s, "v", s.v * 0.9)),
    "assigned, and then in place": lambda s, x: (setattr(s, "v", s.v * 0.9), s.v.add_(x[0])),
    "assigned, beside one in place": lambda s, x: (s.u.mul_(0.5), setattr(s, "v", s.u + s.v)),
    "assigned a row of an input": lambda s, x: setattr(s, "v", x[0]),
    "assigned a constant": lambda s, x: setattr(s, "v", torch.arange(4.0)),
    "assigned a plain tensor": lambda s, x: setattr(s, "v", PLAIN),
    "assigned the other one": lambda s, x: (setattr(s, "v", s.u), setattr(s, "u", s.u * 2)),
    "assigned by a swap": lambda s, x: (lambda u: (setattr(s, "u", s.v), setattr(s, "v", u)))(s.u),
    "assigned one value to both": lambda s, x: (setattr(s, "v", x.mean(0)), setattr(s, "u", s.v)),
    "assigned in other strides": lambda s, x: setattr(s, "v", x.repeat(2, 1)[:, 0]),
    "assigned a count": lambda s, x: setattr(s, "count", s.count + 1),
    "assigned in a dictionary": lambda s, x: s._buffers.update(v=s.v + 1),
}
PLAIN = torch.ones(4)


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


def assert_a_training_is_equal(make, accumulation, stages, updates=3):
    strategy = poptorch.PipelinedExecution("a", "b") if stages else None
    torch.manual_seed(0)
    x, how = torch.randn(2 * accumulation * updates, 4), {"accumulation": accumulation, "updates": updates}
    assert_trains_as_plain_pytorch(make, partial(torch.optim.SGD, lr=0.5), x, strategy=strategy, **how)


RUNS = (3, True), (3, False), (1, False)  # the micro-batches of an update, and whether there are two stages


@pytest.mark.parametrize(("accumulation", "stages"), RUNS)
@pytest.mark.parametrize("read", ["never", "before", "after", "in the other stage"])
@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_that_is_written_is_that_of_plain_pytorch(write, read, accumulation, stages):
    assert_a_training_is_equal(lambda: Writes(write, read), accumulation, stages)


@pytest.mark.parametrize(
    "wrap",
    [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm],
)
def test_normalized_weights_are_those_of_plain_pytorch(wrap):
    for accumulation, stages in RUNS:
        assert_a_training_is_equal(lambda: Normalized(wrap), accumulation, stages)


class Assigns(nn.Module):
    """A model whose forward assigns `value(self, x)` to its buffer."""

    def __init__(self, value, start):
        super().__init__()
        self.layer, self.value = nn.Linear(4, 4), value
        self.register_buffer("state", start)

    def forward(self, x):
        before = self.state
        self.state = self.value(self, self.layer(x))
        return self.state * 2, before


def test_an_assigned_buffer_is_returned_as_it_is_and_as_it_was():
    torch.manual_seed(0)
    model = Assigns(lambda s, y: (s.state * 0.9 + y).detach(), torch.zeros(2, 4))
    twin, x = copy.deepcopy(model), torch.randn(6, 4)
    executor = poptorch.inferenceModel(model, options(accumulation=1, iterations=3))
    outputs = [torch.cat(parts) for parts in zip(*(twin(rows.clone()) for rows in x.split(2)), strict=True)]
    assert all(map(torch.equal, executor(x), outputs))
    assert torch.equal(model.state, twin.state)


@pytest.mark.parametrize("start", [torch.zeros(0), torch.zeros(1), torch.zeros(2, 4, dtype=torch.long)])
def test_a_buffer_of_another_shape_that_no_call_reads_stays_as_it_is_with_a_warning(start, caplog):
    def value(model, y):
        if model.state.shape != y.shape:
            model.state = torch.zeros_like(y)
        model.state = torch.zeros_like(model.state, dtype=y.dtype)
        return torch.sigmoid(model.state) + y

    model = Assigns(value, start)
    model.forward = lambda x: (setattr(model, "state", value(model, model.layer(x))), model.state * 2)[1]
    twin, x = copy.deepcopy(model.layer), torch.randn(2, 4)
    found = poptorch.inferenceModel(model, options(accumulation=1))(x)
    assert torch.equal(found, (torch.sigmoid(torch.zeros(2, 4)) + twin(x)) * 2)
    assert model.state is start
    assert "no call reads them" in caplog.text


@pytest.mark.parametrize(
    "value",
    [
        lambda s, y: y + s.state.sum(),
        lambda s, y: torch.cat([s.state, y.flatten()]),
        lambda s, y: torch.ones_like(y) if s.state.shape == y.shape else torch.zeros_like(y),
        lambda s, y: s.state.new_zeros(len(s.state) + 1),
    ],
    ids=["read", "grown", "another branch", "another shape each time"],
)
def test_a_buffer_of_another_shape_that_the_next_call_reads_is_an_error(value):
    model = Assigns(value, torch.zeros(0))
    with pytest.raises(poptorch.Error, match="Buffer state is reassigned within the model") as caught:
        poptorch.inferenceModel(model, options(accumulation=1))(torch.randn(2, 4))
    assert "in plain PyTorch" in str(caught.value)
    assert model.state.shape == (0,)


def test_a_buffer_with_two_names_is_assigned_under_both_or_refused():
    model = Assigns(lambda s, y: s.state + 1, torch.zeros(4))
    model.register_buffer("other", model.state)
    with pytest.raises(poptorch.Error, match="was the same tensor as state"):
        poptorch.inferenceModel(model, options(accumulation=1))(torch.randn(2, 4))


# Each replica keeps its running statistics in whole and incomplete calls, and after writes by the program.


STEPS = ("whole", "incomplete", "written")
ROWS = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))


def new_model():
    return nn.BatchNorm1d(2, affine=False)


@pytest.mark.parametrize("steps", [*itertools.product(STEPS, repeat=2)], ids=" ".join)
def test_each_replica_keeps_its_running_statistics(steps):
    model, twins = new_model(), [new_model() for _ in range(2)]
    options = poptorch.Options().replicationFactor(2).allowNewShapes().showCompilationProgressBar(False)
    options.broadcastBuffers(False)
    executor = poptorch.inferenceModel(model, options)
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor.averageRunningStatistics()
    for number, step in enumerate(("whole", *steps)):
        rows = ROWS + number
        if step == "written":
            for each in (model, *twins):
                each.running_mean.fill_(number)
            continue
        parts = rows.split(2) if step == "whole" else [rows[:2]]
        found = executor(torch.cat([*parts]))
        expected = [twin(part) for twin, part in zip(twins, parts, strict=False)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=0)
        assert torch.equal(model.running_mean, twins[0].running_mean)
        if number == len(steps):
            executor.averageRunningStatistics()
            mean = (twins[0].running_mean.double() + twins[1].running_mean.double()) / 2
            assert torch.equal(model.running_mean, mean.float())
