"""Memory: which values share it, what a stage holds of it for a micro-batch, and what an ipu needs at the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch
from torch import fx

from ..ir import Compute, Free, Graph, Load, Partition, Plan, Receive
from ..programs import programs


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


def peak_bytes(graph: Graph, plan: Plan, ipu: int, inside: Mapping[int, int]) -> int | None:
    """Return the most bytes that an ipu holds for its micro-batches while it runs its program in order.

    Values that share memory count once; of inputs each view counts, since rows of a batch share the batch's memory.

    Args:
        inside: by piece, the most bytes that are alive in it beyond those that the ipu holds before
    Returns: None where only the kernel knows the size of a workspace (oneDNN's of an LSTM layer)
    """
    values = {node.name: node.meta.get("val") for node in graph.code.nodes}
    state, inputs = set[int](), set[int]()
    for slot in graph.slots:
        if isinstance(value := values.get(slot.name), torch.Tensor):
            (inputs if slot.role == "input" else state).add(value.untyped_storage()._cdata)

    @cache
    def memory(name: str) -> tuple[tuple[int, int], int | None]:
        """Return what is equal for names of the same memory, and its bytes (None: not known)."""
        value = values.get(name)
        if not isinstance(value, torch.Tensor) or (storage := value.untyped_storage())._cdata in state:
            return (0, 0), 0
        if value.dtype == torch.uint8 and not value.numel():
            return (0, 0), None
        if storage._cdata in inputs:
            return (storage._cdata, int(value.storage_offset())), value.nbytes
        return (storage._cdata, 0), storage.nbytes()

    names: dict[int, Counter[tuple[int, int]]] = {}  # by micro-batch, how many names each memory has
    held = most = 0
    for instruction, micro_batch in programs(plan)[ipu].instructions:
        gone: tuple[str, ...] = ()
        new: tuple[str, ...] = ()
        if not isinstance(instruction, Compute | Free | Load | Receive) or micro_batch < 0:
            continue
        if isinstance(instruction, Compute):
            most = max(most, held + inside[instruction.piece])
            gone, new = instruction.last, plan.partition.pieces[instruction.piece].writes
        elif isinstance(instruction, Free):
            gone = instruction.names
        else:
            new = instruction.names
        own = names.setdefault(micro_batch, Counter())
        for sign, changed in ((1, new), (-1, gone)):
            for place, size in map(memory, changed):
                if size is None:
                    return None
                before, own[place] = own[place], own[place] + sign
                held += size * ((own[place] > 0) - (before > 0))
        most = max(most, held)
    return most


def memory_of(node: fx.Node) -> int | None:
    """What is equal for values that share memory. Of an operation with several results: that of the first."""
    value = node.meta.get("val")
    if value is None and node.users:
        value = next(iter(node.users)).meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None  # a sparse tensor has several memories
    return value.untyped_storage()._cdata
