"""Hints of the machine: how much faster another option would make this model's computations here.

Measured when a model is compiled for a profile, on the sample micro-batch; without a profile nothing is measured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from popengine.compile.partition import partition
from popengine.compile.rewriting.channels_last import has_convolutions, in_channels_last
from popengine.compile.rewriting.partials import products_in_float32
from popengine.ir import Graph
from popengine.run.backends.half import faster_in_float32
from popengine.run.measure.piece_costs import measure
from popengine.settings import Strategy

from ..options import Options

_MOST = 1.0  # seconds of a micro-batch; a slower one is not run several times more for a hint
_EACH_ALONE = Strategy("sharded", "auto_increment")


def hints(
    graph: Graph, options: Options, memory_format: str, model: nn.Module, samples: Sequence[Tensor]
) -> dict[str, float]:
    """Options that were not asked for -> how many times as fast a micro-batch is with them, on one core.

    Args:
        graph:         as it will run
        memory_format: of its convolutions
        samples:       one micro-batch
    """
    others: dict[str, Callable[[Graph], Graph]] = {}
    if memory_format == "preserve" and not options.exists("memory_format") and has_convolutions(graph):
        others['options.memoryFormat("channels_last")'] = in_channels_last
    if options.Precision.half_kernels == "native":
        others['options.Precision.halfKernels("auto")'] = lambda found: products_in_float32(
            found, faster_in_float32
        )
    changed = {name: made for name, change in others.items() if (made := change(graph)) is not graph}
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def seconds(found: Graph, rounds: int) -> float:
        return sum(measure(partition(found, _EACH_ALONE), weights, samples, rounds))

    if not changed or _calls_out(graph) or seconds(graph, 1) > _MOST:
        return {}
    return {name: seconds(graph, 3) / seconds(other, 3) for name, other in changed.items()}


def _calls_out(graph: Graph) -> bool:
    """Whether it calls the user's code, by custom operations or on the host: what that does must not be done twice."""
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, torch._ops.OpOverload) and t.namespace in ("aten", "prims") for t in called)
