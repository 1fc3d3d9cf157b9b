"""Meetings: how the instances of a training find each other, and how none waits for one that will not come.

Each instance has one group of connections to all others (torch's gloo), and messages with tags on it. Whoever fails
closes them, which wakes all who wait, in every instance; what has happened is in the store that they met by. Then
there is a next generation of connections, unless an instance is gone: then the training has ended.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from popengine.errors import Error, UnrecoverableError

from .agreement import HEADER, Facts, differences, header, read_header

logger = logging.getLogger("popengine")

WARN_AFTER = 60.0  # seconds without another instance, until somebody is told
LAST_PATIENCE = 1.5  # seconds that an interrupted instance waits for the others to agree on a call's end
_PATIENCE = 0.2  # seconds; an interrupt wakes nobody who waits
_FOREVER, _NEVER = timedelta(days=365), float("inf")
_AGREE, _FACTS, _CUT, _PROBE, _TOLD = 1, 2, 3, 3, 4  # tags; FIRST_FREE and above are for exchanges
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


class Broken(Error):
    """Another instance failed, and all go back to where they were before the call."""


class Left(UnrecoverableError):
    """Another instance is gone, and nobody can go on."""


class Meeting:
    """The instances as one of them sees the others.

    Args:
        store: what torch.distributed met by
        place: of this instance among those that meet here, of which there are `size`
        names: the number of each for messages; by default their places
    """

    def __init__(
        self, store: Any, place: int, size: int, name: str = "all", names: Sequence[int] = ()
    ) -> None:
        self.place, self.size, self.names = place, size, list(names or range(size))
        self.others = [other for other in range(size) if other != place]
        self._store, self._name = store, name
        self._generation = 0
        self._group: Any = None
        self._last = ""  # why the generation before has ended
        self._ended = ""  # why nobody can meet any more
        self._watched = False
        self._lock = threading.RLock()
        self._connecting, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._until: float | None = (
            None  # how long to wait for the agreement on a call's end; None: there is none
        )
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._offers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by what is read
        self._offered = 0
        self._kept: list[Any] = []  # offers that nothing else keeps alive, until the next meeting
        self._waits: dict[int, list[Any]] = {}  # by thread: since when, for which instance, what for

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

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, value: Tensor, other: int, tag: int) -> tuple[Any, int]:
        """Begin to send; `value` may change after `wait`. Returns: the work, and the other instance."""
        return self._started(self._here().send, [value], other, tag), other

    def receive(self, value: Tensor, other: int, tag: int) -> tuple[Any, int]:
        """Begin to receive into `value`, which is there after `wait`. Returns: the work, and the other instance."""
        return self._started(self._here().recv, [value], other, tag), other

    def wait(self, work: Any, other: int, what: str) -> None:
        """Wait for what was begun with another instance."""
        thread = threading.get_ident()
        self._waits[thread] = self._wait_for(other, what)
        generation = self._generation
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error, other, generation) from error
        finally:
            self._waits.pop(thread, None)

    def _started(self, begin: Callable[..., Any], values: list[Tensor], other: int, tag: int) -> Any:
        generation = self._generation
        try:
            return begin(values, other, tag)
        except RuntimeError as error:
            raise self._failed(error, other, generation) from error

    def _watch(self) -> None:
        """Say for whom this instance has been waiting long."""
        while True:
            time.sleep(min(1.0, WARN_AFTER / 2))
            for wait in list(self._waits.values()):
                since, other, what, limit = wait
                if time.monotonic() - since > limit:
                    wait[3] += WARN_AFTER
                    logger.warning("%s has not arrived at %s for %.0f s", other, what, limit)

    # ---- connections -------------------------------------------------------------------------------------

    def connected(self, what: str) -> Any:
        """The connections, made anew if they were closed; waits for everybody."""
        with self._connecting:
            if self._ended:
                raise self._error()
            if self._group is None:
                try:
                    if not self._watched:
                        self._watched = True
                        threading.Thread(target=self._watch, daemon=True).start()
                    group = self._connect(f"{self._name}/{self._generation}", what)
                except RuntimeError as error:
                    self._ended = self._ended or str(error)
                    raise self._error() from error
                finally:
                    self._waits.pop(threading.get_ident(), None)
                with self._lock:
                    self._group = group
            return self._group

    def _connect(self, generation: str, what: str) -> Any:
        self._store.set(f"{generation}/here/{self.place}", "1")
        for other in self.others:
            self._waits[threading.get_ident()] = self._wait_for(other, what)
            pause = 0.001
            while not self._store.check([f"{generation}/here/{other}"]):
                if self._store.check([f"left/{self.names[other]}"]):
                    raise RuntimeError(f"instance {self.names[other]} has ended")
                time.sleep(pause)
                pause = min(1.5 * pause, 0.5)
                if pause == 0.5:
                    self._probe(other)
        store = dist.PrefixStore(generation, self._store)
        return dist.ProcessGroupGloo(store, self.place, self.size, timeout=_FOREVER)

    def _wait_for(self, other: int, what: str) -> list[Any]:
        return [time.monotonic(), f"instance {self.names[other]}", what, WARN_AFTER]

    def _probe(self, other: int) -> None:
        """Raises RuntimeError if the process of another instance is gone: its first connection has closed then."""
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "gloo":
            group.send([torch.zeros(1, dtype=torch.uint8)], self.names[other], _PROBE)

    def _here(self) -> Any:
        with self._lock:
            if self._group is None:
                raise self._error()
            return self._group

    def break_off(self, why: str, ends: bool = False) -> None:
        """This instance has failed: wake all who wait, here and in the other instances.

        While a call's end is agreed on it is too late for that: this instance then waits a little longer.

        Args:
            ends: the others may have finished the call that this one could not: nobody can go on
        """
        with self._lock:
            if self._until is not None:
                self._until = min(self._until, time.monotonic() + LAST_PATIENCE)
            elif self._group is not None:
                told = threading.Thread(
                    target=self._tell,
                    args=({"by": self.names[self.place], "why": why, "ends": ends},),
                    daemon=True,
                )
                told.start()
                told.join(1.0)  # the store may be in a process that stands still
                self._close(why if ends else "", why)
            elif ends:
                self._ended = why

    def _tell(self, news: dict[str, Any]) -> dict[str, Any] | None:
        """Leave the news for the others; returns what was there first."""
        key = f"{self._name}/{self._generation}/broken"
        with suppress(RuntimeError):
            return json.loads(self._store.compare_set(key, "", json.dumps(news)))
        return None

    def _failed(self, error: Exception, other: int, generation: int) -> Error:
        """What has to be said of connections that have closed."""
        with self._lock:
            if self._group is not None and self._generation == generation:
                gone = f"instance {self.names[other]} has left the training ({str(error).splitlines()[0]})"
                news = self._tell({"by": self.names[self.place], "why": gone, "ends": True})
                if news is None or news["why"] == gone:
                    self._close(gone, gone)
                else:
                    why = f"instance {news['by']} {news['why']}" if not news["ends"] else news["why"]
                    self._close(why if news["ends"] else "", why)
            return self._error()

    def _close(self, ended: str, why: str) -> None:
        """Close all connections: a wait that runs out of time does that, and wakes all who wait."""
        group, self._group = self._group, None
        self._ended, self._last = self._ended or ended, why
        self._generation += 1
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], self.others[0], _CUT).wait(timedelta(milliseconds=1))

    def _error(self) -> Error:
        if self._ended:
            return Left(
                f"another instance has left the training: {self._ended}\n"
                "  why: all instances add up their gradients, and have to make the same number of calls\n"
                "  here the weights are as they were before the call\n"
                "  fix: see what the other instance says, and start all of them again"
            )
        return Broken(
            f"another instance failed: {self._last}\n"
            "  in all instances the weights are as they were before the call"
        )


# ---- the one of this process ---------------------------------------------------------------------------------

_current: Meeting | None = None


def open_with(store: Any, place: int, size: int) -> Meeting:
    """Let this process meet the others by this store."""
    global _current
    _current = Meeting(dist.PrefixStore("pando", store), place, size)
    return _current


def current() -> Meeting | None:
    """How this process meets the others; None: it has not met them."""
    if _current is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # The user's program has called torch.distributed itself.
        store = dist.distributed_c10d._get_default_store()
        return open_with(store, dist.get_rank(), dist.get_world_size())
    return _current


def leave() -> None:
    """This process ends: those who wait for it need not. One that has a part of what others may read waits."""
    if _current is not None:
        if _current.has_offers() and not hasattr(sys, "last_value"):  # nor has it failed
            with suppress(Error):
                _current.agree("the end of the program")
        store, place = _current._store, _current.place
        with suppress(Empty):
            in_a_thread(lambda: store.set(f"left/{place}", "1")).get(timeout=1.0)


def of(instances: int) -> Meeting:
    """The meeting of so many instances.

    Raises:
        Error: they have not met
    """
    found = current()
    if found is None:
        raise Error(
            f"the model trains in {instances} processes, but they have not met\n"
            "  fix: call popdist.init() before the model; or options.Distributed.disable() to train alone"
        )
    if found.size != instances:
        raise Error(
            f"the options say that the model trains in {instances} processes, but {found.size} have met\n"
            "  fix: take popdist.poptorch.Options(), which asks the launcher"
        )
    return found
