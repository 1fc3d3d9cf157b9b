"""`DataLoader`: torch's loader, whose batch is what one call of an executor consumes.

The rows of a combined batch are in the order in which an executor reads them, so this only has to multiply
the micro-batch size. Which rows a process reads is in `dataset_shares.py`, reading ahead in `accessor.py`.
"""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.weak import WeakTensorKeyDictionary

from popengine.errors import DataError
from popengine.settings import Counts
from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.batch_waits import noting_waits
from poptorch.data.dataset_shares import partition_of
from poptorch.data.loader_warnings import capped, warn_about_copies, warn_about_tail
from poptorch.data.progress import Progress, Resumable, checked
from poptorch.data.rows import grouped
from poptorch.enums import DataLoaderMode, by_name
from poptorch.logs import logger
from poptorch.nested_values import tensors_of
from poptorch.options import Options

# The counts that the first tensor of a combined batch was loaded for.
_counts = WeakTensorKeyDictionary()


def counts_of(tensor: torch.Tensor) -> Counts | None:
    """Return the counts that a loader has made a tensor for; None for other tensors."""
    return _counts.get(tensor)


def _with_counts(batches: Iterator[Any], counts: Counts) -> Iterator[Any]:
    """Yield the same batches, and note the counts that each was loaded for."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        for tensor in tensors_of(batch)[:1]:
            _counts[tensor] = counts
        yield batch
        del batch


class DataLoader(torch.utils.data.DataLoader):
    """Yields combined batches: `batch_size` rows for each micro-batch of a call, in the order they are read.

    The combined size C is batch_size × device iterations × gradient accumulation × input groups (replicas,
    unless they are grouped). With `batch_size=None` the dataset itself yields complete combined batches.

    Args:
        options: frozen by the loader, and kept as `options`.
        batch_size: rows of a micro-batch, what `forward` sees.
        drop_last: leave out an incomplete combined batch (torch's default is the opposite).
        persistent_workers: None means True where there are workers.
        auto_distributed_partitioning: with several processes, each reads its own share of the dataset.
        mode: Async loads in a worker process; AsyncRebatched also regroups there what each of
            `num_workers` has loaded, so that their incomplete tails are not lost.
        async_options: keywords of `AsynchronousDataAccessor`, for the asynchronous modes.
        rebatched_worker_size: rows that each worker loads at once, for AsyncRebatched (default C).
        batch_sampler: yields the indices of a micro-batch; a combined batch takes as many as a call needs.
    """

    options: Options
    mode: DataLoaderMode

    def __init__(
        self,
        options: Options,
        dataset: Any,
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
        assert isinstance(options, Options), (
            f"the first argument of a DataLoader is a poptorch.Options, got {type(options).__name__}"
        )
        options._freeze()
        # Who rebuilds a loader with another sampler, as Lightning does, takes these: batch_size is the combined one.
        self._remember({**locals(), **kwargs})
        self.options, self._progress = options, Progress()
        self.mode = DataLoaderMode(by_name(DataLoaderMode, mode))
        self._drops_last = drop_last
        self._accessor: AsynchronousDataAccessor | None = None
        self._group = options._counts().product if batch_sampler is not None else 1

        async_options = dict(async_options or {})
        assert "rebatched_size" not in async_options, (
            "'rebatched_size' is what the loader computes: use mode=poptorch.DataLoaderMode.AsyncRebatched"
        )
        micro_batch = _rows_of_a_micro_batch(batch_size, shuffle, batch_sampler)
        combined = None if micro_batch is None else micro_batch * options._counts().product
        self._combined_batch_size = combined
        self._worker_size = worker_size = self._rebatching(rebatched_worker_size, batch_sampler)
        self._shares = options.Distributed.numProcesses  # of which each has a position of its own
        if auto_distributed_partitioning:
            others = {"batch_sampler": batch_sampler, "sampler": kwargs.get("sampler")}
            generator = kwargs.get("generator")
            sampler = partition_of(options, dataset, batch_size, bool(shuffle), drop_last, others, generator)
            if sampler is not None:
                kwargs["sampler"], shuffle = sampler, None
            if options.Distributed.rows_by_replica:
                self._shares = 1

        num_workers = capped(num_workers, dataset)
        warn_about_copies(dataset, num_workers, kwargs.get("worker_init_fn"))
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        else:
            kwargs["batch_size"] = worker_size or combined
            kwargs["drop_last"] = drop_last and batch_size is not None and worker_size is None
            kwargs["shuffle"] = shuffle
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        )
        if not drop_last:
            warn_about_tail(self._rows(), combined, batch_sampler, self._group)
        if self.mode != DataLoaderMode.Sync:
            self._go_asynchronous(async_options)

    @property
    def combinedBatchSize(self) -> int | None:
        """Rows of a combined batch; None where the loader can't know."""
        return self._combined_batch_size

    @property
    def drops_last(self) -> bool:
        """Is an incomplete combined batch left out? (`drop_last` is what torch's loader was told.)"""
        return self._drops_last

    @property
    def is_asynchronous(self) -> bool:
        return self._accessor is not None

    def terminate(self) -> None:
        """End the worker process of the asynchronous modes; iterating afterwards is an error."""
        if self._accessor is not None:
            self._accessor.terminate()

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: after `load_state_dict` another one of the same dataset and arguments gives the rows
        that this one would give next, also in the epochs that follow.

        `"epoch"` counts the epochs that have ended, `"position"` the batches of the present one that were handed out.
        Random numbers that a dataset draws in processes of `num_workers` are not part of it.

        Raises:
            DataError: mode Async, and a new epoch was begun after a break, but nothing of it was taken
        """
        return self._progress.state(self) if self._accessor is None else self._accessor._loader_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on, with the next `iter()`, where the loader of that state was. In mode Sync this also puts the global
        random numbers of torch, numpy and Python back. The number of processes and the size of calls may differ from
        that loader's where rows belong to replicas (`Options.Distributed.rowsByReplica`) or one process reads all.

        Raises:
            DataError: the state is not a loader's, or this loader can't go on from there
        """
        state = checked(state_dict, self)
        if self._accessor is None:
            self._progress.wanted = state
        else:
            self._accessor._resume(state)

    def __len__(self) -> int:
        if self._group > 1:
            return self._whole(super().__len__(), self._group)
        if self._worker_size is None or self._combined_batch_size is None:
            return super().__len__()
        rows = self._rows()
        if rows is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return self._whole(rows, self._combined_batch_size)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return noting_waits(_with_counts(self._batches(), self.options._counts()))

    def _batches(self) -> Iterator[Any]:
        if self._accessor is not None:
            return iter(self._accessor)
        return self._progress.epoch_of(self, self._epoch, self._group)

    def _epoch(self) -> Iterator[Any]:
        batches = super().__iter__()
        return batches if self._group == 1 else grouped(batches, self._group, not self._drops_last)

    @property
    def _index_sampler(self) -> Any:
        return Resumable(super()._index_sampler, self._progress)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process loads there, without a worker of its own."""
        return {**self.__dict__, "_accessor": None, "_iterator": None}

    def _remember(self, arguments: dict[str, Any]) -> None:
        """Keep the constructor's arguments, by the names under which Lightning looks for them (and puts its own)."""
        if type(self) is DataLoader and "__pl_saved_args" not in self.__dict__:
            for name in ("self", "kwargs", "__class__"):  # locals of the constructor, but no arguments
                arguments.pop(name, None)
            kept = {"args": (), "kwargs": arguments, "arg_names": (), "default_kwargs": {}}
            self.__dict__.update({f"__pl_saved_{name}": value for name, value in kept.items()})
            self.__dict__["__dataset"] = arguments["dataset"]

    def _rows_of_a_call(self) -> int | None:
        """Rows by which all processes together move on in the order of an epoch; None where that is not known."""
        if self._combined_batch_size is None:
            return None
        return self._combined_batch_size * (1 if self._shares > 1 else self.options.Distributed.numProcesses)

    def _whole(self, parts: int, size: int) -> int:
        return parts // size if self._drops_last else -(-parts // size)

    def _rows(self) -> int | None:
        """Rows that this process reads in an epoch, where that is known."""
        source = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        try:
            return len(source) if isinstance(source, Sized) else None
        except (TypeError, NotImplementedError):
            return None

    def _rebatching(self, worker_size: int | None, batch_sampler: Any) -> int | None:
        """Rows that torch's loader should load at once, if the worker regroups them; None if it doesn't."""
        combined = self._combined_batch_size
        assert worker_size is None or combined is None or worker_size <= combined, (
            f"rebatched_worker_size={worker_size} must not be larger than the combined batch size {combined}"
        )
        ragged = self.mode == DataLoaderMode.Async and not self._drops_last
        if batch_sampler is not None or not (ragged or self.mode == DataLoaderMode.AsyncRebatched):
            return None
        if combined is None or combined == 1:  # complete batches, or rows: nothing to regroup
            return None
        return worker_size or combined

    def _go_asynchronous(self, async_options: dict[str, Any]) -> None:
        if self.pin_memory:
            logger.warning(
                "pin_memory=True has no effect in mode %s: batches arrive in shared memory", self.mode.name
            )
            self.pin_memory = False
        rebatched_size = None if self._worker_size is None else self._combined_batch_size
        kind = AsynchronousDataAccessor if self._drops_last else _RaggedAccessor
        self._accessor = kind(self, **async_options, rebatched_size=rebatched_size)


class _RaggedAccessor(AsynchronousDataAccessor):
    _short_tail = True


def _rows_of_a_micro_batch(batch_size: int | None, shuffle: bool | None, batch_sampler: Any) -> int | None:
    """None, where it is not known. Raises: DataError, for arguments that exclude each other"""
    if batch_sampler is None:
        return batch_size
    if batch_size != 1 or shuffle:
        raise DataError(
            "batch_sampler is mutually exclusive with batch_size and shuffle: it decides both\n"
            "  fix: DataLoader(options, dataset, batch_sampler=sampler)"
        )
    return getattr(batch_sampler, "batch_size", None)
