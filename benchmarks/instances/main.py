"""Training in 2 and 4 processes: ours against DistributedDataParallel, and the sum of gradients alone."""

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "resnet", "bert"))
import instances
from comparison import calm, disagreement, free_port  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, measure, table  # pyright: ignore[reportMissingImports]

BASELINE = "DDP"
UPDATES = {1: 4, 8: 1}  # in a unit of work, by micro-batches of a process


def training(case: str, processes: int, accumulation: int) -> tuple[list[Contender], int]:
    """Who trains, and the rows of a unit of work."""
    if case == "resnet":
        from resnet import TASK  # pyright: ignore[reportMissingImports]
    else:
        from bert import TASK  # pyright: ignore[reportMissingImports]
    task = replace(TASK, micro_batches=accumulation * processes, updates=UPDATES[accumulation])
    ways = {
        "Pando": partial(instances.ours),
        "Pando, shared state": partial(instances.ours, shares_state=True),
        BASELINE: partial(instances.rivals),
        "DDP + ZeroRedundancyOptimizer": partial(instances.rivals, shares_state=True),
    }
    found = [
        Contender(name, partial(way, task=task, port=free_port(), processes=processes), processes)
        for name, way in ways.items()
    ]
    return found, task.unit_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=["resnet", "bert"], default=["resnet", "bert"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--accumulation", nargs="+", type=int, choices=[*UPDATES], default=[*UPDATES])
    parser.add_argument("--megabytes", type=int, default=40, help="of gradients, in the sum alone")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=int, default=1, help="times the rounds, at most, for calm ones")
    args = parser.parse_args()
    where = environment()
    tell = partial(print, file=sys.stderr)
    for processes in args.processes:
        given = {"elements": args.megabytes * 250_000, "processes": processes}
        ways = {"Pando": instances.our_sum, "all_reduce": instances.all_reduce}
        sums = [Contender(n, partial(w, port=free_port(), **given), processes) for n, w in ways.items()]
        measured = measure(sums, args.rounds, tell, args.patience)
        assert measured[0].numbers == measured[1].numbers
        ours, theirs = (statistics.median(one.calm) / instances.SUMS for one in measured)
        print(f"the sum of {args.megabytes} MB in {processes} processes: {ours * 1e3:.1f} ms,", end=" ")
        print(
            f"all_reduce {theirs * 1e3:.1f} ms, ours takes {ours / theirs:.2f} times as long; {calm(measured)}\n"
        )
        for case in args.cases:
            for accumulation in args.accumulation:
                print(f"{case}, {processes} processes, accumulation {accumulation}\n", flush=True)
                contenders, rows = training(case, processes, accumulation)
                measured = measure(contenders, args.rounds, tell, args.patience, warm=3)
                print(f"\n{table(measured, BASELINE, rows, 'rows')}\n\n{calm(measured)}")
                print(
                    f"losses differ by at most {disagreement(measured):.1e} after the first unit\n",
                    flush=True,
                )
    print(where)


if __name__ == "__main__":
    main()
