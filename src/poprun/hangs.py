"""Kills instances that hang: stopped by a signal, or blocked for ever.

An instance that waits for a peer writes this into a file every second (`popengine.run.instances.connections`), and is
not killed. In an elastic run the records of the nodes have the waits of all nodes. Any other instance makes progress
while its processes use processor time, or wait for a processor on a busy machine. If they do neither for the time
limit, poprun prints the line of the program at which the instance hangs, and kills it. This counts as a failure.
"""

import json
import math
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popengine.environment import STACK_SIGNAL, STATUS

from .guard import child_pids
from .nodes import NodeOfRun

_STALE = 5.0  # seconds after which an unchanged record of a wait is ignored: its writer may hang
_TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks of processor time per second
_IDLE = 0.01  # processor time per second that an idle instance may use, since its threads may poll
_STATES = {"T": "stopped by a signal", "D": "waiting for a disk"}
_STACK_PATIENCE = 2.0  # seconds for a process to write its stack
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1]), "<frozen"),
)


@dataclass
class HangDetector:
    """Finds and kills hanging instances of this node during one round."""

    node: NodeOfRun
    # By instance: the time of its last progress, and its processor time then.
    progress: dict[int, tuple[float, float]] = field(default_factory=dict)
    next_check: float = 0.0

    def kill_hanging(self, running: Mapping[int, int]) -> None:
        """Kill each instance that has made no progress for `hang_timeout` (without `ends_idle`, only if a peer waits
        for it), and log at which line it hangs. `running`: process ids, by instance"""
        now, request = time.monotonic(), self.node.request
        limit = request.hang_timeout
        if not limit or now < self.next_check:  # once a second is enough
            return
        self.next_check = now + min(1.0, limit / 4)
        statuses = {instance: self._read_status(instance, _STALE) for instance in running}
        self.node.waits = {instance: status for instance, status in statuses.items() if "for" in status}
        waits = self.node.peer_waits()
        for instance, pid in running.items():
            peers = [peer for peer, wait in waits.items() if wait["for"] == instance]
            if instance in waits or not (peers or request.ends_idle):
                self.progress.pop(instance, None)
                continue
            family = _process_tree(pid)
            states, times = zip(*map(_read_state_and_time, family), strict=True)
            used = sum(times)
            since, used_before = self.progress.setdefault(instance, (now, used))
            if used - used_before > _IDLE * (now - since) + 0.05:
                self.progress[instance] = (now, used)
            elif now - since >= limit and "R" not in states:
                how = next((f" (it is {_STATES[state]})" for state in states if state in _STATES), "")
                how += _blocked_line_text(Path(self.node.stack_path(instance)), family)
                if peers:
                    verb = "instances {} wait" if len(peers) > 1 else "instance {} waits"
                    names = ", ".join(map(str, peers))
                    how += f", and {verb.format(names)} for it at {waits[peers[0]]['what']}"
                request.log.error(
                    f"instance {instance} has made no progress for {limit:g} s{how}: it is killed\n"
                    "  fix: see what it printed last; --hang-timeout SECONDS sets the limit, 0 is none"
                )
                for each in family:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def has_lost_peer(self, instance: int) -> bool:
        """Return whether an instance has lost the connection to a peer that failed or ended."""
        return "lost" in self._read_status(instance)

    def _read_status(self, instance: int, longest: float = math.inf) -> dict[str, Any]:
        """Return what an instance has written with `write_status` in the last `longest` seconds; else {}."""
        path = Path(self.node.stack_path(instance) + STATUS)
        with suppress(OSError, ValueError):
            if time.time() - path.stat().st_mtime < longest:
                return json.loads(path.read_text())
        return {}


def _blocked_line_text(path: Path, family: list[int]) -> str:
    """Return ", at FILE:LINE in FUNCTION": where in the user's code an instance is; "" if unknown. Its `popdist` has
    written its process id to the file, and at the signal appends all threads' stacks, the main thread's last."""
    with suppress(OSError, ValueError):
        pid = int(path.read_text().split()[0])
        if pid not in family or STACK_SIGNAL is None:
            return ""
        os.kill(pid, STACK_SIGNAL)
        os.kill(pid, signal.SIGCONT)  # a stopped process handles no signal
        until = time.monotonic() + _STACK_PATIENCE
        while "<module>" not in (stacks := path.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', re.split("hread 0x", stacks)[-1])
        file, line, function = next((f for f in frames if not f[0].startswith(_LIBRARIES)), ("", "", ""))
        return f", at {file}:{line} in {function}" if file else ""
    return ""


def _process_tree(pid: int) -> list[int]:
    return [pid, *(each for child in child_pids(pid) for each in _process_tree(child))]


def _read_state_and_time(pid: int) -> tuple[str, float]:
    """Return Linux's letter for a process's state ("R": a thread runs or waits for a processor; "Z": ended or
    gone), and its processor time in seconds."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        states = {fields[0]}
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(OSError):  # the thread has ended
                states.add(path.read_text().rpartition(")")[2].split()[0])
        return "R" if "R" in states else fields[0], sum(map(int, fields[11:13])) / _TICKS
    return "Z", 0.0
