"""Is the simulation of separate devices true? Steps of random small models, each ipu on a core of its own.

What is predicted comes from a profile, which records cores that share all ipus. What is measured runs each ipu's
tasks on a core of its own (`own_cores.py`), on two executors, in turns with the recorded one: how far these two are
apart is what no prediction can go below.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import Case, Runner, random_case  # pyright: ignore[reportMissingImports]

from popengine.profile import load
from popvision.analysis import Figures

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import environment, markdown  # pyright: ignore[reportMissingImports]

HEAD = ["case", "model", "step (ms)", "again", "predicted", "off"]


class InCalls:
    """Seconds of a step in an executor's calls, as a profile counts them."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._spent = runner, list[float]()
        self._engine = runner.executor._plans.engine
        self._run, self._engine.run = self._engine.run, self._timed

    def _timed(self, *args, **more):
        start = time.perf_counter()
        try:
            return self._run(*args, **more)
        finally:
            self._spent.append((time.perf_counter() - start) * self._runner.calls / self._runner.steps)

    def step(self) -> float:
        return statistics.median(self._spent)


def on_own_cores(case: Case, rounds: int) -> tuple[float, float, float]:
    """A step in which each ipu has a core, of two executors, and what the profile of a third one says; in turns."""
    with tempfile.TemporaryDirectory() as folder:
        runners = [Runner(case, folder), Runner(case, is_apart=True), Runner(case, is_apart=True)]
        recorded, *plain = runners
        calls = [InCalls(runner) for runner in plain]
        for _ in range(rounds):
            for runner in runners:
                runner.once()
        recorded.executor.detachFromDevice()
        said = Figures(load(next(Path(folder).glob("*/profile.pop")))).step_apart
        for runner in plain:
            runner.executor.destroy()
    assert said
    return calls[0].step(), calls[1].step(), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rows-factor", type=int, default=8, help="micro-batches of so many times the case's rows"
    )
    parser.add_argument("--rows", type=Path, help="a file to which each row is added, for runs in parts")
    args = parser.parse_args()
    where, rows = environment(), []
    for number in range(args.first, args.first + args.cases):
        case = random_case(random.Random(args.seed * 1000 + number))
        case = replace(case, rows=args.rows_factor * case.rows)  # or tasks are too short for two cores
        times = on_own_cores(case, args.rounds)
        rows.append([number, str(case), *times])
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    print(where)


def table(rows: list[list[Any]]) -> str:
    cells = [[str(n), case, *(f"{1e3 * x:.2f}" for x in times), off(*times)] for n, case, *times in rows]
    errors = sorted(abs(said / ((one + again) / 2) - 1) for _, _, one, again, said in rows)
    noise = sorted(abs(again / one - 1) for _, _, one, again, *_ in rows)
    return (
        f"{markdown(HEAD, cells)}\n\n"
        f"steps on separate devices: {sum(e <= 0.05 for e in errors)} of {len(rows)} within 5 %, the median"
        f" {statistics.median(errors):.1%} off, the worst {errors[-1]:.0%}; two executors of one model differ by"
        f" {statistics.median(noise):.1%} in the median, {noise[-1]:.0%} at the most"
    )


def off(one: float, again: float, said: float) -> str:
    return f"{2 * said / (one + again) - 1:+.0%}"


if __name__ == "__main__":
    main()
