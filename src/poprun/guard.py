"""The guard: poprun's parent process, which ends all processes of a run.

torch.distributed.elastic does not end the instances when it is killed, and never the processes that they have started.
So poprun forks: the child runs the program, and the guard forwards signals to the child, adopts orphaned processes,
and kills them. If the guard is killed, the kernel sends the child a signal.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TextIO

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = [  # Windows lacks two of them, and imports this file to say that poprun can't start
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
]


def run_guarded(work: Callable[[], int]) -> int:
    """Call `work` in a child process and forward signals to the child; then kill all descendants. Return the
    exit code of `work`; 128 + n if this process received signal n first, or if signal n ended the child."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    children = _open_children()
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals are blocked until both processes have handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_run_child(work, guard))
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            # A second signal ends the child at once.
            os.kill(child, number if len(received) == 1 else signal.SIGKILL)

    _handle_signals(forward)
    pid = status = -1
    while pid != child:  # adopted processes end, too
        pid, status = os.wait()
    _kill_descendants(children)
    return 128 + received[0] if received else shell_exit_code(os.waitstatus_to_exitcode(status))


def shell_exit_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + n for a process that signal n has ended."""
    return 128 - code if code < 0 else code


def _run_child(work: Callable[[], int], guard: int) -> int:
    """Call `work` in the child process, kill all descendants, and return the exit code: 128 + n after signal n,
    1 if `work` raises an exception, which is printed. `guard` is this process's parent."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal then reaches the guard only, which forwards it
    children = _open_children()
    _handle_signals(lambda number, _: sys.exit(128 + number))
    code = 1
    try:
        _prctl(_SET_CHILD_SUBREAPER, 1)  # so that orphans are adopted even if the guard was killed
        _prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:  # the guard ended before the call
            return 128 + signal.SIGTERM
        code = work()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    _kill_descendants(children)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install a handler for all signals of `_FORWARDED` that are not ignored; unblock `_FORWARDED`."""
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def _open_children() -> TextIO:
    """Return the file with the ids of the processes that this thread starts, and of adopted orphans. It is opened
    early, since strangers that connect to the store may take all descriptors."""
    return open(f"/proc/self/task/{os.getpid()}/children")


def _kill_descendants(children: TextIO) -> None:
    """Kill all child processes and adopted orphans until this process has no children."""
    while children.seek(0) == 0 and (pids := [int(pid) for pid in children.read().split()]):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _prctl(what: int, value: int) -> None:
    """Set an option of this process by Linux's prctl; errors are ignored."""
    ctypes.CDLL(None).prctl(what, value, 0, 0, 0)
