"""Floating point exceptions: finds the operation that makes an infinity or a NaN.

Checks every operation of a piece, which is slow; on only when the user asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Their results hold whatever was in memory, until something is written there.
_WITHOUT_VALUES = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format)


class FloatingPointException(ArithmeticError):
    """An operation overflowed, divided by zero, or made or compared a NaN."""


class FiniteCheck(TorchDispatchMode):
    """Raises FloatingPointException when finite values become infinite or NaN, or a NaN is compared.

    An infinity that is written as one (a mask of -inf) is not an exception, and may be passed on.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUES:
            return out
        taken = list(_leaves((args, tuple((kwargs or {}).values()))))
        made = [value for value in _leaves((out,)) if isinstance(value, Tensor)]
        inputs = [value for value in taken if isinstance(value, Tensor) and value.is_floating_point()]
        has_nan = any(bool(value.isnan().any()) for value in inputs)
        if has_nan and made and made[0].dtype == torch.bool:
            raise FloatingPointException(f"{func} compares a NaN")
        outputs = [value for value in made if value.is_floating_point()]
        if any(bool(value.isnan().any()) for value in outputs) and inputs and not has_nan:
            raise FloatingPointException(f"{func} makes a NaN")
        said = any(isinstance(value, float) and math.isinf(value) for value in taken)
        overflows = any(bool(value.isinf().any()) for value in outputs) and inputs and not said
        if overflows and all(bool(value.isfinite().all()) for value in inputs):
            raise FloatingPointException(f"{func} makes an infinity: it overflows or divides by zero")
        return out


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value
