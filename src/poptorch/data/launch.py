"""Starting and ending the worker process, by each of the sharing strategies.

Fork           the worker is a copy of this process: nothing is pickled, any dataset will do
ForkServer     the dataset is pickled to a fork of a clean process, which imports torch only once
SharedMemory   a new interpreter; the dataset is pickled, its tensors move to shared memory
FileSystem     a new interpreter; the dataset is pickled to a temporary file
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing

from popengine.errors import DataError
from poptorch.data.loader_process import Request, serve
from poptorch.data.randomness import RandomState, random_state, set_random_state
from poptorch.enums import SharingStrategy
from poptorch.nested_values import ICustomArgParser, registerCustomArgParser, registered_parsers

_START_METHODS = {
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
}


def _generator(device: str, state: bytes) -> torch.Generator:
    return torch.Generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# torch would send a generator's state through shared memory that is gone before the worker opens it.
ForkingPickler.register(
    torch.Generator, lambda g: (_generator, (str(g.device), g.get_state().numpy().tobytes()))
)
_GUARD = (
    'put the main part of the script under `if __name__ == "__main__":`, as the worker imports the script; or let the '
    'worker be a copy of this process: async_options={"sharing_strategy": "Fork"}'
)
_GRACE = 3.0  # seconds a worker gets to end its own workers


@dataclass(frozen=True)
class Parcel:
    """What the worker needs to know of this process."""

    dataset: Any  # an iterable, or what `iter()` can index
    parsers: dict[type, ICustomArgParser]
    random: RandomState
    start_method: str  # of this process: a worker's own workers start as they would here

    def __call__(self) -> Iterable[Any]:
        multiprocessing.set_start_method(self.start_method, force=True)
        for arg_type, parser in self.parsers.items():
            registerCustomArgParser(arg_type, parser)
        set_random_state(self.random)
        return self.dataset


def _opened(content: bytes) -> Iterable[Any]:
    """What is in a parcel; the worker opens it once its modules can be found."""
    return pickle.loads(content)()


def _opened_file(path: str) -> Iterable[Any]:
    try:
        content = Path(path).read_bytes()
    finally:
        os.unlink(path)
    return _opened(content)


def start(dataset: Any, strategy: SharingStrategy, request: Request) -> tuple[BaseProcess, Connection]:
    """A worker process that reads `dataset`, and our end of the connection to it."""
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
        load = _wrapped(Parcel(dataset, registered_parsers(), random_state(), method), strategy)
        process = context.Process(
            target=serve, args=(theirs, inherited, load, request), name="poptorch-data", daemon=False
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


def stop(process: BaseProcess, connection: Connection) -> None:
    """End the worker and all processes that it started."""
    process.terminate()
    connection.close()
    process.join(_GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def cause_of_death(process: BaseProcess) -> str:
    """Why a process that no longer answers ended, in words, with what usually helps."""
    process.join(_GRACE)
    code = process.exitcode
    if code is None:
        return "the worker process closed its connection"
    if code >= 0:
        return (
            f"the worker process ended with exit code {code}: see its output above\n"
            f"  why: where that is about a process that starts, the worker has run the script anew\n  fix: {_GUARD}"
        )
    name = signal.Signals(-code).name
    hints = {
        "SIGKILL": "usually the machine is out of memory: use fewer workers or a smaller buffer_size",
        "SIGBUS": "usually /dev/shm is full: use a smaller buffer_size or more shared memory",
    }
    return f"the worker process (pid {process.pid}) was killed by {name}\n  fix: " + hints.get(
        name, "look for native code in the dataset that crashes"
    )


def _wrapped(parcel: Parcel, strategy: SharingStrategy) -> Callable[[], Iterable[Any]]:
    if strategy == SharingStrategy.ForkServer:
        return partial(_opened, pickle.dumps(parcel))
    if strategy == SharingStrategy.FileSystem:
        with tempfile.NamedTemporaryFile(prefix="poptorch-data-", suffix=".pkl", delete=False) as file:
            try:
                pickle.dump(parcel, file)
            except BaseException:
                os.unlink(file.name)
                raise
        return partial(_opened_file, file.name)
    return parcel
