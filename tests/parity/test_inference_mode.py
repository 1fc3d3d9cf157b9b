"""torch.inference_mode() around the calls of an executor changes nothing: it trains, and its weights stay writable."""

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x):
        return poptorch.identity_loss(self.norm(self.layer(x)).square() + self.layer.weight.sum(), "mean")


def trainer():
    model = Model()
    return poptorch.trainingModel(
        model, options(accumulation=1), poptorch.optim.Adam(model.parameters(), lr=0.1)
    )


X = torch.randn(2, 2, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("inside", [0, 1], ids=["the first call", "a later call"])
def test_a_call_inside_inference_mode_trains_as_any_other(inside):
    # Capture made tensors of inference mode, of which autograd records nothing: the executor never trained.
    expected, found = trainer(), trainer()
    for call in range(3):
        expected(X)
        with torch.inference_mode(call == inside):
            loss = found(X.clone())
        assert not loss.is_inference()
    assert not torch.equal(found.model.layer.weight, Model().layer.weight)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name


def test_weights_that_are_loaded_inside_inference_mode_can_be_trained():
    expected, found = trainer(), trainer()
    expected(X), found(X)
    with torch.inference_mode():
        found.detachFromDevice()
        found.attachToDevice()
    expected(X), found(X)
    assert torch.equal(expected.model.layer.weight, found.model.layer.weight)


def test_a_model_that_was_made_inside_inference_mode_is_refused():
    with torch.inference_mode():
        executor = trainer()
    with pytest.raises(
        poptorch.Error, match=r"layer\.weight, .* made inside torch\.inference_mode"
    ) as caught:
        executor(X)
    assert "fix: make the model" in str(caught.value)
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    assert torch.equal(poptorch.inferenceModel(model)(X), model(X))
