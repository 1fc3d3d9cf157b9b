"""Which products of half precision this processor does faster through float32, measured once a process.

Some CPUs have units for half precision, others compute it number by number, and it differs from operation to operation.
A sample of each kind runs both ways, on one thread. Float32 has to win clearly: then a repetition decides the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("popengine")
aten = torch.ops.aten
_CLEARLY = 2.0  # times as fast
_ROUNDS = 3

Work = Callable[..., Any]
Kind = tuple[str, Work, Sequence[tuple[int, ...]]]  # its name, what it does, the shapes of what it takes


def _products(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """A linear layer: forward, the gradient of its input, that of its weight."""
    torch.mm(x, weight.t())
    torch.mm(gradient, weight)
    torch.mm(gradient.t(), x)


_CONVOLUTION = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
_IMAGES, _FILTERS = (2, 16, 12, 12), (16, 16, 3, 3)
_HEADS = (2, 4, 32, 32)
_attend = aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _convolution(x: Tensor, weight: Tensor) -> None:
    aten.convolution.default(x, weight, *_CONVOLUTION)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> None:
    aten.convolution_backward.default(gradient, x, weight, *_CONVOLUTION, [True, True, False])


def _attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    _attend(query, key, value)


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    sums = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], dtype=torch.float32).transpose(
        1, 2
    )
    _attend_backward(gradient, query, key, value, out, sums, 0.0, False)


_MATRICES: Kind = ("matrix products", _products, [(32, 256), (256, 256), (32, 256)])
_KINDS: dict[Any, Kind] = {
    aten.convolution.default: ("convolutions", _convolution, [_IMAGES, _FILTERS]),
    aten.convolution_backward.default: (
        "backwards of convolutions",
        _convolution_backward,
        [_IMAGES, _IMAGES, _FILTERS],
    ),
    _attend: ("attention", _attention, [_HEADS] * 3),
    _attend_backward: ("backwards of attention", _attention_backward, [_HEADS] * 5),
}


def faster_in_float32(operation: Any, dtype: torch.dtype) -> bool:
    """Whether a product of this half type is to be computed in float32 here."""
    return _measured(_KINDS.get(operation, _MATRICES)[0], dtype)


@functools.cache
def _measured(name: str, dtype: torch.dtype) -> bool:
    _, work, shapes = next(kind for kind in (_MATRICES, *_KINDS.values()) if kind[0] == name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            half = [torch.randn(shape).to(dtype) for shape in shapes]
            native = _best(lambda: work(*half))
            wide = _best(lambda: work(*(value.float() for value in half)))
    except RuntimeError as error:
        logger.info("%s have no native kernel for %s: float32 is used (%s)", name, dtype, error)
        return True
    finally:
        torch.set_num_threads(threads)
    chosen = native > _CLEARLY * wide
    logger.info(
        "halfKernels auto: a sample of %s in %s takes %.3f ms natively and %.3f ms through float32: %s",
        *(name, dtype, native * 1e3, wide * 1e3, "float32 is used" if chosen else "native is used"),
    )
    return chosen


def _best(work: Callable[[], None]) -> float:
    """Seconds of the fastest of some rounds, after one that warms up."""
    work()
    return min(repeat(work, number=1, repeat=_ROUNDS))
