"""The memory's layout of images: the digits' network against plain PyTorch in its best layout, with one large batch."""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "mnist_pipeline"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import ways  # pyright: ignore[reportMissingImports]
from digits import TASK  # pyright: ignore[reportMissingImports]
from harness import (  # pyright: ignore[reportMissingImports]
    Contender,
    environment,
    measure,
    table,
)

BASELINE = "plain PyTorch, micro-batches"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print(environment(), flush=True)
    blocks = " ".join(TASK.blocks(TASK.model()))
    ours = partial(ways.ours, task=TASK, placement=((0, blocks),), threads=given.threads)
    plain = {"task": TASK, "threads": given.threads}
    taking_part = [
        Contender(BASELINE, partial(ways.plain, **plain)),
        Contender("plain PyTorch, one large batch", partial(ways.large, **plain)),
        Contender("one large batch, channels_last", partial(ways.large, layout="channels_last", **plain)),
        Contender('Pando, "preserve"', partial(ours, layout="preserve")),
        Contender('Pando, "channels_last"', partial(ours, layout="channels_last")),
        Contender('Pando, "auto"', partial(ours, layout="auto")),
    ]
    found = measure(taking_part, given.rounds, patience=given.patience)
    print(table(found, BASELINE, TASK.unit_rows, "images"))


if __name__ == "__main__":
    main()
