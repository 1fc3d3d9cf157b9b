"""Functions on the host that change their inputs in place: declared, it is a write; undeclared, an error."""

import pytest
import torch
from torch import nn

import poptorch


class Averaged(nn.Module):
    """A weight, and an average of it that a custom operation keeps."""

    def __init__(self, name):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2, 2))
        self.name = name

    def forward(self, x):
        y = self.layer(x)
        given = [y, self.average, self.layer.weight.detach()]
        (y,) = poptorch.custom_op(given, self.name, "test.writes", 1, example_outputs=[y])
        return poptorch.identity_loss(y, "sum")


def follow(y, average, weight):
    average.mul_(0.5).add_(weight, alpha=0.5)
    return y * average.sum()


def plain(steps, x):
    torch.manual_seed(0)
    model = Averaged("unused")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model.layer(x)
        with torch.no_grad():
            model.average.mul_(0.5).add_(model.layer.weight, alpha=0.5)
        (y * model.average.sum()).sum().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("own_backward", [False, True])
def test_a_declared_write_into_a_buffer_is_kept(own_backward):
    name = f"Follow{own_backward}"

    def backward(gradients, inputs):
        factor = inputs[1].mul(0.5).add(inputs[2], alpha=0.5).sum()
        return [gradients[0].mul_(factor), None, None]

    poptorch.registerCustomOp(name, "test.writes", 1, follow, backward if own_backward else None, writes=[1])
    torch.manual_seed(0)
    model, x = Averaged(name), torch.tensor([[1.0, -2.0]])
    options = poptorch.Options().deviceIterations(1)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        executor(x)
    expected = plain(3, x)
    torch.testing.assert_close(model.average, expected.average)
    torch.testing.assert_close(model.layer.weight, expected.layer.weight)
    assert not torch.equal(model.average, torch.zeros(2, 2))


@pytest.mark.parametrize("write", [lambda v: v.add_(1), lambda v: v.numpy().fill(7)], ids=["torch", "numpy"])
def test_an_undeclared_write_names_operation_input_and_fix(write):
    def forward(y, average, weight):
        write(average)
        return y

    poptorch.registerCustomOp("Silent", "test.writes", 1, forward)
    model = Averaged("Silent")
    executor = poptorch.trainingModel(model)
    before = model.average.clone()
    with pytest.raises(poptorch.Error) as caught:
        executor(torch.ones(1, 2))
    message = str(caught.value)
    assert "the custom operation test.writes.Silent changes its input 1 in place" in message
    assert "writes=[1] of poptorch.registerCustomOp" in message
    assert torch.equal(model.average, before)


def test_a_backward_that_writes_an_input_is_an_error_and_its_gradients_are_its_own():
    def backward(gradients, inputs):
        inputs[1].add_(1)
        return [gradients[0].mul_(2), None, None]

    poptorch.registerCustomOp("Backward", "test.writes", 1, lambda y, average, weight: y * 2, backward)
    executor = poptorch.trainingModel(Averaged("Backward"))
    with pytest.raises(poptorch.Error, match=r"the backward of the custom operation .* changes its input 2"):
        executor(torch.ones(1, 2))


def test_a_cpu_layer_may_declare_what_it_writes():
    class Counting(nn.Module):
        def __init__(self, writes):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.host = poptorch.CPU(self.add, "add", writes=writes)

        def add(self, x, count):
            count += x
            return count * 2

        def forward(self, x):
            return self.host(x, self.count)

    model = Counting([1])
    executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    assert torch.equal(executor(torch.tensor([1.0, 2.0, 10.0, 20.0])), torch.tensor([2.0, 4.0, 22.0, 44.0]))
    executor.copyWeightsToHost()
    assert torch.equal(model.count, torch.tensor([11.0, 22.0]))
    with pytest.raises(poptorch.Error, match=r"poptorch.CPU 'add' changes its input 1 in place"):
        poptorch.inferenceModel(Counting([]))(torch.ones(2))


def test_a_write_into_an_input_of_the_model_reaches_the_caller():
    poptorch.registerCustomOp("Double", "test.writes", 1, lambda x: x.mul_(2).sum(), writes=[0])

    def forward(x):
        (total,) = poptorch.custom_op([x], "Double", "test.writes", 1, [torch.zeros(())])
        return total + x.sum()

    x = torch.tensor([1.0, 2.0])
    assert poptorch.inferenceModel(forward)(x).item() == 12
    assert torch.equal(x, torch.tensor([2.0, 4.0]))


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
