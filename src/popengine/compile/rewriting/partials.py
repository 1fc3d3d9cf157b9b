"""Products of half precision in float32: what PopTorch calls a partials type of float.

A matrix product, convolution or attention reads exact float32 copies of its half operands, sums in float32, and rounds
its result once: on CPUs without units for a half type many times faster than the half kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import Graph
from ...torch_private import cpu_features
from ..recording.functional import with_nodes_replaced
from ..recording.graph_recorder import PLACE, run_node, storage_of

aten = torch.ops.aten
_UNITS = {torch.float16: "avx512_fp16", torch.bfloat16: "avx512_bf16"}  # the processor's feature
HALF = tuple(_UNITS)
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addbmm.default),
        *(aten.mv.default, aten.addmv.default, aten.dot.default),
        *(aten.convolution.default, aten.convolution_backward.default),
        *_ATTENTION,
    }
)
Choice = Callable[[Any, torch.dtype], bool]


def is_faster_in_float32(operation: Any, dtype: torch.dtype) -> bool:
    """Return whether this processor computes a product of a half type faster through float32: if it has no units for
    the type, and attention always: its half kernels take 2 to 7 times as long in backward."""
    return operation in _ATTENTION or not cpu_features().get(_UNITS[dtype], False)


def products_in_float32(graph: Graph, chosen: Choice) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph with float32 in place of half precision inside the products that `chosen` selects, given a
    product and its half type, and texts for these, such as "mm of bfloat16". All values keep their types."""
    half_types: dict[Any, torch.dtype] = {}  # by product (a node), the half type of its operands
    for node in graph.code.nodes:
        operands = node.all_input_nodes if node.target in PRODUCTS else []
        half = next((n.meta["val"].dtype for n in operands if n.meta["val"].dtype in HALF), None)
        if half is not None and chosen(node.target, half):
            half_types[node] = half
    if not half_types:
        return graph, ()
    copies: dict[Any, Tensor] = {}
    inputs = graph.code.find_nodes(op="placeholder")
    # Parameters, constants and views of them are the same for all micro-batches.
    weights = {storage_of(node) for node in inputs if node.meta["role"] in ("parameter", "constant")}

    def float32_copy(node: fx.Node, user: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
        """Return a float32 copy of a half value. Products of a phase and block share a copy; all products share the
        copy of a weight. A view with all elements of a value becomes a view of that value's copy."""
        if node.meta["val"].dtype not in HALF:
            return values[node]
        key = node if storage_of(node) in weights else (node, *(user.meta[name] for name in PLACE[:2]))
        if key not in copies:
            base = _base_of_view(node)
            copy = float32_copy(base, user, values) if base is not None else None
            # If the base is not dense, its copy may have strides for which the view is invalid.
            if base is not None and copy is not None and copy.stride() == base.meta["val"].stride():
                copies[key] = run_node(node, {base: copy})
            else:
                copies[key] = values[node].to(torch.float32)
        return copies[key]

    def run_in_float32(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node in half_types:
            values = {operand: float32_copy(operand, node, values) for operand in node.all_input_nodes}
        made, before = run_node(node, values), node.meta.get("val")
        return made.to(before.dtype) if isinstance(before, Tensor) and before.dtype != made.dtype else made

    words = {
        f"{n.target.overloadpacket.__name__} of {str(dtype).removeprefix('torch.')}"
        for n, dtype in half_types.items()
    }
    return with_nodes_replaced(graph, run_in_float32), tuple(sorted(words))


def _base_of_view(node: fx.Node) -> fx.Node | None:
    """Return the node of which `node` is a view with the same dtype and number of elements, or None."""
    base = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    if base is None or "val" not in base.meta or storage_of(node) != storage_of(base):
        return None
    view, value = node.meta["val"], base.meta["val"]
    return base if (view.dtype, view.numel()) == (value.dtype, value.numel()) else None
