"""Strides: an accelerator's kernels may return other strides than the CPU's, for which a graph is captured.

Operations that read memory by its strides get a copy of their operand that has the strides of the capture.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import Graph
from ...operations import with_strides
from ..recording.functional import with_nodes_replaced

aten = torch.ops.aten
_READ_BY_STRIDES = {
    *(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default),
    *(aten.view.dtype, aten.view_as_complex.default),
}


def with_fixed_strides(graph: Graph) -> Graph:
    """Return the graph with copies before operations that depend on strides; the graph itself if there are none."""
    if not any(node.target in _READ_BY_STRIDES for node in graph.code.nodes):
        return graph

    def run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[misc]
        target: Any = node.target
        if target in _READ_BY_STRIDES and _fills_memory(args[0]):
            args = (with_strides(args[0], args[0].stride()), *args[1:])
        return target(*args, **kwargs)

    return with_nodes_replaced(graph, run)


def _fills_memory(value: Tensor) -> bool:
    """Return whether a tensor is all of its memory, so that a copy with its strides can take its place."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.nbytes
