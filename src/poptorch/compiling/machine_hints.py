"""What only this machine knows: how much faster another option would make this model's computations here, and how
many times as much several threads compute at the same time.

Measured when a model is compiled for a profile, on the sample micro-batch; without a profile nothing is measured.
"""

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from timeit import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from popengine.compile.partition import partition
from popengine.compile.rewriting.channels_last import has_convolutions, in_channels_last
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.ir import Graph
from popengine.run.measure.piece_costs import Factor, Sample, sharing, speedups, with_threads
from popengine.settings import Hyper, Optimizer, Settings, Strategy
from popengine.update.group_update import has_kernel, init_state, update

from ..options import Options
from .arguments import weights_of

_MOST = 1.0  # seconds of a micro-batch; a slower one is not run several times more for a hint
_ROUNDS = 5
_MANY = 1 << 22  # numbers
_EACH_ALONE = Strategy("sharded", "auto_increment")


class Hints(NamedTuple):
    """`options`: not asked for -> how many times as fast a micro-batch is with it. `sharing`: number of threads -> how
    many times as many micro-batches they compute at the same time as one, and how many times as long a core then
    computes each. `fused`: how many times as fast torch's one kernel for an update is. `copying`: bytes a second that
    one core copies, of as many as there are weights."""

    options: Mapping[str, Factor] = {}
    sharing: Mapping[int, tuple[Factor, float]] = {}
    fused: Factor | None = None
    copying: float | None = None


NO_HINTS = Hints()


def hints(
    graph: Graph,
    options: Options,
    settings: Settings,
    memory_format: str,
    model: nn.Module,
    samples: Sequence[Tensor],
    hyper: Hyper | None,
) -> Hints:
    """What this machine gives.

    Args:
        graph:         as it will run
        memory_format: of its convolutions
        samples:       one micro-batch
        hyper:         the rates of an update
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
    counts = settings.counts
    count = (counts.accumulation if settings.training else counts.iterations) * counts.replicas
    if (inside := torch.get_num_threads() // count) > 1:  # else tasks have one thread each
        several, one = (partial(_with_threads, now, threads) for threads in (inside, 1))
        changed["torch.set_num_threads(1)"] = with_threads(inside, lambda: speedups(several, one, alone))
    shared = {threads: sharing(now, threads, alone) for threads in _numbers_of_threads()}
    copying = with_threads(1, partial(_copying, model)) if settings.training else None
    return Hints(changed, shared, _fused(settings.optimizer, hyper, model), copying)


def _sample(graph: Graph, model: nn.Module, samples: Sequence[Tensor]) -> Sample:
    return Sample(partition(graph, _EACH_ALONE), weights_of(model), samples)


def _with_threads(sample: Sample, threads: int, count: int) -> float:
    torch.set_num_threads(threads)
    return sample.several(count)


def _fused(optimizer: Optimizer | None, hyper: Hyper | None, model: nn.Module) -> Factor | None:
    """Measured on copies of the first weights, as many as a core's caches do not hold."""
    if optimizer is None or hyper is None or hyper.groups[0].get("fused"):
        return None
    weights: list[Tensor] = []
    for name, weight in model.named_parameters():
        if optimizer.group_of.get(name) == 0 and sum(map(Tensor.numel, weights)) < _MANY:
            weights.append(weight.detach().flatten()[:_MANY].clone())
    if not weights or not all(has_kernel(optimizer, weight) for weight in weights):
        return None
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    states = [init_state(optimizer, weight) for weight in weights]

    def several(rates: Mapping[str, float], count: int) -> float:
        start = perf_counter()
        with torch.inference_mode():
            for _ in range(count):
                update(optimizer, rates, weights, gradients, states)
        return perf_counter() - start

    plain = partial(several, hyper.groups[0])
    fused = partial(several, {**hyper.groups[0], "fused": 1.0})
    return with_threads(1, lambda: speedups(plain, fused, (plain(1), plain(1))[1]))


def _copying(model: nn.Module) -> float:
    count = min(_MANY, max(1, sum(weight.numel() for weight in model.parameters())))
    source, target = torch.ones(count), torch.ones(count)
    return source.nbytes / min(repeat(lambda: target.copy_(source), number=1, repeat=2 * _ROUNDS))


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


def _numbers_of_threads() -> list[int]:
    """More than one: what the program has, and what it could have."""
    return sorted({torch.get_num_threads(), len(os.sched_getaffinity(0))} - {1})


def _calls_out(graph: Graph) -> bool:
    """Whether it calls the user's code, by custom operations or on the host: what that does must not be done twice."""
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, torch._ops.OpOverload) and t.namespace in ("aten", "prims") for t in called)
