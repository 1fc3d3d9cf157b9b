"""Automatic casts, of PopTorch 3.0 and before: `autocast`, by way of torch.autocast to float16.

In a compiled model only; on plain PyTorch nothing is cast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from popengine.compile.capture import current
from popengine.errors import Error


class Policy:
    """Which operations run in which precision. Here torch decides, so only the default is accepted."""

    def __init__(
        self,
        fp16: Sequence[str] | None = None,
        fp32: Sequence[str] | None = None,
        promote: Sequence[str] | None = None,
        demote: Sequence[str] | None = None,
    ) -> None:
        lists = {"fp16": fp16, "fp32": fp32, "promote": promote, "demote": demote}
        named = [name for name, operations in lists.items() if operations is not None]
        if named:
            raise Error(
                f"autocasting.Policy: lists of operations ({', '.join(named)}) are not supported\n"
                "  why: casts follow torch.autocast, whose lists are fixed\n"
                "  fix: use the default policy, and cast by hand what differs: x.half(), x.float()"
            )


default = Policy()


class autocast(contextlib.AbstractContextManager):  # noqa: N801 the public name
    """Matrix products and convolutions inside run in float16; a context manager and a decorator.

    with poptorch.autocast():
        x = self.layer(x)
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        if current() is not None:
            devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
            for device in devices:
                stack.enter_context(torch.autocast(device, torch.float16, self._enabled))
        self._stacks.append(stack)

    def __exit__(self, *details: Any) -> None:
        self._stacks.pop().__exit__(*details)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with autocast(self._enabled):
                return function(*args, **kwargs)

        return wrapper
