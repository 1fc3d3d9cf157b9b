"""Kills instances that hang: stopped by a signal, or blocked for ever.

An instance that waits for a peer writes this into the store every second
(`popengine.run.instances.connections`), and is not killed. Any other instance makes progress while its
processes use processor time. If they use none for the time limit, poprun prints the line of the program at
which the instance hangs, and kills it. This counts as a failure.
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
from dataclasses import dataclass, field
from pathlib import Path

from popdist.signed_store import SignedStore, StoreError
from popengine.environment import STACK_SIGNAL

from . import Log
from .command_line import CommandLine
from .guard import children

_STALE = 5.0  # seconds after which an unchanged record of a wait does not count: the instance itself hangs
_TICKS = os.sysconf("SC_CLK_TCK")  # of processor time in a second
_IDLE = 0.01  # share of a core that an idle process may use: some threads poll
_STATES = {"T": "stopped by a signal", "D": "waiting for a disk", "Z": "not there any more"}
_STACK_PATIENCE = 2.0  # seconds for a process to write its stack
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1]), "<frozen"),
)


@dataclass
class Hangs:
    """A check for hanging instances of this node during one round."""

    store: SignedStore  # where instances write for which peer they wait
    folder: str  # prefix of their keys there
    processes: Mapping[int, int]  # by instance of this node
    stacks: Mapping[int, Path]  # the file to which each of them writes its stack
    instances: int  # of all nodes
    request: CommandLine
    log: Log
    _waits: dict[int, tuple[str, float]] = field(default_factory=dict)  # record, and time of its last change
    _marks: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # by instance, the last time with progress, and the processor time used until then
    _next: float = 0.0

    def look(self) -> None:
        """Kill the instances that have made no progress for the time limit; check once per second at most."""
        now, limit = time.monotonic(), self.request.hang_timeout
        if not limit or now < self._next:
            return
        self._next = now + min(1.0, limit / 4)
        with suppress(StoreError):  # `Nodes` handles a lost connection
            waits = self._recent_waits(now)
            for instance, pid in self.processes.items():
                peers = [str(i) for i, wait in waits.items() if wait["for"] == instance]
                if instance in waits or not (peers or self.request.ends_idle):
                    self._marks.pop(instance, None)
                    continue
                verb = "instances {} wait" if len(peers) > 1 else "instance {} waits"
                places = [wait["what"] for wait in waits.values() if wait["for"] == instance]
                why = f", and {verb.format(', '.join(peers))} for it at {places[0]}" if peers else ""
                self._judge(instance, pid, why, now)

    def _recent_waits(self, now: float) -> dict[int, dict[str, str | int]]:
        """Return the wait records that changed within the last `_STALE` seconds, by instance."""
        texts = self.store.read([f"{self.folder}/waits/{i}" for i in range(self.instances)])
        for instance, text in enumerate(texts):
            if text != self._waits.get(instance, ("", 0.0))[0]:
                self._waits[instance] = (text or "", now)  # "": the instance waits for no peer
        return {
            instance: json.loads(text)
            for instance, (text, changed) in self._waits.items()
            if text and now - changed < _STALE
        }

    def _judge(self, instance: int, pid: int, why: str, now: float) -> None:
        """Kill an instance and its processes, if they have used no processor time for the time limit."""
        family, limit = list(_family(pid)), self.request.hang_timeout
        states, times = zip(*map(_state_and_time, family), strict=True)
        since, used = self._marks.setdefault(instance, (now, sum(times)))
        if sum(times) - used > _IDLE * (now - since) + 0.05:
            self._marks[instance] = (now, sum(times))
        elif now - since >= limit:
            how = next((f" (it is {_STATES[state]})" for state in states if state in _STATES), "")
            line = _line_of(self.stacks[instance], family)
            self.log.error(
                f"instance {instance} has made no progress for {limit:g} s{how}{line}{why}: it is killed\n"
                "  fix: see what it printed last; --hang-timeout SECONDS sets the limit, 0 is none"
            )
            for each in family:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def _line_of(path: Path, family: list[int]) -> str:
    """Return ", at FILE:LINE in FUNCTION" for the line that the user's program executes; "" if unknown.

    `popdist` has registered a signal handler that appends the stacks of all threads to the file, which begins
    with the process id. SIGCONT continues a stopped process, so that it runs the handler. The main thread's
    stack is the last one.
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
    """Yield the ids of a process and of its descendants."""
    yield pid
    for child in children(pid):
        yield from _family(child)


def _state_and_time(pid: int) -> tuple[str, float]:
    """Return the letter of a process's state ("Z" if it has ended), and its processor time in seconds."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], sum(map(int, fields[11:13])) / _TICKS
    return "Z", 0.0
