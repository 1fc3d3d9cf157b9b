"""Traces a piece on fake tensors: what its values will look like, and the fx graph a compiler is given.

What has to run as it is (a draw of random numbers, an operation that is not torch's own) becomes a call of one
opaque operation, `popengine::eager`, in the middle of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from popengine.control_flow import LIBRARY

from ...ir import Partition, Piece
from ..state.random_draws import draw
from .eager import build


@dataclass(frozen=True, slots=True)
class Like:
    """What a tensor looks like: all that compiled code depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Tensor) -> Like:
        return Like(tuple(value.shape), value.stride(), value.dtype)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


def values_read(partition: Partition) -> list[tuple[Like, ...]]:
    """For each piece what it will read, found by running all pieces in order on fake tensors."""
    fake = FakeTensorMode()
    found = []
    with fake, torch.no_grad():
        values = {slot.name: torch.empty(slot.shape, dtype=slot.dtype) for slot in partition.signature.slots}
        for name, piece in partition.prepared.items():
            (values[name],) = build(piece)([values[read] for read in piece.reads])
        for piece in partition.pieces:
            reads = [values[name] for name in piece.reads]
            found.append(tuple(map(Like.of, reads)))
            code = build(piece, alone=True, draw=_pretend_draw)
            made = code([*reads, 0] if piece.draws else list(reads))
            values.update(zip(piece.writes, made, strict=True))
    return found


def _pretend_draw(func: Any, key: int, place: int, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def trace(
    piece: Piece, reads: Sequence[Like], decompositions: dict[Any, Any]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The fx graph of a piece, and the fake tensors it was traced on (the last one is the key, if it draws)."""
    fake = FakeTensorMode(shape_env=ShapeEnv())  # inductor's cache asks for one, though no shape is dynamic
    with fake:
        values = [like.empty() for like in reads]
        if piece.draws:
            values.append(torch.empty((), dtype=torch.int64))

    code = build(piece, _opaque, draw=_draw)
    traced = make_fx(lambda *given: list(code(list(given))), decomposition_table=decompositions)
    with fake, torch.no_grad():
        return traced(*values), values


# ---- operations that run as they are ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of `popengine::eager` does. `run` and `pretend` take a key first, then the arguments."""

    run: Callable[..., Any]
    pretend: Callable[..., Any]
    structure: Any  # of the arguments
    rest: tuple[Any, ...]  # the arguments, with None where tensors go
    tensors: tuple[int, ...]  # the places of tensors among them

    def __call__(
        self, function: Callable[..., Any], key: Tensor | None, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        leaves = list(self.rest)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        made = function(key, *args, **kwargs)
        return [made] if isinstance(made, Tensor) else list(made)


# By text, so that compiled code which a cache holds finds them: whoever loads it has traced the piece before.
_calls: dict[str, _Call] = {}


def _opaque(operation: Any) -> Any:
    """An operation that is not torch's own, as the compiled code calls it."""
    if operation.namespace in ("aten", "prims"):
        return operation

    def run(key: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs)

    return lambda *args, **kwargs: _call(str(operation), run, run, None, args, kwargs, _is_single(operation))


def _draw(func: Any, key: Tensor, place: int, *args: Any, **kwargs: Any) -> Any:
    """As `draws.draw`."""

    def run(key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return draw(func, int(key), place, *args, **kwargs)

    def pretend(key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return _call(f"draw {func} {place}", run, pretend, key, args, kwargs, _is_single(func))


def _call(
    text: str,
    run: Callable[..., Any],
    pretend: Callable[..., Any],
    key: Tensor | None,
    args: Any,
    kwargs: Any,
    single: bool,
) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    rest = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
    text = f"{text} {rest} {places} {structure}"
    _calls[text] = _Call(run, pretend, structure, rest, places)
    made = torch.ops.popengine.eager(text, key, [leaves[i] for i in places])
    return made[0] if single else tuple(made)


def _is_single(operation: Any) -> bool:
    returns = operation._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _run_eager(text: str, key: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    call = _calls[text]
    # A result that is an argument (of a mark) becomes a copy: the compiled code may reuse the argument's memory.
    owned = {tensor.untyped_storage()._cdata for tensor in tensors}
    made = call(call.run, key, tensors)
    return [value.clone() if value.untyped_storage()._cdata in owned else value for value in made]


def _pretend_eager(text: str, key: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    call = _calls[text]
    return call(call.pretend, key, tensors)


LIBRARY.define("eager(str call, Tensor? key, Tensor[] tensors) -> Tensor[]")
LIBRARY.impl("eager", _run_eager, "CompositeExplicitAutograd")
torch.library.register_fake("popengine::eager", _pretend_eager, lib=LIBRARY)
