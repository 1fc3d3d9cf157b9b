"""The worker process of an AsynchronousDataAccessor: reads a dataset ahead into a ring of shared slots.

    worker                                        consumer
    Ready(ring, skeleton)      ───────────────►
    Item(slot, ...)            ───────────────►   reads the slot ...
                               ◄───────────────   int: ... and gives it back
    EpochEnd(goes_on)          ───────────────►
                               ◄───────────────   Restart: from the beginning, what is in flight is stale
    Failed(reason)             ───────────────►   and the process is over

A slot belongs to the side that received its number last. Generations count restarts: by them the consumer
recognizes messages that the worker sent before it received the restart.
"""

import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from popengine.errors import DataError
from poptorch.data.ring import Ring
from poptorch.data.rows import rebatched
from poptorch.nested_values import describe, tensors_of, with_tensors


@dataclass(frozen=True, slots=True)
class Request:
    """What to read, and how."""

    slots: int
    granted: int  # slots that may be filled before the consumer's first iter()
    load_indefinitely: bool
    rebatched_size: int | None
    short_tail: bool  # the last batch of an epoch may have fewer rows


@dataclass(frozen=True, slots=True)
class Ready:
    ring: Ring
    skeleton: bytes  # the first batch, pickled, with meta tensors for its tensors
    state: bytes | None  # of the dataset, where it is a loader of ours, before anything was loaded


@dataclass(frozen=True, slots=True)
class Item:
    generation: int
    slot: int
    rows: tuple[int, ...] | None
    skeleton: bytes | None  # None: that of Ready
    whole: bool  # the skeleton has its tensors in it: the slot could not hold them
    state: bytes | None  # of the dataset, once this is handed out, but for what is the same in an epoch ...
    begun: bytes | None  # ... which comes with its first item


@dataclass(frozen=True, slots=True)
class EpochEnd:
    generation: int
    goes_on: bool  # False: the worker waits for a Restart
    state: bytes | None


@dataclass(frozen=True, slots=True)
class Restart:
    generation: int
    epoch: int | None = None  # to begin with, where the dataset is a loader of ours
    state: bytes | None = None  # where to go on


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


_END = object()


class _ConsumerGone(Exception):
    pass


def serve(
    connection: Connection,
    consumer_end: Connection | None,
    load: Callable[[], Iterable[Any]],
    request: Request,
) -> None:
    """The main function of the process. `consumer_end` is what a fork inherited and must not keep open."""
    if consumer_end is not None:
        consumer_end.close()
    os.setpgrp()  # the consumer can end this process and all that it starts with one signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the consumer to handle
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)  # a forked OpenMP pool hangs, and loading should not compete with computing
    try:
        _Feeder(connection, load(), request).run()
    except _ConsumerGone:
        pass
    except Exception as error:
        # torch's handler raises once more for every worker of its loader that died, also while we report it;
        # and the consumer's SIGTERM would only disturb a process that is on its way out.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = error.message if isinstance(error, DataError) else traceback.format_exc()
        with suppress(OSError):  # the consumer may have ended
            connection.send(Failed(reason))


def _leave(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)  # not at once: its own workers are ended on the way out


class _Feeder:
    def __init__(self, connection: Connection, dataset: Iterable[Any], request: Request) -> None:
        self.connection = connection
        self.dataset = dataset
        self.request = request
        self.elements: Iterator[Any] | None = None
        self.generation = 0
        self.wanted: dict[str, Any] | None = None
        self.begun: dict[
            int, dict[str, Any]
        ] = {}  # generators at the beginnings of epochs that were read ahead
        self.position = 0  # of this epoch's next element
        self.running = True
        self.free: deque[int] = deque(range(request.granted))
        consumer = parent_process()
        assert consumer is not None
        self.watched = [connection, consumer.sentinel]

    def run(self) -> None:
        state = self.state()
        self.elements = self.epoch()
        first = next(self.elements, _END)
        if first is _END:
            raise DataError("the dataset is empty: it has not a single (complete) batch")
        self.first = describe(first)
        self.ring = Ring.like(tensors_of(first), self.request.slots)
        self.send(Ready(self.ring, _skeleton(first), state))
        self.feed(first)
        while True:
            while not (self.free and self.running) or self.connection.poll():
                self.obey(self.receive())
            if self.elements is None:
                self.elements = self.epoch()
            element = next(self.elements, _END)
            if element is not _END:
                self.feed(element)
            else:
                # Nothing more comes from an iterator that can be used only once: don't spin on it.
                self.elements, self.running = None, self.request.load_indefinitely and self.position > 0
                self.send(EpochEnd(self.generation, self.running, self.state()))

    def epoch(self) -> Iterator[Any]:
        """The elements of the next epoch, or of the rest of the one that was wanted."""
        size, short = self.request.rebatched_size, self.request.short_tail
        head, self.position, self.is_first = 0, 0, True
        if self.wanted is not None:
            state, self.wanted = self.wanted, None
            self.position = state["position"]
            if size is not None:  # the loader counts batches of another size
                batches, head = divmod(self.position * size, self.dataset.batch_size)  # type: ignore[attr-defined]
                state["position"] = batches
            self.dataset._progress.wanted = state  # type: ignore[attr-defined]
        batches = iter(self.dataset)
        return batches if size is None else rebatched(batches, size, keep_tail=short, head=head)

    def state(self, **instead: Any) -> bytes | None:
        """Return the pickled state of the dataset if it is a `poptorch.DataLoader`, else None."""
        if not hasattr(self.dataset, "_progress"):
            return None
        return pickle.dumps({**self.dataset.state_dict(), **instead})  # type: ignore[attr-defined]

    def feed(self, element: Any) -> None:
        slot = self.free.popleft()
        tensors = tensors_of(element)
        if whole := self.ring.has_the_shapes_but_not_the_types_of(tensors):
            rows, skeleton = None, pickle.dumps(with_tensors(element, (t.detach().clone() for t in tensors)))
        else:
            rows = self.ring.fill(slot, tensors, self.request.short_tail)
            skeleton = None if describe(element) == self.first else _skeleton(element)
        begun = None
        if self.is_first and (progress := getattr(self.dataset, "_progress", None)) is not None:
            begun = pickle.dumps({"epoch": progress.epoch, "begun": progress.begun})
            self.begun[progress.epoch] = progress.begun
            self.begun.pop(progress.epoch - self.request.slots - 1, None)
        self.is_first = False
        self.position += 1
        state = self.state(position=self.position, begun=None)
        self.send(Item(self.generation, slot, rows, skeleton, whole, state, begun))

    def obey(self, message: int | Restart) -> None:
        if isinstance(message, Restart):
            self.generation, self.elements, self.running = message.generation, None, True
            self.wanted = None if message.state is None else pickle.loads(message.state)
            if message.epoch in self.begun:  # how far the worker had read ahead is chance: begin it once more
                state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
                start = {"epoch": message.epoch, "position": 0, "begun": None}
                self.wanted = {**state, **start, "now": self.begun[message.epoch]}
            self.begun = {}
        else:
            self.free.append(message)

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


def _skeleton(batch: Any) -> bytes:
    stand_ins = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors_of(batch))
    return pickle.dumps(with_tensors(batch, stand_ins))
