"""Kills instances that hang: stopped by a signal, or blocked for ever.

An instance that waits for a peer writes that into the store every second (`popengine.run.instances.connections`), and
is not judged. Any other instance makes progress while its processes use processor time. An instance that has used none
for the time limit is named, with the line of its program, and killed, which counts as a failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from popdist.signed_store import SignedStore, StoreError
from popengine.environment import STACK_SIGNAL

from . import Log

_STALE = 5.0  # seconds after which an unchanged record of a wait is void: the instance itself must hang
_TICKS = os.sysconf("SC_CLK_TCK")  # of processor time in a second
_IDLE = 0.01  # of a core: threads that poll
_STATES = {"T": "stopped by a signal", "D": "waiting for a disk", "Z": "not there any more"}
_STACK_PATIENCE = 2.0  # seconds for a process to write its stack
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1]), "<frozen"),
)


class _Wait(NamedTuple):
    text: str
    changed: float  # time


class _Mark(NamedTuple):
    since: float
    used: float  # seconds of processor time until then


class Hangs:
    """Watches the instances of this node during a round.

    Args:
        store:     where instances write for which peer they wait
        folder:    prefix of their keys there
        processes: by instance of this node
        stacks:    the file to which each of them writes its stack
        instances: of all nodes
        limit:     seconds; 0: none is killed
        ends_idle: whether an instance for which no peer waits is judged, too
    """

    def __init__(
        self,
        store: SignedStore,
        folder: str,
        processes: Mapping[int, int],
        stacks: Mapping[int, Path],
        instances: int,
        limit: float,
        ends_idle: bool,
        log: Log,
    ) -> None:
        self._store, self._folder, self._processes, self._stacks = store, folder, processes, stacks
        self._instances, self._limit, self._ends_idle, self._log = instances, limit, ends_idle, log
        self._waits = [_Wait("", 0.0)] * instances
        self._marks: dict[int, _Mark] = {}
        self._next = 0.0

    def look(self) -> None:
        """Kill the instances that have made no progress for the limit."""
        now = time.monotonic()
        if not self._limit or now < self._next:
            return
        self._next = now + min(1.0, self._limit / 4)
        with suppress(StoreError):  # `Nodes` notices that
            texts = self._store.read([f"{self._folder}/waits/{i}" for i in range(self._instances)])
            waits = self._recent_waits(texts, now)
            for instance, pid in self._processes.items():
                peers = [str(i) for i, wait in waits.items() if wait["for"] == instance]
                if instance in waits or not (peers or self._ends_idle):
                    self._marks.pop(instance, None)
                    continue
                verb = "instances {} wait" if len(peers) > 1 else "instance {} waits"
                places = [wait["what"] for wait in waits.values() if wait["for"] == instance]
                why = f", and {verb.format(', '.join(peers))} for it at {places[0]}" if peers else ""
                self._judge(instance, pid, why, now)

    def _recent_waits(self, texts: list[str | None], now: float) -> dict[int, dict[str, str | int]]:
        """Return the wait records that changed within the last `_STALE` seconds, by instance.

        Args:
            texts: the record of each instance as JSON; None or "": the instance waits for no peer
            now:   seconds of the monotonic clock
        """
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
            line = _line_of(self._stacks[instance], family)
            self._log.error(
                f"instance {instance} has made no progress for {self._limit:g} s{how}{line}{why}: it is killed\n"
                "  fix: see what it printed last; --hang-timeout SECONDS sets the limit, 0 is none"
            )
            for each in family:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def _line_of(path: Path, family: list[int]) -> str:
    """Return ", at FILE:LINE in FUNCTION" of the user's program, "" if it can't be found.

    `popdist` has registered a handler that appends the stacks of all threads to the file, which begins with the
    process's number. The handler runs when the process goes on after SIGCONT. The main thread's stack is the last.
    """
    with suppress(OSError, ValueError):
        pid = int(path.read_text().split()[0])
        if pid not in family or STACK_SIGNAL is None:
            return ""
        os.kill(pid, STACK_SIGNAL)
        os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + _STACK_PATIENCE
        while "<module>" not in (stacks := path.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', re.split("hread 0x", stacks)[-1])
        file, line, function = next((f for f in frames if not f[0].startswith(_LIBRARIES)), ("", "", ""))
        return f", at {file}:{line} in {function}" if file else ""
    return ""


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
    """Return the fields of Linux's description of a process, from its state on."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
