"""Python on the host in the middle of a graph: CPU layers and custom operations."""

import gc
import weakref

import numpy
import pytest
import torch
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def compiled(forward, *inputs):
    return poptorch.inferenceModel(forward)(*inputs)


def test_a_cpu_function_runs_at_every_execution():
    seen = []

    def count(x):
        seen.append(x.numpy().sum())
        return torch.from_numpy(numpy.clip(x.numpy(), 0, None))

    layer = poptorch.CPU(count, "clip")
    model = poptorch.inferenceModel(lambda x: layer(x * 2) + layer(x), poptorch.Options().deviceIterations(2))
    model.compile(X)
    seen.clear()
    assert torch.equal(model(X), X.clamp(min=0) * 3)
    assert len(seen) == 4
    assert torch.equal(layer(X), X.clamp(min=0))


def test_a_cpu_layer_may_be_a_part_of_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)
            self.host = poptorch.CPU(self.second, "second")

        def forward(self, x):
            return self.host(self.first(x))

    module = Model()
    assert not module.second.weight.requires_grad
    torch.testing.assert_close(compiled(module, X), module(X))


def test_a_cpu_function_keeps_the_kind_of_its_result():
    layer = poptorch.CPU(lambda x: (x + 1, poptorch.isRunningOnIpu() * x), "two")
    first, second = compiled(lambda x: layer(x), X)
    assert torch.equal(first, X + 1)
    assert torch.equal(second, X * 0)


@pytest.mark.parametrize(("result", "found"), [(3, "int"), ((X, [X]), "list"), (None, "NoneType")])
def test_a_cpu_function_that_returns_no_tensors_is_an_error(result, found):
    # It ended in an AttributeError within the library.
    layer = poptorch.CPU(lambda x: result, "wrong")
    with pytest.raises(poptorch.Error, match=f"poptorch.CPU 'wrong' must return a tensor.*found {found}$"):
        compiled(lambda x: layer(x), X)


def test_cpu_is_refused_in_training_and_its_failure_is_reported():
    with pytest.raises(poptorch.Error, match="only supported in inference"):
        poptorch.trainingModel(
            module(
                lambda self, x: poptorch.identity_loss(self.host(self.layer(x)), "sum"),
                layer=nn.Linear(2, 2),
                host=poptorch.CPU(torch.neg, "negate"),
            )
        )(X)
    grows = []
    layer = poptorch.CPU(lambda x: torch.zeros(len(grows)), "grows")
    model = poptorch.inferenceModel(lambda x: layer(x))
    model.compile(X)
    grows.append(1)
    with pytest.raises(poptorch.Error, match="'grows' returned"):
        model(X)


def with_custom_op(function):
    poptorch.registerCustomOp("Tanh", "test.ops", 1, function)
    return lambda x: poptorch.custom_op([x], "Tanh", "test.ops", 1, [x])[0]


def with_cpu_layer(function):
    layer = poptorch.CPU(function, "tanh")
    return lambda x: layer(x)


@pytest.mark.parametrize("make", [with_custom_op, with_cpu_layer])
def test_a_function_lives_as_long_as_the_model_that_calls_it(make):
    function = nn.Tanh()
    link = weakref.ref(function)
    model = poptorch.inferenceModel(make(function), poptorch.Options().allowNewShapes())
    del function
    for rows in (X, X[:1]):
        assert torch.equal(model(rows), rows.tanh())
        gc.collect()
    poptorch.registerCustomOp("Tanh", "test.ops", 1, torch.tanh)  # in place of `function`
    assert torch.equal(model(X), X.tanh())
    del model
    gc.collect()
    assert link() is None


class Cube(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(X.clone())

    def forward(self, x):
        (y,) = poptorch.custom_op(
            [self.weight * x], "Cube", "test.ops", 1, [x], {"scale": 2.0, "tags": ["a"]}
        )
        return poptorch.identity_loss(y, "sum")


def cube(x, scale, tags):
    assert tags == ["a"]
    return x**3 * scale


def test_an_unregistered_custom_operation_is_an_error_that_shows_what_to_write():
    with pytest.raises(
        poptorch.Error, match=r"poptorch.registerCustomOp\('Unknown', 'test.ops', 1, forward\)"
    ):
        compiled(lambda x: poptorch.custom_op([x], "Unknown", "test.ops", 1, [x]), X)
    assert torch.equal(poptorch.custom_op([X], "Unknown", "test.ops", 1, [X])[0], X * 0)


@pytest.mark.parametrize(
    "backward", [None, lambda gradients, inputs, scale, tags: [gradients[0] * 3 * scale * inputs[0] ** 2]]
)
def test_a_registered_custom_operation_runs_and_trains(backward):
    poptorch.registerCustomOp("Cube", "test.ops", 1, cube, backward)
    module = Cube()
    trainer = poptorch.trainingModel(module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.01))
    loss = trainer(torch.ones(2, 2))
    assert loss == (2 * X**3).sum()
    torch.testing.assert_close(module.weight.detach(), X - 0.01 * 6 * X**2)


@pytest.mark.parametrize(
    ("attributes", "error", "words"),
    [
        ({1: 2}, ValueError, "names must be strings"),
        ({"a": X}, ValueError, "takes a float, an int or a string"),
        ({"a": [1, 2.0]}, ValueError, "must all be the same"),
        ({"a": "é"}, ValueError, "é contains non-ASCII characters."),
        ({"ü": 1}, ValueError, "ü contains non-ASCII characters."),
        ({"a": 1e39}, poptorch.Error, "too high"),
        ({"a": -1e39}, poptorch.Error, "too low"),
    ],
)
def test_attributes_are_checked(attributes, error, words):
    with pytest.raises(error, match=words):
        poptorch.custom_op([X], "Cube", "test.ops", 1, [X], attributes)


def test_a_function_takes_an_expanded_scalar():
    # Its bits, which are compared for writes, were read by a view that needs strides.
    host = poptorch.CPU(lambda x: x + 1, "add")
    found = poptorch.inferenceModel(lambda x: host(x.sum().expand(2, 2)))(torch.ones(2, 1))
    assert torch.equal(found, torch.full((2, 2), 3.0))


# Functions on the host that change their inputs or the model in place: an error that shows the fix.


def averaged(name):
    """A model with a weight, and a buffer that a custom operation gets."""

    def forward(self, x):
        y = self.layer(x)
        given = [y, self.average, self.layer.weight.detach()]
        (y,) = poptorch.custom_op(given, name, "test.writes", 1, example_outputs=[y])
        return poptorch.identity_loss(y, "sum")

    return module(forward, layer=nn.Linear(2, 2), average=torch.zeros(2, 2))


@pytest.mark.parametrize("write", [lambda v: v.add_(1), lambda v: v.numpy().fill(7)], ids=["torch", "numpy"])
def test_a_write_names_operation_input_and_fix(write):
    def forward(y, average, weight):
        write(average)
        return y

    poptorch.registerCustomOp("Silent", "test.writes", 1, forward)
    model = averaged("Silent")
    executor = poptorch.trainingModel(model)
    before = model.average.clone()
    with pytest.raises(poptorch.Error) as caught:
        executor(torch.ones(1, 2))
    message = str(caught.value)
    assert "the custom operation test.writes.Silent changes its input 1 in place" in message
    assert "return the new value, and copy it in forward" in message
    assert torch.equal(model.average, before)


def test_a_backward_that_writes_an_input_is_an_error_and_its_gradients_are_its_own():
    def backward(gradients, inputs):
        inputs[1].add_(1)
        return [gradients[0].mul_(2), None, None]

    poptorch.registerCustomOp("Backward", "test.writes", 1, lambda y, average, weight: y * 2, backward)
    executor = poptorch.trainingModel(averaged("Backward"))
    with pytest.raises(poptorch.Error, match=r"the backward of the custom operation .* changes its input 2"):
        executor(torch.ones(1, 2))


def test_forward_copies_a_new_value_of_the_host_into_a_buffer():
    model = module(
        lambda self, x: self.count.copy_(self.host(x, self.count)) * 2,
        count=torch.zeros(2),
        host=poptorch.CPU(torch.add, "add"),
    )
    executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    assert torch.equal(executor(torch.tensor([1.0, 2.0, 10.0, 20.0])), torch.tensor([2.0, 4.0, 22.0, 44.0]))
    assert torch.equal(model.count, torch.tensor([11.0, 22.0]))


def test_a_write_into_the_model_around_a_function_is_an_error():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0
            self.host = poptorch.CPU(self.add, "add")

        def add(self, x):
            self.calls += 1
            if x.max() > 1:
                self.count += x.max()
            return x * 2

        def forward(self, x):
            return self.host(x)

    model = Counting()
    executor = poptorch.inferenceModel(model)
    assert torch.equal(executor(torch.ones(2)), torch.full((2,), 2.0))
    assert model.calls > 0
    with pytest.raises(poptorch.Error, match=r"poptorch\.CPU 'add' changes count of the model in the middle"):
        executor(torch.full((2,), 3.0))
