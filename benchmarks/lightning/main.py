"""Lightning's Trainer on ipus against the same Trainer on the CPU, and against our own loop without Lightning."""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "mnist_pipeline"))
from contenders import lightning, loop
from digits import TASK  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, measure, table  # pyright: ignore[reportMissingImports]

BASELINE = "Trainer, CPU, 2 threads"


def contenders(calls: int) -> dict[str, Contender]:
    """By short names."""
    cpu, ipu = (partial(lightning, accelerator=name, calls=calls) for name in ("cpu", "ipu"))
    return {
        "cpu2": Contender(BASELINE, cpu),
        "cpu1": Contender("Trainer, CPU, 1 thread", partial(cpu, threads=1)),
        "ipu1": Contender("Trainer, 1 ipu", ipu),
        "loop1": Contender("own loop, 1 ipu", partial(loop, calls=calls)),
        "ipu2": Contender("Trainer, 2 replicas", partial(ipu, replicas=2)),
        "loop2": Contender("own loop, 2 replicas", partial(loop, calls=calls, replicas=2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=4, help="calls of 10 weight updates in a unit of work")
    parser.add_argument("--patience", type=int, default=1, help="see harness.measure")
    names = list(contenders(1))
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="beside cpu2")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    where = environment()
    chosen = [who for name, who in contenders(args.calls).items() if name in (*args.only, "cpu2")]
    measured = measure(chosen, args.rounds, patience=args.patience)
    losses = [measurement.numbers[0] for measurement in measured]
    print(table(measured, BASELINE, args.calls * TASK.unit_rows, "images"))
    print()
    print(f"losses of the contenders differ by at most {max(losses) - min(losses):.2g} after the first unit")
    print(where)


if __name__ == "__main__":
    main()
