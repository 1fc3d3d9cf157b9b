"""Connections: messages between instances, and how none waits for one that will not come.

Each instance has one group of connections to all others (torch's gloo), and messages with tags on it. Whoever fails
closes them, which wakes all who wait, in every instance; what has happened is in the store that they met by. Then
there is a next generation of connections, unless an instance is gone: then the training has ended.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from popengine.errors import Error, UnrecoverableError

logger = logging.getLogger("popengine")

WARN_AFTER = 60.0  # seconds without another instance, until somebody is told
STALE = 5.0  # seconds without news from an instance that waits, after which it is taken to be stopped
LAST_PATIENCE = 1.5  # seconds that an interrupted instance waits for the others to agree on a call's end
_FOREVER = timedelta(days=365)
_CUT, _PROBE = 3, 3  # tags


class Broken(Error):
    """Another instance failed, and all go back to where they were before the call."""


class Left(UnrecoverableError):
    """Another instance is gone, and nobody can go on."""


class Connections:
    """The instances as one of them reaches the others.

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
        self._connecting = threading.Lock()
        self._until: float | None = (
            None  # how long to wait for the agreement on a call's end; None: there is none
        )
        self._waits: dict[
            int, list[Any]
        ] = {}  # by thread: since when, for which instance, what for, when to warn

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
        """Publish for which instance this one waits, and warn when it has waited long."""
        key, count = f"waits/{self.names[self.place]}", 0
        while True:
            time.sleep(pause := min(1.0, WARN_AFTER / 2))
            waits = [wait for wait in list(self._waits.values()) if time.monotonic() - wait[0] > pause]
            with suppress(RuntimeError):
                if waits:
                    count += 1
                    self._store.set(
                        key, json.dumps({"for": waits[0][1], "what": waits[0][2], "count": count})
                    )
                elif count:
                    count = 0
                    self._store.set(key, "")
            for wait in waits:
                since, other, what, limit = wait
                if time.monotonic() - since > limit:
                    wait[3] += WARN_AFTER
                    threading.Thread(target=self._warn, args=(other, what, limit), daemon=True).start()

    def _warn(self, other: int, what: str, seconds: float) -> None:
        last = self._last_of_waits(other)
        logger.warning("instance %d has not arrived at %s for %.0f s", last, what, seconds)

    def _last_of_waits(self, instance: int) -> int:
        """Return the instance at the end of a chain of waits: the one that does not wait itself."""
        seen = {self.names[self.place]}
        while instance not in seen:
            seen.add(instance)
            wait = self._wait_of(instance)
            if wait is None:
                break
            instance = wait["for"]
        return instance

    def _wait_of(self, instance: int) -> dict[str, Any] | None:
        """Return what another instance waits for; None if it does not wait, or is stopped and so says nothing new."""
        key, first, until = f"waits/{instance}", b"", time.monotonic() + STALE
        with suppress(RuntimeError):
            while self._store.check([key]) and (text := self._store.get(key)):
                if first and text != first:
                    return json.loads(text)
                if time.monotonic() > until:
                    break
                first = text
                time.sleep(0.1)
        return None

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
        return [time.monotonic(), self.names[other], what, WARN_AFTER]

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
