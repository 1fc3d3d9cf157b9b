"""Training speed on ResNet-18 with images of 64 x 64: ours with two replicas, and what a user would pick instead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison import Ours, main  # pyright: ignore[reportMissingImports]
from resnet import TASK

LAYOUTS = {
    "replicas2": Ours("2 replicas", ((0, "stem layer1 layer2 layer3 layer4 head"),), replicas=2),
    "ours2": Ours("2 ipus", ((0, "stem layer1 layer2"), (1, "layer3 layer4 head"))),
}

if __name__ == "__main__":
    main(__doc__, TASK, LAYOUTS, noun="images", rounds=9)
