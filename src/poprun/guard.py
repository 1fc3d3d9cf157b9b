"""A process that holds nothing but the ends of all others.

torch.distributed.elastic ends the instances when it is asked to, but not when it is killed, and not what they have
started. So poprun forks: the child does the work, and its parent, this guard, hands it all signals, adopts whatever
loses its parent, and ends it. Should the guard be killed, the kernel tells the child.
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
    """The exit code of `work`, which runs in a child; nothing that it has started outlives a failure."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals wait until there is somebody to hand them to.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_as_child(work, guard))
    asked: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):
            # Who asks to end a second time doesn't want to wait.
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
    """As shells count: 128 and the number of the signal that ended a process."""
    return 128 - code if code < 0 else code


def end_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel send this process a signal as soon as its parent is gone."""
    _prctl(_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone already
        os.kill(os.getpid(), number)


def _as_child(work: Callable[[], int], guard: int) -> int:
    os.setpgid(0, 0)  # Ctrl-C of a terminal comes through the guard, and once
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = 1
    try:
        _prctl(_SET_CHILD_SUBREAPER, 1)  # so that it ends what it has started also without a guard
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
    """Wait, and meanwhile bury what was adopted."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_adopted() -> None:
    """End all that lost its parent, and then what that has left."""
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
    """Ask Linux's kernel; other systems are without."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)
