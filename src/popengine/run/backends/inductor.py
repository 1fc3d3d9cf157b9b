"""The inductor backend: each piece compiled into fused kernels by torch._inductor, before the first call.

Kernels for CPUs are C++ and have one thread, as an ipu is a thread: left alone, inductor bakes the number of
cores at hand into each kernel, and the ipus would compete for them. Inductor keeps what it compiles on disk, by
graph, shapes, options and versions of torch and the compiler (`TORCHINDUCTOR_CACHE_DIR`), and compiles the kernels of
a piece in parallel.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import Partition, Piece
from .eager import NEEDS_GRADIENTS_ON, Code, build
from .tracing import Like, trace, values_read

OPTIONS = {
    "cpp.threads": 1,
    "fx_graph_cache": True,
    "size_asserts": False,  # `_guarded` looks at strides instead, and copies where they differ
    "fallback_random": True,
}
_compiling = threading.Lock()  # inductor has global state


def load(partition: Partition, device: torch.device) -> tuple[Code, ...]:
    """The functions of all pieces; the eager ones of those that can't be compiled, with a warning."""
    missing = why_not(device)
    if missing:
        warnings.warn(
            f"the compiled backend is not used: {missing[0]}\n"
            "  so: pieces run eagerly, slower but with the same results\n"
            f'  fix: {missing[1]}; or options.compiler("eager")',
            RuntimeWarning,
            stacklevel=2,
        )
        return tuple(build(piece, device=device) for piece in partition.pieces)
    with _compiling:
        pairs = zip(partition.pieces, values_read(partition), strict=True)
        return tuple(_function(piece, likes) for piece, likes in pairs)


def why_not(device: torch.device) -> tuple[str, str] | None:
    """Why nothing can be compiled for this device, and what helps; None if it can."""
    if device.type != "cpu":
        return (
            f"pieces are compiled for CPUs only, and the device is {device.type!r}",
            'options.device("cpu")',
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler", "install a C++ compiler (g++), or name one in CXX"
    return None


def _function(piece: Piece, reads: Sequence[Like]) -> Code:
    if not piece.calls or piece.gathers or any(call in NEEDS_GRADIENTS_ON for call in piece.calls):
        return build(piece)
    try:
        return compiled(piece, tuple(reads))
    except Exception as error:  # whatever a compiler runs into, the piece itself can run
        phase = "forward" if piece.phase == "F" else "backward"
        warnings.warn(
            f"{phase} of stage {piece.stage} (piece {piece}) can't be compiled and runs eagerly: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return build(piece)


@functools.lru_cache(maxsize=256)  # replicas and repeated layers run the same code
def compiled(piece: Piece, reads: tuple[Like, ...]) -> Code:
    """The compiled function of a piece that reads values like these."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    graph, fakes = trace(piece, reads, select_decomp_table())
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # keeps their strides
    mode: Any = fakes[0].fake_mode if fakes else None  # pyright: ignore[reportAttributeAccessIssue]
    with tracing(TracingContext(mode)), config.patch(OPTIONS):
        code: Any = compile_fx_inner(graph, fakes, is_inference=True)
    return _guarded(code, reads, piece.draws)


def _guarded(code: Any, reads: tuple[Like, ...], draws: bool) -> Code:
    """Inputs of users and loaded buffers may lie otherwise in memory than those that the code was made for."""
    strides = [like.stride for like in reads]

    def call(values: list[Any]) -> tuple[Tensor, ...]:
        if draws:
            key = values.pop()
            values.append(torch.tensor(key - (1 << 64) if key >> 63 else key))
        for i, stride in enumerate(strides):
            if values[i].stride() != stride:
                like = torch.empty_strided(values[i].shape, stride, dtype=values[i].dtype)
                values[i] = like.copy_(values[i])
        return code(values)

    return call
