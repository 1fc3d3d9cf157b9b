"""The return value of a forward: its structure at capture, and the outputs of each call in that structure."""

import warnings
from typing import Any

import torch
from torch import Tensor

from popengine.errors import CaptureError, Error
from poptorch.annotating.notes import filled, without_values
from poptorch.nested_values import tensors_of


def traced_outputs(value: Any, where: str) -> tuple[Any, list[Tensor]]:
    """Return the structure of a forward's return value, and the traced tensors in it.

    A tensor that exists before the model runs is no output: it stays in the structure, with a warning.

    Args:
        where: the line of forward
    """
    template, traced = without_values(value, where)
    for tensor in traced:
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"forward, at {where}, returns a sparse tensor ({tensor.layout}) of shape {tuple(tensor.shape)}\n"
                "  why: the outputs of a call are dense tensors\n"
                "  fix: return `value.to_dense()`"
            )
    if len(traced) < len(tensors_of(template)):
        warnings.warn(
            "Output expected to be on the IPU, but is a constant of the host: returned as it is", stacklevel=2
        )
    return template, traced


def returned(template: Any, outputs: list[Tensor]) -> Any:
    """Return a forward's output structure with the outputs of a call."""
    return filled(template, map(_marked_as_output, outputs))


def _marked_as_output(value: Tensor) -> Tensor:
    """Return the same tensor, on which `backward()` is an error that explains what to write."""
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
