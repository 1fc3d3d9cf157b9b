"""`DataLoader`: torch's loader, whose batch is what one call of an executor consumes.

The rows of a combined batch are in the order in which an executor reads them, so the loader only multiplies
the size of the micro-batch. `dataset_shares.py` chooses the rows of a process, `accessor.py` loads ahead.
"""

import inspect
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset, RandomSampler
from torch.utils.weak import WeakTensorKeyDictionary

from popengine.errors import DataError, hide_internal_frames, without_internal_frames
from popengine.settings import Counts
from poptorch.checks import checked
from poptorch.data.accessor import AsynchronousDataAccessor, length_or_none, row_count_of_epoch
from poptorch.data.dataset_shares import ProcessSampler, sampler_of_process
from poptorch.data.loader_state import Progress, ResumableSampler, state_for_loader
from poptorch.data.rows import group_batches, rebatch_rows
from poptorch.enums import DataLoaderMode, member_by_name
from poptorch.logs import logger
from poptorch.nested_values import tensors_of
from poptorch.options import Options

# Recorders of profiles, to which each wait for a batch is reported, since a loader has no reference to its executor.
wait_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class LoadedBatch:
    """What is known of a combined batch: the loader's factors, its number of micro-batches (with a smaller last one 4/3
    or so), and the rows of all but the last. None: not known."""

    counts: Counts
    micro_batches: Fraction | int | None
    rows: int | None = None

    def micro_batch_rows(self, rows: int) -> int | None:
        """Return the rows of a micro-batch, given those of the batch, of which collate_fn can make more or fewer than
        there are items. None: not known; 0: whole micro-batches have no equal number of rows."""
        exact = self.micro_batches
        if exact is None or (self.rows and -(-rows // self.rows) == exact):
            return self.rows
        count = ceil(exact) if rows % exact else exact
        return 0 if rows % count and count == self.counts.product else ceil(rows / count)


# What is known of the batches that loaders have yielded, by tensor.
loaded_batches: MutableMapping[torch.Tensor, LoadedBatch] = WeakTensorKeyDictionary()


def record_loaded(batch: Any, loaded: LoadedBatch) -> None:
    """Store what is known of a batch in `loaded_batches`."""
    loaded_batches.update(dict.fromkeys(tensors_of(batch), loaded))


@without_internal_frames
class DataLoader(torch.utils.data.DataLoader):
    """A loader of combined batches, each with the rows of all micro-batches of one call of an executor.

    >>> loader = poptorch.DataLoader(options, dataset, batch_size=16, shuffle=True, num_workers=4)
    >>> for images, labels in loader:
    ...     output, loss = trainer(images, labels)

    The combined size C is batch_size × device iterations × gradient accumulation × input groups (replicas,
    unless they are grouped). With `batch_size=None` the dataset itself yields complete combined batches.

    Args:
        options: frozen by the loader: change a copy, `options.clone()`.
        dataset: a map-style or iterable dataset, as in torch.
        batch_size: rows of a micro-batch, which `forward` is called with.
        drop_last: leave out an incomplete combined batch at the end of an epoch (torch's default is False).
        persistent_workers: as in torch; None means True if `num_workers` is greater than 0.
        auto_distributed_partitioning: with several processes, each reads its own share of the dataset.
        mode: Sync loads in this process and its `num_workers`; Async loads ahead in a worker process;
            AsyncRebatched also cuts and joins there the batches that `num_workers` processes load of an
            IterableDataset, so that rows of their incomplete batches are not lost.
        async_options: keywords of `AsynchronousDataAccessor`, for the asynchronous modes.
        rebatched_worker_size: rows that each of `num_workers` loads at once in mode AsyncRebatched, and in
            mode Async with drop_last=False (default C).
        batch_sampler: yields the row indices of each micro-batch; excludes batch_size and shuffle.
    """

    options: Options
    mode: DataLoaderMode
    drops_last: bool  # leaves out an incomplete combined batch; torch's `drop_last` is of torch's own batches

    def __init__(
        self,
        options: Options,
        dataset: Any = None,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode | str = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self._save_arguments({**locals(), **kwargs})
        checked("DataLoader: options", options, Options)
        is_stream, sampler = isinstance(dataset, IterableDataset), kwargs.get("sampler", batch_sampler)
        needs = [] if is_stream else ["__getitem__"] if sampler is not None else ["__getitem__", "__len__"]
        if not all(hasattr(type(dataset), name) for name in needs):
            raise DataError(
                f"the dataset is {dataset!r:.80}, and needs {' and '.join(needs)}, or must be an IterableDataset\n"
                "  fix: a dataset such as torch.utils.data.TensorDataset(images, labels); of a generator, which ends"
                " after one epoch, list(dataset), or an IterableDataset whose __iter__ makes it"
            )
        options._freeze()
        self.options, self._progress = options, Progress()
        self.mode = member_by_name(DataLoaderMode, mode)
        self.drops_last = drop_last
        self._accessor: AsynchronousDataAccessor | None = None
        names = inspect.signature(AsynchronousDataAccessor).parameters.keys() - {"dataset", "rebatched_size"}
        for name in async_options or {}:  # the loader computes the size
            checked("async_options", name, tuple(sorted(names)), fix='async_options={"buffer_size": 4}')
        rows = 1 if batch_size is None else batch_size
        checked("DataLoader: batch_size", rows, int, ValueError, least=1, fix="batch_size={}")
        micro_batch_count = options._counts().product  # micro-batches of a combined batch
        self._has_batch_sampler = batch_sampler is not None
        self._micro_batch = batch_size  # rows of a micro-batch; None: not known
        self._elements_per_batch = 1  # elements of the sampler per combined batch
        if batch_sampler is not None:
            if batch_size != 1 or shuffle:
                raise DataError(
                    "batch_sampler is mutually exclusive with batch_size and shuffle: it decides both\n"
                    "  fix: DataLoader(options, dataset, batch_sampler=sampler)"
                )
            self._micro_batch = getattr(batch_sampler, "batch_size", None)
            self._elements_per_batch = micro_batch_count
        self._combined_batch_size = self._micro_batch and self._micro_batch * micro_batch_count
        self._worker_size = self._worker_batch_size(rebatched_worker_size, batch_sampler, is_stream)
        regroups_rows = is_stream and self._worker_size is not None
        if self._worker_size is not None:
            self._elements_per_batch = -(-(self._combined_batch_size or 1) // self._worker_size)
        is_shared = auto_distributed_partitioning and options.Distributed.rows_by_replica
        # Number of processes that count batches separately.
        self._share_count = 1 if is_shared else options.Distributed._dataset_share[1]
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        else:
            kwargs["batch_size"] = self._worker_size if regroups_rows else self._combined_batch_size
            kwargs["drop_last"] = drop_last and batch_size is not None and not regroups_rows
            kwargs["shuffle"] = shuffle
        if auto_distributed_partitioning:
            sampler = sampler_of_process(options, dataset, batch_size, bool(shuffle), drop_last, kwargs)
            if sampler is not None:
                kwargs |= {"sampler": sampler, "shuffle": None}
        num_workers = _limit_worker_count(num_workers, dataset, kwargs.get("worker_init_fn"))
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        )
        self._log_incomplete_batch(batch_sampler, bool(shuffle) or isinstance(self.sampler, RandomSampler))
        if self.mode != DataLoaderMode.Sync:
            if self.pin_memory:
                self.pin_memory = False
                words = "pin_memory=True has no effect in mode %s: batches arrive in shared memory"
                logger.warning(words, self.mode.name)
            self._accessor = AsynchronousDataAccessor(self, **(async_options or {}))

    @property
    def combinedBatchSize(self) -> int | None:
        """Return the number of rows of a combined batch; None if not known."""
        return self._combined_batch_size

    @property
    def is_asynchronous(self) -> bool:
        """Return whether batches come from a worker process (modes Async and AsyncRebatched)."""
        return self._accessor is not None

    def terminate(self) -> None:
        """End the worker process of an asynchronous mode: iterating then raises FetcherError."""
        if self._accessor is not None:
            self._accessor.terminate()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, from which a loader of the same dataset and arguments yields the same
        next rows, also in later epochs.

        `"epoch"` counts the epochs that have ended, `"position"` the batches yielded in the current epoch.
        Random numbers that a dataset draws in processes of `num_workers` are not part of the state.
        """
        return self._progress.state(self) if self._accessor is None else self._accessor._loader_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()`: the next `iter()` continues from it.

        In mode Sync that iteration also sets the global random generators of torch, numpy and Python. A state
        from between two epochs fits any number of processes and size of calls. Inside an epoch these may
        differ only if rows belong to replicas (`Options.Distributed.rowsByReplica`) or one process reads all.

        Raises: DataError, if the value is not a loader's state, or this loader can't go on from it
        """
        state = state_for_loader(state_dict, self)
        if self._accessor is None:
            self._progress.loaded_state = state
        else:
            self._accessor._send_restart(state)

    def __len__(self) -> int:
        parts, size = row_count_of_epoch(self), self._combined_batch_size or 1
        if self._worker_size is None:
            parts, size = super().__len__(), self._elements_per_batch
        if parts is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return parts // size if self.drops_last else -(-parts // size)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._accessor is None:
            batches, position = self._progress.begin_epoch(self), self._progress.position
        else:
            batches, position = iter(self._accessor), self._accessor._loader_state()["position"]
        return self._yield_and_record(batches, position)

    def _yield_and_record(self, batches: Iterator[Any], position: int) -> Iterator[Any]:
        """Yield the batches, from the epoch's `position` on; report the waits to `wait_recorders`, and store what is
        known of each in `loaded_batches`."""
        total, start = self._micro_batch_count(), time.perf_counter_ns()
        try:
            for number, batch in enumerate(batches, position):
                for recorder in list(wait_recorders):
                    recorder.record_host_event("loader", start)
                record_loaded(batch, self._describe(number, total))
                yield batch
                del batch
                start = time.perf_counter_ns()
        except Exception as error:
            hide_internal_frames(error)
            raise

    def _micro_batch_count(self) -> Fraction | float | None:
        """Return the number of micro-batches of an epoch, as in `LoadedBatch`, or inf if there are whole ones only."""
        if self._has_batch_sampler or not self._micro_batch:
            return length_or_none(self.batch_sampler)
        if self.drops_last:
            return inf
        rows = None if isinstance(self.dataset, IterableDataset) else row_count_of_epoch(self)
        return None if rows is None else Fraction(rows, self._micro_batch)

    def _describe(self, number: int, total: Any) -> LoadedBatch:
        """Return what is known of an epoch's batch, given the `_micro_batch_count`."""
        counts, rows = self.options._counts(), self._micro_batch
        left = None if total is None else total - number * counts.product
        if left is None or (self._has_batch_sampler and left <= counts.product):
            # The last micro-batch may be smaller.
            return LoadedBatch(counts, left if rows or left == 1 else None, rows)
        return LoadedBatch(counts, min(left, counts.product))

    def _begin_epoch(self) -> Iterator[Any]:
        batches = super().__iter__()
        if self._worker_size is not None and isinstance(self.dataset, IterableDataset):
            return rebatch_rows(batches, self._combined_batch_size or 1, not self.drops_last)
        if self._elements_per_batch == 1:
            return batches
        return group_batches(batches, self._elements_per_batch, not self.drops_last)

    @property
    def _index_sampler(self) -> Any:
        """Return torch's sampler of indices in a ResumableSampler, which can skip elements of an epoch."""
        return ResumableSampler(super()._index_sampler, self._progress, self._worker_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accessor": None, "_iterator": None}

    def _save_arguments(self, arguments: dict[str, Any]) -> None:
        """Save the arguments for Lightning, which rebuilds loaders; it would save those of torch's constructor."""
        if type(self) is DataLoader and "__pl_saved_args" not in self.__dict__:
            for name in ("self", "kwargs", "__class__"):  # locals of the constructor that are not arguments
                arguments.pop(name, None)
            saved = {"args": (), "kwargs": arguments, "arg_names": (), "default_kwargs": {}}
            self.__dict__.update({f"__pl_saved_{name}": value for name, value in saved.items()})
            self.__dict__["__dataset"] = arguments["dataset"]

    def _worker_batch_size(self, worker_size: int | None, batch_sampler: Any, is_stream: bool) -> int | None:
        """Return the number of rows that are loaded at once if combined batches consist of several such parts."""
        combined = self._combined_batch_size
        if worker_size is not None and combined is not None and worker_size > combined:
            raise AssertionError(
                f"rebatched_worker_size={worker_size} must not be larger than the combined batch size {combined}"
            )
        regroups = self.mode == DataLoaderMode.AsyncRebatched or (
            self.mode == DataLoaderMode.Async and not self.drops_last
        )
        if not regroups or batch_sampler is not None or combined in (None, 1):
            return None
        return worker_size or combined if is_stream or worker_size not in (None, combined) else None

    def _log_incomplete_batch(self, batch_sampler: Any, is_shuffled: bool) -> None:
        """Log once which rows an executor won't run; at level INFO if they are others in each epoch."""
        parts, whole, unit = row_count_of_epoch(self) or 0, self._combined_batch_size or 1, "rows"
        if batch_sampler is not None:
            parts, whole, unit = length_or_none(batch_sampler), self._elements_per_batch, "micro-batches"
        if self.drops_last:
            if isinstance(self.sampler, ProcessSampler):
                parts, whole = self.sampler.rows, whole * self.options.Distributed._dataset_share[1]
            if parts is not None and parts > whole and parts % whole:
                words = "drop_last=True leaves out %d of %d %s in each epoch, since a call takes %d"
                level = logging.INFO if is_shuffled else logging.WARNING
                logger.log(level, words, parts % whole, parts, unit, whole)
        elif not self.options.exists("new_shapes") and (parts is None or parts % whole):
            size = "may be incomplete" if parts is None else f"has {parts % whole} of {whole} {unit}"
            fix = "without options.allowNewShapes(); drop_last=True leaves it out"
            logger.warning(
                "drop_last=False: the last combined batch %s. An executor can't run it %s", size, fix
            )

    def _warn_of_no_batch(self) -> None:
        if self.mode == DataLoaderMode.Sync:  # in other modes the worker raises
            rows, combined = row_count_of_epoch(self), self._combined_batch_size
            logger.warning(
                "the DataLoader yields no batch: its dataset has %s rows, and a call takes %s (batch_size x device "
                "iterations x accumulation x replicas). Use more data, or lower one of these",
                "too few" if rows is None else rows,
                "more" if combined is None else combined,
            )


def _limit_worker_count(num_workers: int, dataset: Any, worker_init_fn: Any) -> int:
    """Return `num_workers`, at most the number of cores, except for an IterableDataset."""
    if isinstance(dataset, IterableDataset):
        if num_workers > 1 and worker_init_fn is None:
            logger.warning(
                "each of %d workers reads the whole IterableDataset: every element will appear %d times. Pass a "
                "worker_init_fn that gives each worker its own part (torch.utils.data.get_worker_info)",
                num_workers,
                num_workers,
            )
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers > cores:
        logger.warning("num_workers=%d is more than this machine's cores: using %d", num_workers, cores)
    return min(num_workers, cores)
