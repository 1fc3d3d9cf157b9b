"""Torch's global modes in public calls: set as the engine needs them, and afterwards as they were."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def with_torch_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs outside inference mode, and after Ctrl-C leaves gradients on or off as they were."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            # Tensors made in it take no gradient, and are not writable after it, as a model's have to be.
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        takes_gradients = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            # Just before the end of a `with torch.no_grad()`, an interrupt keeps it from restoring the mode.
            torch.set_grad_enabled(takes_gradients)
            raise

    return call


def methods_with_torch_modes(kind: type[T]) -> type[T]:
    """Wrap all public methods of a class by `with_torch_modes`."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(kind, name, with_torch_modes(member))
    return kind
