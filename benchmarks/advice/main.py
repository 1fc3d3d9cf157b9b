"""Is the advice of a report true? Random small models, each profiled, and each advice of its report followed.

What a report says of this host is measured as a program runs here. What it says of separate devices is not measured:
there are none, and the engine has no program of an ipu that a process of its own could run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import Case, Runner, random_case  # pyright: ignore[reportMissingImports]

from popengine.profile import Profile, load
from popvision.analysis import Figures
from popvision.virtual import Change, promised_speedup

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import environment, markdown  # pyright: ignore[reportMissingImports]

HEAD = ["case", "model", "advice", "machine", "promised", "measured"]


def profile_of(case: Case) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(case, folder)
        for _ in range(4):
            runner.once()
        runner.executor.detachFromDevice()
        return load(next(Path(folder).glob("*/profile.pop")))


def ratio(before: Callable[[], float], after: Callable[[], float], rounds: int) -> float:
    """How many times as fast a row is after the change: a median over alternating rounds."""
    found = []
    for number in range(rounds):
        if number % 2:
            one, two = before(), after()
        else:
            two, one = after(), before()
        found.append(one / two)
    return statistics.median(found)


def gain_here(case: Case, change: Change, rounds: int) -> float:
    runners = Runner(case), Runner(case.changed(change))
    found = ratio(runners[0].once, runners[1].once, rounds)
    for runner in runners:
        runner.executor.destroy()
    return found


def promises(change: Change, found: Figures) -> list[tuple[str, float]]:
    """Where, and how much."""
    machines = (("here", change.here),)
    sure = [(name, promised_speedup(gain, found.spread)) for name, gain in machines]
    return [(name, gain) for name, gain in sure if gain is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a file to which each row is added, for runs in parts")
    args = parser.parse_args()
    where, rows = environment(), []
    for number in range(args.first, args.first + args.cases):
        case = random_case(random.Random(args.seed * 1000 + number))
        profile = profile_of(case)
        found = Figures(profile)
        said = [(change, promises(change, found)) for change in found.changes]
        for change, machines in said:
            for machine, least in machines:
                measured = gain_here(case, change, args.rounds)
                rows.append([number, str(case), change.what, machine, least, measured])
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        if not any(machines for _, machines in said):
            rows.append([number, str(case), "", "", None, None])
        if args.rows:
            with args.rows.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows if row[0] == number)
    print(table(rows))
    print(where)


def table(rows: list[list[Any]]) -> str:
    measured = [row for row in rows if row[-1] is not None]
    kept = sum(gain - 1 >= (promised - 1) / 2 for *_, promised, gain in measured)
    harmed = sum(gain < 0.97 for *_, gain in measured)
    cells = [[str(n), *words, *(f"{x:.2f}" if x else "" for x in (p, m))] for n, *words, p, m in rows]
    return (
        f"{markdown(HEAD, cells)}\n\n"
        f"{len(measured)} promises: {kept} gave at least half of what was promised"
        f" ({kept / max(1, len(measured)):.0%}), {harmed} made a row slower by more than 3 %; the worst"
        f" {min((row[-1] for row in measured), default=1):.2f}"
    )


if __name__ == "__main__":
    main()
