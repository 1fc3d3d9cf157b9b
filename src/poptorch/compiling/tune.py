"""`AutoBalance`: the cost of each block is measured on the captured graph, and the blocks become explicit stages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from popengine.compile.describe import bytes_held_for_backward
from popengine.compile.partition import partition, visits_with_operations
from popengine.compile.placement import (
    Cost,
    balance_blocks,
    describe_balance,
    place_blocks,
)
from popengine.errors import PartitionError
from popengine.ir import Graph
from popengine.run.instances.all_reduce import all_gather_rows
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import group_of_size
from popengine.run.piece_costs import call_in_one_thread, seconds_of_pieces
from popengine.settings import Settings, StagePlan, Strategy

from ..logs import logger

_STAGE_OF_EACH_BLOCK = Strategy("interleaved", "auto_increment")


def with_balanced_stages(
    graph: Graph,
    settings: Settings,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    together: bool,
) -> Settings:
    """Return the settings with the stages of `AutoBalance`, by measured costs of the blocks. If all instances
    train, and call this function `together`, they use the seconds of instance 0."""
    costs = _block_costs(graph, settings, weights, inputs)
    if together and settings.training and settings.counts.processes > 1:
        group = group_of_size(settings.counts.processes)
        mine = torch.tensor([[cost.seconds for cost in costs]], dtype=torch.float64)
        fingerprint = {"AutoBalance": {"blocks": str(len(costs))}}
        gather = partial(all_gather_rows, group, range(group.size), Tag.COSTS, mine)
        seconds = group.barrier("AutoBalance", fingerprint, gather)[0].tolist()
        costs = [replace(cost, seconds=spent) for cost, spent in zip(costs, seconds, strict=True)]
    cut = balance_blocks(costs, settings.strategy.ipus, settings.strategy.capacity)
    logger.info("AutoBalance placed %d blocks:\n%s", len(costs), describe_balance(costs, cut))
    stages = tuple(StagePlan(blocks, ipu) for ipu, blocks in enumerate(cut))
    return replace(settings, strategy=replace(settings.strategy, auto=None, stages=stages))


def _block_costs(
    graph: Graph, settings: Settings, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> list[Cost]:
    """Return seconds and bytes of each block in order; the first one has what runs before it, too."""
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
    measured = call_in_one_thread(partial(seconds_of_pieces, parts, weights, inputs))
    for piece, spent in zip(parts.pieces, measured, strict=True):
        seconds[piece.stage] += spent
    # A pipeline holds the activations of one micro-batch for each ipu; an update holds copies of the weights.
    size = [held * settings.strategy.ipus for held in bytes_held_for_backward(graph, parts)]
    optimizer = settings.optimizer
    copies = 2 + optimizer.states if optimizer else 1
    for slot in graph.slots:
        if slot.name in parts.home:
            value = weights[slot.key]
            size[parts.home[slot.name]] += value.numel() * value.element_size() * copies
    first = min(names)
    seconds[first], size[first] = sum(seconds[: first + 1]), sum(size[: first + 1])
    return [Cost(str(name), seconds[stage], size[stage]) for stage, name in sorted(names.items())]
