"""The engine's own operations: a branch, a loop, a gather of the values of all replicas of a group, a strided copy,
torch's attention as one operation for all kinds of devices.

A branch or loop runs bodies, graphs inside a graph, which are passed as text, since the operations of a graph take
tensors and plain values only. Gathering is a task of its own in a plan; outside a plan the operation returns `size`
copies of its value, as if all replicas had the same value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .piece import Line, Piece, Value


@dataclass(frozen=True)
class Body:
    """The body of a branch or loop: a function from tensors to tensors, and each output's shape and dtype."""

    piece: Piece
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    draws: bool  # whether it draws random numbers

    def as_text(self) -> str:
        """Return the body as Python text, from which `from_text` makes it again."""
        return repr(self)

    @staticmethod
    @functools.cache
    def from_text(text: str) -> Body:
        """Return the body of a text that `as_text` has returned; the same object for the same text."""
        return eval(text, dict(_NAMES))


_NAMES = {
    **{kind.__name__: kind for kind in (Body, Piece, Line, Value)},
    **{"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan},
}


def called_operations(piece: Piece) -> Iterator[str]:
    """Yield the names of the operations that a piece, and the bodies of its branches and loops, call."""
    yield from piece.calls
    for line in piece.lines:
        if line.call.startswith("popengine."):
            for argument in line.arguments:
                if isinstance(argument, str):
                    yield from called_operations(Body.from_text(argument).piece)


LIBRARY = torch.library.Library("popengine", "DEF")
_BODIES = "str then_body, Tensor[] then_inputs, str else_body, Tensor[] else_inputs"
_COND = f"(Tensor condition, {_BODIES}) -> Tensor[]"
_LOOP = "(int count, str body, Tensor[] state, Tensor[] others) -> Tensor[]"


def _empty_outputs(body: str, device: torch.device) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in Body.from_text(body).outputs]


# Bodies that draw random numbers have a variant with the tag of random operations, so it is given a key.
for _suffix, _tags in (("", ()), ("_that_draws", (torch.Tag.nondeterministic_seeded,))):
    LIBRARY.define(f"cond{_suffix}{_COND}", tags=_tags)
    LIBRARY.define(f"loop{_suffix}{_LOOP}", tags=_tags)
    torch.library.register_fake(
        f"popengine::cond{_suffix}",
        lambda condition, body, *others: _empty_outputs(body, condition.device),
        lib=LIBRARY,
    )
    torch.library.register_fake(
        f"popengine::loop{_suffix}",
        lambda count, body, state, others: _empty_outputs(body, state[0].device),
        lib=LIBRARY,
    )


LIBRARY.define("gather_over_replicas(Tensor value, int size, bool exchange=False) -> Tensor")
# The composite implementation gives fake tensors their shape, too.
LIBRARY.impl(
    "gather_over_replicas",
    lambda value, size, exchange=False: (
        value.clone(memory_format=torch.contiguous_format)
        if exchange
        else value.unsqueeze(0).repeat(size, *[1] * value.dim())
    ),
    "CompositeExplicitAutograd",
)


def gather_over_replicas(value: Tensor, size: int, exchange: bool = False) -> Tensor:
    """Return the values of the group's replicas, stacked: [size, *value.shape], without a gradient. With `exchange`
    `value` has a row for each replica, [size, ...]: return only this replica's row of each value."""
    return torch.ops.popengine.gather_over_replicas(value, size, exchange)


LIBRARY.define("with_strides(Tensor value, int[] strides) -> Tensor")
LIBRARY.impl(
    "with_strides",
    lambda value, strides: value.new_empty_strided(value.shape, strides).copy_(value),
    "CompositeExplicitAutograd",
)


def with_strides(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of a tensor with other strides."""
    return torch.ops.popengine.with_strides(value, strides)


# ---- attention -----------------------------------------------------------------------------------------------

_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, bool enable_gqa"
)
LIBRARY.define(f"attention({_ATTENTION}) -> Tensor")
LIBRARY.define(f"attention_backward(Tensor gradient, {_ATTENTION}) -> (Tensor, Tensor, Tensor)")
_attend = functional.scaled_dot_product_attention


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any) -> Tensor:
    return _attend(query, key, value, mask, 0.0, others[0], scale=others[1], enable_gqa=others[2])


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value. Runs forward again: what torch's kernels save differs by kind."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),  # the caller may capture the work of its thread
    ):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        plain = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in others]
        return torch.autograd.grad(_attention(*inputs, *plain), inputs, gradient.clone())


for _kind in ("CPU", "CUDA", "XPU"):
    LIBRARY.impl("attention", _attention, _kind)
    LIBRARY.impl("attention_backward", _attention_backward, _kind)


@torch.library.register_fake("popengine::attention", lib=LIBRARY)
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.register_fake("popengine::attention_backward", lib=LIBRARY)
def _(gradient: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors[:3])


def _backward_of_attention(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors, others = ctx.saved_tensors, ctx.others
    mask = tensors[3] if len(tensors) > 3 else None
    found = torch.ops.popengine.attention_backward(gradient, *tensors[:3], mask, *others)
    return (*found, None, None, None, None)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(tensor for tensor in inputs[:4] if tensor is not None))
    ctx.others = inputs[4:]


torch.library.register_autograd(
    "popengine::attention", _backward_of_attention, setup_context=_save_for_backward, lib=LIBRARY
)


class OneAttention(TorchFunctionMode):
    """A mode in which `scaled_dot_product_attention` is the operation `attention`: a device runs torch's fused
    kernels. Attention with dropout, or with a mask that is trained, is recorded as products and a softmax instead."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _record_attention(*args, **(kwargs or {})) if function is _attend else None
        return function(*args, **(kwargs or {})) if found is None else found


def _record_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Call the operation `attention`, with the arguments of torch's function; return None if it can't be used."""
    mask = attn_mask
    is_trained = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if dropout_p or is_trained or query.dim() != 4:
        return None
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(dtype) for each in (query, key, value))
        mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    return torch.ops.popengine.attention(query, key, value, mask, is_causal, scale, enable_gqa)
