"""Training speed on ResNet-20 with images of 28 x 28: ours in 1, 2 and 16 replicas, and what a user would pick."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison import Ours, main  # pyright: ignore[reportMissingImports]
from resnet20 import TASK

UNSPLIT = ((0, "stem layer1 layer2 layer3 head"),)
LAYOUTS = {
    "replica1": Ours("1 replica", UNSPLIT),
    "replicas16": Ours("16 replicas", UNSPLIT, replicas=16),
    "layout1": Ours("1 replica, best layout", UNSPLIT, memory_format="channels_last"),
    "layout2": Ours("2 replicas, best layout", UNSPLIT, replicas=2, memory_format="channels_last"),
    "inductor": Ours("1 replica, best layout, inductor", UNSPLIT, 1, "channels_last", "inductor"),
    "layout16": Ours("16 replicas, best layout", UNSPLIT, replicas=16, memory_format="channels_last"),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="images", rounds=9)
