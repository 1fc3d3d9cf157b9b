"""Say how many images of the test set a network classifies correctly.

python3 validate.py --checkpoint-input-path FILE|DIR        # all checkpoints of a folder, one after another
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import checkpoints
import flags as command_line
import parts
from common.logs import say
from common.sampling import Layout
from images import FilledUp, as_they_are
from models import Classifier

import poptorch
from popdist import collectives


class Validation:
    """Every replica of every instance takes a share; the last batch is filled up with blank images."""

    def __init__(self, model: Classifier, flags: argparse.Namespace, layout: Layout) -> None:
        stages = parts.ipus_of(flags)
        opts = parts.options(flags, layout).deviceIterations(max(stages, 4))
        opts.outputMode(poptorch.OutputMode.All)
        self.model, self.data = model, parts.dataset(flags, layout, "validation")
        filled = FilledUp(self.data, layout.micro_batch * max(stages, 4) * layout.replicas)
        self.loader = poptorch.DataLoader(opts, filled, batch_size=layout.micro_batch, collate_fn=as_they_are)
        self.executor = poptorch.inferenceModel(model, opts)

    def accuracy(self) -> float:
        """As a fraction, over the whole set."""
        self.model.eval()
        correct = sum(
            int((self.executor(images).argmax(1) == labels).sum()) for images, labels in self.loader
        )
        self.model.train()
        return collectives.all_reduce(float(correct)) / len(self.data)


def main(words: Sequence[str] | None = None) -> list[float]:
    """Returns the accuracy of each checkpoint."""
    place, others = checkpoint_and_others(words, __doc__)
    paths = [place] if place.is_file() else checkpoints.all_in(place) or [checkpoints.newest(place)]
    found = []
    for path in paths:
        content = checkpoints.load(path)
        flags = command_line.parse(others, checkpoints.arguments_of(content))
        layout = parts.layout_of(flags)
        model = parts.model_of(flags, parts.dataset(flags, layout, "validation"))
        model.load_state_dict(content["model_state_dict"])
        found.append(Validation(model, flags, layout).accuracy())
        say(f"{path.name}: Validation Accuracy: {100 * found[-1]:.2f}%")
    return found


def checkpoint_and_others(words: Sequence[str] | None, about: str | None) -> tuple[Path, list[str]]:
    """What --checkpoint-input-path names, and all other words: flags that override those of the checkpoint."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--checkpoint-input-path", type=Path, required=True, metavar="FILE|DIR")
    first, others = parser.parse_known_args(words)
    return first.checkpoint_input_path, others


if __name__ == "__main__":
    main()
