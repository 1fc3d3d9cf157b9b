"""Training speed on a small BERT: ours over 1, 2 and 4 ipus, and what a user would pick instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bert import TASK
from comparison import Ours, main  # pyright: ignore[reportMissingImports]

# The head's weight is the embeddings'. At the end of the line it is on another ipu, which gets a copy each step;
# where the embeddings are, it needs none, but data makes a turn.
LAYOUTS = {
    "unsplit": Ours("1 ipu", ((0, "words layer0 layer1 layer2 layer3 head"),)),
    "inductor": Ours("1 ipu, inductor", ((0, "words layer0 layer1 layer2 layer3 head"),), backend="inductor"),
    "line4": Ours(
        "4 ipus, head on the last", ((0, "words layer0"), (1, "layer1 layer2"), (2, "layer3"), (3, "head"))
    ),
    "turn4": Ours(
        "4 ipus, head with the words",
        ((0, "words"), (1, "layer0 layer1"), (2, "layer2"), (3, "layer3"), (0, "head")),
    ),
    "line2": Ours("2 ipus, head on the last", ((0, "words layer0 layer1 layer2"), (1, "layer3 head"))),
    "turn2": Ours(
        "2 ipus, head with the words", ((0, "words layer0"), (1, "layer1 layer2 layer3"), (0, "head"))
    ),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="sequences", rounds=9)
