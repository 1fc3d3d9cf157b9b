"""Small models that need no class of their own."""

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
