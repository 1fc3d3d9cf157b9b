"""The worker process of an AsynchronousDataAccessor: loads batches ahead into a ring of slots in shared memory.

    worker                                        consumer
    Ready(ring, skeleton)      ───────────────►
    Item(slot, ...)            ───────────────►   reads the slot ...
                               ◄───────────────   int: ... and returns it
    EpochEnd(goes_on)          ───────────────►
                               ◄───────────────   Restart: begin an epoch; what is in flight is stale
    Failed(reason)             ───────────────►   and the process ends

A slot belongs to the side that received its number last, so no lock is needed. The generation of a message is
the number of restarts before it was sent: the consumer discards messages from before its last restart.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from popengine.errors import DataError
from poptorch.data.rows import rebatched
from poptorch.nested_values import describe, tensors_of, with_tensors

_ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker process.

    Args:
        slots:      number of slots of the ring
        granted:    number of slots that are filled before the consumer takes the first batch
        load_indefinitely: load the beginning of the next epoch as soon as one has ended
        rebatched_size: rows of a batch, if the dataset's batches are to be regrouped
        keep_tail:  whether regrouping keeps a smaller last batch
    """

    slots: int
    granted: int
    load_indefinitely: bool
    rebatched_size: int | None
    keep_tail: bool


@dataclass(frozen=True, slots=True)
class Ready:
    ring: Ring
    skeleton: bytes  # the first batch, pickled, with meta tensors in place of its tensors
    state: (
        bytes | None
    )  # pickled state of the dataset before anything was loaded, if it is a poptorch.DataLoader


@dataclass(frozen=True, slots=True)
class Item:
    generation: int
    slot: int
    skeleton: bytes | None  # None if it is that of Ready
    has_tensors: (
        bool  # whether the skeleton has the tensors, since their shapes or dtypes are not those of the slot
    )
    state: bytes | None  # as in Ready, after this batch, without what is equal in all batches of an epoch
    begun: bytes | None  # the rest of the state, with an epoch's first batch


@dataclass(frozen=True, slots=True)
class EpochEnd:
    generation: int
    goes_on: bool  # False if the worker waits for a Restart
    state: bytes | None


@dataclass(frozen=True, slots=True)
class Restart:
    generation: int
    epoch: int | None = None  # the epoch to begin, if the dataset is a poptorch.DataLoader
    state: bytes | None = None  # the state to go on from


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(frozen=True, slots=True)
class Ring:
    """Slots for batches of equal shapes in one shared storage, which takes only one file descriptor."""

    memory: Tensor  # uint8 [slots, bytes of a slot]
    templates: tuple[Tensor, ...]  # meta tensors with the shapes and dtypes of a batch

    @classmethod
    def like(cls, tensors: Sequence[Tensor], slots: int) -> Ring:
        """Return a ring for batches with the shapes and dtypes of `tensors`."""
        templates = tuple(_on_meta(tensors))
        size = max(sum(map(_padded, templates)), 1)
        return cls(torch.empty(slots, size, dtype=torch.uint8).share_memory_(), templates)

    def views(self, slot: int) -> list[Tensor]:
        """Return the tensors of the batch in a slot, as views."""
        views, start = [], 0
        for template in self.templates:
            part = self.memory[slot, start : start + template.nbytes]
            views.append(part.view(template.dtype).view(template.shape))
            start += _padded(template)
        return views

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a batch has the shapes and dtypes of the slots."""
        return [(t.shape, t.dtype) for t in tensors] == [(t.shape, t.dtype) for t in self.templates]

    def fill(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Copy a batch into a slot, whose shapes and dtypes it must have."""
        with torch.no_grad():
            for view, tensor in zip(self.views(slot), tensors, strict=True):
                view.copy_(tensor)


def _on_meta(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


_END = object()


class _ConsumerGone(Exception):
    pass


class _StatePickler(pickle.Pickler):
    """A pickler of tensors as bytes. Each batch comes with a state, for which torch's way takes too long."""

    def reducer_override(self, value: Any) -> Any:
        return (
            (_tensor_of, (value.numpy().tobytes(), value.dtype))
            if isinstance(value, Tensor)
            else NotImplemented
        )


def _tensor_of(content: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype)


def _pickled(state: Any) -> bytes:
    file = io.BytesIO()
    _StatePickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
    return file.getvalue()


def serve(
    connection: Connection,
    consumer_end: Connection | None,
    load: Callable[[], Iterable[Any]],
    settings: WorkerSettings,
) -> None:
    """Run the worker process, until the consumer is gone.

    Args:
        consumer_end: the consumer's connection, if this process has inherited it by a fork
        load:         returns the dataset
    """
    if consumer_end is not None:
        consumer_end.close()
    os.setpgrp()  # the consumer can end this process and all that it starts with one signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the consumer to handle
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)  # a forked OpenMP pool hangs, and loading should not compete with computing
    try:
        _Feeder(connection, load(), settings).run()
    except _ConsumerGone:
        pass
    except Exception as error:
        # torch's handler of SIGCHLD raises once more for every process of its loader that died, and the consumer's
        # SIGTERM would interrupt the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = error.message if isinstance(error, DataError) else traceback.format_exc()
        with suppress(OSError):  # the consumer may have ended
            connection.send(Failed(reason))


def _leave(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)  # not os._exit: the exit handlers end the processes of torch's loader


class _Feeder:
    """The worker's loop: fills free slots and handles messages."""

    def __init__(self, connection: Connection, dataset: Any, settings: WorkerSettings) -> None:
        self.connection, self.dataset, self.settings = connection, dataset, settings
        self.batches: Iterator[Any] | None = None  # the rest of the present epoch
        self.generation = 0
        self.wanted: dict[str, Any] | None = None  # state to begin the next epoch from
        self.begun: dict[int, Any] = {}  # by epoch, the generators' states at its beginning
        self.position = 0  # of this epoch's next batch
        self.running = True
        self.free: deque[int] = deque(range(settings.granted))
        consumer = parent_process()
        assert consumer is not None
        self.watched = [connection, consumer.sentinel]

    def run(self) -> None:
        """Load until _ConsumerGone is raised. Raises: DataError, if the dataset is empty"""
        state = self.state()
        self.batches = self.epoch()
        first = next(self.batches, _END)
        if first is _END:
            raise DataError("the dataset is empty: it has not a single (complete) batch")
        self.first = describe(first)
        self.ring = Ring.like(tensors_of(first), self.settings.slots)
        self.send(Ready(self.ring, self.skeleton(first), state))
        self.feed(first)
        while True:
            while not (self.free and self.running) or self.connection.poll():
                self.handle(self.receive())
            if self.batches is None:
                self.batches = self.epoch()
            batch = next(self.batches, _END)
            if batch is not _END:
                self.feed(batch)
            else:
                # After an empty epoch the worker waits: a generator, for example, can be iterated only once.
                self.batches, self.running = None, self.settings.load_indefinitely and self.position > 0
                self.send(EpochEnd(self.generation, self.running, self.state()))

    def epoch(self) -> Iterator[Any]:
        """Return the batches of the next epoch, or the rest of the epoch in `wanted`."""
        size, head = self.settings.rebatched_size, 0
        self.position, self.is_first = 0, True
        if self.wanted is not None:
            state, self.wanted = self.wanted, None
            self.position = state["position"]
            if size is not None:  # the loader counts batches of another size
                state["position"], head = divmod(self.position * size, self.dataset.batch_size)
            self.dataset._progress.wanted = state
        batches = iter(self.dataset)
        if size is None:
            return batches
        return rebatched(batches, size, keep_tail=self.settings.keep_tail, head=head)

    def state(self, **instead: Any) -> bytes | None:
        """Return the pickled state of a `poptorch.DataLoader`, updated by `instead`; else None."""
        if not hasattr(self.dataset, "_progress"):
            return None
        return _pickled({**self.dataset.state_dict(), **instead})

    def skeleton(self, batch: Any) -> bytes:
        return pickle.dumps(with_tensors(batch, _on_meta(tensors_of(batch))))

    def feed(self, batch: Any) -> None:
        """Copy a batch into a free slot and send the slot's number; a batch that doesn't fit is pickled."""
        slot, tensors = self.free.popleft(), tensors_of(batch)
        fits = self.ring.fits(tensors)
        if fits:
            self.ring.fill(slot, tensors)
            skeleton = None if describe(batch) == self.first else self.skeleton(batch)
        else:  # clones, since a pickle has the whole memory that a view is of
            skeleton = pickle.dumps(with_tensors(batch, (t.detach().clone() for t in tensors)))
        begun = None
        if self.is_first and (progress := getattr(self.dataset, "_progress", None)) is not None:
            begun = _pickled({"epoch": progress.epoch, "begun": progress.begun})
            self.begun[progress.epoch] = progress.begun
            self.begun.pop(progress.epoch - self.settings.slots - 1, None)
        self.is_first = False
        self.position += 1
        state = self.state(position=self.position, begun=None)
        self.send(Item(self.generation, slot, skeleton, not fits, state, begun))

    def handle(self, message: int | Restart) -> None:
        if isinstance(message, int):
            self.free.append(message)
            return
        self.generation, self.batches, self.running = message.generation, None, True
        self.wanted = None if message.state is None else pickle.loads(message.state)
        if message.epoch in self.begun:  # was loaded ahead, and the consumer has not seen it: begin again
            start = {"epoch": message.epoch, "position": 0, "begun": None, "now": self.begun[message.epoch]}
            self.wanted = {**self.dataset.state_dict(), **start}
        self.begun = {}

    def receive(self) -> int | Restart:
        if self.connection not in wait(self.watched):
            raise _ConsumerGone
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise _ConsumerGone from error

    def send(self, message: Ready | Item | EpochEnd) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise _ConsumerGone from error
