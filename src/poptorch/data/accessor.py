"""`AsynchronousDataAccessor`: the next batches are loaded by a worker process while the device computes."""

import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from popengine.errors import DataError
from poptorch.data.launch import cause_of_death, start, stop
from poptorch.data.loader_process import EpochEnd, Failed, Item, Ready, Request, Restart
from poptorch.enums import SharingStrategy, by_name
from poptorch.nested_values import with_tensors


class FetcherError(DataError, AssertionError):
    """The data fetcher failed or was terminated; programs written for PopTorch catch an AssertionError."""


class AsynchronousDataAccessor:
    """Iterates over `dataset` in a worker process, which stays ahead by up to `buffer_size` batches.

    A batch is a view of shared memory: it is valid until the next one has been taken, so clone what you
    want to keep. Tuples arrive as lists. All batches must have the shapes of the first.

    Args:
        buffer_size: slots in the ring; at least two are made, as one is in your hands.
        miss_sleep_time_in_ms: accepted and checked, of no effect: a waiting process sleeps until a message arrives.
        load_indefinitely: load the beginning of the next epoch as soon as one has ended.
        early_preload: fill the ring before the first `iter()`.
        sharing_strategy: how the dataset gets to the worker, see `launch.py`.
        rebatched_size: cut the rows of the dataset's batches into batches of this size.
    """

    _short_tail = False  # a loader with drop_last=False lets the last batch of an epoch be smaller

    def __init__(
        self,
        dataset: Iterable[Any] | Dataset,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy | str = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        self._check(dataset, buffer_size, miss_sleep_time_in_ms, rebatched_size)
        self._length = _length(dataset, rebatched_size)
        slots = max(2, buffer_size)
        granted = slots if early_preload else 1
        self._kept_back = list(range(granted, slots))  # given to the worker at the first iter()
        strategy = SharingStrategy(by_name(SharingStrategy, sharing_strategy))
        request = Request(slots, granted, load_indefinitely, rebatched_size, self._short_tail)
        self._process, self._connection = start(dataset, strategy, request)
        # Before multiprocessing's own exit handler (priority 0), which would wait for the worker for ever.
        self._stop = Finalize(self, stop, args=(self._process, self._connection), exitpriority=10)
        self._generation = 0
        self._held: int | None = None  # the slot that the user is looking at
        self._inside = False  # batches of this epoch have been handed out
        self._ended = False  # next() has nothing to give until iter()
        self._worker_waits = False
        ready = self._receive("AsynchronousDataAccessor worker thread failed to start")
        assert isinstance(ready, Ready)
        self._ring = ready.ring
        self._state, self._begun = ready.state, None  # of the loader that is read, pickled
        self._skeleton = _with_lists(pickle.loads(ready.skeleton))

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the dataset has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._check_alive()
        if self._inside or self._worker_waits:
            epoch = None
            if self._inside:
                self._state = None  # comes with the next batch of the worker
                epoch = None if self._begun is None else pickle.loads(self._begun)["epoch"] + 1
            self._generation += 1
            self._tell(Restart(self._generation, epoch))
        self._inside = self._ended = self._worker_waits = False
        return self

    def __next__(self) -> Any:
        self._check_alive()
        if self._ended:
            raise StopIteration
        while self._kept_back:
            self._tell(self._kept_back.pop(0))
        while True:
            message = self._receive("An error occurred in the data fetcher")
            if isinstance(message, Item) and message.generation == self._generation:
                return self._take(message)
            if isinstance(message, Item):
                self._tell(message.slot)
            elif isinstance(message, EpochEnd) and message.generation == self._generation:
                self._inside, self._ended, self._worker_waits = False, True, not message.goes_on
                self._state, self._begun = message.state, None
                raise StopIteration

    def _loader_state(self) -> dict[str, Any]:
        """Where the loader that is read would be, had it loaded only what was handed out."""
        if self._state is None:
            raise DataError(
                "after a break the order of the new epoch is known with its first batch\n"
                "  fix: call state_dict() before iter(loader), or after a batch"
            )
        begun = {} if self._begun is None else pickle.loads(self._begun)
        return {**pickle.loads(self._state), **begun}

    def _resume(self, state: dict[str, Any]) -> None:
        """Let the worker go on from a loader's state."""
        self._check_alive()
        self._generation += 1
        self._state, self._begun = pickle.dumps(state), None
        self._inside = self._ended = self._worker_waits = False
        self._tell(Restart(self._generation, state=self._state))

    def terminate(self) -> None:
        """End the worker process. Iterating afterwards is an error; batches in hand stay valid."""
        self._stop()

    def _take(self, item: Item) -> Any:
        if self._held is not None:
            self._tell(self._held)
        self._held, self._inside = item.slot, True
        self._state, self._begun = item.state, item.begun or self._begun
        skeleton = self._skeleton
        if item.skeleton is not None:
            skeleton = _with_lists(pickle.loads(item.skeleton))
        views = self._ring.views(item.slot, item.rows)
        return skeleton if item.whole else with_tensors(skeleton, iter(views))

    def _receive(self, complaint: str) -> Any:
        """The worker's next message. Raises: an error that begins with `complaint`, if it failed or died."""
        wait([self._connection, self._process.sentinel])
        message = None
        # A dead worker's last messages are read first; then the connection is at its end, or is silent.
        with suppress(EOFError, OSError):
            message = self._connection.recv() if self._connection.poll() else None
        if message is not None and not isinstance(message, Failed):
            return message
        reason = message.reason if message is not None else cause_of_death(self._process)
        self.terminate()
        raise (FetcherError if hasattr(self, "_ring") else DataError)(f"{complaint}: {reason}")

    def _tell(self, message: int | Restart) -> None:
        with suppress(OSError):  # a dead worker is reported by _receive, with its cause
            self._connection.send(message)

    def _check_alive(self) -> None:
        if not self._stop.still_active():
            raise FetcherError(
                "the data accessor's worker was terminated: there is nothing left to iterate over\n"
                "  fix: call terminate() after the last epoch, or make another loader"
            )

    def _check(self, dataset: Any, buffer_size: int, miss_sleep: float, rebatched_size: int | None) -> None:
        assert isinstance(buffer_size, int) and buffer_size > 0, (
            f"buffer_size must be positive: {buffer_size}"
        )
        assert miss_sleep >= 0, f"miss_sleep_time_in_ms must not be negative: {miss_sleep}"
        assert rebatched_size is None or rebatched_size > 1, (
            f"rebatched_size must be None or greater than 1, got {rebatched_size}"
        )
        if isinstance(dataset, AsynchronousDataAccessor):
            raise DataError(
                "the dataset already uses an AsynchronousDataAccessor: it is one; use it as it is"
            )
        if getattr(dataset, "is_asynchronous", False):
            raise DataError(
                f"the DataLoader already uses an AsynchronousDataAccessor (mode={dataset.mode.name})\n"
                f"  fix: iterate over the loader itself, or make it with mode=poptorch.DataLoaderMode.Sync"
            )
        ragged = not getattr(dataset, "drops_last", True) and (dataset.combinedBatchSize or 1) > 1
        assert not ragged or self._short_tail or rebatched_size is not None, (
            "a DataLoader with 'drop_last=False' may end with a smaller batch, but all batches of an "
            "accessor have one shape: set drop_last=True, or pass 'rebatched_size' to regroup the rows"
        )


def _length(dataset: Any, rebatched_size: int | None) -> int | None:
    """Batches in an epoch, kept as a number: a reference to the dataset could keep its loader alive."""
    try:
        batches = len(dataset)
        if rebatched_size is None:
            return batches
        if not isinstance(dataset, TorchLoader) or dataset.batch_size is None:
            return batches // rebatched_size  # each is taken for one row
        if dataset.drop_last:
            return batches * dataset.batch_size // rebatched_size
        rows: Any = dataset.dataset if isinstance(dataset.dataset, IterableDataset) else dataset.sampler
        return len(rows) // rebatched_size
    except (TypeError, NotImplementedError):
        return None


def _with_lists(value: Any) -> Any:
    """Plain tuples become lists, as torch's own loader returns them."""
    if type(value) in (tuple, list):
        return [_with_lists(part) for part in value]
    if type(value) is dict:
        return {key: _with_lists(part) for key, part in value.items()}
    return value
