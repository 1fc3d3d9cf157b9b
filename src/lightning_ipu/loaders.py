"""Loaders of combined batches for the stages of a Trainer, and batches that are padded to a whole call."""

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import poptorch
from poptorch.data.accessor import length_or_none
from poptorch.data.rows import concatenate_batches, group_batches
from poptorch.nested_values import tensors_of, with_tensors

_COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
_COPIED += ("prefetch_factor", "persistent_workers")


def convert_loader(loader: Any, stage: Any, options: poptorch.Options, lightning: Any) -> Any:
    """Return a loader of combined batches for a stage of the Trainer, in place of a loader of torch. Only in the
    stage "predict" it has a short last batch."""
    if isinstance(loader, poptorch.DataLoader) or not isinstance(loader, DataLoader):
        return loader
    predicts, n = stage == "predict", micro_batch_count(options, stage == "train")
    if type(loader).__iter__ is not DataLoader.__iter__:
        combined: Any = JoinedBatches(loader, n, concatenate_batches, keep_tail=predicts)
    else:
        combined = _prediction_loader(loader, n, lightning) if predicts else _combined_loader(loader, options)
    if not predicts:
        _check_length(loader, combined, n, stage, options, lightning)
    return combined


def _prediction_loader(loader: DataLoader[Any], n: int, lightning: Any) -> DataLoader[Any]:
    """Return a loader of the same rows in batches of n micro-batches, which records their indices for Lightning."""
    copied = {name: getattr(loader, name) for name in _COPIED}
    size = None if loader.batch_size is None else loader.batch_size * n
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=size, **copied)
    if loader.batch_sampler is None:
        return loader
    batches: Any = JoinedBatches(loader.batch_sampler, n, lambda lists: list(chain(*lists)), keep_tail=True)
    if size is not None:
        batches = BatchSampler(loader.sampler, size, drop_last=False)
    index_recorder = lightning.import_object("overrides.distributed._IndexBatchSamplerWrapper")
    return DataLoader(loader.dataset, batch_sampler=index_recorder(batches), **copied)


def _check_length(
    loader: DataLoader[Any], combined: Any, n: int, stage: Any, options: poptorch.Options, lightning: Any
) -> None:
    """Raise an exception if `loader` has less than one call; warn of micro-batches that `combined` leaves out, which
    poptorch.DataLoader says itself."""
    micro_batches, calls = length_or_none(loader), length_or_none(combined)
    if micro_batches is None or calls is None:
        return
    if calls == 0 and micro_batches > 0:
        raise lightning.Misconfiguration(
            f"a call takes {n} micro-batches, the loader for {stage.value} has {micro_batches}: nothing would run."
            " Use more data or smaller batches, or lower device_iterations, accumulate_grad_batches or devices."
        )
    left = micro_batches - calls * n * options.Distributed.numProcesses
    if stage != "train" and left > 0 and not isinstance(combined, poptorch.DataLoader):
        warnings.warn(
            f"the last {left} of {micro_batches} micro-batches ({stage.value}) are left out: a call takes {n}",
            stacklevel=2,
        )


def micro_batch_count(options: poptorch.Options, training: bool) -> int:
    """Return the number of micro-batches that a call reads from this process's loader."""
    counts = options._counts()
    return counts.product if training else counts.iterations * counts.groups


def _combined_loader(loader: DataLoader[Any], options: poptorch.Options) -> poptorch.DataLoader:
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED}
    arguments["multiprocessing_context"] = loader.multiprocessing_context
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if not is_iterable and loader.batch_sampler is not None and loader.batch_size is None:
        arguments["batch_sampler"] = loader.batch_sampler  # given by the user
    else:
        arguments["batch_size"] = loader.batch_size
        arguments |= (
            {"auto_distributed_partitioning": False} if is_iterable else _sampling_arguments(loader, options)
        )
    return poptorch.DataLoader(options, loader.dataset, drop_last=True, **arguments)


def _sampling_arguments(loader: DataLoader[Any], options: poptorch.Options) -> dict[str, Any]:
    """Return the arguments by which a poptorch.DataLoader has the order of a torch loader: its sampler; or, to
    partition the rows, `shuffle`."""
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


class JoinedBatches:
    """An iterable that joins each n consecutive batches of a loader or batch sampler into one batch."""

    def __init__(self, source: Any, n: int, join: Callable[[list[Any]], Any], keep_tail: bool) -> None:
        self._source, self._n, self._join, self._keep_tail = source, n, join, keep_tail
        for name in ("dataset", "sampler", "batch_sampler"):  # attributes that Lightning reads
            setattr(self, name, getattr(source, name, None))

    def __iter__(self) -> Iterator[Any]:
        return group_batches(self._source, self._n, self._keep_tail, self._join)

    def __len__(self) -> int:
        calls, left = divmod(len(self._source), self._n)
        return calls + (self._keep_tail and left > 0)


def resize_batch(value: Any, before: int, after: int) -> Any:
    """Return a value in which tensors of `before` rows have `after` rows: cut, or padded with the last row."""
    if before == after:
        return value
    rows = torch.arange(after).clamp(max=before - 1)
    tensors = [t[rows] if t.dim() and len(t) == before else t for t in tensors_of(value)]
    return with_tensors(value, iter(tensors))
