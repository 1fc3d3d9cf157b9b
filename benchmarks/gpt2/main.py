"""Training speed on GPT-2 nano: ours over 1, 2 and 4 ipus, and what a user would pick instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison import Ours, main  # pyright: ignore[reportMissingImports]
from gpt2 import TASK

# The head's weight is the words'.
LAYOUTS = {
    "unsplit": Ours("1 ipu", ((0, "words layer0 layer1 layer2 layer3 head"),)),
    "inductor": Ours("1 ipu, inductor", ((0, "words layer0 layer1 layer2 layer3 head"),), backend="inductor"),
    "line2": Ours("2 ipus, head on the last", ((0, "words layer0 layer1 layer2"), (1, "layer3 head"))),
    "turn4": Ours(
        "4 ipus, head with the words",
        ((0, "words"), (1, "layer0 layer1"), (2, "layer2"), (3, "layer3"), (0, "head")),
    ),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="rows", rounds=9)
