"""Concatenate and cut batches along dimension 0 of their tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from popengine.errors import DataError
from poptorch.nested_values import spec_of, tensors_of, with_tensors


def concatenate_batches(batches: Sequence[Any]) -> Any:
    """Return a batch with the rows of all batches. Raises DataError if these differ in more than tensors."""
    if len(batches) == 1:
        return batches[0]
    if any(spec_of(batch) != spec_of(batches[0]) for batch in batches[1:]):
        raise DataError(
            f"batches that differ in more than their tensors can't be concatenated: "
            f"{spec_of(batches[0])} and others\n"
            f"  fix: return tensors only, in the same containers, from the dataset or from collate_fn"
        )
    columns = zip(*map(tensors_of, batches), strict=True)
    return with_tensors(batches[0], (torch.cat(column) for column in columns))


def group_batches(
    batches: Iterable[Any], size: int, keep_tail: bool, join: Callable[[list[Any]], Any] = concatenate_batches
) -> Iterator[Any]:
    """Yield each `size` consecutive batches joined; with `keep_tail` also fewer, at the end."""
    source = iter(batches)
    while group := list(islice(source, size)):
        if len(group) == size or keep_tail:
            yield join(group)


def rebatch_rows(batches: Iterable[Any], size: int, keep_tail: bool) -> Iterator[Any]:
    """Yield the rows of all batches in batches of `size` rows; with `keep_tail` also a smaller last batch."""
    parts: list[Any] = []
    missing = size
    for batch in batches:
        start, rows = 0, row_count_of(batch)
        if rows is None:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_of(batch)) or "no tensors"
            raise DataError(
                f"a batch can't be cut into rows: dimension 0 must be the same in all tensors, found {shapes}\n"
                f"  fix: give every tensor a batch dimension, or load without AsyncRebatched / rebatched_size"
            )
        while start < rows:
            taken = min(rows - start, missing)
            cut = (tensor.narrow(0, start, taken) for tensor in tensors_of(batch))
            parts.append(with_tensors(batch, cut) if taken < rows else batch)
            start, missing = start + taken, missing - taken
            if not missing:
                yield concatenate_batches(parts)
                parts, missing = [], size
    if keep_tail and parts:
        yield concatenate_batches(parts)


def row_count_of(batch: Any) -> int | None:
    """Return the size of dimension 0 of a batch's tensors; None unless all have the same size."""
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    return counts.pop() if len(counts) == 1 else None
