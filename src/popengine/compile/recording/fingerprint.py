"""Fingerprints: texts of what a graph computes, equal for graphs that compute the same."""

import hashlib
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...ir import Graph
from ...torch_private import hash_of_bits, tree_leaves
from .graph_recorder import empty_like, is_pure, run_node, sources_of
from .reads import layout_of

aten = torch.ops.aten
# Operations that read no values of their operands.
_READS_LAYOUT = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)


def fingerprint(graph: Graph, bound: Container[str] = (), without: Container[str] = ()) -> str:
    """Return a hash of what a graph computes. Arguments as of `graph_lines`."""
    return hashlib.sha256(repr([text for _, text in graph_lines(graph, bound, without)]).encode()).hexdigest()


def graph_lines(
    graph: Graph, bound: Container[str] = (), without: Container[str] = ()
) -> list[tuple[str, str]]:
    """Return the user's line and a text of each operation and result of a graph, equal for graphs that compute the
    same. What depends on constants and layouts alone counts by its value; of the constants in `bound`, which each call
    binds anew, only the layout counts, and the buffers `without` not at all."""
    texts: dict[fx.Node, str] = {}
    values: dict[fx.Node, Any] = {}  # of nodes that depend on constants alone
    handles = {handle: f"{index}: {call}" for index, (handle, call) in enumerate(graph.held)}
    output: Any = graph.code.output_node().args[0]
    results = [
        (result, node)
        for result, node in zip(graph.results, output, strict=False)  # an anchored gradient is a result twice
        if result.kind != "buffer" or result.key not in without
    ]
    wanted = sources_of(node for _, node in results)
    lines = [("", repr((visit.name, visit.ipu))) for visit in graph.visits]
    for node in (node for node in graph.code.nodes if node in wanted):
        meta, key = node.meta, node.meta.get("key")
        if node.op == "placeholder" and meta["role"] == "constant" and key not in bound:
            values[node] = graph.constants[key]
        elif node.op == "placeholder":
            texts[node] = repr((meta["role"], key, layout_of(meta["val"])))
        elif node.target in _READS_LAYOUT:
            values[node] = run_node(node, {n: empty_like(n.meta["val"]) for n in node.all_input_nodes})
        elif all(operand in values for operand in node.all_input_nodes) and is_pure(node):
            values[node] = run_node(node, values)
        else:
            arguments: Any = map_arg((node.args, node.kwargs), lambda n: texts.get(n, ""))
            if handles:
                arguments = [handles.get(part, part) for part in tree_leaves(arguments)]
            place = [meta.get(name) for name in ("phase", "block", "draw", "scope", "attributes", "group")]
            lines.append((meta.get("where", ""), repr((node.target, arguments, place))))
            texts[node] = f"%{len(lines)}"
        if node in values:
            texts[node] = _text_of_value(values[node])
    return [*lines, *(("", repr((r.kind, r.key, r.shape, r.dtype, texts[node]))) for r, node in results)]


def _text_of_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr([_text_of_value(part) for part in value] if isinstance(value, list | tuple) else value)
    if value.layout != torch.strided:  # sparse
        return f"{value.layout} {_text_of_value(value.to_dense())}"
    return f"{layout_of(value)} {hash_of_bits(value)}"
