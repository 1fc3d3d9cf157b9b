"""A parent process of poprun that ends all processes of a training.

torch.distributed.elastic does not end the instances when it is killed, and never the processes that they have started.
So poprun forks: the child works, and its parent, the guard, forwards signals to the child, adopts processes that lose
their parent, and ends them. If the guard is killed, the kernel sends the child a signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(work: Callable[[], int]) -> int:
    """Run `work` in a child and return its exit code; no process that it has started outlives a failure."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals are held back until the child can receive them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_as_child(work, guard))
    asked: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):
            # A second signal ends the child at once.
            os.kill(child, number if len(asked) == 1 else signal.SIGKILL)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's, for example
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = _wait_for(child)
    code = exit_code(os.waitstatus_to_exitcode(status))
    if asked:
        code = 128 + asked[0]
    if code:
        _end_adopted()
    return code


def exit_code(code: int) -> int:
    """Return an exit code as shells do: 128 plus the number of the signal that ended a process."""
    return 128 - code if code < 0 else code


def end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal as soon as its parent is gone."""
    _prctl(_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone already
        os.kill(os.getpid(), number)


def _as_child(work: Callable[[], int], guard: int) -> int:
    os.setpgid(0, 0)  # Ctrl-C in a terminal then reaches the guard only, which forwards it
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = 1
    try:
        _prctl(_SET_CHILD_SUBREAPER, 1)  # to end what it has started also when the guard is gone
        end_with(guard, signal.SIGTERM)
        code = work()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    if code:
        _end_adopted()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _wait_for(child: int) -> int:
    """Return the child's status at its end; until then reap adopted processes."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_adopted() -> None:
    """Kill all adopted processes, and then those that they leave."""
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    me = os.getpid()
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    return []


def _prctl(what: int, value: int) -> None:
    """Call Linux's prctl; other systems have none."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)
