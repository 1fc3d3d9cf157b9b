"""Memory: which values share it, and what a stage holds of it for one micro-batch between forward and backward."""

from __future__ import annotations

import torch
from torch import fx

from ..ir import Graph, Partition


def held_bytes(graph: Graph, partition: Partition) -> tuple[int, ...]:
    """For each stage the bytes of activations and inputs that wait for its backward, a micro-batch.

    Values that share memory count once. Weights, buffers, gradients and optimizer state are not part of it.
    """
    nodes = {node.name: node for node in graph.code.nodes}
    flowing = {name for piece in partition.pieces for name in piece.writes}
    flowing |= {slot.name for slot in graph.slots if slot.role == "input"}
    held = [0] * partition.stages
    for piece in partition.pieces:
        if piece.phase == "B":
            made_late = {name for other in partition.pieces if other.phase == "B" for name in other.writes}
            memory: dict[int, int] = {}
            for name in piece.reads:
                if name in flowing and name not in made_late:
                    value: torch.Tensor = nodes[name].meta["val"]
                    memory[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            held[piece.stage] = sum(memory.values())
    return tuple(held)


def memory_of(node: fx.Node) -> int | None:
    """What is equal for values that share memory. Of an operation with several results: that of the first."""
    value = node.meta.get("val")
    if value is None and node.users:
        value = next(iter(node.users)).meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
