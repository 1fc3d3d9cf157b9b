"""Gradient sums over micro-batches. The first gradient of a step becomes the sum as it is, where nobody else has it.

A copy would cost as much as a fifth of a large update, and memory for all gradients twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from popengine import ir


def begin_sums(
    sums: dict[str, Tensor],
    keys: Sequence[str],
    frame: Mapping[str, Tensor],
    names: Sequence[str],
    freed: frozenset[str],
) -> None:
    """Let sums begin with the gradients of the first micro-batch.

    Args:
        freed: names that nobody will ask the frame for (`freed_at_once`)
    """
    copied: list[tuple[Tensor, Tensor]] = []
    for key, name in zip(keys, names, strict=True):
        if name in freed and _is_ours(frame, name, sums[key]):
            sums[key] = frame[name]
        else:
            copied.append((sums[key], frame[name]))
    if copied:
        torch._foreach_copy_([target for target, _ in copied], [value for _, value in copied])


def freed_at_once(program: Sequence[ir.Instruction]) -> frozenset[str]:
    """Gradients of which nothing is asked once they are added up."""
    found: set[str] = set()
    for place, instruction in enumerate(program):
        if isinstance(instruction, ir.Accumulate):
            names = set(instruction.names)
            for other in program[place + 1 :]:
                if isinstance(other, ir.Free):
                    found |= names & set(other.names)
                if isinstance(other, (ir.Free, ir.Compute)):
                    break
                names -= set(getattr(other, "names", ()))
    return frozenset(found)


def _is_ours(frame: Mapping[str, Tensor], name: str, like: Tensor) -> bool:
    """Whether the frame alone has this tensor and its memory, and it has the form of the sum."""
    value = frame[name]
    form = value.dtype, value.shape, value.stride(), value.nbytes
    if form != (like.dtype, like.shape, like.stride(), value.untyped_storage().nbytes()):
        return False
    del value
    return _names(frame, name) == _ONE_NAME and _owners(frame[name]) == _ONE_OWNER


def _names(frame: Mapping[str, Tensor], name: str) -> int:
    return sys.getrefcount(frame[name])


def _owners(value: Tensor) -> int:
    """Tensors of this memory, and what asking for their number adds."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata)  # pyright: ignore


# What both are for a tensor that a frame alone has.
_ONE_NAME = _names({"": torch.empty(1)}, "")
_ONE_OWNER = _owners(torch.empty(1))
