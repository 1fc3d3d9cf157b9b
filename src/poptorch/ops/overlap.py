"""Asks for inputs and outputs to move while the model computes. Recorded: results are the same."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from popengine.errors import Error

from ..enums import OverlapMode
from .library import mark

mark("set_overlap_for_input(Tensor input, str mode) -> Tensor")
mark("set_overlap_for_output(Tensor input, str mode) -> Tensor")


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """The same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked("input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """The same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked("output", output_tensors, mode)


def _marked(kind: str, tensors: Any, mode: OverlapMode) -> Any:
    if not isinstance(mode, OverlapMode):
        raise Error(f"the mode must be one of poptorch.OverlapMode's; found {mode!r}")

    def marked(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise Error(
                f"poptorch.set_overlap_for_{kind}: you may only set overlap on tensors, in tuples, lists and"
                f" dictionaries; found {type(value).__name__}\n  fix: pass the tensors only"
            )
        return getattr(torch.ops.poptorch, f"set_overlap_for_{kind}")(value, mode.value)

    return tree_map(marked, tensors)
