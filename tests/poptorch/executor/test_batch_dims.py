"""Inputs whose rows are not in dimension 0: time-major sequences, and tensors that each micro-batch gets whole."""

import pytest
import torch
from executor_models import options
from torch import nn

import poptorch

TIMES, ROWS = 5, 2  # of a micro-batch


class Recurrent(nn.Module):
    """A time-major LSTM; its loss, and its output with the rows in dimension 0."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def forward(self, tokens, target, state=None):
        output, _ = self.rnn(tokens, state)
        return output.transpose(0, 1), nn.functional.mse_loss(output, target)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, nodes, given):
        output = given["adjacency"] @ self.layer(nodes)
        return output, nn.functional.mse_loss(output, given["target"])


def trained(model, opts, *inputs):
    """Return the outputs of all micro-batches, and the weights after a call."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    opts.outputMode(poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.5))
    output, _ = executor(*inputs)
    executor.copyWeightsToHost()
    return output, [parameter.detach().clone() for parameter in model.parameters()]


def plain(model, steps, micro_batches):
    """Return what plain PyTorch computes: a list of micro-batches, `micro_batches` for each update."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.5), []
    for start in range(0, len(steps), micro_batches):
        optimizer.zero_grad()
        for inputs in steps[start : start + micro_batches]:
            output, loss = model(*inputs)
            (loss / micro_batches).backward()
            outputs.append(output.detach())
        optimizer.step()
    return torch.cat(outputs), [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(found, expected):
    for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize(
    ("iterations", "accumulation", "replicas"), [(1, 1, 1), (1, 3, 1), (2, 1, 2), (2, 2, 2)]
)
def test_time_major_sequences_are_split_along_their_second_dimension(iterations, accumulation, replicas, dim):
    per_update = accumulation * replicas
    count = iterations * per_update
    tokens, target = torch.randn(TIMES, count * ROWS, 3), torch.randn(TIMES, count * ROWS, 4)
    opts = options(iterations=iterations, accumulation=accumulation, replicas=replicas)
    found = trained(Recurrent(), opts.batchDims({"tokens": dim, "target": 1}), tokens, target)
    parts = zip(tokens.chunk(count, 1), target.chunk(count, 1), strict=True)
    assert_close(found, plain(Recurrent(), list(parts), per_update))


def test_each_micro_batch_gets_a_whole_input():
    nodes, target, adjacency = torch.randn(4 * 6, 3), torch.randn(4 * 6, 4), torch.rand(6, 6)
    opts = options(accumulation=2, replicas=2).batchDims({'given["adjacency"]': None})
    found = trained(Graph(), opts, nodes, {"adjacency": adjacency, "target": target})
    parts = zip(nodes.chunk(4), target.chunk(4), strict=True)
    assert_close(found, plain(Graph(), [(n, {"adjacency": adjacency, "target": t}) for n, t in parts], 4))


def test_all_tensors_of_an_argument_have_its_dimension():
    state = torch.randn(1, 2 * ROWS, 4), torch.randn(1, 2 * ROWS, 4)
    tokens, target = torch.randn(TIMES, 2 * ROWS, 3), torch.randn(TIMES, 2 * ROWS, 4)
    opts = options(accumulation=2).batchDims({"tokens": 1, "target": 1, "state": 1})
    found = trained(Recurrent(), opts, tokens, target, state)
    parts = zip(
        tokens.chunk(2, 1), target.chunk(2, 1), state[0].chunk(2, 1), state[1].chunk(2, 1), strict=True
    )
    assert_close(found, plain(Recurrent(), [(a, b, (h, c)) for a, b, h, c in parts], 2))


def test_an_argument_that_a_call_leaves_out_may_be_named():
    opts = options().batchDims({"tokens": 1, "target": 1, "state": 1})
    trained(Recurrent(), opts, torch.randn(TIMES, ROWS, 3), torch.randn(TIMES, ROWS, 4))


def test_new_shapes_are_complete_batches():
    opts = options(iterations=2).allowNewShapes().batchDims({"x": 1})
    executor = poptorch.inferenceModel(lambda x: x.sum(0), opts.outputMode(poptorch.OutputMode.All))
    for times in (TIMES, TIMES - 1, TIMES):
        x = torch.randn(times, 2 * ROWS)
        torch.testing.assert_close(executor(x), x.sum(0))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"y": 1}, "no input is named 'y'"),
        ({"x[0]": None}, r"no input is named 'x\[0\]'"),
        ({"x": 1}, r"input x has shape \(4, 3\), and can't be split along dimension 1 into 2 micro-batches"),
        ({"x": 2}, "dimension 2"),
        ({"x": -3}, "dimension -3"),
    ],
)
def test_a_dimension_that_does_not_fit_is_an_error(dims, words):
    executor = poptorch.inferenceModel(lambda x: x * 2, options(iterations=2).batchDims(dims))
    with pytest.raises(poptorch.Error, match=words):
        executor(torch.zeros(4, 3))


def test_a_tensor_without_dimensions_can_not_be_whole():
    executor = poptorch.inferenceModel(lambda x, y: x * y, options(iterations=2).batchDims({"y": None}))
    with pytest.raises(poptorch.Error, match=r"input y has no dimensions\n  fix: pass it as y\[None\]"):
        executor(torch.zeros(4, 3), torch.tensor(2.0))


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_write_into_such_an_input_is_an_error(iterations):
    executor = poptorch.inferenceModel(
        lambda x: x.add_(1), options(iterations=iterations).batchDims({"x": 1})
    )
    with pytest.raises(poptorch.Error, match=r"forward writes into x, which options\.batchDims splits"):
        executor(torch.zeros(4, 2))


@pytest.mark.parametrize("dims", [["x"], {1: 1}, {"x": 1.5}, {"x": True}])
def test_the_option_takes_names_and_dimensions(dims):
    with pytest.raises(AssertionError, match="batchDims takes"):
        poptorch.Options().batchDims(dims)
