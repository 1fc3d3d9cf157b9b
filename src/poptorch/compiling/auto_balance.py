"""`AutoBalance`: measure the blocks of a captured model, and turn the rule into explicit stages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from popengine.compile.describe import held_bytes
from popengine.compile.partition import partition, used_visits
from popengine.compile.placement import Cost, balance, explain, place
from popengine.errors import PartitionError
from popengine.ir import Graph
from popengine.run.instances.all_reduce import all_gather_rows
from popengine.run.instances.process_group import FIRST_TAG, ProcessGroup, group_of
from popengine.run.piece_costs import measure
from popengine.settings import Settings, StagePlan, Strategy
from popengine.update.optimizer_rules import rule_of

from ..logs import logger

_EACH_ALONE = Strategy("pipelined", "auto_increment")


def balanced(
    graph: Graph,
    settings: Settings,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    together: bool = False,
) -> Settings:
    """Return the settings with the stages that `AutoBalance` chooses for this model.

    Args:
        weights:  parameters and buffers by canonical name
        inputs:   one micro-batch
        together: all instances call this now, and in training take the seconds that instance 0 has measured
    Raises:
        PartitionError: fewer blocks than ipus, or they don't fit the capacity
    """
    costs = _block_costs(graph, settings, weights, inputs)
    if together and settings.training and settings.counts.instances > 1:
        group = group_of(settings.counts.instances)
        seconds = _of_first_instance(group, [cost.seconds for cost in costs])
        costs = [replace(cost, seconds=spent) for cost, spent in zip(costs, seconds, strict=True)]
    cut = balance(costs, settings.strategy.ipus, settings.strategy.capacity)
    logger.info("AutoBalance placed %d blocks:\n%s", len(costs), explain(costs, cut))
    stages = tuple(StagePlan(blocks, ipu) for ipu, blocks in enumerate(cut))
    return replace(settings, strategy=replace(settings.strategy, auto=None, stages=stages))


def _of_first_instance(group: ProcessGroup, seconds: list[float]) -> list[float]:
    """Return the seconds that instance 0 has measured: stages have to be the same in all instances."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    facts = {"AutoBalance": {"blocks": str(len(seconds))}}
    found = group.after_barrier(
        "AutoBalance", facts, lambda: all_gather_rows(group, range(group.size), FIRST_TAG, mine)
    )
    return found[0].tolist()


def _block_costs(
    graph: Graph, settings: Settings, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> list[Cost]:
    """Return the seconds and bytes of each block, in the order of their first operations.

    Operations before the first block count for the first block.
    """
    used = used_visits(graph)
    placement = place(graph.visits, used, _EACH_ALONE)
    names = {
        placement.stage_of[i]: visit.name for i, visit in enumerate(graph.visits) if i in used and visit.name
    }
    if not names:
        raise PartitionError(
            "AutoBalance has no blocks to place: the model has neither marks nor a list of repeated layers\n"
            '  fix: mark the parts of the model: poptorch.BeginBlock(layer, "name")'
        )
    parts = partition(graph, _EACH_ALONE, settings.recompute)
    seconds = [0.0] * parts.stages
    for piece, spent in zip(parts.pieces, measure(parts, weights, inputs), strict=True):
        seconds[piece.stage] += spent
    # A pipeline holds the activations of one micro-batch for each ipu; an update holds copies of the weights.
    size = [held * settings.strategy.ipus for held in held_bytes(graph, parts)]
    optimizer = settings.optimizer
    states = [state for state in rule_of(optimizer).kept(optimizer) if state.dtype] if optimizer else []
    copies = 2 + len(states) if optimizer else 1
    for slot in graph.slots:
        if slot.name in parts.home:
            value = weights[slot.key]
            size[parts.home[slot.name]] += value.numel() * value.element_size() * copies
    first = min(names)
    seconds[first], size[first] = sum(seconds[: first + 1]), sum(size[: first + 1])
    return [Cost(str(name), seconds[stage], size[stage]) for stage, name in sorted(names.items())]
