"""Runs poprun for tests, within time limits, and finds every process that it has left behind.

Poprun begins in a fork of the tests' process, which has loaded torch already; so a run takes parts of a second.
"""

import ctypes
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from poprun import agent, cli  # noqa: F401  the agent loads torch, once for all forks

LIMIT = 600  # seconds; a few on an idle machine, hundreds on a starved one
MARK = "POPRUN_TEST_MARK"


def is_zombie(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def start_of(pid: int) -> str:
    """When a process began, in clock ticks: another process may get its id later."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class Poprun:
    """One run of `poprun WORDS`, with its output in files."""

    def __init__(self, folder: Path, words, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self.out.touch(), self.err.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(words, variables)
        self.code: int | None = None
        self._agent: tuple[int, str] | None = None  # process id and start

    def _become(self, words, variables) -> None:
        code = 70
        try:
            os.setsid()
            os.closerange(3, 1 << 16)  # such as sockets at which other tests listen
            if name := variables.pop("TEST_NETWORK", ""):  # a network namespace
                with open(f"/run/netns/{name}") as file:
                    if ctypes.CDLL(None).setns(file.fileno(), 0x40000000):
                        raise OSError(f"can't run in the network {name}")
            os.environ |= {MARK: self.mark, **variables}
            for descriptor, path in ((1, self.out), (2, self.err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = cli.main([str(word) for word in words])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code, minus the signal's number if one ended it."""
        deadline = time.monotonic() + limit
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.code is not None, f"still running after {limit} s:\n{self.said()}"
        return self.code

    def has_ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def until(self, text: str, limit: float = LIMIT, times: int = 1) -> None:
        """Wait until this text was printed, by default once."""
        deadline = time.monotonic() + limit
        while self.said().count(text) < times:
            assert not self.has_ended() or self.said().count(text) >= times, (
                f"ended before {text!r}:\n{self.said()}"
            )
            assert time.monotonic() < deadline, f"{text!r} was not said:\n{self.said()}"
            time.sleep(0.01)

    def processes(self, word: str = "") -> list[int]:
        """Everything alive that descends from this run, where `word` is in the command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                pid = int(folder.name)
                marked = marked or ((pid, start_of(pid)) == self._agent and not is_zombie(folder))
                if marked and word in (folder / "cmdline").read_text():
                    found.append(pid)
            except OSError:
                continue  # it has ended meanwhile
        return sorted(found)

    def agent(self) -> int:
        """The child of the guard, which has the pid of this run; its environment bears no mark."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        while not (pids := children.read_text().split()):  # a poprun that has only begun
            time.sleep(0.01)
        self._agent = int(pids[0]), start_of(int(pids[0]))
        return self._agent[0]

    def nothing_left(self, limit: float = LIMIT) -> bool:
        deadline = time.monotonic() + limit
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.processes()

    def clean_up(self) -> None:
        for pid in {*self.processes(), *([self.pid] if self.code is None else [])}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.code is None:
            self.wait()


def elastic(folder: Path, *more) -> tuple:
    """The words of an elastic run of 1 or 2 instances."""
    return ("--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir", folder, *more)


ONE_EACH = "--instances-per-node=1"


def nodes(poprun, *words, ranks=(0, 1), count=2, **variables):
    """Popruns as a scheduler starts them on the nodes of a run, of which an elastic run's first round waits for all."""
    common = {"POPRUN_NUM_NODES": str(count), "MASTER_ADDR": "127.0.0.1", **variables}
    return [poprun(*words, POPRUN_NODE_RANK=str(rank), **common) for rank in ranks]


def until_changed(record: Path) -> None:
    """Wait until a poprun has renewed its record."""
    before, until = record.read_text(), time.monotonic() + LIMIT
    while record.read_text() in (before, ""):
        assert time.monotonic() < until
        time.sleep(0.05)
