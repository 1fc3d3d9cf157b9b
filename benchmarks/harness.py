"""Measure contenders side by side: one run, alternating rounds, medians against a baseline.

Each contender lives in child processes of its own, so thread settings and memory pools of one can't touch
another. In a round each does one unit of work while the others sleep on a pipe; rounds start with another
contender each time. What a unit is, and who takes part, is the benchmark's matter.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
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

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def measure(
    contenders: Sequence[Contender], rounds: int, progress: Callable[[str], None] = print
) -> list[Measurement]:
    """Set up each contender, then let them work in turns.

    Returns: a `Measurement` for each contender, in their order
    Raises:  RuntimeError, with the child's traceback, if a contender fails
    """
    teams: list[Team] = []
    try:
        for contender in contenders:
            teams.append(Team(contender))
            teams[-1].work()
            progress(f"{contender.name}: first unit after {teams[-1].seconds[0]:.2f} s")
        for number in range(rounds):
            for team in rotated(teams, number):
                team.work()
            progress(f"round {number + 1} of {rounds}")
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
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("work")
        answers = [self.receive(pipe) for pipe in self.pipes]
        self.seconds.append(time.perf_counter() - start)
        self.numbers.append(answers[-1])

    def receive(self, pipe: Connection) -> float:
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of contender {self.name!r} died") from None
        if isinstance(answer, str):
            raise RuntimeError(f"contender {self.name!r} failed:\n{answer}")
        return answer

    def measurement(self) -> Measurement:
        return Measurement(self.name, self.seconds[0], tuple(self.seconds[1:]), tuple(self.numbers))

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # the child's `recv` ends, and so does the child
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def child(pipe: Connection, setup: Callable[[int], Unit], rank: int) -> None:
    """The loop of a child process: set up at the first message, then a unit of work for each."""
    unit: Unit | None = None
    try:
        pipe.send(0.0)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            if unit is None:
                unit = setup(rank)
            pipe.send(float(unit()))
    except BaseException:
        pipe.send(traceback.format_exc())


def table(measurements: Sequence[Measurement], baseline: str, items: int, noun: str) -> str:
    """Medians as a Markdown table; `items` are done in a unit, ratios are speeds against `baseline`."""
    base = next(measured.median for measured in measurements if measured.name == baseline)
    head = ["contender", "median (s)", "fastest", "slowest", f"{noun}/s", "speed", "first unit (s)"]
    rows = [
        [
            measured.name,
            f"{measured.median:.3f}",
            f"{min(measured.rounds):.3f}",
            f"{max(measured.rounds):.3f}",
            f"{items / measured.median:.0f}",
            f"{base / measured.median:.2f}×",
            f"{measured.first:.2f}",
        ]
        for measured in measurements
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells, widths) for cells in [head, rule, *rows])


def line(cells: list[str], widths: list[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([cells[0].ljust(widths[0]), *numbers]) + " |"


def environment() -> str:
    """Where a measurement was made, and the command that repeats it."""
    lines = {
        "command": shlex.join(["python", *map(relative, sys.argv)]),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": processor(),
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
