"""Makes a piece callable: the eager backend runs its source as it is."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir import Piece
from .draws import draw

Code = Callable[[list[Any]], tuple[Tensor, ...]]

# Kernels that make the workspace of their backward only where gradients are on.
_MAKE_WORKSPACE = ("aten.mkldnn_rnn_layer.default",)


def build(piece: Piece, **more: Any) -> Code:
    """The function of a piece: takes the list of what it reads, empties it, returns what it writes.

    `more`: other names that its source may use.
    """
    names: dict[str, Any] = {"torch": torch, "draw": draw, "inf": float("inf"), "nan": float("nan"), **more}
    for position, call in enumerate(piece.calls):
        namespace, operation, overload = call.rsplit("::", 1)[-1].split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
        names[f"f{position}"] = _with_gradients_on(function) if call in _MAKE_WORKSPACE else function
    exec(compile(piece.source, _file(piece), "exec"), names)
    return names["piece"]


def _with_gradients_on(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.enable_grad():  # within inference mode nothing is recorded
            return function(*args)

    return call


def user_line(piece: Piece, error: BaseException) -> str:
    """The line of the user's code behind the operation that failed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == _file(piece) and frame.lineno is not None:
            return piece.lines[frame.lineno - 1]
    return "?"


def _file(piece: Piece) -> str:
    return f"<piece {piece}>"
