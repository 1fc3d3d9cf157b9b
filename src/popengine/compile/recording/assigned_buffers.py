"""Buffers to which a forward assigns another tensor: its value for the next micro-batch.

A tensor of another shape or dtype can't be kept. If the next call would not read it, it is no state: the buffer stays.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import CaptureError
from ...ir import Graph
from ...operations import with_strides
from .current_capture import Capture
from .graph_recorder import sources_of, storage_of

logger = logging.getLogger("poptorch::python")


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


# Operations that read no values of their operands; and all that make a value without reading one.
_LIKE = re.compile(r"aten\.((zeros|ones|empty|full|rand|randn|randint)_like|new_\w+)\.\w+")
_CREATION = re.compile(r"aten\.((zeros|ones|empty|full)(_like|_strided|_permuted)?|new_\w+)\.\w+")


def check_unread(
    graph: Graph, reshaped: Mapping[str, Tensor], again: Graph, reshaped_again: Mapping[str, Tensor]
) -> None:
    """Raise CaptureError unless a forward that assigns tensors of other shapes to buffers (`reshaped`) reads none of
    them at its next call (`again`), and computes the same: then they are no state, and the buffers stay as they are."""

    def operations(graph: Graph) -> list[str]:
        output: Any = graph.code.output_node().args[0]
        wanted = sources_of(
            node for result, node in zip(graph.results, output, strict=True) if result.key not in reshaped
        )
        names = [
            str(node.target) for node in graph.code.nodes if node in wanted and node.op == "call_function"
        ]
        return [name for name in names if not _CREATION.fullmatch(name)]

    slots = {slot.key: slot for slot in graph.slots if slot.role == "buffer"}
    is_equal = not reshaped_again and operations(graph) == operations(again)
    for node in again.code.find_nodes(op="placeholder"):
        name, slot = node.meta["key"], slots.get(node.meta["key"])
        if slot is None or name not in reshaped:
            continue
        if not is_equal or not all(_LIKE.fullmatch(str(user.target)) for user in node.users):
            value = reshaped[name]
            raise CaptureError(
                f"Buffer {name} is reassigned within the model, and becomes {value.dtype} {tuple(value.shape)};"
                f" it was {slot.dtype} {slot.shape}\n"
                "  why: the next call would read it; a compiled model keeps its state in place, in one shape and type\n"
                "  fix: give the buffer its later shape before: register it so, or run the model once in plain PyTorch,"
                f" `model(*micro_batch)`; or reset it at the begin of forward: `self.{name} = torch.zeros(...)`"
            )
    logger.warning(
        "forward assigns tensors of other shapes or types to the buffers %s; no call reads them, and the buffers stay"
        " as they are; return the tensors from forward, if the program needs them",
        ", ".join(reshaped),
    )
