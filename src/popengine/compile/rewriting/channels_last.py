"""Memory layout: the same graph with its convolutions in channels_last.

A convolution's operands are brought into the layout where they are not in it already; what runs between convolutions
keeps it. So a convolutional part changes as a whole, with one conversion where the data enters and one where it leaves.
Weights are converted once a step, as casts of weights are. Results differ from those of the other layout by rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from popengine.ir import Graph

from ..recording.functional import drop_what_does_nothing
from ..recording.graph_recorder import PLACE, Recorder

aten = torch.ops.aten
_OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # the first so many arguments
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_ANY_LAYOUT: dict[Any, Any] = {aten.view.default: Tensor.reshape, aten._unsafe_view.default: Tensor.reshape}


def has_convolutions(graph: Graph) -> bool:
    """Whether there is something whose layout can be chosen: a convolution over two or three dimensions."""
    return any(
        node.target is aten.convolution.default and node.meta["val"].dim() in _FORMATS
        for node in graph.code.nodes
    )


def in_channels_last(graph: Graph) -> Graph:
    """The graph, replayed on fake tensors with the operands of convolutions in channels_last."""
    nodes = list(graph.code.nodes)
    replayed = nodes[0]

    def meta(func: Any) -> dict[str, Any]:
        # What else a node says is of itself.
        only = () if func is replayed.target else PLACE
        known = replayed.meta.items()
        return {
            name: value for name, value in known if name in only or (not only and name not in ("val", "draw"))
        }

    recorder = Recorder(meta)
    fake = next(node.meta["val"] for node in nodes if node.op == "placeholder").fake_mode
    env: dict[fx.Node, Any] = {}
    with fake, torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                like = node.meta["val"]
                env[node] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
                recorder.placeholder(node.name, env[node], role=node.meta["role"], key=node.meta["key"])
        converted: dict[int, Tensor] = {}
        with recorder:
            for replayed in nodes:
                if replayed.op == "call_function":
                    env[replayed] = _replayed(replayed, env, converted)
    output: Any = nodes[-1]
    made: Any = recorder.graph.output(tuple(recorder.node(env[node]) for node in output.args[0]))
    drop_what_does_nothing(recorder.graph)
    results = [
        replace(result, name=node.name) for result, node in zip(graph.results, made.args[0], strict=True)
    ]
    return replace(graph, code=recorder.graph, results=tuple(results))


def _replayed(node: fx.Node, env: dict[fx.Node, Any], converted: dict[int, Tensor]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[misc]
    target: Any = node.target
    count = _OPERANDS.get(target, 0)
    given = [_converted(value, converted) for value in args[:count]] + list(args[count:])
    return _ANY_LAYOUT.get(target, target)(*given, **kwargs)


def _converted(value: Tensor, converted: dict[int, Tensor]) -> Tensor:
    """The value in channels_last; one conversion serves all its users."""
    layout = _FORMATS.get(value.dim())
    if layout is None:
        return value
    if id(value) not in converted:
        converted[id(value)] = value.to(memory_format=layout)
    return converted[id(value)]
