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


def test_a_layer_in_a_closure_records_no_gradients_in_inference():
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))

    def forward(x):
        left, right = layer(x).chunk(2, 1)
        return left.mul_(2) + right  # autograd refuses this on a view of several

    with torch.no_grad():
        expected = forward(x)
    assert torch.equal(poptorch.inferenceModel(forward)(x), expected)


def test_inference_runs_the_kernels_that_plain_pytorch_chooses_for_weights_that_require_gradients():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval(), torch.randn(2, 5, 8)
    assert torch.equal(poptorch.inferenceModel(layer, options(accumulation=1))(x), layer(x).detach())
