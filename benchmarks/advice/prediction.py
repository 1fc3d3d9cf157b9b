"""Is virtual time true? Steps of random small models on one core, and steps and bubbles of separate processes.

What is measured runs without a recorder; what is predicted comes from the profile of another run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from cases import Runner, random_case  # pyright: ignore[reportMissingImports]
from main import profile_of  # pyright: ignore[reportMissingImports]
from separate import Pair  # pyright: ignore[reportMissingImports]

from popvision.analysis import figures

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import environment, markdown  # pyright: ignore[reportMissingImports]

HEAD = [
    "case",
    "model",
    "step, one core (ms)",
    "predicted",
    "step, two processes (ms)",
    "predicted",
    "bubble",
    "predicted",
]


class InCalls:
    """Seconds that an executor's engine spends in calls: what a profile counts as steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._spent = runner, 0.0
        self._engine = runner.executor._lease.engine
        self._run, self._engine.run = self._engine.run, self._timed

    def _timed(self, *args, **more):
        start = time.perf_counter()
        try:
            return self._run(*args, **more)
        finally:
            self._spent += time.perf_counter() - start

    def step(self) -> float:
        self._spent = 0.0
        self._runner.once()
        return self._spent / self._runner.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    where, pair, rows = environment(), Pair(), []
    for number in range(args.first, args.first + args.cases):
        case = random_case(random.Random(number))
        one_core = case.changed({"threads": 1})
        apart, alone = figures(profile_of(case)), figures(profile_of(one_core))
        assert apart.step_apart and apart.bubble_apart is not None and alone.step_here
        runner = Runner(one_core)
        calls = InCalls(runner)
        step = statistics.median(calls.step() for _ in range(args.rounds))
        runner.executor.destroy()
        pair.prepare("it", case)
        found = [(pair.step("it"), waiting) for _ in range(args.rounds) for _, waiting in [pair.once("it")]]
        pair.drop("it")
        both, bubble = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append((number, case, step, alone.step_here, both, apart.step_apart, bubble, apart.bubble_apart))
    pair.close()
    cells = [
        [str(n), str(case), *(f"{1e3 * x:.2f}" for x in times), *(f"{100 * x:.0f} %" for x in bubbles)]
        for n, case, *times, b1, b2 in rows
        for bubbles in [(b1, b2)]
    ]
    print(markdown(HEAD, cells))
    for name, real, guess in (("on one core", 2, 3), ("of two processes", 4, 5)):
        errors = sorted(abs(row[guess] / row[real] - 1) for row in rows)
        near = sum(error <= 0.1 for error in errors)
        print(
            f"steps {name}: {near} of {len(rows)} within 10 %, the median {statistics.median(errors):.0%} off"
        )
    errors = [abs(row[6] - row[7]) for row in rows]
    print(
        f"bubbles: {sum(e <= 0.1 for e in errors)} of {len(rows)} within 10 points, the worst {max(errors):.0%}"
    )
    print(where)


if __name__ == "__main__":
    main()
