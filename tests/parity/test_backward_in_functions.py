"""Gradients that do not come from the loss's own backward, but from one inside an autograd function, reach `.grad`."""

from functools import partial

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, made, options
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch
from small_models import module

SGD = partial(torch.optim.SGD, lr=0.5)


class Inner(torch.autograd.Function):
    """Runs a function without a graph; in backward once more, with a backward of its own."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, *gradients):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradients)
        return None, x.grad


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


class Model(nn.Module):
    """Four layers; `a` and `b` run inside of functions, `shared` also outside, `frozen` is no leaf that trains."""

    def __init__(self, inside, shared, first):
        super().__init__()
        self.inside, self.is_shared, self.first = inside, shared, first
        self.a, self.b, self.c, self.frozen = (
            poptorch.BeginBlock(nn.Linear(4, 4), name) for name in ("a", "b", "c", "d")
        )
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = x.requires_grad_() if self.first == "input" else self.frozen(x).requires_grad_()
        x = self.inside(lambda y: self.b(self.a(y)).tanh(), x)
        x = self.inside(lambda y: self.b(y).sigmoid(), x)
        if self.is_shared:
            x = self.a(x) * self.b.weight.sum()
        return poptorch.identity_loss(self.c(x).square(), "mean")


@pytest.mark.parametrize("inside", [reentrant, Inner.apply], ids=["checkpoint", "function"])
@pytest.mark.parametrize("shared", [False, True], ids=["inside alone", "outside, too"])
@pytest.mark.parametrize("first", ["input", "frozen"])
def test_parameters_inside_are_trained_as_in_plain_pytorch(inside, shared, first):
    # One micro-batch: with more, plain PyTorch adds each part of a gradient to `.grad` by itself.
    make = partial(Model, inside, shared, first)
    assert_trains_as_plain_pytorch(make, SGD, torch.randn(2, 4), accumulation=1)


def test_a_language_model_with_frozen_embeddings_trains_all_layers_of_a_reentrant_checkpoint():
    """The usual recipe of LoRA: `enable_input_require_grads` and gradient checkpointing."""
    transformers = pytest.importorskip("transformers")

    def make():
        config = transformers.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8,
        )  # fmt: skip
        bert = transformers.BertForSequenceClassification(config).train()
        bert.bert.embeddings.requires_grad_(False)
        bert.enable_input_require_grads()
        bert.gradient_checkpointing_enable({"use_reentrant": True})
        return module(lambda self, words, labels: self.bert(input_ids=words, labels=labels).loss, bert=bert)

    words, labels = torch.randint(0, 11, (2, 5)), torch.randint(0, 2, (2,))
    assert_trains_as_plain_pytorch(make, SGD, words, labels, accumulation=1)


def test_gradients_are_not_copied():
    """Autograd copies a gradient into `.grad`; a step would copy all gradients for each micro-batch."""

    overview = poptorch.describe(
        module(
            lambda self, x, labels: nn.functional.cross_entropy(self.layer(x), labels), layer=nn.Linear(4, 3)
        ),
        None,
        (torch.randn(4, 4), torch.randint(3, (4,))),
    )
    assert "copy" not in str(overview) and "empty" not in str(overview)


def energy(x):
    return (x.tanh() ** 3).sum()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: torch.func.grad(energy)(x),
        lambda x: torch.func.grad_and_value(energy)(x),
        lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        lambda x: torch.func.jacrev(torch.tanh)(x),
        lambda x: torch.func.jacfwd(torch.tanh)(x),
        lambda x: torch.func.hessian(energy)(x),
        lambda x: torch.func.vmap(torch.func.grad(energy))(x),
        lambda x: torch.autograd.grad(energy(y := x.detach().requires_grad_()), y)[0],
        lambda x: torch.autograd.grad(energy(x.requires_grad_()), x)[0].detach(),
    ],
)
def test_a_forward_takes_derivatives_in_inference(derivative):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    found = poptorch.inferenceModel(derivative, options(accumulation=1))(x)
    expected = derivative(x.clone())
    for one, other in zip(
        *([each] if isinstance(each, torch.Tensor) else each for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other.detach())


def test_a_loss_of_derivatives_by_torch_func_trains():
    def forward(self, x, y):
        forces = torch.func.vmap(torch.func.grad(lambda row: self.layers(row).sum()))(x)
        return nn.functional.mse_loss(forces, y)

    def make():
        return module(forward, layers=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))

    model, plain = made(make), made(make)
    x, y = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    poptorch.trainingModel(model, options(accumulation=2), torch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows, target in zip(x.split(2), y.split(2), strict=True):
        (plain(rows.clone(), target.clone()) / 2).backward()
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
