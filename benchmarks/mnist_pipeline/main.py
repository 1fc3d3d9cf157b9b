"""Training speed on the MNIST example's network: ours and what a user would pick instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison import Ours, main  # pyright: ignore[reportMissingImports]
from digits import TASK

LAYOUTS = {
    "ours4": Ours("4 ipus", ((0, "B1"), (1, "B2"), (2, "B3"), (3, "B4"))),
    "ours2": Ours("2 ipus", ((0, "B1"), (1, "B2 B3 B4"))),
    "ours1": Ours("1 ipu", ((0, "B1 B2 B3 B4"),)),
    "best1": Ours("1 ipu, best layout", ((0, "B1 B2 B3 B4"),), memory_format="auto"),
    "inductor": Ours("1 ipu, best layout, inductor", ((0, "B1 B2 B3 B4"),), 1, "auto", "inductor"),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="images")
