"""Sub-graphs: the bodies of branches and loops, traced while the surrounding forward is traced.

A body is recorded into a graph of its own. Tensors of the surrounding forward that the body uses become
inputs, too. In-place operations of the body do not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...operations import Body
from ..partition import make_piece
from .current_capture import Capture, recording_paused
from .functional import drop_aliases_and_dead_code, functionalize_graph
from .graph_recorder import GraphRecorder, empty_like, is_write

_BODY = -1  # in place of a stage: a failing line is looked up in the piece that runs the body


def trace_body(
    capture: Capture,
    body: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
) -> tuple[Body, list[Tensor]]:
    """Run `body` once, on new tensors of the shapes and dtypes of `inputs`, and record its operations.

    Returns: the body, and the tensors of the surrounding forward that it reads: its inputs after `inputs`
    """
    block = capture.block
    with recording_paused() as fake, fake:
        recorder = GraphRecorder(capture.node_meta, outer_role="outer")
        given = [empty_like(value) for value in inputs]
        for position, value in enumerate(given):
            recorder.add_placeholder(f"input_{position}", value, role="input", key=str(position))
        with recorder:
            outputs = list(body(given))
        nodes = [recorder.node_of(value) for value in outputs]
        capture.block = block
        recorder.graph.output(tuple(nodes))
        graph, outer = recorder.graph, recorder.constants
        if any(map(is_write, graph.nodes)):
            with torch._C.DisableTorchFunction():
                graph = functionalize_graph(graph, {}).graph
    drop_aliases_and_dead_code(graph)
    name_of = {node.meta["key"]: node.name for node in graph.find_nodes(op="placeholder")}
    reads = [name_of[key] for key in (*map(str, range(len(inputs))), *outer)]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    draws = [node.meta.pop("draw") for node in calls if "draw" in node.meta]  # the whole body has one key
    results: Any = graph.output_node().args[0]
    piece = make_piece("F", _BODY, reads, [node.name for node in results], calls)
    shapes = tuple((tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in results)
    return Body(piece, shapes, bool(draws)), list(outer.values())
