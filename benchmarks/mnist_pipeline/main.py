"""Training speed on the MNIST example's network: ours, plain PyTorch and torch.distributed.pipelining."""

import argparse
import socket
import sys
from functools import partial
from pathlib import Path

import contenders as ways

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Contender, environment, measure, table  # pyright: ignore[reportMissingImports]

BASELINE = "plain PyTorch, 1 thread"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def contenders(updates: int) -> dict[str, Contender]:
    ours = partial(ways.poptorch_setup, updates=updates)
    plain = partial(ways.plain_setup, updates=updates)
    distributed = partial(ways.distributed_setup, updates=updates, port=free_port())
    return {
        "ours4": Contender("Pando, 4 ipus", partial(ours, ipus=4)),
        "ours2": Contender("Pando, 2 ipus", partial(ours, ipus=2)),
        "plain1": Contender(BASELINE, partial(plain, threads=1)),
        "plain2": Contender("plain PyTorch, 2 threads", partial(plain, threads=2)),
        "gloo2": Contender("torch.distributed.pipelining, 2 processes", distributed, processes=2),
    }


def disagreement(measurements) -> float:
    """How far apart the contenders' losses are after the first unit: rounding, or a mistake.

    Later units say less: rounding grows from update to update.
    """
    losses = [measured.numbers[0] for measured in measurements]
    return max(losses) - min(losses)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--updates", type=int, default=10, help="weight updates in a unit")
    names = contenders(updates=0)
    parser.add_argument("--only", nargs="+", choices=names, default=[*names], help="these and the baseline")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    chosen = [team for name, team in contenders(args.updates).items() if name in {*args.only, "plain1"}]
    measurements = measure(chosen, args.rounds, progress=lambda text: print(text, file=sys.stderr))
    images = args.updates * ways.ACCUMULATION * ways.BATCH
    print(table(measurements, BASELINE, images, "images"))
    print()
    unit = f"{args.updates} weight updates of {ways.ACCUMULATION} micro-batches of {ways.BATCH} images"
    print(f"unit: {unit}; {args.rounds} alternating rounds")
    print(f"losses of the contenders differ by at most {disagreement(measurements):.1e} after the first unit")
    print(environment())


if __name__ == "__main__":
    main()
