"""Measure what this machine gives a model: the speed with other options, and the throughput of several threads.

Done when a model is compiled for a profile, on the sample micro-batch. The result is advice in the report: it does not
change what is computed.
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
from popengine.run.piece_costs import Factor, Sample, sharing, speedups, with_threads
from popengine.settings import Strategy

from ..options import Options
from .arguments import weights_of

_MOST = 1.0  # seconds of a micro-batch; a slower one is not run several more times
_ROUNDS = 5
_EACH_ALONE = Strategy("sharded", "auto_increment")


class Hints(NamedTuple):
    """The measurements of a machine.

    Args:
        options: from an option that was not set to the speedup of a micro-batch with it
        sharing: from a number of threads to their throughput, as a multiple of one thread's, and to the factor by
            which a micro-batch then takes longer
    """

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
    """Measure; nothing where the model calls the user's code, or a micro-batch takes more than a second.

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
    """Return the graph with each option that was not set, where it differs."""
    others: dict[str, Callable[[Graph], Graph]] = {}
    if memory_format == "preserve" and not options.exists("memory_format") and has_convolutions(graph):
        others['options.memoryFormat("channels_last")'] = in_channels_last
    if options.Precision.half_kernels == "native":
        others['options.Precision.halfKernels("auto")'] = lambda graph: products_in_float32(
            graph, is_faster_in_float32
        )[0]
    return {name: made for name, change in others.items() if (made := change(graph)) is not graph}


def _calls_out(graph: Graph) -> bool:
    """Return whether a graph calls the user's code, whose side effects must not happen twice."""
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, torch._ops.OpOverload) and t.namespace in ("aten", "prims") for t in called)
