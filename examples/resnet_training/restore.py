"""Go on with a training from its checkpoint, with the flags that the checkpoint holds.

python3 restore.py --checkpoint-input-path FILE|DIR [--epoch 20]        # the newest of a folder
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import checkpoints
import flags as command_line
from train import Training
from validate import checkpoint_and_others


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    place, others = checkpoint_and_others(words, __doc__)
    path = checkpoints.newest(place)
    flags = command_line.parse(others, checkpoints.arguments_of(checkpoints.load(path)))
    return Training(flags, path).run()


if __name__ == "__main__":
    main()
