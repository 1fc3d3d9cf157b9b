"""Slices with a start that depends on data, and products in pieces."""

import pytest
import torch
from torch import nn

import poptorch
from poptorch import MatMulSerializationMode as Mode
from small_models import module

X = torch.arange(12.0).reshape(4, 3)


def test_a_dynamic_slice_starts_at_the_value_of_a_tensor():
    def forward(x, start):
        return poptorch.dynamic_slice(x, 0, start, 3, 2)

    model = poptorch.inferenceModel(forward)
    for start in (torch.tensor([0]), torch.tensor([1])):
        assert torch.equal(model(X, start), X[int(start) : int(start) + 3 : 2])
        assert torch.equal(forward(X, start), model(X, start))


def test_a_dynamic_update_is_a_copy():
    def forward(x, source, start):
        return poptorch.dynamic_update(x, source, 1, start, 2), x + 0

    source = torch.full((4, 2), -1.0)
    start = torch.tensor([1], dtype=torch.int32)
    updated, before = poptorch.inferenceModel(forward)(X, source, start)
    expected = X.clone()
    expected[:, 1:3] = -1
    assert torch.equal(updated, expected)
    assert torch.equal(before, X)


def test_a_step_may_be_larger_than_the_dimension():
    start = torch.tensor([1])
    found = poptorch.inferenceModel(lambda x, s: poptorch.dynamic_slice(x, 0, s, 2, 9))(X, start)
    assert torch.equal(found, X[1:2])


def test_a_dynamic_slice_trains():
    model = module(
        lambda self, start: poptorch.identity_loss(
            poptorch.dynamic_slice(self.weight, 0, start, 2, 1), "sum"
        ),
        weight=nn.Parameter(torch.ones(4, 3)),
    )
    trainer = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=1.0))
    trainer(torch.tensor([1]))
    assert model.weight[:, 0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: poptorch.dynamic_slice(X, 0, 1, 1, 1),  # type: ignore[arg-type]
        lambda: poptorch.dynamic_slice(X, 0, torch.tensor(1.0), 1, 1),
        lambda: poptorch.dynamic_slice(X, 0, torch.tensor(1), 0, 1),
        lambda: poptorch.dynamic_slice(X, 0, torch.tensor(1), 5, 1),
        lambda: poptorch.dynamic_slice(X, 0, torch.tensor(1), 1, 0),
        lambda: poptorch.dynamic_update(X, X[:1].half(), 0, torch.tensor(1), 1),
        lambda: poptorch.dynamic_update(X, X[0], 0, torch.tensor(1), 1),
        lambda: poptorch.dynamic_update(X, 1, 0, torch.tensor(1), 1),  # type: ignore[arg-type]
    ],
)
def test_what_cant_be_a_slice_is_an_error(call):
    with pytest.raises(poptorch.Error):
        call()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("keep", [False, True])
def test_a_serialized_product_equals_matmul(mode, keep):
    a, b = torch.randn(2, 4, 8), torch.randn(8, 6)

    def forward(a, b):
        return poptorch.serializedMatMul(a, b, mode, 2, keep)

    model = poptorch.inferenceModel(forward)
    torch.testing.assert_close(model(a, b), a @ b)
    assert torch.equal(forward(a, b), a @ b)
    products = [n for n in model._executable.graph.code.nodes if "mm" in str(n.target)]
    assert len(products) == (1 if mode is Mode.Disabled else 2)


def test_a_factor_that_does_not_divide_is_an_error():
    with pytest.raises(poptorch.Error, match="factor 3"):
        poptorch.serializedMatMul(X, X.T, Mode.InputChannels, 3)
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(X, X.T, "input_channels", 2)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(X, 3, Mode.InputChannels, 2)  # type: ignore[arg-type]
