"""Functions on the host that change their inputs or the model in place: an error that shows the fix."""

import pytest
import torch
from torch import nn

import poptorch
from small_models import module


class Averaged(nn.Module):
    """A weight, and a buffer that a custom operation gets."""

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


@pytest.mark.parametrize("write", [lambda v: v.add_(1), lambda v: v.numpy().fill(7)], ids=["torch", "numpy"])
def test_a_write_names_operation_input_and_fix(write):
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
    assert "return the new value, and copy it in forward" in message
    assert torch.equal(model.average, before)


def test_a_backward_that_writes_an_input_is_an_error_and_its_gradients_are_its_own():
    def backward(gradients, inputs):
        inputs[1].add_(1)
        return [gradients[0].mul_(2), None, None]

    poptorch.registerCustomOp("Backward", "test.writes", 1, lambda y, average, weight: y * 2, backward)
    executor = poptorch.trainingModel(Averaged("Backward"))
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
