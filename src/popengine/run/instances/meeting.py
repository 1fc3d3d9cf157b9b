"""Meetings: what the instances agree on before and after each call, and what they ask each other.

How they reach each other, and what happens when one fails, says `connections.py`.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from popengine.errors import Error

from .agreement import HEADER, Facts, differences, header, read_header
from .connections import Connections

_PATIENCE = 0.2  # seconds; an interrupt wakes nobody who waits
_NEVER = float("inf")
_AGREE, _FACTS, _TOLD = 1, 2, 4  # tags; 3 is of connections, FIRST_FREE and above are for exchanges
FIRST_FREE = 16
_ASKED = "the reading of "


T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> SimpleQueue[tuple[T, BaseException | None]]:
    """Begin something that waits within torch, where no interrupt is heard; its value or error comes in the queue."""
    outcome: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # whatever it is, the caller must hear of it
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    return outcome


class Readable(Protocol):
    """What instances have a part each of."""

    def part(self) -> Tensor:
        """This instance's, as bytes. It is called between the calls of a training."""
        ...


class Meeting(Connections):
    """The instances as one of them meets the others; arguments as of `Connections`."""

    def __init__(
        self, store: Any, place: int, size: int, name: str = "all", names: Sequence[int] = ()
    ) -> None:
        super().__init__(store, place, size, name, names)
        self._one_at_a_time = threading.Lock()
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._offers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by what is read
        self._offered = 0
        self._kept: list[Any] = []  # offers that nothing else keeps alive, until the next meeting

    # ---- agreeing ----------------------------------------------------------------------------------------

    def agree(self, what: str, facts: Facts | None = None, final: bool = False) -> None:
        """Wait until all instances are here, and make sure that they say the same of themselves.

        Args:
            what:  the place in the program: "call 17"
            facts: what has to be equal, by section and name
            final: all that a call computes is done; from here on it can't be taken back by this instance alone
        Raises:
            Error:  the instances differ; every one of them raises it
            Broken: another one has failed
            Left:   another one is gone
        """
        self.meet(what, facts or {}, lambda: None, final)

    def meet(self, what: str, facts: Facts, then: Callable[[], T], final: bool = False) -> T:
        """As `agree`, and `then` do something with the others; in a thread, where it can be interrupted."""
        abandoned = threading.Event()

        def work() -> T:
            self.connected(what)
            if abandoned.is_set():
                raise KeyboardInterrupt
            self._agree(what, facts)
            return then()

        with self._one_at_a_time:
            with self._lock:
                self._until = _NEVER if final else None
            outcome = in_a_thread(work)
            while True:
                try:
                    value, error = outcome.get(timeout=_PATIENCE)
                    break
                except Empty:
                    if self._until is not None and time.monotonic() > self._until:
                        self._until = None
                        self.break_off(f"was interrupted at {what}", ends=True)
                except KeyboardInterrupt:
                    abandoned.set()
                    self.break_off(f"was interrupted at {what}")
                    raise
            with self._lock:
                self._until = None
            if error is not None:
                raise error
            return value

    def among(self, names: Sequence[int]) -> Meeting:
        """The meeting of some of the instances, made once."""
        found = self._parts.get(tuple(names))
        if found is None:
            name = "-".join(map(str, names))
            found = Meeting(self._store, names.index(self.place), len(names), name, names)
            self._parts[tuple(names)] = found
        return found

    def _agree(self, what: str, facts: Facts) -> None:
        mine = header(what, facts)
        while True:
            headers = self._everybody(mine, [HEADER] * self.size, _AGREE, what)
            if all(torch.equal(other, mine) for other in headers):
                if not what.startswith(_ASKED):
                    self._kept.clear()
                return
            asked = min(
                (w for w in (read_header(one).what for one in headers) if w.startswith(_ASKED)), default=""
            )
            if asked == what:
                return  # the others answer first, wherever they are
            if not asked:
                break
            self._tell_part(asked)
        told = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        sizes = [read_header(other).size for other in headers]
        texts = self._everybody(told, sizes, _FACTS, what)
        raise Error(
            differences(
                [read_header(other).what for other in headers],
                [json.loads(bytes(text.numpy())) for text in texts],
                self.names,
            )
        )

    # ---- asking ------------------------------------------------------------------------------------------

    def offer(self, what: str, source: Readable) -> str:
        """Let other instances read what this one has a part of, as all have. `source` is not kept alive.

        Returns: by which name to `ask` for it, the same in all instances, which offer in the same order
        """
        self._offered += 1
        name = f"{_ASKED}{what} (number {self._offered})"
        self._offers[name] = source
        return name

    def ask(self, name: str) -> list[Tensor]:
        """The parts of all instances, as bytes. Those that do not ask give theirs when they come to the next meeting,
        whatever it is about, and go on to that."""
        return self.meet(name, {}, lambda: self._tell_part(name))

    def keep(self, source: Readable) -> None:
        """Keep what was offered until the next meeting: another instance, not as far in the program, may ask for it."""
        if not self._ended:
            self._kept.append(source)

    def has_offers(self) -> bool:
        """Whether another instance may want to read something of this one."""
        return bool(self._offers)

    def _tell_part(self, name: str) -> list[Tensor]:
        try:
            mine = self._offers[name].part()
        except BaseException as error:
            why = "has let go of it" if isinstance(error, KeyError) else f"failed: {error}"
            self.break_off(f"was asked for its part of {name.removeprefix(_ASKED)}, and {why}")
            raise self._error() from error
        size = torch.tensor([mine.numel()]).view(torch.uint8)
        sizes = self._everybody(size, [size.numel()] * self.size, _TOLD, name)
        return self._everybody(mine, [int(one.view(torch.int64)) for one in sizes], _TOLD, name)

    def _everybody(self, mine: Tensor, sizes: Sequence[int], tag: int, what: str) -> list[Tensor]:
        """What each instance says, this one included."""
        group = self.connected(what)
        said = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        said[self.place] = mine
        sent = [self._started(group.send, [mine], other, tag) for other in self.others]
        received = [self._started(group.recv, [said[other]], other, tag) for other in self.others]
        for other, work in zip(self.others * 2, received + sent, strict=True):
            self.wait(work, other, what)
        return said
