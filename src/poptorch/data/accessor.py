"""`AsynchronousDataAccessor`: a worker process loads the next batches while the device computes.

How the dataset gets to the worker is the sharing strategy:

Fork           the worker is a copy of this process: nothing is pickled, so any dataset will do
ForkServer     the dataset is pickled for a fork of a server process, which has imported torch once
SharedMemory   a new interpreter; the dataset is pickled, its tensors move to shared memory
FileSystem     a new interpreter; the dataset is pickled
"""

import multiprocessing
import os
import pickle
import signal
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from popengine.errors import DataError
from poptorch.checks import checked
from poptorch.data.loader_process import (
    Feeder,
    Loaded,
    Restart,
    SlotUnpickler,
    pickle_state,
    run_worker,
)
from poptorch.data.loader_state import LoaderState, state_after_break
from poptorch.enums import DataLoaderMode, SharingStrategy, member_by_name
from poptorch.logs import logger
from poptorch.nested_values import tensors_of


class FetcherError(DataError, AssertionError):
    """The error of an accessor whose worker failed or was terminated; an AssertionError, as in PopTorch."""


class AsynchronousDataAccessor:
    """An iterable over a dataset's batches, which a worker process loads ahead into slots of shared memory.

    The constructor waits for the first batch. A batch's tensors are views of a slot, valid until the next
    batch is taken: clone tensors to keep them. Tuples arrive as lists. A slot is as large as the first batch;
    tensors of later batches that don't fit are pickled, which is slower. An `iter()` in the middle of an
    epoch drops the rest of this epoch, and begins the next epoch.

    >>> for images, labels in poptorch.AsynchronousDataAccessor(loader): ...

    Args:
        dataset: an iterable of batches, such as a DataLoader, or a map-style dataset with batches as items
        buffer_size: number of slots; 1 means 2, since the latest batch occupies a slot
        miss_sleep_time_in_ms: checked, without effect: a waiting process sleeps until a message arrives
        load_indefinitely: load the next epoch's first batches as soon as an epoch has ended
        early_preload: fill all slots before the first batch is taken, instead of one slot
        sharing_strategy: how the dataset gets to the worker process
        rebatched_size: regroup the rows into batches of this size; an incomplete last batch is left out
    """

    _may_warn = True

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
        _check_arguments(dataset, buffer_size, miss_sleep_time_in_ms, rebatched_size)
        self._length = _batch_count(dataset, rebatched_size)  # a reference to the dataset could keep it alive
        slots, preloaded = max(2, buffer_size), max(2, buffer_size) if early_preload else 1
        strategy = member_by_name(SharingStrategy, sharing_strategy)
        feeder = Feeder(dataset, slots, load_indefinitely, rebatched_size)
        self._process, self._connection = _start_worker(strategy, feeder)
        # Before multiprocessing's own exit handler (priority 0), which would wait for the worker for ever.
        self._stop = Finalize(self, _stop_worker, args=(self._process, self._connection), exitpriority=10)
        self._restart_count = 0
        for slot in range(preloaded):
            self._send_message(slot)
        # Slots to send to the worker with the next batch: the latest batch's; at first all that aren't preloaded.
        self._slots_to_release = list(range(preloaded, slots))
        self._is_epoch_ended = False  # whether next() raises StopIteration until iter()
        # Whether iter() sends a Restart: after the first batch of an epoch, or if the worker waits.
        self._needs_restart = False
        # The tensors of the batch before the latest, and of that one.
        self._yielded: list[list[weakref.ref]] = [[], []]
        self._state: bytes | None = None  # of a poptorch.DataLoader after the latest batch, pickled
        if hasattr(dataset, "_progress"):
            self._state = pickle_state(dataset._progress.next_state(dataset))  # type: ignore[union-attr]
        self._memory = self._receive_message("AsynchronousDataAccessor worker thread failed to start")

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the dataset has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._raise_if_terminated()
        if self._needs_restart:
            after_break = not self._is_epoch_ended and self._state is not None
            self._send_restart(state_after_break(self._loader_state()) if after_break else None)
        self._is_epoch_ended = False
        return self

    def __next__(self) -> Any:
        self._raise_if_terminated()
        if self._is_epoch_ended:
            raise StopIteration
        while True:
            message: Loaded = self._receive_message("An error occurred in the data fetcher")
            if message.restart_count == self._restart_count:
                break
            if message.slot is not None:  # from before the latest restart
                self._send_message(message.slot)
        self._state = message.state
        if message.slot is None:
            self._is_epoch_ended, self._needs_restart = True, not message.is_continuing
            raise StopIteration
        for slot in self._slots_to_release:
            self._send_message(slot)
        self._slots_to_release, self._needs_restart = [message.slot], True
        self._warn_of_kept_batch()
        batch = SlotUnpickler(message.content, self._memory[message.slot]).load()
        self._yielded = [self._yielded[1], [*map(weakref.ref, tensors_of(batch))]]
        return batch

    def _warn_of_kept_batch(self) -> None:
        """Warn, once, if a tensor of the batch before the latest is still in use. A loop's variable has the latest one
        until the next one is there."""
        if self._may_warn and any(tensor() is not None for tensor in self._yielded[0]):
            self._may_warn = False
            logger.warning(
                "a batch of an asynchronous loader is kept, and its memory holds another batch now\n"
                "  fix: keep copies, tensor.clone()"
            )

    def _loader_state(self) -> LoaderState:
        """Return the state of the worker's poptorch.DataLoader after the latest batch that was taken."""
        assert self._state is not None
        return pickle.loads(self._state)

    def _send_restart(self, state: LoaderState | None) -> None:
        """Make the worker drop the current epoch and continue from `state`; None: begin the next epoch."""
        self._raise_if_terminated()
        self._restart_count += 1
        self._needs_restart = self._is_epoch_ended = False
        pickled = None if state is None else pickle_state(state)
        self._state = pickled or self._state
        self._send_message(Restart(self._restart_count, pickled))

    def terminate(self) -> None:
        """End the worker process. Iterating afterwards raises FetcherError; the latest batch stays valid."""
        self._stop()

    def _receive_message(self, failure: str) -> Any:
        """Return the worker's next message. If the worker has failed, raise a FetcherError with its reason."""
        wait([self._connection, self._process.sentinel])
        message = None
        # The last messages of a dead worker are read first; then poll() is False or recv() raises EOFError.
        with suppress(EOFError, OSError):
            message = self._connection.recv() if self._connection.poll() else None
        if message is not None and not isinstance(message, str):
            return message
        reason = _describe_worker_exit(self._process) if message is None else message
        self.terminate()
        raise FetcherError(f"{failure}: {reason}")

    def _send_message(self, message: int | Restart) -> None:
        with suppress(OSError):  # _receive_message reports a dead worker, with the cause
            self._connection.send(message)

    def _raise_if_terminated(self) -> None:
        if not self._stop.still_active():
            raise FetcherError(
                "the data accessor's worker was terminated: there is nothing left to iterate over\n"
                "  fix: call terminate() after the last epoch, or make another loader"
            )


def _check_arguments(dataset: Any, buffer_size: int, miss_sleep: float, rebatched_size: int | None) -> None:
    checked("buffer_size", buffer_size, int, least=1, fix="buffer_size={}")
    checked("miss_sleep_time_in_ms", miss_sleep, int | float, least=0)
    checked("rebatched_size", 2 if rebatched_size is None else rebatched_size, int, least=2)
    if isinstance(dataset, AsynchronousDataAccessor) or getattr(dataset, "is_asynchronous", False):
        raise DataError(
            f"the {type(dataset).__name__} already uses an AsynchronousDataAccessor\n"
            f"  fix: iterate over it as it is, or make the DataLoader with mode=poptorch.DataLoaderMode.Sync"
        )
    keeps_tail = getattr(dataset, "mode", None) == DataLoaderMode.Sync and not dataset.drops_last
    if keeps_tail and rebatched_size is None and dataset.combinedBatchSize not in (None, 1):
        raise AssertionError(
            "a DataLoader with 'drop_last=False' may end with a smaller batch: set drop_last=True, or pass "
            "'rebatched_size' to regroup the rows"
        )


def _batch_count(dataset: Any, rebatched_size: int | None) -> int | None:
    """Return the number of batches that an accessor of this dataset yields in an epoch; None if not known."""
    if not isinstance(dataset, TorchLoader) or dataset.batch_size is None or rebatched_size is None:
        rows = length_or_none(dataset)  # assuming one row per batch
    else:
        rows = row_count_of_epoch(dataset)
        if rows is not None and dataset.drop_last:
            rows -= rows % dataset.batch_size
    return None if rows is None else rows // (rebatched_size or 1)


def row_count_of_epoch(loader: TorchLoader) -> int | None:
    """Return the number of rows that a loader's process reads in an epoch; None for a stream without length."""
    return length_or_none(loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler)


def length_or_none(value: Any) -> int | None:
    """Return `len(value)` for a dataset, loader or sampler; None if it has no length."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


# The worker process ---------------------------------------------------------------------------------------

# torch sends a generator's state in shared memory, which may be freed before the worker opens it.
ForkingPickler.register(torch.Generator, lambda generator: (pickle.loads, (pickle.dumps(generator),)))
_FIX_OF_SCRIPT = (
    'put the main part of the script under `if __name__ == "__main__":`, as the worker imports the script; or let the '
    'worker be a copy of this process: async_options={"sharing_strategy": "Fork"}'
)
_CODE_WITHOUT_FORK_SERVER = 255  # of multiprocessing, if the fork server can't tell a worker's exit code
_END_TIMEOUT = 3.0  # seconds that a worker has to end its own workers


def _start_worker(strategy: SharingStrategy, feeder: Feeder) -> tuple[BaseProcess, Connection]:
    """Start a worker process; return it, and this process's end of the connection. Later errors come over it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DataError(
            f"an asynchronous loader is made while its own worker process starts\n  fix: {_FIX_OF_SCRIPT}"
        )
    method = {SharingStrategy.Fork: "fork", SharingStrategy.ForkServer: "forkserver"}.get(strategy, "spawn")
    context: Any = torch.multiprocessing.get_context(method)
    if strategy == SharingStrategy.ForkServer:
        context.set_forkserver_preload(["__main__", "poptorch.data.loader_process"])
    ours, theirs = context.Pipe()
    register_after_fork(ours, Connection.close)  # a forked process that holds it would keep the worker alive
    as_bytes = strategy in (SharingStrategy.ForkServer, SharingStrategy.FileSystem)
    try:
        arguments = (theirs, pickle.dumps(feeder) if as_bytes else feeder)
        process = context.Process(target=run_worker, args=arguments, name="poptorch-data", daemon=False)
        process.start()
    except BrokenPipeError as error:
        ours.close()
        raise DataError(
            f"the loader's worker process ended before it had read the dataset: see its output above\n"
            f"  why: usually it imports the script, which makes another loader\n  fix: {_FIX_OF_SCRIPT}"
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


def _stop_worker(process: BaseProcess, connection: Connection) -> None:
    """End the worker, by SIGTERM or after 3 s by SIGKILL, and all its children; close the connection."""
    process.terminate()
    connection.close()
    process.join(_END_TIMEOUT)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def _describe_worker_exit(process: BaseProcess) -> str:
    process.join(_END_TIMEOUT)
    code = process.exitcode
    if code == _CODE_WITHOUT_FORK_SERVER:
        return (
            "the fork server, the process that had started the worker, has ended\n"
            "  fix: see the output above; if it was killed, usually the machine is out of memory: use fewer workers"
        )
    if code is None or code >= 0:
        return (
            f"the worker process ended with exit code {code}: see its output above\n"
            f"  why: where that is about a process that starts, the worker has run the script anew\n"
            f"  fix: {_FIX_OF_SCRIPT}"
        )
    name = signal.Signals(-code).name
    fixes = {
        "SIGKILL": "usually the machine is out of memory: use fewer workers or a smaller buffer_size",
        "SIGBUS": "usually /dev/shm is full: use a smaller buffer_size or more shared memory",
    }
    fix = fixes.get(name, "look for native code in the dataset that crashes")
    return f"the worker process (pid {process.pid}) was killed by {name}\n  fix: {fix}"
