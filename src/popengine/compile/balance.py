"""Balance: place consecutive blocks on ipus so that the slowest ipu is as fast as possible.

A pipeline runs at the pace of its slowest stage. Blocks stay in their order, so a placement cuts the list of blocks
into consecutive parts. Dynamic programming over (block, ipu) gives the exact optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PartitionError


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one block: seconds of its forward and backward on one micro-batch, and bytes of memory."""

    name: str
    seconds: float
    bytes: int = 0


def balance(costs: Sequence[Cost], ipus: int, capacity: float = float("inf")) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of each ipu, such that the largest sum of seconds on an ipu is minimal.

    Of equally fast cuts the result has the least sum of squares, which also balances the other ipus.

    Args:
        capacity: bytes an ipu can hold
    Raises:
        PartitionError: fewer blocks than ipus, or no cut fits the capacity
    """
    count = len(costs)
    if count < ipus:
        raise PartitionError(
            f"{count} blocks can't be placed on {ipus} ipus\n  fix: mark more blocks, or use at most {count} ipus"
        )
    seconds, size = [0.0], [0]
    for cost in costs:
        seconds.append(seconds[-1] + cost.seconds)
        size.append(size[-1] + cost.bytes)
    # best[i]: for the first i blocks on the ipus so far: (slowest ipu, sum of squares, cuts)
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())] + [None] * count
    for _ in range(ipus):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                before = best[start]
                if before is None or size[end] - size[start] > capacity:
                    continue
                load = seconds[end] - seconds[start]
                found = (max(before[0], load), before[1] + load * load, (*before[2], end))
                if following[end] is None or found < following[end]:  # type: ignore[operator]
                    following[end] = found
        best = following
    chosen = best[count]
    if chosen is None:
        raise PartitionError(
            f"no placement of {count} blocks on {ipus} ipus fits {capacity:.3g} bytes an ipu\n"
            "  fix: use more ipus, smaller blocks, or recomputation"
        )
    starts = (0, *chosen[2][:-1])
    return tuple(
        tuple(cost.name for cost in costs[start:end]) for start, end in zip(starts, chosen[2], strict=True)
    )


def explain(costs: Sequence[Cost], cut: Sequence[Sequence[str]]) -> str:
    """Describe the load of each ipu, and the effect of moving a block from the slowest ipu to a neighbour."""
    of = {cost.name: cost.seconds for cost in costs}
    loads = [sum(of[name] for name in names) for names in cut]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    lines = [
        f"  ipu {ipu}: {load * 1e3:.3f} ms: {', '.join(names)}"
        for ipu, (names, load) in enumerate(zip(cut, loads, strict=True))
    ]
    for neighbour, name in ((slowest - 1, cut[slowest][0]), (slowest + 1, cut[slowest][-1])):
        if 0 <= neighbour < len(cut) and len(cut[slowest]) > 1:
            moved = max(
                load - of[name] if ipu == slowest else load + of[name] if ipu == neighbour else load
                for ipu, load in enumerate(loads)
            )
            lines.append(
                f"  moving {name!r} to ipu {neighbour} would make the slowest {moved * 1e3:.3f} ms instead of"
                f" {loads[slowest] * 1e3:.3f} ms"
            )
    return "\n".join(lines)
