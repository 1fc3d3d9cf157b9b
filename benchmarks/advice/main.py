"""Is the advice of a report true? Random small models, each profiled, and each advice of its report followed.

A report's advice is about separate devices. They are measured with a core for each ipu (`own_cores.py`).
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

HEAD = ["case", "model", "advice", "promised", "measured"]


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


def measured_gain(case: Case, change: Change, rounds: int) -> float:
    runners = Runner(case, is_apart=True), Runner(case.changed(change), is_apart=True)
    found = ratio(runners[0].once, runners[1].once, rounds)
    for runner in runners:
        runner.executor.destroy()
    return found


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
        for change in found.changes:
            if change.kind == "stages" and "module" in change.what:
                continue  # a case cuts between its blocks only
            least = promised_speedup(change.apart, found.spread)
            rows.append([number, str(case), change.what, least, measured_gain(case, change, args.rounds)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        if not found.changes:
            rows.append([number, str(case), "", None, None])
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
