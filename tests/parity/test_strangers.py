"""Weights that forward reaches in another way than by their module's attribute are the same weights."""

import copy
from functools import partial

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, made, options
from torch import Tensor, nn
from torch.nn import functional

import poptorch
from fuzz.models import Product

ROWS, SIZE, UPDATES = 4, 3, 4


class Net(nn.Module):
    """A linear layer and a moving average, reached as a subclass says."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.other = nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.remember()

    def remember(self):
        """Keep weights in places that torch does not know of."""

    def output(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.other(self.output(x)), target)


class ByList(Net):
    def remember(self):
        self.weights = [self.layer.weight, self.layer.bias]

    def output(self, x):
        return functional.linear(x, *self.weights)


class ByDictInAnObject(Net):
    def remember(self):
        self.held = type("Holder", (), {})()
        self.held.weights = {"w": self.layer.weight}

    def output(self, x):
        return x @ self.held.weights["w"].t() + self.layer.bias


class ByClosure(Net):
    def remember(self):
        weight = self.layer.weight
        self.scaled = lambda x: functional.linear(x, weight * 2)

    def output(self, x):
        return self.scaled(x)


class ByViews(Net):
    """Views made before forward runs; one of them in another order."""

    def remember(self):
        self.first, self.rest = self.layer.weight[:1], self.layer.weight[1:]
        self.turned = self.other.weight.t()

    def output(self, x):
        return x @ torch.cat([self.first, self.rest]).t() @ self.turned + self.layer.weight[0]


class TiedByList(Net):
    """The same weight used by its name, and by a list."""

    def remember(self):
        self.tied = [self.layer.weight]

    def output(self, x):
        return functional.linear(self.layer(x), self.tied[0])


class ByData(Net):
    """A constant factor that follows the weight."""

    def remember(self):
        self.values = self.layer.weight.data

    def output(self, x):
        return self.layer(x) * self.values.abs().sum()


class ByAutogradFunction(Net):
    def remember(self):
        self.weights = [self.layer.weight]

    def output(self, x):
        return Product.apply(self.layer(x), self.weights[0])


class BufferByList(Net):
    def remember(self):
        self.state = [self.mean]

    def output(self, x):
        self.state[0].mul_(0.5).add_(x.mean(0))
        return self.layer(x) + self.state[0]


class BufferByData(Net):
    """`.data = ...` writes into memory."""

    def output(self, x):
        self.mean.data = self.mean.data * 0.5 + x.detach().mean(0)
        return self.layer(x) + self.mean


class OfAnotherModule(Net):
    """A part that shares its weight with a part that registers it, and isn't registered itself."""

    def remember(self):
        part = nn.Linear(SIZE, SIZE)
        part.weight, part.bias = self.layer.weight, self.layer.bias
        self.parts = [part]

    def output(self, x):
        return self.parts[0](x)


ALL = Net.__subclasses__()


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def data(updates: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(updates * ROWS, SIZE), torch.randn(updates * ROWS, SIZE)


def assert_trains(kind, updates: int = 1) -> None:
    assert_trains_as_plain_pytorch(kind, SGD, *data(updates), accumulation=1, updates=updates)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_weight_is_trained_however_forward_reaches_it(kind):
    assert_trains(kind, UPDATES)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_inference_uses_the_weights_of_the_moment(kind):
    model = made(kind)
    executor = poptorch.inferenceModel(model)
    x, target = data()
    executor(x, target)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3)
        model.mean.zero_()
    executor.copyWeightsToDevice()
    with torch.no_grad():
        expected = model(x, target)
        model.mean.zero_()  # forward changes it
    assert torch.equal(executor(x, target), expected)


def refused(kind) -> str:
    model = made(kind)
    executor = poptorch.trainingModel(model, options(accumulation=1))
    with pytest.raises(poptorch.Error) as caught:
        executor(*data())
    return str(caught.value)


def test_a_weight_that_belongs_to_nobody_is_an_error_with_its_line():
    class Unregistered(Net):
        def remember(self):
            self.parts = [nn.Linear(SIZE, SIZE)]

        def output(self, x):
            return self.parts[0](x)

    message = refused(Unregistered)
    assert "a tensor of shape (3, 3) needs a gradient, but is no parameter of the model" in message
    assert f"{__file__}:{Unregistered.output.__code__.co_firstlineno + 1}" in message
    assert "nn.ModuleList" in message


def test_what_was_computed_from_a_weight_before_forward_is_an_error():
    class Computed(Net):
        def remember(self):
            self.doubled = self.layer.weight * 2

        def output(self, x):
            return x @ self.doubled

    assert "compute in forward what depends on parameters" in refused(Computed)


def test_a_foreign_weight_that_no_gradient_reaches_is_a_constant():
    class Detached(Net):
        def remember(self):
            self.parts = [nn.Linear(SIZE, SIZE)]

        def output(self, x):
            with torch.no_grad():
                scale = self.parts[0](x)
            return self.layer(x) * scale + self.parts[0].bias.detach()

    assert_trains(Detached)


def test_a_tensor_over_the_memory_of_two_weights_is_an_error_that_names_both():
    class Flat(Net):
        def remember(self):
            self.flat = torch.randn(2 * SIZE * SIZE)
            self.layer.weight.data = self.flat[: SIZE * SIZE].view(SIZE, SIZE)
            self.other.weight.data = self.flat[SIZE * SIZE :].view(SIZE, SIZE)

        def output(self, x):
            return self.layer(x) * self.flat.norm()

    class Nested(Net):
        def remember(self):
            self.register_buffer("row", self.layer.weight.data[0])
            self.begin = [self.row[:2]]

        def output(self, x):
            return self.layer(x) * self.begin[0].sum()

    assert "shares its memory with layer.weight, other.weight" in refused(Flat)
    assert "shares its memory with layer.weight, row" in refused(Nested)


def test_weights_in_one_flat_memory_train_as_ever():
    class Flat(Net):
        def remember(self):
            flat = torch.randn(2 * SIZE * SIZE)
            self.layer.weight.data = flat[: SIZE * SIZE].view(SIZE, SIZE)
            self.other.weight.data = flat[SIZE * SIZE :].view(SIZE, SIZE)
            # These views end where the next weight begins, and begin where the one before ends.
            self.views = [self.layer.weight.data[-1], self.other.weight.data[:, 0]]

        def output(self, x):
            return self.layer(x) * self.views[0] + self.views[1]

    assert_trains(Flat)


def test_two_parameters_over_the_same_memory_are_an_error_that_names_both():
    class Twice(Net):
        def remember(self):
            self.other.weight = nn.Parameter(self.layer.weight.data)

        def output(self, x):
            return self.layer(x)

    message = refused(Twice)
    assert "layer.weight and other.weight share their memory, but are two tensors" in message


def test_a_write_into_a_tensor_that_is_no_buffer_is_an_error_with_its_line():
    class Average(Net):
        def remember(self):
            self.average = torch.zeros(SIZE)

        def output(self, x):
            self.average.mul_(0.5).add_(x.mean(0))
            return self.layer(x) + self.average

    message = refused(Average)
    assert "is neither a buffer nor made by forward" in message
    assert f"{__file__}:{Average.output.__code__.co_firstlineno + 1}" in message


def test_a_scratch_tensor_that_is_written_before_it_is_read_is_no_state():
    class Scratch(Net):
        def remember(self):
            self.scratch = torch.zeros(ROWS, SIZE)

        def output(self, x):
            self.scratch.copy_(x)
            return self.layer(self.scratch * 2)

    assert_trains(Scratch)


def test_a_frozen_parameter_that_forward_changes_is_state():
    class Teacher(Net):
        """A teacher that follows its student."""

        def remember(self):
            self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

        def output(self, x):
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                    slow.mul_(0.75).add_(fast, alpha=0.25)
            return self.layer(x) + self.teacher(x)

    assert_trains(Teacher, UPDATES)


def test_a_second_parameter_over_the_memory_of_one_is_an_error():
    class Second(Net):
        def remember(self):
            self.second = [nn.Parameter(self.layer.weight.data)]

        def output(self, x):
            return functional.linear(x, self.second[0])

    assert "needs a gradient, but is no parameter of the model" in refused(Second)


def test_a_weight_that_forward_returns_by_a_list_is_its_value_of_the_moment():
    class Returned(Net):
        def remember(self):
            self.weights = [self.layer.weight, self.layer.weight[0]]

        def forward(self, x):
            return x * 2, self.weights[0], self.weights[1]

    model = made(Returned)
    executor = poptorch.inferenceModel(model)
    executor(torch.ones(1))
    with torch.no_grad():
        model.layer.weight.fill_(3)
    executor.copyWeightsToDevice()
    _, whole, row = executor(torch.ones(1))
    assert torch.equal(whole, torch.full((SIZE, SIZE), 3.0))
    assert torch.equal(row, torch.full((SIZE,), 3.0))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.as_strided((2, 2), (1, 3), 0) + 0,
        lambda x: x.as_strided((2, 2), (1, 3), 2) + 0,
        lambda x: x[1:].as_strided((2, 2), (1, 3), 2) + 0,
        lambda x: x[1:].as_strided((2, 2), (1, 3)) + 0,
        lambda x: torch.as_strided_copy(x, (2, 2), (1, 3), 1),
        lambda x: torch.as_strided_scatter(x, torch.zeros(2, 2), (2, 2), (1, 3), 1),
        lambda x: x.as_strided((2, 2), (1, 3), 2).mul_(0) + x[:, 2:4],
    ],
)
def test_an_offset_in_memory_is_one_in_the_micro_batch(read):
    x = torch.arange(24.0).reshape(4, 6)
    executor = poptorch.inferenceModel(read, options(accumulation=1, iterations=2))
    assert torch.equal(executor(x.clone()), torch.cat([read(rows.clone()) for rows in x.split(2)]))
