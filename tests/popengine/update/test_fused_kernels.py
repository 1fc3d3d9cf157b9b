"""Fused kernels update as the rules do, but for rounding."""

from dataclasses import replace

import pytest
import torch

from popengine.settings import Optimizer
from popengine.update import formulas, group_update
from popengine.update.optimizer_rules import RULES

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = {"lr": 0.1}
CASES = {
    "adam": ("adam", {**ADAM, "weight_decay": 0.0}),
    "adam with decay": ("adam", {**ADAM, "weight_decay": 0.1}),
    "adamw": ("adamw", {**ADAM, "weight_decay": 0.1}),
    "adamw that maximizes": ("adamw", {**ADAM, "weight_decay": 0.1, "maximize": True}),
    "sgd": ("sgd", {**SGD, "momentum": 0.0, "weight_decay": 0.1}),
    "sgd, dampened": ("sgd", {**SGD, "momentum": 0.0, "dampening": 0.3, "weight_decay": 0.1}),
    "momentum": ("sgd", {**SGD, "momentum": 0.9, "weight_decay": 0.1}),
    "momentum, dampened": ("sgd", {**SGD, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": ("sgd", {**SGD, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "sgd that maximizes": ("sgd", {**SGD, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
}


def trained(optimizer, rates, steps=5):
    torch.manual_seed(0)
    weights = [torch.randn(17, 5), torch.randn(3)]
    states = [group_update.init_state(optimizer, weight) for weight in weights]
    for _ in range(steps):
        gradients = [torch.randn_like(weight) for weight in weights]
        group_update.update(optimizer, rates, weights, gradients, states)
    return weights, states


@pytest.mark.parametrize("case", CASES)
def test_a_fused_kernel_updates_as_its_rule_does(case, monkeypatch):
    kind, rates = CASES[case]
    optimizer = Optimizer(kind, {})
    weights, states = trained(optimizer, rates)
    calls = []
    real = getattr(formulas, f"fused_{kind}")
    watched = replace(RULES[kind], fused=lambda *given: (calls.append(1), real(*given)))
    monkeypatch.setitem(RULES, kind, watched)
    found, found_states = trained(optimizer, {**rates, "fused": True})
    assert len(calls) == 5
    for one, two in zip(weights, found, strict=True):
        torch.testing.assert_close(one, two)
    for one, two in zip(states, found_states, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(one[name], two[name])


def test_a_group_may_hold_both_kinds_of_parameters():
    optimizer, rates = Optimizer("adamw", {}), {**ADAM, "weight_decay": 0.1, "fused": True}
    torch.manual_seed(0)
    weights = [torch.randn(5), torch.randn(5).half(), torch.randn(5)]
    states = [group_update.init_state(optimizer, weight) for weight in weights]
    before = [weight.clone() for weight in weights]
    group_update.update(optimizer, rates, weights, [torch.ones(5) for _ in weights], states)
    for weight, old, state in zip(weights, before, states, strict=True):
        torch.testing.assert_close(weight, (old * (1 - 0.001) - 0.01).to(weight.dtype), atol=2e-3, rtol=0)
        assert state["step"] == 1


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [
        (Optimizer("adamw", {}), True),
        (Optimizer("adamw", {}, {"exp_avg": torch.float16}), False),
        (Optimizer("adamw", {}, accumulator_type=torch.float16), False),
        (Optimizer("adamw", {}, flags={"bias_correction": False}), False),
        (Optimizer("sgd", {}, flags={"torch_dampening": True}), True),
        (Optimizer("lamb", {}), False),
        (Optimizer("rmsprop", {}), False),
    ],
)
def test_what_has_no_kernel_is_updated_by_its_rule(optimizer, fits):
    assert group_update.has_fused_kernel(optimizer) is fits
