"""Hooks change gradients as in plain PyTorch, or are refused; torch.inference_mode() around calls changes nothing."""

from functools import partial

import pytest
import torch
from parity_runs import ACCUMULATION, ROWS, assert_trains_as_plain_pytorch, options
from torch import nn

import poptorch

seen = []


class Hooked(nn.Module):
    """Hooks on a weight of each stage, on a value of forward, and on a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = poptorch.BeginBlock(nn.Linear(3, 3), "a", ipu_id=0)
        self.b = poptorch.BeginBlock(nn.Linear(3, 3), "b", ipu_id=1)
        mask = torch.eye(3)
        self.a.weight.register_hook(lambda gradient: gradient * mask)
        self.a.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        self.b.weight.register_hook(lambda gradient: gradient + self.a.bias.detach())
        self.b.bias.register_hook(lambda gradient: None)
        self.b.register_full_backward_hook(lambda layer, inner, outer: (inner[0] * 3,))

    def forward(self, x):
        y = self.a(x)
        y.register_hook(lambda gradient: gradient * 2)
        return poptorch.identity_loss(self.b(y).square(), "mean")


X = torch.randn(ACCUMULATION * ROWS, 3, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("stages", [("a", "b"), None], ids=["two stages", "one stage"])
def test_hooks_change_gradients_as_in_plain_pytorch(stages):
    strategy = stages and poptorch.PipelinedExecution(*stages)
    assert_trains_as_plain_pytorch(Hooked, partial(torch.optim.SGD, lr=0.5), X, strategy=strategy)


def trainer():
    model = nn.Sequential(nn.Linear(3, 1))
    loss = nn.Module()
    loss.forward = lambda x: poptorch.identity_loss(model(x), "mean")
    loss.model = model
    return model[0].weight, poptorch.trainingModel(
        loss, options(accumulation=1), torch.optim.SGD(model.parameters(), lr=0.5)
    )


def test_a_hook_that_is_set_or_removed_is_followed_by_the_next_call_and_one_after_accumulation_is_refused():
    weight, executor = trainer()

    def change_by(factor):
        before = weight.detach().clone()
        handle = weight.register_hook(lambda gradient: factor * gradient)
        executor(X)
        handle.remove()
        return weight.detach() - before

    executor(X)
    first = weight.detach().clone()
    assert torch.equal(change_by(0), torch.zeros_like(weight))
    executor(X)
    assert not torch.equal(weight, first)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(poptorch.Error, match=r"model\.0\.weight has a hook of register_post_accumulate_grad"):
        executor(X)


def test_a_gradient_that_a_hook_keeps_is_an_error():
    weight, executor = trainer()
    weight.register_hook(seen.append)
    with pytest.raises(poptorch.Error, match=r"leaves tensors behind in a hook of model\.0\.weight"):
        executor(X)
    seen.clear()
    weight, executor = trainer()
    weight.register_hook(lambda gradient: seen.append(gradient))
    with pytest.raises(poptorch.Error, match=r"leaves tensors behind in seen\[0\]"):
        executor(X)
    seen.clear()


# torch.inference_mode() around the calls of an executor changes nothing: it trains, and its weights stay writable.


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x):
        return poptorch.identity_loss(self.norm(self.layer(x)).square() + self.layer.weight.sum(), "mean")


def normed_trainer():
    model = Normed()
    return poptorch.trainingModel(
        model, options(accumulation=1), poptorch.optim.Adam(model.parameters(), lr=0.1)
    )


INPUT = torch.randn(2, 2, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("inside", [0, 1], ids=["the first call", "a later call"])
def test_a_call_inside_inference_mode_trains_as_any_other(inside):
    # Capture made tensors of inference mode, of which autograd records nothing: the executor never trained.
    expected, found = normed_trainer(), normed_trainer()
    for call in range(3):
        expected(INPUT)
        with torch.inference_mode(call == inside):
            loss = found(INPUT.clone())
        assert not loss.is_inference()
    assert not torch.equal(found.model.layer.weight, Normed().layer.weight)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name


def test_weights_that_are_loaded_inside_inference_mode_can_be_trained():
    expected, found = normed_trainer(), normed_trainer()
    expected(INPUT), found(INPUT)
    with torch.inference_mode():
        found.detachFromDevice()
        found.attachToDevice()
    expected(INPUT), found(INPUT)
    assert torch.equal(expected.model.layer.weight, found.model.layer.weight)


def test_a_model_that_was_made_inside_inference_mode_is_refused():
    with torch.inference_mode():
        executor = normed_trainer()
    with pytest.raises(
        poptorch.Error, match=r"layer\.weight, .* made inside torch\.inference_mode"
    ) as caught:
        executor(INPUT)
    assert "fix: make the model" in str(caught.value)
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    assert torch.equal(poptorch.inferenceModel(model)(INPUT), model(INPUT))


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
