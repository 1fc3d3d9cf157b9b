"""The values of a plain tensor that forward takes to Python are those of the call, in any way to take them."""

import numpy as np
import pytest
import torch
from executor_models import options
from torch import nn

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

WAYS = {
    "tolist": lambda v: v.tolist()[1],
    "tolist of a part": lambda v: v[1:].tolist()[0],
    "item": lambda v: v[1].item(),
    "float": lambda v: float(v[1]),
    "if": lambda v: 2.0 if v[1] > 2 else 3.0,
    "numpy": lambda v: float(v.numpy()[1]),
    "asarray": lambda v: float(np.asarray(v)[1]),
    "asarray with a type": lambda v: float(np.asarray(v, dtype=np.float64)[1]),
    "array": lambda v: float(np.array(v)[1]),
    "iterated": lambda v: [float(each) for each in v][1],
    "format": lambda v: float(f"{v[1]:.1f}"),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_written", [True, False], ids=["written", "replaced"])
def test_the_values_of_a_plain_tensor_are_those_of_the_call(name, is_written):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = torch.tensor([1.0, 2.0])

        def forward(self, x):
            return x * WAYS[name](self.v)

    model = Model()
    executor = poptorch.inferenceModel(model, options())
    for value in (2.0, 5.0, 5.0, 2.0):
        if is_written:
            model.v[1] = value
        else:
            model.v = torch.tensor([1.0, value])
        assert torch.equal(executor(X), model(X))
