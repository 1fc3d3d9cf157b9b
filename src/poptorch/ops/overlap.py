"""Asks for inputs and outputs to move while the model computes. Recorded: results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from ..enums import OverlapMode
from .library import mark

mark("set_overlap_for_input(Tensor input, str mode) -> Tensor")
mark("set_overlap_for_output(Tensor input, str mode) -> Tensor")


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """The same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked(torch.ops.poptorch.set_overlap_for_input, "input", input_tensors, _checked(mode))


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """The same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked(torch.ops.poptorch.set_overlap_for_output, "output", output_tensors, _checked(mode))


def _checked(mode: OverlapMode) -> str:
    if not isinstance(mode, OverlapMode):
        raise Error(f"the mode must be one of poptorch.OverlapMode's; found {mode!r}")
    return mode.value


def _marked(operation: Callable[..., Tensor], kind: str, value: Any, mode: str) -> Any:
    if isinstance(value, Tensor):
        return operation(value, mode)
    if isinstance(value, dict):
        return type(value)((key, _marked(operation, kind, item, mode)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        items = [_marked(operation, kind, item, mode) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise Error(
        f"poptorch.set_overlap_for_{kind}: you may only set overlap on tensors, in tuples, lists and dictionaries;"
        f" found {type(value).__name__}\n  fix: pass the tensors only"
    )
