"""Memory layout: convert a graph's convolutions to channels_last; fix the strides that operations read.

The operands of a convolution are converted if they have another layout; operations between convolutions keep it. So a
sequence of convolutions needs one conversion of its input and one of its output. An accelerator's kernels may return
other strides than the CPU's, for which a graph is captured: operations that read memory by its strides get a copy of
their operand with the strides of the capture.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import Graph
from ...operations import with_strides
from ..recording.functional import with_nodes_replaced

aten = torch.ops.aten
_OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # number of leading operands
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions
_CONTIGUOUS = dict.fromkeys((3, 4, 5), torch.contiguous_format)
# Their kernels for CPUs are vectorised over rows of pixels or over channels: 2 to 10 times as fast in channels_last.
_POOLING = {
    *(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default),
    *(aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default),
    *(aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default),
}
_MIN_CHANNELS = 8  # channels: the float32 elements of the shortest vector register
_ANY_LAYOUT: dict[Any, Any] = {aten.view.default: Tensor.reshape, aten._unsafe_view.default: Tensor.reshape}


def in_wanted_layout(graph: Graph, wanted: str) -> tuple[Graph, str]:
    """Return the graph with convolutions in the wanted layout, and the layout: "preserve" or "channels_last". "auto" is
    channels_last if the graph, which is equal in all processes, pools or resizes images of 8 or more channels, too."""
    if wanted == "preserve" or not has_convolutions(graph) or (wanted == "auto" and not _has_pooling(graph)):
        return graph, "preserve"
    return in_channels_last(graph), "channels_last"


def _has_pooling(graph: Graph) -> bool:
    """Return whether the graph pools or resizes images of `_MIN_CHANNELS` or more channels."""
    return any(
        node.target in _POOLING and node.all_input_nodes[0].meta["val"].shape[-3] >= _MIN_CHANNELS
        for node in graph.code.nodes
    )


def has_convolutions(graph: Graph) -> bool:
    """Return whether the graph has a convolution over two or three dimensions."""
    nodes = graph.code.find_nodes(op="call_function", target=aten.convolution.default)
    return any(node.meta["val"].dim() in _FORMATS for node in nodes)


def in_channels_last(graph: Graph) -> Graph:
    """Return the graph with its convolutions' operands in channels_last (contiguous, where oneDNN has a bug)."""

    @functools.cache
    def in_layout(value: Tensor, layout: torch.memory_format) -> Tensor:
        # With one channel or one pixel, strides fit both layouts: only a clone makes them contiguous.
        is_contiguous = layout is torch.contiguous_format
        return value.clone(memory_format=layout) if is_contiguous else value.to(memory_format=layout)

    def run_in_layout(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[misc]
        target: Any = node.target
        count = _OPERANDS.get(target, 0)
        formats = _CONTIGUOUS if _has_bug_in_channels_last(target, args) else _FORMATS
        operands = [in_layout(v, formats[v.dim()]) if v.dim() in formats else v for v in args[:count]]
        return _ANY_LAYOUT.get(target, target)(*operands, *args[count:], **kwargs)

    return with_nodes_replaced(graph, run_in_layout)


def _has_bug_in_channels_last(target: Any, args: Any) -> bool:
    """Return whether an operation is a convolution's backward that oneDNN computes wrongly in channels_last.

    In torch 2.13, on processors with AVX2 but not AVX-512, `brgconv_strided:avx2` writes outside its memory for kernels
    of one pixel with a stride above 1 and fewer than 8 input channels. All processors follow the rule.
    """
    if target is not aten.convolution_backward.default:
        return False
    weight, stride = args[2], args[4]
    return weight.shape[1] < _MIN_CHANNELS and all(size == 1 for size in weight.shape[2:]) and max(stride) > 1


# ---- strides ----------------------------------------------------------------------------------------------

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
        if target in _READ_BY_STRIDES:
            # A tensor that is all of its memory can be replaced by a copy with its strides.
            fills_memory = args[0].untyped_storage().nbytes() == args[0].nbytes
            if fills_memory and not args[0].storage_offset():
                args = (with_strides(args[0], args[0].stride()), *args[1:])
        return target(*args, **kwargs)

    return with_nodes_replaced(graph, run)
