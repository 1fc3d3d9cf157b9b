"""`AsynchronousDataAccessor`: a worker process loads the next batches while the device computes.

How the dataset gets to the worker is the sharing strategy:

Fork           the worker is a copy of this process: nothing is pickled, so any dataset will do
ForkServer     the dataset is pickled to a fork of a clean process, which imports torch only once
SharedMemory   a new interpreter; the dataset is pickled, its tensors move to shared memory
FileSystem     a new interpreter; the dataset is pickled
"""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from popengine.errors import DataError
from poptorch.data.loader_process import EpochEnd, Failed, Item, Ready, Restart, WorkerSettings, serve
from poptorch.data.loader_state import RandomState, random_state, set_random_state
from poptorch.enums import SharingStrategy, by_name
from poptorch.nested_values import ICustomArgParser, registerCustomArgParser, registered_parsers, with_tensors


class FetcherError(DataError, AssertionError):
    """The error of a worker that failed or was terminated; an AssertionError too, as in PopTorch."""


class AsynchronousDataAccessor:
    """An iterable over a dataset that a worker process loads, up to `buffer_size` batches ahead.

    A batch is a view of shared memory and valid until the next batch has been taken: clone the tensors to keep them.
    Tuples arrive as lists. A batch with other shapes or dtypes than the first one is pickled, which is slower.

    Args:
        buffer_size: number of batches in shared memory; 1 counts as 2, as the latest one is still in use
        miss_sleep_time_in_ms: checked, without effect: a waiting process sleeps until a message arrives
        load_indefinitely: load the beginning of the next epoch as soon as one has ended
        early_preload: load `buffer_size` batches before the first `iter()`
        sharing_strategy: how the dataset gets to the worker process
        rebatched_size: cut the rows of the dataset's batches into batches of this size
    """

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
        self._length = _length(dataset, rebatched_size)  # a reference to the dataset could keep it alive
        slots = max(2, buffer_size)
        granted = slots if early_preload else 1
        self._kept_back = list(range(granted, slots))  # slots sent to the worker at the first next()
        strategy = SharingStrategy(by_name(SharingStrategy, sharing_strategy))
        keep_tail = getattr(dataset, "_keeps_tail", False)
        settings = WorkerSettings(slots, granted, load_indefinitely, rebatched_size, keep_tail)
        self._process, self._connection = _start(dataset, strategy, settings)
        # Before multiprocessing's own exit handler (priority 0), which would wait for the worker for ever.
        self._stop = Finalize(self, _stop, args=(self._process, self._connection), exitpriority=10)
        self._generation = 0
        self._held: int | None = None  # the slot of the latest batch
        self._ended = False  # whether next() raises StopIteration until iter()
        self._restarts = (
            False  # whether iter() restarts the worker: in the middle of an epoch, or if the worker waits
        )
        ready = self._receive("AsynchronousDataAccessor worker thread failed to start")
        assert isinstance(ready, Ready)
        self._ring = ready.ring
        # Pickled state of a poptorch.DataLoader after the latest batch, and its part that is fixed per epoch.
        self._state, self._begun = ready.state, None
        self._skeleton = _with_lists(pickle.loads(ready.skeleton))

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the dataset has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._check_alive()
        if self._restarts:
            epoch = None
            if not self._ended:
                self._state = None  # arrives with the next batch
                epoch = None if self._begun is None else pickle.loads(self._begun)["epoch"] + 1
            self._generation += 1
            self._send(Restart(self._generation, epoch))
        self._ended = self._restarts = False
        return self

    def __next__(self) -> Any:
        self._check_alive()
        if self._ended:
            raise StopIteration
        while self._kept_back:
            self._send(self._kept_back.pop(0))
        while True:
            message = self._receive("An error occurred in the data fetcher")
            if isinstance(message, Item) and message.generation == self._generation:
                return self._take(message)
            if isinstance(message, Item):
                self._send(message.slot)
            elif isinstance(message, EpochEnd) and message.generation == self._generation:
                self._ended, self._restarts = True, not message.goes_on
                self._state, self._begun = message.state, None
                raise StopIteration

    def _loader_state(self) -> dict[str, Any]:
        """Return the loader's state after the latest batch from `next()`. Raises: DataError, if not known"""
        if self._state is None:
            raise DataError(
                "after a break the order of the new epoch is known with its first batch\n"
                "  fix: call state_dict() before iter(loader), or after a batch"
            )
        begun = {} if self._begun is None else pickle.loads(self._begun)
        return {**pickle.loads(self._state), **begun}

    def _resume(self, state: dict[str, Any]) -> None:
        """Restart the worker process at the position of a loader's `state_dict`."""
        self._check_alive()
        self._generation += 1
        self._state, self._begun = pickle.dumps(state), None
        self._ended = self._restarts = False
        self._send(Restart(self._generation, state=self._state))

    def terminate(self) -> None:
        """End the worker process. Iterating afterwards is an error; the latest batch stays valid."""
        self._stop()

    def _take(self, item: Item) -> Any:
        if self._held is not None:
            self._send(self._held)
        self._held, self._restarts = item.slot, True
        self._state, self._begun = item.state, item.begun or self._begun
        skeleton = self._skeleton
        if item.skeleton is not None:
            skeleton = _with_lists(pickle.loads(item.skeleton))
        return skeleton if item.has_tensors else with_tensors(skeleton, iter(self._ring.views(item.slot)))

    def _receive(self, complaint: str) -> Any:
        """Return the worker's next message. Raises an error that begins with `complaint` if the worker failed."""
        wait([self._connection, self._process.sentinel])
        message = None
        # The last messages of a dead worker are read first; then poll() is False or recv() raises EOFError.
        with suppress(EOFError, OSError):
            message = self._connection.recv() if self._connection.poll() else None
        if message is not None and not isinstance(message, Failed):
            return message
        reason = message.reason if message is not None else _cause_of_death(self._process)
        self.terminate()
        raise (FetcherError if hasattr(self, "_ring") else DataError)(f"{complaint}: {reason}")

    def _send(self, message: int | Restart) -> None:
        with suppress(OSError):  # _receive reports a dead worker, with the cause
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
        assert not ragged or dataset._keeps_tail or rebatched_size is not None, (
            "a DataLoader with 'drop_last=False' may end with a smaller batch: set drop_last=True, or pass "
            "'rebatched_size' to regroup the rows"
        )


def _length(dataset: Any, rebatched_size: int | None) -> int | None:
    """Return the number of batches in an epoch; None if not known."""
    if not isinstance(dataset, TorchLoader) or dataset.batch_size is None or rebatched_size is None:
        rows = length_of(dataset)  # assuming one row per batch
    elif dataset.drop_last:
        batches = length_of(dataset)
        rows = None if batches is None else batches * dataset.batch_size
    else:
        rows = length_of(dataset.dataset if isinstance(dataset.dataset, IterableDataset) else dataset.sampler)
    return None if rows is None else rows // (rebatched_size or 1)


def length_of(value: Any) -> int | None:
    """Return the length of a dataset, loader or sampler; None if it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _with_lists(value: Any) -> Any:
    """Return the value with lists in place of plain tuples, as torch's loader returns them."""
    if type(value) in (tuple, list):
        return [_with_lists(part) for part in value]
    if type(value) is dict:
        return {key: _with_lists(part) for key, part in value.items()}
    return value


# The worker process ---------------------------------------------------------------------------------------

_START_METHODS = {
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
}


def _generator(device: str, state: bytes) -> torch.Generator:
    return torch.Generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# torch sends a generator's state through shared memory that may be freed before the worker opens it.
ForkingPickler.register(
    torch.Generator, lambda g: (_generator, (str(g.device), g.get_state().numpy().tobytes()))
)
_GUARD = (
    'put the main part of the script under `if __name__ == "__main__":`, as the worker imports the script; or let the '
    'worker be a copy of this process: async_options={"sharing_strategy": "Fork"}'
)
_GRACE = 3.0  # seconds a worker gets to end its own workers


@dataclass(frozen=True)
class _Parcel:
    """A callable for the worker: sets up the worker like this process, and returns the dataset.

    Args:
        dataset:      an iterable
        start_method: of this process, used there for the processes of the dataset's own loader
    """

    dataset: Any
    parsers: dict[type, ICustomArgParser]
    random: RandomState
    start_method: str

    def __call__(self) -> Iterable[Any]:
        multiprocessing.set_start_method(self.start_method, force=True)
        for arg_type, parser in self.parsers.items():
            registerCustomArgParser(arg_type, parser)
        set_random_state(self.random)
        return self.dataset


def _opened(content: bytes) -> Iterable[Any]:
    # Unpickled after the worker has set the import path, which it does after unpickling its own arguments.
    return pickle.loads(content)()


def _start(
    dataset: Any, strategy: SharingStrategy, settings: WorkerSettings
) -> tuple[BaseProcess, Connection]:
    """Start a worker process that loads `dataset`. Returns it, and this process's end of the connection.

    Raises: DataError, if the dataset can't be pickled, or the worker imports a script that makes a loader
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that imports the script
        raise DataError(
            f"an asynchronous loader is made while its own worker process starts\n  fix: {_GUARD}"
        )
    context: Any = torch.multiprocessing.get_context(_START_METHODS[strategy])
    if strategy == SharingStrategy.ForkServer:
        context.set_forkserver_preload(["__main__", "poptorch.data.loader_process"])
    ours, theirs = context.Pipe()
    inherited = ours if strategy == SharingStrategy.Fork else None
    try:
        method = multiprocessing.get_start_method()
        load: Callable[[], Iterable[Any]] = _Parcel(dataset, registered_parsers(), random_state(), method)
        if strategy in (SharingStrategy.ForkServer, SharingStrategy.FileSystem):
            load = partial(_opened, pickle.dumps(load))
        process = context.Process(
            target=serve, args=(theirs, inherited, load, settings), name="poptorch-data", daemon=False
        )
        process.start()
    except BrokenPipeError as error:
        ours.close()
        raise DataError(
            f"the loader's worker process ended before it had read the dataset: see its output above\n"
            f"  why: usually it imports the script, which makes another loader\n  fix: {_GUARD}"
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        ours.close()
        raise DataError(
            f"the dataset can't be pickled for its worker (SharingStrategy.{strategy.name}): {error}\n"
            f"  fix: define its classes, collate_fn and worker_init_fn at the top level of a module, "
            f"or let the worker inherit them: "
            f'async_options={{"sharing_strategy": poptorch.SharingStrategy.Fork}}'
        ) from error
    finally:
        theirs.close()
    return process, ours


def _stop(process: BaseProcess, connection: Connection) -> None:
    """End the worker and all processes that it started."""
    process.terminate()
    connection.close()
    process.join(_GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def _cause_of_death(process: BaseProcess) -> str:
    """Return the reason why a worker process has ended, and a fix."""
    process.join(_GRACE)
    code = process.exitcode
    if code is None or code >= 0:
        return (
            f"the worker process ended with exit code {code}: see its output above\n"
            f"  why: where that is about a process that starts, the worker has run the script anew\n  fix: {_GUARD}"
        )
    hints = {
        signal.SIGKILL: "usually the machine is out of memory: use fewer workers or a smaller buffer_size",
        signal.SIGBUS: "usually /dev/shm is full: use a smaller buffer_size or more shared memory",
    }
    hint = hints.get(signal.Signals(-code), "look for native code in the dataset that crashes")
    return f"the worker process (pid {process.pid}) was killed by {signal.Signals(-code).name}\n  fix: {hint}"
