"""Training speed on the MNIST example's network: ours and what a user would pick instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison import Ours, main  # pyright: ignore[reportMissingImports]
from digits import TASK

LAYOUTS = {
    "ours4": Ours("4 ipus", ((0, "conv1"), (1, "conv2"), (2, "hidden"), (3, "head"))),
    "ours2": Ours("2 ipus", ((0, "conv1"), (1, "conv2 hidden head"))),
    "ours1": Ours("1 ipu", ((0, "conv1 conv2 hidden head"),)),
    "best1": Ours("1 ipu, best layout", ((0, "conv1 conv2 hidden head"),), memory_format="auto"),
    "inductor": Ours(
        "1 ipu, best layout, inductor", ((0, "conv1 conv2 hidden head"),), 1, "auto", "inductor"
    ),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="images")
