"""The cut of a sequence of blocks, or of layers, into stages of nearly equal cost."""

import math
from collections.abc import Sequence
from itertools import accumulate


def even_cut(
    costs: Sequence[float], parts: int, sizes: Sequence[int] = (), capacity: float = math.inf
) -> list[int]:
    """Return the index at which each of `parts` parts of a sequence begins; [] if there is no such cut.

    No part is empty. The largest sum of `costs` of a part is minimal; of several such cuts, that with the least sum of
    squares is returned. The sum of a part's `sizes` is at most `capacity`.
    """
    loads, held = [0.0, *accumulate(costs)], [0, *accumulate(sizes or [0] * len(costs))]
    # By index: (largest sum, sum of squares, begins) of the best cut of the items before it.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(parts):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, len(loads)):
            for start in range(end - 1, -1, -1):
                load = loads[end] - loads[start]
                if held[end] - held[start] > capacity or (end in found and load > found[end][0]):
                    break  # an earlier start has a larger load
                if start in best:
                    largest, squares, begins = best[start]
                    cut = max(largest, load), squares + load * load, (*begins, start)
                    found[end] = min(found.get(end, cut), cut)
        best = found
    return list(best[len(costs)][2]) if len(costs) in best else []
