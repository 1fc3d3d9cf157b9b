"""Where tensors begin: kernels of MKL and oneDNN are chosen by the alignment of what they read, and so are bits.

A micro-batch is a slice of the combined batch, which begins wherever it happens to. Let all that pieces are given
begin at a multiple of 64 bytes, as torch's own allocations do: then a row's bits don't depend on its place in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from popengine.errors import Error

BYTES = 64


def aligned(batch: Tensor) -> Tensor:
    """The same values, [iterations, accumulation, groups, ...], each of whose slices begins at a multiple of 64 bytes.

    The batch itself where that is so; else one copy, with room between the slices."""
    size, first = batch.element_size(), batch.shape[:3]
    steps = [stride for stride, count in zip(batch.stride()[:3], first, strict=True) if count > 1]
    if not batch.numel() or all(
        number % BYTES == 0 for number in (batch.data_ptr(), *(s * size for s in steps))
    ):
        return batch
    inner = torch.empty_like(batch[0, 0, 0]).stride()  # channels_last stays what it is
    row = -(-prod(batch.shape[3:]) * size // BYTES) * BYTES // size
    strides = (first[1] * first[2] * row, first[2] * row, row, *inner)
    room = torch.empty(prod(first) * row, dtype=batch.dtype)
    return room.as_strided(batch.shape, strides).copy_(batch)


def begins_well(value: Tensor) -> Tensor:
    """The tensor itself, or a copy that begins at a multiple of 64 bytes."""
    return value.clone() if value.is_cpu and value.data_ptr() % BYTES else value


def check(given: Mapping[str, Tensor], made: Mapping[str, Tensor], piece: str) -> None:
    """Look at all that a piece reads on a CPU.

    Args:
        given: what it has of the user or from step to step; these begin well themselves
        made:  what other pieces have made; the memory of these begins well, and views of it lie where they lie in
            every layout
    Raises:
        Error: one of them does not
    """
    wrong = [name for name, value in given.items() if value.is_cpu and value.data_ptr() % BYTES]
    wrong += [n for n, v in made.items() if v.is_cpu and v.untyped_storage().data_ptr() % BYTES]
    if wrong:
        raise Error(
            f"{', '.join(wrong)} begins at no multiple of {BYTES} bytes, and piece {piece} reads it\n"
            "  why: kernels may give other bits there (POPTORCH_CHECK_ALIGNMENT looks for it)\n"
            "  fix: this is a mistake of the engine's; please report it"
        )
