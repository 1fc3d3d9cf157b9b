"""An unsplit model against plain PyTorch with the same threads, for each accumulation and one or two replicas.

The question: is there a batch at which the engine costs its user time?
"""

import argparse
import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in (".", "mnist_pipeline", "resnet", "bert"))
import ways  # pyright: ignore[reportMissingImports]
from comparison import calm, disagreement  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, markdown, measure  # pyright: ignore[reportMissingImports]
from task import Task  # pyright: ignore[reportMissingImports]

ACCUMULATIONS = (1, 2, 4, 8, 16)
THREADS = 2
WORK = 16  # micro-batches of a unit, at least


def task_of(name: str, accumulation: int, replicas: int) -> Task:
    task = importlib.import_module(name).TASK
    micro_batches = accumulation * replicas
    return replace(task, micro_batches=micro_batches, updates=max(1, WORK // micro_batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=int, default=1, help="times the rounds, at most, for calm ones")
    parser.add_argument("--models", nargs="+", default=["digits", "resnet", "bert"])
    parser.add_argument("--accumulation", nargs="+", type=int, default=list(ACCUMULATIONS))
    args = parser.parse_args()
    where, rows, remarks = environment(), [], []
    for name in args.models:
        for replicas in (1, 2):
            cells = []
            for accumulation in args.accumulation:
                task = task_of(name, accumulation, replicas)
                placement = ((0, " ".join(task.blocks(task.model()))),)
                chosen = [
                    Contender("ours", partial(ways.ours, task=task, placement=placement, replicas=replicas)),
                    Contender("plain", partial(ways.plain, task=task, threads=THREADS)),
                ]
                found = measure(chosen, args.rounds, progress=lambda text: None, patience=args.patience)
                ours, plain = found
                cells.append(f"{plain.median / ours.median:.2f}")
                print(name, f"{replicas} x {accumulation}:", cells[-1], "x;", calm(found), file=sys.stderr)
                remarks.append(disagreement(found))
            rows.append([name, str(replicas), *cells])
    print(markdown(["model", "replicas", *(f"accumulation {n}" for n in args.accumulation)], rows))
    print()
    print(f"speed of ours over plain PyTorch with {THREADS} threads; {args.rounds} alternating rounds a cell")
    print(f"losses differ by at most {max(remarks):.1e} after the first unit")
    print(where)


if __name__ == "__main__":
    main()
