"""A ring of slots in shared memory: one process copies batches in, another reads views of them.

Who owns a slot at which time is decided by the messages of `loader_process.py`; nothing here waits or locks. All
slots lie in one storage, so that handing the ring over costs a single file descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from popengine.errors import DataError

_ALIGNMENT = 64  # a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True)
class Region:
    """Where a tensor lies within each slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ring:
    memory: torch.Tensor  # uint8 [slots, bytes of a slot]
    regions: tuple[Region, ...]

    @classmethod
    def like(cls, tensors: Sequence[torch.Tensor], slots: int) -> Ring:
        """Slots that can hold batches of the shapes and dtypes of `tensors`."""
        regions: list[Region] = []
        end = 0
        for tensor in tensors:
            region = Region(end, tuple(tensor.shape), tensor.dtype)
            regions.append(region)
            end += -(-region.bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(torch.empty(slots, max(end, 1), dtype=torch.uint8).share_memory_(), tuple(regions))

    def views(self, slot: int, rows: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The tensors in a slot; only the first `rows` of each where the batch was smaller than the slot."""
        memory = self.memory[slot]
        views = [memory[p.offset : p.offset + p.bytes].view(p.dtype).view(p.shape) for p in self.regions]
        return views if rows is None else [view[:count] for view, count in zip(views, rows, strict=True)]

    def has_the_shapes_but_not_the_types_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a batch has the shapes of the first one, but other dtypes: slots can't hold such a one."""
        found, expected = _kinds(tensors), _kinds(self.regions)
        return found != expected and [shape for shape, _ in found] == [shape for shape, _ in expected]

    def fill(self, slot: int, tensors: Sequence[torch.Tensor], short: bool) -> tuple[int, ...] | None:
        """Copy a batch in. Returns: the rows of each tensor, if it is `short` of rows; None for a full slot.

        Raises: DataError, if it is not like the first batch (`short` allows fewer rows).
        """
        found, expected, rows = _kinds(tensors), _kinds(self.regions), None
        if found != expected:
            if not (short and _fits(found, expected)):
                raise DataError(
                    f"a batch differs from the first one: expected {_words(expected)}, got {_words(found)}\n"
                    f"  fix: shapes must not change: drop_last=True leaves an incomplete last batch out, "
                    f"a collate_fn can pad"
                )
            rows = tuple(shape[0] for shape, _ in found)
        with torch.no_grad():
            for view, tensor in zip(self.views(slot, rows), tensors, strict=True):
                view.copy_(tensor)
        return rows


_Kind = tuple[tuple[int, ...], torch.dtype]


def _kinds(tensors: Sequence[torch.Tensor | Region]) -> list[_Kind]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _fits(found: list[_Kind], expected: list[_Kind]) -> bool:
    return len(found) == len(expected) and all(
        dtype == slot_dtype
        and shape
        and slot_shape
        and shape[1:] == slot_shape[1:]
        and shape[0] <= slot_shape[0]
        for (shape, dtype), (slot_shape, slot_dtype) in zip(found, expected, strict=True)
    )


def _words(kinds: list[_Kind]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in kinds) or "no tensors"
