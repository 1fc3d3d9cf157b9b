"""Loaders that yield combined batches, and functions that pad batches and cut outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import poptorch
from poptorch.data.rows import concatenate_batches
from poptorch.nested_values import tensors_of, with_tensors

logger = logging.getLogger("poptorch::python")

_COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
_COPIED += ("prefetch_factor", "persistent_workers")


def converted_loader(loader: Any, stage: Any, options: poptorch.Options, lightning: Any) -> Any:
    """Return a loader of combined batches for a stage of the Trainer; for predictions the last may be short.

    A `poptorch.DataLoader`, and a loader that is not torch's, is returned unchanged. Other stages than
    "predict" raise a MisconfigurationException if the loader has too few rows for a call.
    """
    if isinstance(loader, poptorch.DataLoader) or not isinstance(loader, DataLoader):
        return loader
    predicts, n = stage == "predict", micro_batch_count(options, stage == "train")
    made: Any = None
    if type(loader).__iter__ is not DataLoader.__iter__:
        made = Joined(loader, n, concatenate_batches, keep_tail=predicts)
    elif predicts:
        made = _prediction_loader(loader, n, lightning)
    else:
        made = _combined_loader(loader, options)
    if not predicts:
        _check_length(loader, made, n, stage, options, lightning)
    return made


def _prediction_loader(loader: DataLoader[Any], n: int, lightning: Any) -> DataLoader[Any]:
    """Return a torch loader of all rows in batches of n micro-batches, whose indices Lightning can read;
    return a loader without automatic batching unchanged."""
    copied = {name: getattr(loader, name) for name in _COPIED}
    size = None if loader.batch_size is None else loader.batch_size * n
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=size, **copied)
    if loader.batch_sampler is None:
        return loader
    sampler: Any = Joined(loader.batch_sampler, n, _joined_indices, keep_tail=True)
    if size is not None:
        sampler = BatchSampler(loader.sampler, size, drop_last=False)
    noting = lightning.get("overrides.distributed._IndexBatchSamplerWrapper")
    return DataLoader(loader.dataset, batch_sampler=noting(sampler), **copied)


def _check_length(
    loader: DataLoader[Any], made: Any, n: int, stage: Any, options: poptorch.Options, lightning: Any
) -> None:
    """Raise a MisconfigurationException if a loader has too few micro-batches for a call. Warn, except in
    training, if micro-batches are left out. A loader without a length is not checked."""
    try:
        micro_batches, calls = len(loader), len(made)
    except TypeError:  # a dataset without a length
        return
    if calls == 0 and micro_batches > 0:
        raise lightning.Misconfiguration(
            f"a call takes {n} micro-batches, the loader for {stage.value} has {micro_batches}: nothing would run."
            " Use more data or smaller batches, or lower device_iterations, accumulate_grad_batches or devices."
        )
    left = micro_batches - calls * n * options.Distributed.numProcesses
    if stage != "train" and left > 0:
        warnings.warn(
            f"the last {left} of {micro_batches} micro-batches ({stage.value}) are left out: a call takes {n}",
            stacklevel=2,
        )


def micro_batch_count(options: poptorch.Options, training: bool) -> int:
    """Return how many micro-batches a call takes from the loader in this process: device iterations × input
    groups, in training also × gradient accumulation."""
    counts = options._counts()
    return counts.product if training else counts.iterations * counts.groups


def _combined_loader(loader: DataLoader[Any], options: poptorch.Options) -> poptorch.DataLoader:
    """Return a poptorch.DataLoader with the dataset, workers and order of rows of a torch loader."""
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED}
    arguments["multiprocessing_context"] = loader.multiprocessing_context
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if not is_iterable and loader.batch_sampler is not None and loader.batch_size is None:
        arguments["batch_sampler"] = loader.batch_sampler  # given by the user
    else:
        arguments["batch_size"] = loader.batch_size
        arguments |= (
            {"auto_distributed_partitioning": False} if is_iterable else _order_arguments(loader, options)
        )
    return poptorch.DataLoader(options, loader.dataset, drop_last=True, **arguments)


def _order_arguments(loader: DataLoader[Any], options: poptorch.Options) -> dict[str, Any]:
    """Return the arguments of a poptorch.DataLoader for the order of rows of a torch loader.

    With several instances, or rows by replica, SequentialSampler and a plain RandomSampler become `shuffle`:
    poptorch.DataLoader partitions the rows. Every other sampler is kept; with several instances a warning is
    given unless it is a DistributedSampler.
    """
    sampler: Any = loader.sampler
    is_shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    is_plain = is_shuffled or type(sampler) is SequentialSampler
    distributed = options.Distributed
    if is_plain and (distributed.numProcesses > 1 or distributed.rows_by_replica):
        return {"shuffle": is_shuffled}
    if distributed.numProcesses > 1 and not isinstance(sampler, DistributedSampler):
        warnings.warn(
            f"each of {distributed.numProcesses} instances reads all rows of its own {type(sampler).__name__}:"
            " take a sampler that gives each instance rows of its own, such as DistributedSampler",
            stacklevel=2,
        )
    return {"sampler": sampler, "auto_distributed_partitioning": False}


class Joined:
    """An iterable over the elements of a loader or batch sampler, each n consecutive elements joined to one.

    Args:
        join:      function that joins a list of elements
        keep_tail: whether the last elements are yielded if they are fewer than n
    """

    def __init__(self, source: Any, n: int, join: Callable[[list[Any]], Any], keep_tail: bool) -> None:
        self._source, self._n, self._join, self._keep_tail = source, n, join, keep_tail
        for name in ("dataset", "sampler", "batch_sampler"):  # attributes that Lightning reads
            setattr(self, name, getattr(source, name, None))

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self._source)
        while group := list(islice(elements, self._n)):
            if len(group) == self._n or self._keep_tail:
                yield self._join(group)

    def __len__(self) -> int:
        calls, left = divmod(len(self._source), self._n)
        return calls + (self._keep_tail and left > 0)


def _joined_indices(batches: list[Any]) -> list[int]:
    return list(chain.from_iterable(batches))


def numbers_as_tensors(value: Any, n: int) -> Any:
    """Return a nested value with each int and float replaced by a tensor of n equal elements."""
    return tree_map_only((int, float), lambda number: torch.tensor(number).repeat(n), value)


def rows_of(batch: Any) -> int | None:
    """Return the size of the first dimension, if all tensors of a batch share it; else None."""
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    return counts.pop() if len(counts) == 1 else None


def padded_batch(batch: Any, rows: int) -> Any:
    """Return the batch with copies of its last row appended, up to `rows` rows."""

    def whole(tensor: Tensor) -> Tensor:
        missing = rows - len(tensor)
        return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

    return with_tensors(batch, iter([whole(tensor) for tensor in tensors_of(batch)]))


def cut_output(output: Any, rows: int, wanted: int) -> Any:
    """Return an output with each tensor of `rows` rows cut to its first `wanted` rows; others unchanged."""
    tensors = [t[:wanted] if t.dim() and len(t) == rows else t for t in tensors_of(output)]
    return with_tensors(output, iter(tensors))
