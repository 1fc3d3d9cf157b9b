"""The worker process of an AsynchronousDataAccessor: loads batches ahead into slots of shared memory.

    worker                                        consumer
                               ◄───────────────   int: a free slot
    Tensor: all slots          ───────────────►
    Loaded(slot, ...)          ───────────────►   reads the slot ...
                               ◄───────────────   int: ... and returns it
    Loaded(None, ...)          ───────────────►   an epoch has ended
                               ◄───────────────   Restart: begin an epoch; batches in flight are stale
    str: why it failed         ───────────────►   and the worker ends

A slot belongs to the side that received its number last, so no lock is needed. A message's `restart_count` is
the number of restarts before it was sent: the consumer discards messages from before its last restart.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from popengine.errors import DataError, hide_internal_frames
from poptorch.data.loader_state import LoaderState, RandomState, random_state, set_random_state
from poptorch.data.rows import rebatch_rows
from poptorch.nested_values import ICustomArgParser, registerCustomArgParser, registered_parsers, tensors_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker's message that a slot has been filled with a batch, or that an epoch has ended."""

    restart_count: int
    state: bytes | None  # of a poptorch.DataLoader at this point, pickled; None for another dataset
    slot: int | None = None  # None: the epoch has ended
    content: bytes = b""  # the batch, for SlotUnpickler
    is_continuing: bool = True  # False: the worker waits for a Restart


@dataclass(frozen=True, slots=True)
class Restart:
    """The consumer's request to drop the current epoch and begin the next epoch, or continue from a state."""

    restart_count: int
    state: bytes | None  # a loader's state, pickled; None: begin the next epoch


# Batches and states as bytes ------------------------------------------------------------------------------


class _SlotPickler(pickle.Pickler):
    """A pickler that copies tensors into a slot (uint8, [bytes]), one after another, and pickles a reference.
    A tensor that doesn't fit into the rest of the slot is pickled itself."""

    def __init__(self, file: io.BytesIO, slot: Tensor) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slot, self._end = slot, 0

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or self._end + obj.nbytes > len(self._slot):
            return None
        where = self._end, obj.nbytes, obj.dtype, obj.shape
        self._end += _size_in_slot(obj)
        with torch.no_grad():
            _view_of_slot(self._slot, *where).copy_(obj)
        return where

    def reducer_override(self, obj: Any) -> Any:
        # A clone, since the pickle of a view contains the whole storage.
        return obj.detach().clone().__reduce_ex__(2) if isinstance(obj, Tensor) else NotImplemented


class SlotUnpickler(pickle.Unpickler):
    """The unpickler of a batch's content; tensors that were copied into the slot become views of the slot."""

    def __init__(self, content: bytes, slot: Tensor) -> None:
        super().__init__(io.BytesIO(content))
        self._slot = slot

    def persistent_load(self, pid: Any) -> Tensor:
        return _view_of_slot(self._slot, *pid)


def _view_of_slot(slot: Tensor, start: int, size: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return slot[start : start + size].view(dtype).view(shape)


def _size_in_slot(tensor: Tensor) -> int:
    """Return a tensor's size in bytes, rounded up to a multiple of 64, a cache line."""
    return -(-tensor.nbytes // 64) * 64


def pickle_state(state: LoaderState) -> bytes:
    """Return a loader's state as bytes. Tensors are pickled as numpy arrays, which is faster."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}
    pickler.dump(state)
    return file.getvalue()


def _tuples_to_lists(value: Any) -> Any:
    """Return a batch with lists in place of tuples (but not of named tuples), also in lists and dictionaries."""
    if type(value) in (tuple, list):
        return [_tuples_to_lists(part) for part in value]
    if type(value) is dict:
        return {key: _tuples_to_lists(part) for key, part in value.items()}
    return value


# The process ----------------------------------------------------------------------------------------------


def run_worker(connection: Connection, feeder: Feeder | bytes) -> None:
    """Run the feeder (or its pickle) until an error, which is sent as text, or the consumer's end."""
    os.setpgrp()  # the consumer can end this process and all that it starts with one signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the consumer to handle
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    torch.set_num_threads(1)  # a forked OpenMP pool hangs, and loading should not compete with computing
    try:
        (pickle.loads(feeder) if isinstance(feeder, bytes) else feeder).run(connection)
    except Exception as error:
        # torch's handler of SIGCHLD raises once more for every process of its loader that died, and the consumer's
        # SIGTERM would interrupt the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hide_internal_frames(error)
        reason = error.message if isinstance(error, DataError) else traceback.format_exc()
        with suppress(OSError):  # the consumer may have ended
            connection.send(reason)


def _exit_on_sigterm(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)  # not os._exit: the exit handlers end the processes of torch's loader


@dataclass
class Feeder:
    """The loop of a worker process, which fills free slots with batches and handles messages.

    The consumer makes this object and sends it to the worker.
    """

    dataset: Any
    slots: int
    load_indefinitely: bool
    rebatched_size: int | None
    # What the worker takes over from the consumer.
    parsers: dict[type, ICustomArgParser] = field(default_factory=registered_parsers)
    random: RandomState = field(default_factory=random_state)
    start_method: str = field(default_factory=multiprocessing.get_start_method)

    def run(self, connection: Connection) -> None:
        """Send batches to the consumer and handle its messages, until an error or the consumer's end."""
        multiprocessing.set_start_method(self.start_method, force=True)
        for arg_type, parser in self.parsers.items():
            registerCustomArgParser(arg_type, parser)
        set_random_state(self.random)
        self.connection = connection
        self.memory: Tensor | None = None  # uint8 [slots, bytes of a slot], as large as the first batch
        self.free_slots = deque[int]()
        self.batches: Any = None  # an iterator over the rest of the current epoch; None between two epochs
        self.is_loading, self.restart_count = True, 0
        is_empty, end = True, object()  # whether the current epoch has yielded no batch so far
        while True:
            while not (self.free_slots and self.is_loading) or connection.poll():
                self.handle_message()
            if self.batches is None:
                self.batches, is_empty = iter(self.dataset), True
                if self.rebatched_size is not None:
                    self.batches = rebatch_rows(self.batches, self.rebatched_size, keep_tail=False)
            batch = next(self.batches, end)
            if batch is not end:
                self.send_batch(_tuples_to_lists(batch))
                is_empty = False
                continue
            if self.memory is None:
                raise DataError("the dataset is empty: it has not a single (complete) batch")
            # After an empty epoch the worker waits: a generator, for example, can be iterated only once.
            self.batches, self.is_loading = None, self.load_indefinitely and not is_empty
            state = self.pickle_dataset_state()
            connection.send(Loaded(self.restart_count, state, is_continuing=self.is_loading))

    def pickle_dataset_state(self) -> bytes | None:
        return pickle_state(self.dataset.state_dict()) if hasattr(self.dataset, "_progress") else None

    def send_batch(self, batch: Any) -> None:
        """Copy a batch into a free slot, and send it; before the first batch, allocate and send the slots."""
        is_first = self.memory is None
        if self.memory is None:
            size = max(sum(map(_size_in_slot, tensors_of(batch))), 1)
            self.memory = torch.empty(self.slots, size, dtype=torch.uint8).share_memory_()
        slot = self.free_slots.popleft()
        file = io.BytesIO()
        _SlotPickler(file, self.memory[slot]).dump(batch)
        if is_first:
            self.connection.send(self.memory)
        state = self.pickle_dataset_state()
        self.connection.send(Loaded(self.restart_count, state, slot, file.getvalue()))

    def handle_message(self) -> None:
        """Wait for a message, and handle it: a returned slot is free; a Restart drops the current epoch."""
        consumer = multiprocessing.parent_process()
        assert consumer is not None
        if self.connection not in wait([self.connection, consumer.sentinel]):
            raise EOFError("the consumer has ended")
        message: int | Restart = self.connection.recv()
        if isinstance(message, int):
            self.free_slots.append(message)
            return
        self.restart_count, self.batches, self.is_loading = message.restart_count, None, True
        if message.state is not None:
            self.dataset._progress.loaded_state = pickle.loads(message.state)
