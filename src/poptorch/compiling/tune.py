"""`AutoBalance`: the cost of each block is measured on the captured graph, and the blocks become explicit stages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from popengine.compile.partition import partition, visits_with_operations
from popengine.compile.placement import balance_blocks, describe_balance, place_blocks
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
        mine = torch.tensor([[*costs.values()]], dtype=torch.float64)
        fingerprint = {"AutoBalance": {"blocks": str(len(costs))}}
        gather = partial(all_gather_rows, group, range(group.size), Tag.COSTS, mine)
        seconds = group.barrier("AutoBalance", fingerprint, gather)[0].tolist()
        costs = dict(zip(costs, seconds, strict=True))
    cut = balance_blocks(costs, settings.strategy.ipus)
    logger.info("AutoBalance placed %d blocks:\n%s", len(costs), describe_balance(costs, cut))
    stages = tuple(StagePlan(blocks, ipu) for ipu, blocks in enumerate(cut))
    return replace(settings, strategy=replace(settings.strategy, auto=None, stages=stages))


def _block_costs(
    graph: Graph, settings: Settings, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> dict[str, float]:
    """Return the seconds of each block in order, by name; those of the first one include what runs before it."""
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
    first = min(names)
    seconds[first] = sum(seconds[: first + 1])
    return {str(name): seconds[stage] for stage, name in sorted(names.items())}
