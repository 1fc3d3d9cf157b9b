"""Products of half precision in float32: what PopTorch calls a partials type of float.

A matrix product, convolution or attention takes float32 copies of its half operands, which are exact, sums in float32,
and rounds its result once. On CPUs without units for a half type this is many times faster than the half kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import Graph
from ..recording.graph_recorder import PLACE, memory_of

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
    """Return whether this processor computes a product of a half type faster through float32.

    The processor's features decide, never a clock. Of a type without a unit these are all products; of the others only
    attention: its half kernels are no faster, and in backward 2 to 7 times slower.
    """
    return operation in _ATTENTION or not torch.cpu.get_capabilities().get(_UNITS[dtype], False)


def products_in_float32(graph: Graph, chosen: Choice) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph with float32 in place of half precision inside products; all values keep their types.

    Args:
        chosen: from an operation and a half type to whether it shall be computed in float32
    Returns: the graph, and what is computed in float32, in words
    """
    if not any(_half_type(node) for node in graph.code.nodes):
        return graph, ()
    code = fx.Graph()
    code.output(code.graph_copy(graph.code, {}))
    copies, widened = _Copies(code), set()
    for node in list(code.nodes):
        kind = _half_type(node)
        if kind is not None and chosen(node.target, kind):
            widened.add(f"{node.target.overloadpacket.__name__} of {str(kind).removeprefix('torch.')}")
            _widen(node, copies)
    if not widened:
        return graph, ()
    code.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return replace(graph, code=code), tuple(sorted(widened))


def _half_type(node: fx.Node) -> torch.dtype | None:
    """Return the half type that a product computes in."""
    if node.target not in PRODUCTS:
        return None
    types = (operand.meta["val"].dtype for operand in node.all_input_nodes)
    return next((kind for kind in types if kind in HALF), None)


class _Copies:
    """Float32 copies of values: one of a weight, and of another value one in each block that uses it."""

    def __init__(self, code: fx.Graph) -> None:
        self._code = code
        self._made: dict[Any, fx.Node] = {}

    def of(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Return the copy, inserted before its first user; of a view of a whole value, a view of the value's copy."""
        if node.meta["val"].dtype not in HALF:
            return node
        key = (node, *(user.meta[name] for name in PLACE[:2])) if not _is_of_weight(node) else node
        if key not in self._made:
            self._made[key] = self._view(node, user) or self.inserted(
                user, aten._to_copy.default, (node,), {"dtype": torch.float32}, node
            )
        return self._made[key]

    def _view(self, node: fx.Node, user: fx.Node) -> fx.Node | None:
        base = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if base is None or not isinstance(base.meta.get("val"), Tensor):
            return None
        own, other = node.meta["val"], base.meta["val"]
        if memory_of(node) != memory_of(base) or own.dtype != other.dtype or own.numel() != other.numel():
            return None
        copy = self.of(base, user)
        if copy.meta["val"].stride() != other.stride():
            return None  # not dense: the copy may have strides for which the view is invalid
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: copy)  # type: ignore[misc]
        return self.inserted(user, node.target, args, kwargs, node)

    def inserted(self, before: fx.Node, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        """Insert a node, named after another one."""
        with self._code.inserting_before(before):
            node = self._code.create_node("call_function", target, args, kwargs, name=f"{like.name}_float32")
        node.meta.update({name: before.meta[name] for name in PLACE})
        node.meta["val"] = _pretended(target, args, kwargs)
        return node


def _widen(node: fx.Node, copies: _Copies) -> None:
    """Compute a product in float32. Its node becomes the rounding of the result, so that the name stays."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: copies.of(operand, node))  # type: ignore[misc]
    if isinstance(node.meta.get("val"), Tensor):
        wide = copies.inserted(node, node.target, args, kwargs, node)
        wide.meta.update({name: value for name, value in node.meta.items() if name != "val"})
        node.meta = {name: node.meta[name] for name in (*PLACE, "val")}
        _round(node, wide)
        return
    made = _pretended(node.target, args, kwargs)
    node.args, node.kwargs = args, kwargs
    for item in list(node.users):
        if item.meta["val"].dtype in HALF:
            wide = copies.inserted(item, item.target, item.args, {}, item)
            wide.meta["val"] = made[item.args[1]]
            _round(item, wide)


def _round(node: fx.Node, wide: fx.Node) -> None:
    node.target = aten._to_copy.default
    node.args, node.kwargs = (wide,), {"dtype": node.meta["val"].dtype}


def _is_of_weight(node: fx.Node) -> bool:
    """Return whether a value is the same for all micro-batches: a parameter or constant, or a view of one."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if memory_of(node) != memory_of(node.all_input_nodes[0]):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.meta["role"] in ("parameter", "constant")


def _pretended(target: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation as fake tensors; None if its operand is one of several results."""
    nodes: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), nodes.append)  # type: ignore[arg-type]
    if any("val" not in node.meta for node in nodes):
        return None
    args, kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])  # type: ignore[misc]
    with nodes[0].meta["val"].fake_mode, torch.no_grad():
        return target(*args, **kwargs)
