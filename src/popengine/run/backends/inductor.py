"""The inductor backend: torch._inductor compiles each piece into fused kernels, before the first call.

Kernels have one thread each, because tasks run in parallel. Inductor caches kernels on disk. A draw of random numbers,
or an operation that is not torch's own, is not compiled: the compiled code calls it through one opaque operation,
`popengine::eager`.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...ir import Partition, Piece
from ...operations import LIBRARY
from ...torch_private import (
    FakeTensorMode,
    OpOverload,
    compile_graph,
    decompositions,
    has_cpp_compiler,
    storage_id,
    trace,
    tree_flatten,
    tree_unflatten,
)
from ..random_draws import draw
from .eager import NEEDS_GRADIENTS_ON, Code, build

OPTIONS = {
    "cpp.threads": 1,
    "fx_graph_cache": True,
    "size_asserts": False,  # `_with_traced_inputs` copies inputs with other strides
    "fallback_random": True,
}
_compiling = threading.Lock()  # inductor has global state


def load_pieces(partition: Partition, device: torch.device) -> tuple[Code, ...]:
    """Return the compiled function of each piece; with a warning, the eager function of a piece that can't be compiled
    (of all pieces without a C++ compiler or on an accelerator)."""
    why, fix = "", ""
    if device.type != "cpu":
        why = f"pieces are compiled for CPUs only, and the device is {device.type!r}"
        fix = 'options.device("cpu")'
    elif not has_cpp_compiler():
        why, fix = "there is no C++ compiler", "install a C++ compiler (g++), or name one in CXX"
    if why:
        _warn(
            f"the compiled backend is not used: {why}\n"
            "  so: pieces run eagerly, slower but with the same results\n"
            f'  fix: {fix}; or options.compiler("eager")'
        )
        return tuple(build(piece, device=device) for piece in partition.pieces)
    with _compiling:
        pairs = zip(partition.pieces, input_metadata(partition), strict=True)
        return tuple(_compile_or_build(piece, reads) for piece, reads in pairs)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _compile_or_build(piece: Piece, reads: Sequence[TensorMetadata]) -> Code:
    """Return the compiled function of a piece; the eager one if it can't be compiled, with a warning if that is new."""
    if not piece.calls or piece.gather_group_size or any(call in NEEDS_GRADIENTS_ON for call in piece.calls):
        return build(piece)
    try:
        return compile_piece(piece, tuple(reads))
    except Exception as error:  # whatever makes the compiler fail, the piece runs eagerly
        phase = "forward" if piece.phase == "F" else "backward"
        _warn(
            f"{phase} of stage {piece.stage} (piece {piece}) can't be compiled and runs eagerly: "
            f"{type(error).__name__}: {error}"
        )
        return build(piece)


@functools.lru_cache(maxsize=256)  # replicas and repeated layers run the same code
def compile_piece(piece: Piece, reads: tuple[TensorMetadata, ...]) -> Code:
    """Return the compiled function of a piece for inputs with the metadata `reads`. Results are cached."""
    graph, fakes = trace_piece(piece, reads, decompositions())
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # keeps their strides
    return _with_traced_inputs(compile_graph(graph, fakes, OPTIONS), reads, bool(piece.draws))


def _with_traced_inputs(code: Any, reads: tuple[TensorMetadata, ...], draws: bool) -> Code:
    """Return a function that calls compiled code with inputs as it was traced: it copies inputs with other
    strides than in `reads`, and makes the key of random numbers, the last input if `draws`, a tensor."""
    strides = [like.stride for like in reads]

    def call(values: list[Any]) -> tuple[Tensor, ...]:
        if draws:
            key = values.pop()
            values.append(torch.tensor(key - (1 << 64) if key >> 63 else key))
        for i, stride in enumerate(strides):
            if values[i].stride() != stride:
                values[i] = values[i].new_empty_strided(values[i].shape, stride).copy_(values[i])
        return code(values)

    return call


# ---- tracing a piece on fake tensors -------------------------------------------------------------------------


class TensorMetadata(NamedTuple):
    """The metadata of a tensor that compiled code depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def input_metadata(partition: Partition) -> list[tuple[TensorMetadata, ...]]:
    """Return the metadata of the inputs of each piece, by running all pieces on fake tensors."""
    fake = FakeTensorMode()
    metadata = []
    with fake, torch.no_grad():
        values = {slot.name: torch.empty(slot.shape, dtype=slot.dtype) for slot in partition.signature.slots}
        for name, piece in partition.prepared.items():
            (values[name],) = build(piece)([values[read] for read in piece.reads])
        for piece in partition.pieces:
            reads = [values[name] for name in piece.reads]
            metadata.append(tuple(TensorMetadata(tuple(v.shape), v.stride(), v.dtype) for v in reads))
            code = build(piece, draw=lambda func, key, number, *args, **kwargs: func(*args, **kwargs))
            made = code([*reads, 0] if piece.draws else list(reads))
            values.update(zip(piece.writes, made, strict=True))
    return metadata


def trace_piece(
    piece: Piece, reads: Sequence[TensorMetadata], table: Mapping[Any, Any]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the fx graph of a piece, and the fake inputs with which it was traced, the key of its draws last."""

    def make_inputs() -> list[Tensor]:
        values = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in reads]
        return [*values, torch.empty((), dtype=torch.int64)] if piece.draws else values

    code = build(piece, _traced_function, draw=_call_eager)
    return trace(lambda *given: list(code(list(given))), make_inputs, table)


# ---- operations that are not compiled ---------------------------------------------------------------------


# Functions of (key of the random numbers, tensors, whether the tensors are fake), by a text that compiled code
# contains. Also before code from inductor's cache on disk runs, this process traces the piece.
_calls: dict[str, Callable[[Tensor | None, Sequence[Tensor], bool], list[Tensor]]] = {}


def _traced_function(operation: OpOverload) -> Callable[..., Any]:
    """Return the function that is traced for an operation: a functional operation of torch, or else
    `popengine::eager`."""
    is_compiled = operation.namespace in ("aten", "prims") and not operation._schema.is_mutable
    return operation if is_compiled else functools.partial(_call_eager, operation, None, None)


def _call_eager(
    operation: OpOverload, key: Tensor | None, number: int | None, *args: Any, **kwargs: Any
) -> Any:
    """Call an operation through `popengine::eager`, by `random_draws.draw` if there are a key and a number."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = [... if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call_operation(key: Tensor | None, tensors: Sequence[Tensor], is_fake: bool) -> list[Tensor]:
        given = iter(tensors)
        filled = [next(given) if leaf is ... else leaf for leaf in constants]
        args, kwargs = tree_unflatten(filled, structure)
        if number is None or key is None or is_fake:
            made = operation(*args, **kwargs)
        else:
            made = draw(operation, int(key), number, *args, **kwargs)
        return [made] if isinstance(made, Tensor) else list(made)

    text = f"{operation} {number} {constants} {structure}"
    _calls[text] = call_operation
    made = torch.ops.popengine.eager(text, key, tensors)
    returns = operation._schema.returns
    is_single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return made[0] if is_single else tuple(made)


def _run_eager(text: str, key: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    """Return the results of `_calls[text]`, none in an argument's memory, which compiled code may reuse."""
    owned = {storage_id(tensor) for tensor in tensors}
    made = _calls[text](key, tensors, False)
    return [value.clone() if storage_id(value) in owned else value for value in made]


LIBRARY.define("eager(str call, Tensor? key, Tensor[] tensors) -> Tensor[]")
LIBRARY.impl("eager", _run_eager, "CompositeExplicitAutograd")
torch.library.register_fake(
    "popengine::eager", lambda text, key, tensors: _calls[text](key, tensors, True), lib=LIBRARY
)
