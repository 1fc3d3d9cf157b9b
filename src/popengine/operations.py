"""The engine's own operations: a branch, a loop, a gather of the values of all replicas of a group, a strided copy.

A branch or loop runs bodies, graphs inside a graph, which are passed as text, since the operations of a graph take
tensors and plain values only. Gathering is a task of its own in a plan; outside a plan the operation returns `size`
copies of its value, as if all replicas had the same value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
