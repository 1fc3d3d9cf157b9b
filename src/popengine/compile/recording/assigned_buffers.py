"""Buffers to which a forward assigns another tensor: its value for the next micro-batch.

A tensor of another shape or dtype can't be kept. If the next call would not read it, it is no state: the buffer stays.
"""

from collections.abc import Mapping

from torch import Tensor

from ...ir import Graph
from ...operations import with_strides
from .current_capture import Capture
from .graph_recorder import storage_of


def assigned_buffers(state: Capture) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that forward has assigned to buffers, by name: those with the buffer's shape and dtype, in its
    strides and in memory of their own, and all others."""
    kept, reshaped = dict[str, Tensor](), dict[str, Tensor]()
    of_slots = {storage_of(node) for node in state.recorder.graph.find_nodes(op="placeholder")}
    for name, value in state.stand_ins.rebound_buffers().items():
        fake = state.stand_ins.buffers[name]
        if (value.shape, value.dtype) != (fake.shape, fake.dtype):
            reshaped[name] = value
            continue
        node = state.recorder.node_of(value)
        if value.stride() != fake.stride() or node.op == "placeholder" or storage_of(node) in of_slots:
            state.block = node.meta.get("block", 0)
            value = with_strides(value, fake.stride())
        kept[name] = value
    return kept, reshaped


def reshaped_buffer_text(graph: Graph, reshaped: Mapping[str, Tensor]) -> str:
    """Return the text of the error for a buffer that forward replaces by a tensor of another shape, and reads."""
    name, value = next(iter(reshaped.items()))
    slot = next(slot for slot in graph.slots if (slot.role, slot.key) == ("buffer", name))
    return (
        f"Buffer {name} is reassigned within the model, and becomes {value.dtype} {tuple(value.shape)};"
        f" it was {slot.dtype} {slot.shape}\n"
        "  why: the next call would read it; a compiled model keeps its state in place, in one shape and type\n"
        "  fix: give the buffer its later shape before: register it so, or run the model once in plain PyTorch,"
        f" `model(*micro_batch)`; or reset it at the begin of forward: `self.{name} = torch.zeros(...)`"
    )
