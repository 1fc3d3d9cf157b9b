"""The worker process of an AsynchronousDataAccessor: loads batches ahead into slots of shared memory.

    worker                                        consumer
    Tensor: the slots          ───────────────►
    Loaded(slot, ...)          ───────────────►   reads the slot ...
                               ◄───────────────   int: ... and returns it
    EpochEnd(is_continuing)    ───────────────►
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

from popengine.errors import DataError
from poptorch.data.loader_state import LoaderState, RandomState, random_state, set_random_state
from poptorch.data.rows import rebatched
from poptorch.nested_values import ICustomArgParser, registerCustomArgParser, registered_parsers, tensors_of


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The dataset and settings of a worker process, and the global state that it copies from the consumer.

    Args:
        dataset:          an iterable over batches
        slots:            number of slots
        prefilled_slots:  number of slots that are filled before the consumer takes the first batch
        load_indefinitely: load the next epoch's first batches as soon as an epoch has ended
        rebatched_size:   rows of a batch, if the dataset's batches are to be regrouped; else None
        start_method:     multiprocessing's, for processes that the dataset starts
    """

    dataset: Any
    slots: int
    prefilled_slots: int
    load_indefinitely: bool
    rebatched_size: int | None
    parsers: dict[type, ICustomArgParser] = field(default_factory=registered_parsers)
    random: RandomState = field(default_factory=random_state)
    start_method: str = field(default_factory=multiprocessing.get_start_method)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The message that a slot has been filled with a batch.

    Args:
        content: the pickled batch, with references to the tensors in the slot, for `unpacked`
        state:   pickled state of the dataset (if a poptorch.DataLoader) after this batch, without "begun"
        begun:   the pickled value of "begun" in the state, with the first batch of an epoch
    """

    restart_count: int
    slot: int
    content: bytes
    state: bytes | None
    begun: bytes | None


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The message that an epoch has ended; `state` as in Loaded."""

    restart_count: int
    is_continuing: bool  # False if the worker waits for a Restart
    state: bytes | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The request to begin an epoch: `epoch`, or that of `state`; with neither, the next epoch."""

    restart_count: int
    epoch: int | None = None  # the epoch to begin, if the dataset is a poptorch.DataLoader
    state: bytes | None = None  # pickled state of the loader to continue from


# Batches and states as bytes ------------------------------------------------------------------------------


class _SlotPickler(pickle.Pickler):
    """A pickler that copies tensors into a slot, and pickles the tensors that don't fit there any more."""

    def __init__(self, file: io.BytesIO, slot: Tensor) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slot, self._end = slot, 0

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or self._end + obj.nbytes > len(self._slot):
            return None
        place = self._end, obj.nbytes, obj.dtype, obj.shape
        self._end += _padded(obj)
        with torch.no_grad():
            _view(self._slot, *place).copy_(obj)
        return place

    def reducer_override(self, obj: Any) -> Any:
        # A clone, since the pickle of a view has the whole memory that it is a view of.
        return obj.detach().clone().__reduce_ex__(2) if isinstance(obj, Tensor) else NotImplemented


class _SlotUnpickler(pickle.Unpickler):
    """The unpickler for _SlotPickler: tensors that were copied into the slot are views of it."""

    def __init__(self, content: bytes, slot: Tensor) -> None:
        super().__init__(io.BytesIO(content))
        self._slot = slot

    def persistent_load(self, pid: Any) -> Tensor:
        return _view(self._slot, *pid)


def _view(slot: Tensor, start: int, size: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a tensor that is a view of `size` bytes of a slot."""
    return slot[start : start + size].view(dtype).view(shape)


def _padded(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor in a slot, rounded up to a multiple of 64, a cache line."""
    return -(-tensor.nbytes // 64) * 64


def _pack_into_slot(batch: Any, slot: Tensor) -> bytes:
    """Copy a batch's tensors into a slot (uint8 [bytes]), if they fit; return the rest, pickled."""
    file = io.BytesIO()
    _SlotPickler(file, slot).dump(batch)
    return file.getvalue()


def unpacked(content: bytes, slot: Tensor) -> Any:
    """Return the batch that a worker packed; the tensors that fitted into the slot are views of it."""
    return _SlotUnpickler(content, slot).load()


def pickled(state: Any) -> bytes:
    """Return a loader's state, or a part of it, pickled. Tensors are pickled as numpy arrays, since a state
    is sent with every batch and torch's pickling is slow."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}
    pickler.dump(state)
    return file.getvalue()


def _with_lists(value: Any) -> Any:
    """Return a batch with plain tuples, also nested ones, replaced by lists, as torch's loader does."""
    if type(value) in (tuple, list):
        return [_with_lists(part) for part in value]
    if type(value) is dict:
        return {key: _with_lists(part) for key, part in value.items()}
    return value


# The process ----------------------------------------------------------------------------------------------


def serve(connection: Connection, consumer_end: Connection | None, settings: WorkerSettings | bytes) -> None:
    """Run the worker process until the consumer ends, or an error, which is sent to the consumer as text.

    Args:
        consumer_end: the consumer's connection, if this process has inherited it by a fork; it is closed here
        settings:     WorkerSettings, or pickled: then an error of unpickling is sent to the consumer, too
    """
    if consumer_end is not None:
        consumer_end.close()
    os.setpgrp()  # the consumer can end this process and all that it starts with one signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the consumer to handle
    signal.signal(signal.SIGTERM, _exit_on_signal)
    torch.set_num_threads(1)  # a forked OpenMP pool hangs, and loading should not compete with computing
    try:
        _Feeder(connection, pickle.loads(settings) if isinstance(settings, bytes) else settings).run()
    except Exception as error:
        # torch's handler of SIGCHLD raises once more for every process of its loader that died, and the consumer's
        # SIGTERM would interrupt the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = error.message if isinstance(error, DataError) else traceback.format_exc()
        with suppress(OSError):  # the consumer may have ended
            connection.send(reason)


def _exit_on_signal(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)  # not os._exit: the exit handlers end the processes of torch's loader


class _Feeder:
    """The worker's loop: fills free slots and handles messages."""

    def __init__(self, connection: Connection, settings: WorkerSettings) -> None:
        multiprocessing.set_start_method(settings.start_method, force=True)
        for arg_type, parser in settings.parsers.items():
            registerCustomArgParser(arg_type, parser)
        set_random_state(settings.random)
        self.connection, self.settings, self.dataset = connection, settings, settings.dataset
        self.memory: Tensor | None = None  # uint8 [slots, bytes of a slot], as large as the first batch
        self.free_slots = deque(range(settings.prefilled_slots))
        self.batches: Any = None  # an iterator over the rest of the current epoch; None between two epochs
        self.is_epoch_start = True  # whether this epoch has yielded no batch so far
        self.is_loading = True
        self.restart_count = 0
        self.start_states: dict[int | None, LoaderState] = {}  # by epoch, the loader's state at its beginning
        consumer = multiprocessing.parent_process()
        assert consumer is not None
        self.watched = [connection, consumer.sentinel]

    def run(self) -> None:
        """Load batches and handle messages, until an error ends the loop.

        Raises:
            DataError: the first epoch has no batch
            EOFError, OSError: the consumer has ended
        """
        end = object()
        while True:
            while not (self.free_slots and self.is_loading) or self.connection.poll():
                self.handle_message(self.receive_message())
            if self.batches is None:
                self.batches, self.is_epoch_start = iter(self.dataset), True
                if self.settings.rebatched_size is not None:
                    self.batches = rebatched(self.batches, self.settings.rebatched_size, keep_tail=False)
            batch = next(self.batches, end)
            if batch is not end:
                self.send_batch(_with_lists(batch))
                continue
            if self.memory is None:
                raise DataError("the dataset is empty: it has not a single (complete) batch")
            # After an empty epoch the worker waits: a generator, for example, can be iterated only once.
            self.batches, self.is_loading = None, self.settings.load_indefinitely and not self.is_epoch_start
            state = self.loader_state()
            state = None if state is None else pickled(state)
            self.connection.send(EpochEnd(self.restart_count, self.is_loading, state))

    def loader_state(self) -> LoaderState | None:
        """Return the state of the dataset, if it is a poptorch.DataLoader; else None."""
        return self.dataset.state_dict() if hasattr(self.dataset, "_progress") else None

    def send_batch(self, batch: Any) -> None:
        """Copy a batch into a free slot, and send a Loaded; before the first one, make and send the slots."""
        is_first = self.memory is None
        if self.memory is None:
            size = max(sum(map(_padded, tensors_of(batch))), 1)
            self.memory = torch.empty(self.settings.slots, size, dtype=torch.uint8).share_memory_()
        slot = self.free_slots.popleft()
        content = _pack_into_slot(batch, self.memory[slot])
        if is_first:
            self.connection.send(self.memory)
        state, sent, begun = self.loader_state(), None, None
        if state is not None:
            epoch, start = state["epoch"], state.pop("begun")
            if self.is_epoch_start:
                begun = pickled(start)
                self.start_states[epoch] = {**state, "position": 0, "begun": None, "now": start}
                self.start_states.pop(epoch - self.settings.slots - 1, None)
            sent = pickled(state)
        self.is_epoch_start = False
        self.connection.send(Loaded(self.restart_count, slot, content, sent, begun))

    def handle_message(self, message: int | Restart) -> None:
        """Free a returned slot; or, at a Restart, drop the current epoch, so that `run` begins another."""
        if isinstance(message, int):
            self.free_slots.append(message)
            return
        self.restart_count, self.batches, self.is_loading = message.restart_count, None, True
        state = self.start_states.get(message.epoch) if message.state is None else pickle.loads(message.state)
        if state is not None:
            self.dataset._progress.loaded_state = state
        self.start_states = {}

    def receive_message(self) -> int | Restart:
        if self.connection not in wait(self.watched):
            raise EOFError("the consumer has ended")
        return self.connection.recv()
