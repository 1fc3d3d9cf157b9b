"""Every optimizer: 20 updates, pipelined over two stages, against torch.optim or the rule's formula."""

from functools import partial

import pytest
import torch
from parity_rules import Formula, Lars, adam, lamb, plain, rmsprop_tf, sgd, trained
from parity_runs import cut, made, options, plain_update
from torch import nn

import poptorch
from poptorch import optim


def differing(given, expected):
    assert given.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(given[name], value)]


def formula(rule):
    return lambda parameters: Formula(parameters, rule)


TORCH = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd, decay": ("SGD", {"lr": 0.05, "weight_decay": 0.1}),
    "sgd, momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd, nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd, maximize": ("SGD", {"lr": 0.01, "momentum": 0.5, "maximize": True}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam, decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "sgd, fused": ("SGD", {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
    "sgd, momentum, fused": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "fused": True}),
    "adam, fused": ("Adam", {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}),
    "adamw, fused": ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "fused": True}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop, momentum": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop, centered": ("RMSprop", {"lr": 0.01, "centered": True}),
    "rmsprop, centered, momentum": ("RMSprop", {"lr": 0.001, "centered": True, "momentum": 0.9}),
}


@pytest.mark.parametrize("case", TORCH)
@pytest.mark.parametrize("library", [optim, torch.optim], ids=lambda library: library.__name__)
def test_an_optimizer_that_torch_has_trains_to_torchs_bits(case, library):
    name, rates = TORCH[case]
    expected = plain(partial(getattr(torch.optim, name), **rates))
    assert differing(trained(partial(getattr(library, name), **rates)), expected) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_torchs_sgd_leaves_the_first_gradient_undampened(momentum, fused):
    made = partial(torch.optim.SGD, lr=0.05, momentum=momentum, dampening=0.3, weight_decay=0.1, fused=fused)
    assert differing(trained(made), plain(made)) == []


FORMULAS = {
    "sgd, dampening": (
        partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
        sgd(0.1, 0.9, 0.5, 0.1),
    ),
    "sgd, dampening without momentum": (partial(optim.SGD, lr=0.1, dampening=0.5), sgd(0.1, 0, 0.5)),
    "sgd, combined": (
        partial(optim.SGD, lr=0.05, momentum=0.9, use_combined_accum=True, velocity_scaling=4.0),
        sgd(0.05, 0.9),
    ),
    "adam": (partial(optim.Adam, lr=0.01, weight_decay=0.1), adam(0.01, decay=0.1, coupled=True)),
    "adamw without bias correction": (
        partial(optim.AdamW, lr=0.001, weight_decay=0.1, bias_correction=False),
        adam(0.001, decay=0.1, corrected=False),
    ),
    "rmsprop of tensorflow": (partial(optim.RMSprop, lr=0.01, use_tf_variant=True), rmsprop_tf(0.01)),
    "rmsprop of tensorflow, all": (
        partial(
            optim.RMSprop,
            lr=0.01,
            momentum=0.9,
            weight_decay=0.1,
            centered=True,
            alpha=0.9,
            eps=0.01,
            use_tf_variant=True,
        ),
        rmsprop_tf(0.01, 0.9, 0.01, 0.1, 0.9, True),
    ),
    "lamb": (partial(optim.LAMB, lr=0.01, weight_decay=0.1), lamb(0.01, decay=0.1)),
    "lamb without bias correction": (
        partial(optim.LAMB, lr=0.01, bias_correction=False),
        lamb(0.01, corrected=False),
    ),
    "lamb, max_weight_norm": (
        partial(optim.LAMB, lr=0.05, weight_decay=0.1, max_weight_norm=0.5),
        lamb(0.05, decay=0.1, max_weight_norm=0.5),
    ),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_a_rule_follows_its_formula(case):
    optimizer, rule = FORMULAS[case]
    given, expected = trained(optimizer), plain(formula(rule))
    for name, value in expected.items():
        # The formula is another order of float32 operations: some 1e-7 an update, carried over 20 of them.
        torch.testing.assert_close(
            given[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("more", [{}, {"momentum": 0.0}, {"eta": 0.02}], ids=str)
def test_lars_is_its_twin_in_plain_pytorch(more):
    twin = plain(partial(Lars, lr=0.5, decay=0.01, **more))
    mine = trained(partial(optim.LARS, lr=0.5, weight_decay=0.01, **more))
    for name, value in twin.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-7)


# Complex parameters train as in plain PyTorch: real and imaginary parts of their gradients are kept.


class Filter(nn.Module):
    """A layer in the frequency domain, as in networks of Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.mixed = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat).t())

    def forward(self, x):
        found = torch.fft.rfft(self.a(x)) * self.weight @ self.mixed
        return poptorch.identity_loss(torch.fft.irfft(found, 6).square(), "mean")


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")
    },
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_train_as_in_plain_pytorch(name, accumulation):
    ours, plain = made(Filter), made(Filter)
    own = options(accumulation=accumulation, iterations=3)
    executor = poptorch.trainingModel(ours, own, OPTIMIZERS[name](ours.parameters()))
    x = torch.randn(6 * accumulation, 6)
    losses, expected = executor(x).reshape(-1), []
    executor.copyWeightsToHost()
    step = OPTIMIZERS[name](plain.parameters())
    for update in cut(2 * accumulation, x):
        expected += plain_update(plain, step, cut(2, *update))
    # The products of complex numbers in torch's updates round otherwise.
    torch.testing.assert_close(losses, torch.stack(expected))
    for value, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=1e-4)


def test_clipping_takes_both_parts_into_the_norm():
    ours, plain = made(Filter), made(Filter)
    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1, use_combined_accum=False, max_grad_norm=0.01)
    x = torch.randn(2, 6)
    executor = poptorch.trainingModel(ours, options(accumulation=1), optimizer)
    executor(x)
    executor.copyWeightsToHost()
    plain(x).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for value, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, other)
