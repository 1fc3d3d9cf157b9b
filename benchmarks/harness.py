"""Measure contenders side by side: one run, alternating rounds, medians against a baseline.

Each contender lives in child processes of its own, so thread settings and memory pools of one can't touch
another. In a round each does one unit of work while the others sleep on a pipe; rounds start with another
contender each time. What a unit is, and who takes part, is the benchmark's matter.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

CALM = 0.1  # cores that other programs may use

Unit = Callable[[], float]  # does one unit of work; returns a number on which contenders should agree


@dataclass(frozen=True)
class Contender:
    """Who takes part: `setup(rank)` runs once in each of its processes and returns its unit of work.

    Both must pickle: `setup` is a function of a module, or a `functools.partial` of one. The number that
    rank `processes - 1` returns is the contender's.
    """

    name: str
    setup: Callable[[int], Unit]
    processes: int = 1


@dataclass(frozen=True)
class Measurement:
    """What was measured of one contender, in seconds."""

    name: str
    first: float  # from the start of its set-up to the end of its first unit
    rounds: tuple[float, ...]
    numbers: tuple[float, ...]  # what each unit returned, the first one included
    others: tuple[float, ...] = ()  # cores that other programs used during each round
    memory: int = 0  # bytes that its processes held at their peak

    @property
    def calm(self) -> tuple[float, ...]:
        """The rounds in which the machine was ours; all of them if none was."""
        quiet = [r for r, others in zip(self.rounds, self.others, strict=False) if others < CALM]
        return tuple(quiet) or self.rounds

    @property
    def median(self) -> float:
        return statistics.median(self.calm)


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    progress: Callable[[str], None] = print,
    patience: int = 1,
    warm: int = 1,
    lenient: bool = False,
) -> list[Measurement]:
    """Set up each contender, then let them work in turns.

    Args:
        patience: times the rounds, the most that a contender gets to have its rounds in calm
        warm:     units before the first round
        lenient:  go on without a contender that fails before the first round
    Returns: a `Measurement` for each contender, in their order
    Raises:  RuntimeError, with the child's traceback, if a contender fails
    """
    teams: list[Team] = []
    try:
        for contender in contenders:
            teams.append(Team(contender))
            try:
                teams[-1].warm_up(warm)
            except RuntimeError as error:
                if not lenient:
                    raise
                teams.pop().stop()
                progress(f"left out: {error}")
                continue
            progress(f"{contender.name}: first unit after {teams[-1].seconds[0]:.2f} s")
        for number in range(rounds * patience):
            waiting = [team for team in rotated(teams, number) if team.calm_rounds < rounds or patience == 1]
            for team in waiting:
                if patience > 1:
                    await_calm()
                team.work()
            if waiting:
                progress(f"round {number + 1}, of at most {rounds * patience}")
        return [team.measurement() for team in teams]
    finally:
        for team in teams:
            team.stop()


def rotated(items: list, by: int) -> list:
    by %= len(items)
    return items[by:] + items[:by]


class Team:
    """The processes of one contender, and the times of their units so far."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        self.seconds: list[float] = []
        self.numbers: list[float] = []
        self.others: list[float] = []
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(contender.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, contender.setup, rank))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            self.receive(pipe)  # interpreter and imports are there: the set-up may start

    def work(self) -> None:
        """One unit of work in all processes, from the first message to the last answer."""
        used, own = cores_used(), self.own()
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("work")
        answers = [self.receive(pipe) for pipe in self.pipes]
        self.seconds.append(time.perf_counter() - start)
        self.numbers.append(answers[-1])
        self.others.append((cores_used() - used - self.own() + own) / self.seconds[-1])

    def warm_up(self, units: int) -> None:
        """Work without counting; of the first unit the time is kept."""
        for _ in range(units):
            self.work()
        del self.seconds[1:], self.others[1:]

    @property
    def calm_rounds(self) -> int:
        return sum(others < CALM for others in self.others[1:])

    def own(self) -> float:
        """Seconds of a core that these processes and this one have used."""
        return time.process_time() + sum(used_by(process.pid) for process in self.processes)

    def receive(self, pipe: Connection) -> float:
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of contender {self.name!r} died") from None
        if isinstance(answer, str):
            raise RuntimeError(f"contender {self.name!r} failed:\n{answer}")
        return answer

    def measurement(self) -> Measurement:
        first, *rounds = self.seconds
        for pipe in self.pipes:
            pipe.send("memory")
        memory = sum(int(self.receive(pipe)) for pipe in self.pipes)
        return Measurement(
            self.name, first, tuple(rounds), tuple(self.numbers), tuple(self.others[1:]), memory
        )

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # the child's `recv` ends, and so does the child
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def cores_used() -> float:
    """Seconds that all cores together have been busy, or taken by another machine on the same processor."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = map(int, words)
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")


def used_by(process: int | None) -> float:
    """Seconds of a core that a running process has used."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def await_calm(most: float = 20.0) -> None:
    """Wait until other programs leave the cores alone, or the seconds are over."""
    end = time.perf_counter() + most
    while time.perf_counter() < end:
        used = cores_used()
        time.sleep(0.3)
        if (cores_used() - used) / 0.3 < CALM:
            return


def child(pipe: Connection, setup: Callable[[int], Unit], rank: int) -> None:
    """The loop of a child process: set up at the first message, then a unit of work for each "work"."""
    unit: Unit | None = None
    try:
        pipe.send(0.0)
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message == "memory":
                pipe.send(float(peak_memory()))
                continue
            if unit is None:
                unit = setup(rank)
            pipe.send(float(unit()))
    except BaseException:
        pipe.send(traceback.format_exc())


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(measurements: Sequence[Measurement], baseline: str, items: int, noun: str) -> str:
    """Medians as a Markdown table; `items` are done in a unit, ratios are speeds against `baseline`."""
    base = next(measured.median for measured in measurements if measured.name == baseline)
    head = ["contender", "median (s)", "fastest", "slowest", f"{noun}/s", "speed", "first unit (s)"]
    rows = [
        [
            measured.name,
            f"{measured.median:.3f}",
            f"{min(measured.calm):.3f}",
            f"{max(measured.calm):.3f}",
            f"{items / measured.median:.0f}",
            f"{base / measured.median:.2f}×",
            f"{measured.first:.2f}",
        ]
        for measured in measurements
    ]
    return markdown(head, rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column of words, the others of numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells, widths) for cells in [head, rule, *rows])


def line(cells: list[str], widths: list[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([cells[0].ljust(widths[0]), *numbers]) + " |"


def environment() -> str:
    """Where a measurement is made, and the command that repeats it; ask before measuring."""
    lines = {
        "command": shlex.join(["python", *map(relative, sys.argv)]),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": processor(),
        "load": f"{os.getloadavg()[0]:.1f} before the measurement",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def relative(argument: str) -> str:
    """A path below the working directory without its beginning; anything else as it is."""
    path = Path(argument)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else argument


def commit() -> str:
    """The commit of this file's repository, marked where tracked files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
