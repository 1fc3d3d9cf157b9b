"""Outputs of a call: plain tensors, of which nobody can go backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from popengine.errors import Error


def marked_as_output(value: Tensor) -> Tensor:
    """The same tensor; `backward()` on it is an error that says what to write."""
    if value.is_floating_point():
        value.backward = _refuse_backward
        value.__getstate__ = _no_state  # so that a saved output is a plain tensor
    return value


def _no_state() -> None:
    return None


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on a model's output: the call of the model has trained it\n"
        "  fix: leave it out; wrap the model with poptorch.trainingModel to have it trained"
    )
