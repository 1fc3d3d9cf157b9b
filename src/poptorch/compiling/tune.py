"""Tuning: running the captured model on a micro-batch to decide something, only if an option requests it.

`AutoBalance` becomes explicit stages, by the measured cost of each block. The hints of a profile are the
speedups by other options; they do not change what is computed.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from popengine.compile.describe import bytes_held_for_backward
from popengine.compile.partition import partition, visits_with_operations
from popengine.compile.placement import Cost, balance_blocks, describe_balance, place_blocks
from popengine.compile.rewriting.channels_last import in_wanted_layout
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.errors import PartitionError
from popengine.ir import Graph
from popengine.run.instances.all_reduce import all_gather_rows
from popengine.run.instances.process_group import FIRST_TAG, group_of_size
from popengine.run.piece_costs import call_in_one_thread, measure_speedup, sample_of
from popengine.settings import Settings, StagePlan, Strategy
from popengine.torch_private import OpOverload
from popengine.update.optimizer_rules import RULES

from ..annotating.replica_groups import first_rows_only
from ..logs import logger
from ..options import Options
from .arguments import weights_of

_MOST_SECONDS = 1.0  # a micro-batch that takes longer is not measured
_ROUNDS = 5
_EACH_ALONE = Strategy("sharded", "auto_increment")
_STAGE_OF_EACH_BLOCK = Strategy("interleaved", "auto_increment")
Hints = dict[str, Any]  # the facts of a profile that `measure_hints` returns
NO_HINTS: Hints = {"hints": {}}


# ---- hints ---------------------------------------------------------------------------------------------------


def measure_hints(
    graph: Graph, settings: Settings, options: Options, model: nn.Module, samples: Sequence[Tensor]
) -> Hints:
    """Measure the speedup of a micro-batch by options that are not set.

    Args: samples: the inputs of one micro-batch
    Returns: "hints": {option: lower quartile of the speedup}. `NO_HINTS` unless the CPU runs eager pieces, and a
        profile is recorded; also if the graph may call user code, or a micro-batch takes more than `_MOST_SECONDS`
    """
    is_measurable = (settings.device, settings.backend) == ("cpu", "eager")
    if not is_measurable or options._profile_directory(settings.training) is None or calls_user_code(graph):
        return NO_HINTS
    with first_rows_only(model, settings.replica_groups):
        weights = weights_of(model)
    now = sample_of(partition(graph, _EACH_ALONE), weights, samples)
    if call_in_one_thread(lambda: now.total_seconds(1)) > _MOST_SECONDS:
        return NO_HINTS
    alone = call_in_one_thread(lambda: min(now.total_seconds(1) for _ in range(_ROUNDS)))
    others: dict[str, Graph] = {}  # by option, the graph that it would give
    if not options.exists("memory_format"):
        others['options.memoryFormat("channels_last")'], _ = in_wanted_layout(graph, "channels_last")
    if options.Precision.half_kernels == "native":
        others['options.Precision.halfKernels("auto")'], _ = products_in_float32(graph, is_faster_in_float32)
    gains = {}
    for name, other in others.items():
        if other is not graph:
            changed = sample_of(partition(other, _EACH_ALONE), weights, samples)
            speedup = partial(measure_speedup, now.total_seconds, changed.total_seconds, alone)
            gains[name] = call_in_one_thread(speedup)
    return {"hints": gains}


def calls_user_code(graph: Graph) -> bool:
    """Return whether a graph calls functions that are no aten or prims operations, such as the user's."""
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, OpOverload) and t.namespace in ("aten", "prims") for t in called)


# ---- AutoBalance ---------------------------------------------------------------------------------------------


def with_balanced_stages(
    graph: Graph,
    settings: Settings,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    together: bool,
) -> Settings:
    """Measure the blocks, log their costs, and return the settings with the stages of `AutoBalance`.

    Args:
        inputs:   one micro-batch of each input
        together: whether all instances call this function now; in training they use the seconds of instance 0
    """
    costs = _block_costs(graph, settings, weights, inputs)
    if together and settings.training and settings.counts.instances > 1:
        group = group_of_size(settings.counts.instances)
        mine = torch.tensor([[cost.seconds for cost in costs]], dtype=torch.float64)
        fingerprint = {"AutoBalance": {"blocks": str(len(costs))}}
        gather = partial(all_gather_rows, group, range(group.size), FIRST_TAG, mine)
        seconds = group.after_barrier("AutoBalance", fingerprint, gather)[0].tolist()
        costs = [replace(cost, seconds=spent) for cost, spent in zip(costs, seconds, strict=True)]
    cut = balance_blocks(costs, settings.strategy.ipus, settings.strategy.capacity)
    logger.info("AutoBalance placed %d blocks:\n%s", len(costs), describe_balance(costs, cut))
    stages = tuple(StagePlan(blocks, ipu) for ipu, blocks in enumerate(cut))
    return replace(settings, strategy=replace(settings.strategy, auto=None, stages=stages))


def _block_costs(
    graph: Graph, settings: Settings, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> list[Cost]:
    """Return the measured seconds and the bytes of each block, in the order of the blocks' first operations.

    Operations before the first block count as a part of that block. Raises: PartitionError without any block
    """
    used = visits_with_operations(graph)
    placement = place_blocks(graph.visits, used, _STAGE_OF_EACH_BLOCK)
    names = {
        placement.stage_of[i]: visit.name for i, visit in enumerate(graph.visits) if i in used and visit.name
    }
    if not names:
        raise PartitionError(
            "AutoBalance has no blocks to place: the model has neither marks nor a list of repeated layers\n"
            '  fix: mark the parts of the model: poptorch.BeginBlock(layer, "name")'
        )
    parts = partition(graph, _STAGE_OF_EACH_BLOCK, settings.recompute)
    seconds = [0.0] * parts.stages
    sample = sample_of(parts, weights, inputs)
    runs = call_in_one_thread(lambda: [sample.seconds_of_pieces() for _ in range(3)])
    for piece, *spent in zip(parts.pieces, *runs, strict=True):
        seconds[piece.stage] += min(spent)
    # A pipeline holds the activations of one micro-batch for each ipu; an update holds copies of the weights.
    size = [held * settings.strategy.ipus for held in bytes_held_for_backward(graph, parts)]
    optimizer = settings.optimizer
    states = (
        [state for state in RULES[optimizer.kind].states_of(optimizer) if state.dtype] if optimizer else []
    )
    copies = 2 + len(states) if optimizer else 1
    for slot in graph.slots:
        if slot.name in parts.home:
            value = weights[slot.key]
            size[parts.home[slot.name]] += value.numel() * value.element_size() * copies
    first = min(names)
    seconds[first], size[first] = sum(seconds[: first + 1]), sum(size[: first + 1])
    return [Cost(str(name), seconds[stage], size[stage]) for stage, name in sorted(names.items())]
