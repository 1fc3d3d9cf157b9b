"""Small models that need no class of their own, and an optimizer of a user."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def module(forward: Callable[..., Any], **held: Any) -> Any:
    """Return a module with this forward, and with layers, weights, buffers and attributes by their names.

    >>> model = module(lambda self, x: self.layer(x) * self.scale, layer=nn.Linear(2, 2), scale=torch.ones(2))
    """
    made = type("Module", (nn.Module,), {"forward": forward})()
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made


class Signed(torch.optim.Optimizer):
    """An optimizer of a user: m ← μ·m + (1 − μ)·g;  w ← w − lr·sign(m)."""

    def __init__(self, parameters, lr=0.125, momentum=0.5):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.add_(mean.sign(), alpha=-group["lr"])
