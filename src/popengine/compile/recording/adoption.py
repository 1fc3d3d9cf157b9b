"""Adoption: while it is on, torch's functions are given stand-ins for the module's own tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from popengine.errors import CaptureError

from .graph_recorder import map_leaves, user_line
from .standins import StandIns


@contextlib.contextmanager
def adoption(stand_ins: StandIns) -> Iterator[None]:
    """While it is on, stand-ins are what torch's functions are given, and functions with a backward of their own."""
    own, thread = Function.__dict__["apply"], threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args = tuple(map(stand_ins.of, args))
        return own.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _Adoption(stand_ins):
            yield
    finally:
        Function.apply = own


class _Adoption(TorchFunctionMode):
    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(self._stand_ins.of, (args, kwargs or {}))
        if func == Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            return _write(*args)
        return func(*args, **kwargs)


def _write(target: Tensor, value: Tensor) -> None:
    """`target.data = value`, as the write into memory that it is to everybody who holds the tensor."""
    if target.shape != value.shape or target.dtype != value.dtype:
        raise CaptureError(
            f"`.data` of a {target.dtype} tensor of shape {tuple(target.shape)} is set to a {value.dtype} tensor of"
            f" shape {tuple(value.shape)}, at {user_line()}\n"
            "  fix: keep shape and type: a compiled model's tensors have fixed ones"
        )
    target.detach().copy_(value)
