"""What only this machine knows: how much faster another option would make this model's computations here, and how
many times as much several threads compute at the same time.

Measured when a model is compiled for a profile, on the sample micro-batch; without a profile nothing is measured.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from popengine.compile.partition import partition
from popengine.compile.rewriting.channels_last import has_convolutions, in_channels_last
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.ir import Graph
from popengine.run.measure.piece_costs import Factor, Sample, sharing, speedups, with_threads
from popengine.settings import Strategy

from ..options import Options
from .arguments import weights_of

_MOST = 1.0  # seconds of a micro-batch; a slower one is not run several times more for a hint
_ROUNDS = 5
_EACH_ALONE = Strategy("sharded", "auto_increment")


class Hints(NamedTuple):
    """`options`: not asked for -> how many times as fast a micro-batch is with it. `sharing`: number of threads -> how
    many times as many micro-batches they compute at the same time as one, and how many times as long a core then
    computes each."""

    options: Mapping[str, Factor] = {}
    sharing: Mapping[int, tuple[Factor, float]] = {}


NO_HINTS = Hints()


def hints(
    graph: Graph,
    options: Options,
    memory_format: str,
    model: nn.Module,
    samples: Sequence[Tensor],
) -> Hints:
    """Measure what this machine gives.

    Args:
        graph:         as it will run
        memory_format: of its convolutions
        samples:       one micro-batch
    """
    if _calls_out(graph):
        return NO_HINTS
    now = _sample(graph, model, samples)
    alone = with_threads(1, lambda: now.several(1))
    if alone > _MOST:
        return NO_HINTS
    alone = with_threads(1, lambda: min(now.several(1) for _ in range(_ROUNDS)))
    changed = {
        name: with_threads(1, partial(speedups, now.several, _sample(other, model, samples).several, alone))
        for name, other in _others(graph, options, memory_format).items()
    }
    threads = torch.get_num_threads()
    shared = {threads: sharing(now, threads, alone)} if threads > 1 else {}
    return Hints(changed, shared)


def _sample(graph: Graph, model: nn.Module, samples: Sequence[Tensor]) -> Sample:
    return Sample(partition(graph, _EACH_ALONE), weights_of(model), samples)


def _others(graph: Graph, options: Options, memory_format: str) -> dict[str, Graph]:
    """The graph with each option that was not asked for, where it makes a difference."""
    others: dict[str, Callable[[Graph], Graph]] = {}
    if memory_format == "preserve" and not options.exists("memory_format") and has_convolutions(graph):
        others['options.memoryFormat("channels_last")'] = in_channels_last
    if options.Precision.half_kernels == "native":
        others['options.Precision.halfKernels("auto")'] = lambda graph: products_in_float32(
            graph, is_faster_in_float32
        )[0]
    return {name: made for name, change in others.items() if (made := change(graph)) is not graph}


def _calls_out(graph: Graph) -> bool:
    """Whether it calls the user's code, by custom operations or on the host: what that does must not be done twice."""
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, torch._ops.OpOverload) and t.namespace in ("aten", "prims") for t in called)
