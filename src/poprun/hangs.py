"""Ends instances that others wait for and that do nothing: stopped by a signal, or blocked for ever.

An instance that waits for another one says so in the store every second (`popengine.run.instances.connections`). An
instance that is waited for and does not wait itself is what the training depends on. It may compute for as long as it
likes; one that has used no processor time for the limit is killed, which counts as a failure.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from popdist.signed_store import SignedStore, StoreError

from . import Log

_STALE = 5.0  # seconds without news of a wait, after which the instance itself must stand still
_TICKS = os.sysconf("SC_CLK_TCK")  # of processor time in a second
_IDLE = 0.01  # of a core: threads that look at a clock
_STATES = {"T": "stopped by a signal", "D": "waiting for a disk", "Z": "not there any more"}


class _Wait(NamedTuple):
    text: str
    changed: float  # when


class _Mark(NamedTuple):
    since: float
    used: float  # seconds of processor time until then


class Hangs:
    """Watches the instances of this node during a round.

    Args:
        store:     where instances say for whom they wait
        folder:    prefix of their keys there
        processes: by instance of this node
        instances: of all nodes
        limit:     seconds; 0: nothing is ended
    """

    def __init__(
        self,
        store: SignedStore,
        folder: str,
        processes: Mapping[int, int],
        instances: int,
        limit: float,
        log: Log,
    ) -> None:
        self._store, self._folder, self._processes = store, folder, processes
        self._instances, self._limit, self._log = instances, limit, log
        self._waits = [_Wait("", 0.0)] * instances
        self._marks: dict[int, _Mark] = {}
        self._next = 0.0

    def look(self) -> None:
        """Kill what has stood still for longer than the limit."""
        now = time.monotonic()
        if not self._limit or self._instances == 1 or now < self._next:
            return
        self._next = now + min(1.0, self._limit / 4)
        with suppress(StoreError):  # the meeting of nodes notices that
            texts = self._store.read([f"{self._folder}/waits/{i}" for i in range(self._instances)])
            waits = self._fresh(texts, now)
            waited = {wait["for"]: wait["what"] for wait in waits.values()}
            for instance, pid in self._processes.items():
                if instance in waited and instance not in waits:
                    others = [str(i) for i, wait in waits.items() if wait["for"] == instance]
                    verb = "instances {} wait" if len(others) > 1 else "instance {} waits"
                    why = f"{verb.format(', '.join(others))} for it at {waited[instance]}"
                    self._judge(instance, pid, why, now)
                else:
                    self._marks.pop(instance, None)

    def _fresh(self, texts: list[str | None], now: float) -> dict[int, dict[str, str | int]]:
        """Return what each instance waits for that has lately said so."""
        for instance, text in enumerate(texts):
            if (text or "") != self._waits[instance].text:
                self._waits[instance] = _Wait(text or "", now)
        return {
            instance: json.loads(wait.text)
            for instance, wait in enumerate(self._waits)
            if wait.text and now - wait.changed < _STALE
        }

    def _judge(self, instance: int, pid: int, why: str, now: float) -> None:
        family = list(_family(pid))
        used = sum(map(_used, family))
        mark = self._marks.setdefault(instance, _Mark(now, used))
        if used - mark.used > _IDLE * (now - mark.since) + 0.05:
            self._marks[instance] = _Mark(now, used)
        elif now - mark.since >= self._limit:
            states = [_STATES[state] for state in map(_state, family) if state in _STATES]
            how = f" (it is {states[0]})" if states else ""
            self._log.error(
                f"instance {instance} has done nothing for {self._limit:g} s{how}, and {why}: it is ended\n"
                "  fix: see what it printed last; --hang-timeout SECONDS sets the limit, 0 is none"
            )
            for one in family:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from _family(int(child))


def _used(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = _fields(pid)
    return sum(map(int, fields[11:13])) / _TICKS if fields else 0.0


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else "Z"


def _fields(pid: int) -> list[str]:
    """Return what Linux says of a process, from its state on."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
