"""What a plan would be with the other choice of recomputation, for advice about it."""

from typing import Any

from ..ir import Graph, Partition
from ..settings import Settings
from .partition import partition
from .stage_memory import held_bytes


def recomputation(graph: Graph, chosen: Partition, settings: Settings) -> dict[str, Any]:
    """Whether stages recompute, and what that changes.

    Returns: `on`; bytes that each stage holds for a micro-batch between forward and backward if everything is `kept`,
        and if only what it can't compute again is (`left`); and the names of the operations computed `again` in each
        stage's backward. Empty in inference.
    """
    if not settings.training:
        return {}
    other = partition(graph, settings.strategy, not settings.recompute)
    plain, again = (other, chosen) if settings.recompute else (chosen, other)
    more: list[list[str]] = [[] for _ in range(chosen.stages)]
    for stage, names in enumerate(more):
        own, all_of = (_backward(found, stage) for found in (plain, again))
        names += [name for name in all_of if name not in own]
    return {
        "on": settings.recompute,
        "kept": held_bytes(graph, plain),
        "left": held_bytes(graph, again),
        "again": more,
    }


def _backward(found: Partition, stage: int) -> dict[str, None]:
    """The names of its lines, in order."""
    pieces = (piece for piece in found.pieces if (piece.phase, piece.stage) == ("B", stage))
    return {line.name: None for piece in pieces for line in piece.lines}
