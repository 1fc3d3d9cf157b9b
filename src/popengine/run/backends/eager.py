"""Makes a piece callable: the eager backend runs its source as it is.

A piece was captured on the CPU, and its source says so wherever it makes a tensor. Built for an accelerator, its
operations make tensors there.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from popengine.ir import Piece

from ..devices import CPU
from ..state.random_draws import draw, drawing_on
from .direct_calls import direct, operation_of

Code = Callable[[list[Any]], tuple[Tensor, ...]]

# Kernels that make the workspace of their backward only where gradients are on.
NEEDS_GRADIENTS_ON = ("aten.mkldnn_rnn_layer.default",)
# Accelerators' kernels may lay out their results otherwise in memory, so that such a view has to be a copy.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def build(
    piece: Piece,
    call: Callable[[Any], Callable[..., Any]] = direct,
    device: torch.device = CPU,
    after: Mapping[int, str] = MappingProxyType({}),
    alone: bool = False,
    **more: Any,
) -> Code:
    """The function of a piece: takes the list of what it reads, empties it, returns what it writes.

    Args:
        call: from an operation of torch.ops to what the source calls for it
        device: where what it reads is, and all that it makes
        after: statements that follow lines of its body, by their numbers; -1: before the first
        alone: it waits for no other replicas, as if they had the same values
        more: other names that its source may use
    """
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    names |= {"draw": draw if device.type == "cpu" else drawing_on(device), **more}
    for (name, is_drawn), written in piece.functions.items():
        operation = operation_of(name)
        # Draws look at what they are given to draw.
        function = operation if is_drawn else _on_accelerator(operation, device) or call(operation)
        names[written] = _with_gradients_on(function) if name in NEEDS_GRADIENTS_ON else function
    exec(compile(piece.written(after, alone), _file(piece), "exec"), names)
    return names["piece"]


def _on_accelerator(operation: Any, device: torch.device) -> Callable[..., Any] | None:
    """Return what to call on an accelerator where it is not the operation itself."""
    if device.type == "cpu":
        return None
    if operation in _VIEWS:
        return Tensor.reshape
    if any(argument.name == "device" and argument.kwarg_only for argument in operation._schema.arguments):
        return lambda *args, **kwargs: operation(*args, **{**kwargs, "device": device, "pin_memory": None})
    return None


def _with_gradients_on(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.enable_grad():  # within inference mode nothing is recorded
            return function(*args)

    return call


def user_line(piece: Piece, error: BaseException) -> str:
    """The line of the user's code behind the operation that failed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == _file(piece) and frame.lineno is not None:
            return piece.where(frame.lineno)
    return "?"


def _file(piece: Piece) -> str:
    return f"<piece {piece}>"
