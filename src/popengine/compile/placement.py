"""Placement: the stage of each block and the ipu of each stage, from the user's strategy and the captured blocks."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from ..errors import PartitionError, did_you_mean
from ..ir import Graph, Visit
from ..order import order_named
from ..settings import Settings, Strategy

logger = logging.getLogger("poptorch::python")


class BlockError(PartitionError, AssertionError):
    """A block has no stage, or a stage has two ipus. By PopTorch's contract also an AssertionError."""


@dataclass(frozen=True)
class Placement:
    """The stage of each visit to a block, and for each stage its ipu and the names of its blocks as a text."""

    stage_of: tuple[int, ...]
    ipus: tuple[int, ...]
    names: tuple[str, ...]


def place_blocks(visits: Sequence[Visit], used: set[int], strategy: Strategy) -> Placement:
    """Return the stage of each visit, numbered from 0 without gaps, and the ipu and blocks of each stage. The first of
    `visits` stands for operations before any block; `used`: the indices of those that have operations."""
    numbers = _stage_numbers(visits, used, strategy)
    ipu_of = _stage_ipus(visits, numbers, strategy)
    placement = order_named(strategy.order).placement
    if placement == "turns":
        # Ipus take turns as the forward does: each change of ipu begins a new stage.
        turns, ipu_of_turn, turn = [0] * len(visits), dict[int, int](), -1
        for i in sorted(used):
            named = _named_ipu(visits[i], numbers[i], strategy)
            ipu = ipu_of[numbers[i]] if named is None else named
            turn += ipu != ipu_of_turn.get(turn)
            turns[i], ipu_of_turn[turn] = turn, ipu
        numbers, ipu_of = turns, ipu_of_turn
    elif placement == "merged":
        kept = sorted({numbers[i] for i in used})
        first = {kept[0]: kept[0]}  # of each stage: the first of the neighbours on its ipu
        for before, number in pairwise(kept):
            first[number] = first[before] if ipu_of[before] == ipu_of[number] else number
        numbers = [first.get(number, number) for number in numbers]
    stages = sorted({numbers[i] for i in used})  # those with operations
    blocks = [
        dict.fromkeys(visits[i].name or "no block" for i in sorted(used) if numbers[i] == stage)
        for stage in stages
    ]
    return Placement(
        tuple(stages.index(number) if number in stages else 0 for number in numbers),
        tuple(ipu_of[stage] for stage in stages),
        tuple(map(", ".join, blocks)),
    )


def _check_layout(ipus: Sequence[int], schedule: str) -> None:
    """Raise PartitionError if stages on these ipus do not have the layout that a schedule needs."""
    order = order_named(schedule)
    layout = order.layout_on(ipus)
    if [*ipus] != layout:
        raise PartitionError(
            f"the schedule {schedule!r} needs several stages on each ipu, in the layout"
            f" {', '.join(map(str, layout))}; the stages are on the ipus {', '.join(map(str, ipus))}\n"
            f"  fix: poptorch.AutoStage.AutoIncrement with {len(layout)} blocks or more, each with its ipu; or"
            f' name the stages, as PipelinedExecution(poptorch.Stage("a").ipu({layout[0]}),'
            f' poptorch.Stage("b").ipu({layout[1]}), ..., schedule="{schedule}"); or schedule="1f1b"'
        )
    if len({*ipus}) == 1 and order.placement in ("loop", "v"):
        logger.info("the schedule %r needs several ipus, and all stages are on one", schedule)


def _stage_numbers(visits: Sequence[Visit], used: set[int], strategy: Strategy) -> list[int]:
    """Return the strategy's stage number of each visit. Raise BlockError for a block without a stage."""
    stage_of: dict[str | None, int]
    if strategy.auto is None:
        stages = reversed(tuple(enumerate(strategy.stages)))  # of several stages the first has the block
        stage_of = {name: number for number, stage in stages for name in stage.blocks}
    elif strategy.auto == "same_as_ipu":
        stage_of = {v.name: v.ipu for v in reversed(visits) if v.ipu is not None}  # the first ipu of a block
    else:  # stage 0 is what runs before the first block, if anything
        names = dict.fromkeys(visit.name for visit in visits[1:])
        stage_of = {name: number for number, name in enumerate(names, start=int(0 in used))}
    unknown = next((visit for visit in visits[1:] if visit.name not in stage_of), None)
    if unknown is not None and strategy.auto is None:
        blocks = [name for stage in strategy.stages for name in stage.blocks]
        listed = ", ".join(map(repr, blocks)) or "no blocks"
        unused = [name for name in blocks if name not in {visit.name for visit in visits}]
        fix = f'add poptorch.Stage("{unknown.name}") to the strategy, or use one of the names above'
        for name in unused:
            if meant := did_you_mean(name, [str(unknown.name)]):
                fix = f"the strategy has {name!r}, which no block of the model has{meant}"
        raise BlockError(
            f"Unknown Block '{unknown.name}', opened at {unknown.where}\n"
            f"  the strategy's stages have: {listed}\n  fix: {fix}"
        )
    if unknown is not None:
        raise BlockError(
            f"the strategy is AutoStage.SameAsIpu, but no IPU was specified for block '{unknown.name}'\n"
            f"  opened at {unknown.where}\n"
            f'  fix: poptorch.BeginBlock(layer, "{unknown.name}", ipu_id=0); or options.setExecutionStrategy('
            "poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))"
        )
    return [0, *(stage_of[visit.name] for visit in visits[1:])]


def _stage_ipus(visits: Sequence[Visit], numbers: list[int], strategy: Strategy) -> dict[int, int]:
    """Return the ipu of each stage: n of Stage(...).ipu(n), else a block's ipu_id, else the stage's own number.
    Raise BlockError if blocks of one stage (where ipus take turns: uses of one block) name different ipus."""
    takes_turns = order_named(strategy.order).placement == "turns"
    first_named, ipu_of = dict[Any, tuple[int, str]](), dict[int, int]()
    for visit, number in zip(visits, numbers, strict=True):
        ipu = _named_ipu(visit, number, strategy)
        if ipu is None:
            continue
        ipu_of.setdefault(number, ipu)
        before, where = first_named.setdefault(visit.name if takes_turns else number, (ipu, visit.where))
        if before != ipu:
            raise BlockError(
                f"stage {number} can't be on ipu {before} and on ipu {ipu}\n"
                f"  block {visit.name!r}, opened at {visit.where}, asks for ipu {ipu}; ipu {before} is from {where}\n"
                f"  fix: name the ipu once: poptorch.Stage({visit.name!r}).ipu({before}); or give the blocks two names"
            )
    return {number: ipu_of.get(number, number) for number in numbers}


def _named_ipu(visit: Visit, number: int, strategy: Strategy) -> int | None:
    """Return the ipu that the visit's stage or else its block names; None if neither does."""
    stage = strategy.stages[number] if number < len(strategy.stages) else None
    return stage.ipu if stage and stage.ipu is not None else visit.ipu


def sharded_if_too_few_micro_batches(graph: Graph, used: set[int], settings: Settings) -> Settings:
    """Return the settings, with the order "sharded" for too few micro-batches if `or_sharded`; else raise an error."""
    strategy, training = settings.strategy, settings.training
    placement = place_blocks(graph.visits, used | {*range(1, len(graph.visits))}, strategy)
    # By PopTorch's rule a forward begins on ipu 0.
    forward = 1 + sum(ipu != following for ipu, following in pairwise([0, *placement.ipus]))
    needed = 2 * forward - 1 if training else forward  # fill a pipeline
    given = settings.counts.accumulation if training else settings.counts.iterations
    if forward == 1 or given >= needed or not order_named(strategy.order).overlaps:
        if training:
            _check_layout(place_blocks(graph.visits, used, strategy).ipus, strategy.order)
        return settings
    option = "Training.gradientAccumulation" if training else "deviceIterations"
    if strategy.or_sharded:
        text = "the stages run one after another: %s is %d, and from %d they are a pipeline"
        logger.info(text, option, given, needed)
        return replace(settings, strategy=replace(strategy, order="sharded"))
    stages_text = f": {forward} forward stages bring {forward - 1} more in training" if training else ""
    rows = given * gcd(*(slot.shape[0] for slot in graph.slots if slot.role == "input" and slot.shape))
    fitting = next((count for count in range(needed, rows + 1) if rows % count == 0), needed)
    raise PartitionError(
        f"poptorch.Options().{option} is {given}, and must be greater than or equal to the number of pipeline"
        f" stages ({needed}) when poptorch.PipelinedExecution is used{stages_text}\n"
        "  why: with fewer micro-batches the pipeline is never full\n"
        f"  fix: options.{option}({fitting}); or options.setExecutionStrategy(poptorch.ShardedExecution()), which has"
        " no such rule"
    )


def balance_blocks(costs: Mapping[str, float], ipus: int) -> tuple[tuple[str, ...], ...]:
    """Return the names of the blocks of each ipu, cut evenly by `costs`, their seconds for forward and backward of a
    micro-batch. Raise PartitionError if there are too few blocks."""
    names = list(costs)
    if len(names) < ipus:
        raise PartitionError(
            f"{len(names)} blocks can't be placed on {ipus} ipus\n"
            f"  fix: mark more blocks, or use at most {len(names)} ipus"
        )
    begins = _even_cut([*costs.values()], ipus)
    return tuple(tuple(names[start:end]) for start, end in pairwise([*begins, len(names)]))


def _even_cut(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the index at which each of `parts` parts of a sequence begins.

    No part is empty. The largest sum of `costs` of a part is minimal; of several such cuts, that with the least sum of
    squares is returned.
    """
    loads = [0.0, *accumulate(costs)]
    # By index: (largest sum, sum of squares, begins) of the best cut of the items before it.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(parts):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, len(loads)):
            for start in range(end - 1, -1, -1):
                load = loads[end] - loads[start]
                if end in longer and load > longer[end][0]:
                    break  # an earlier start has a larger load
                if start in best:
                    largest, squares, begins = best[start]
                    cut = max(largest, load), squares + load * load, (*begins, start)
                    longer[end] = min(longer.get(end, cut), cut)
        best = longer
    return best[len(costs)][2]


def describe_balance(costs: Mapping[str, float], cut: Sequence[Sequence[str]]) -> str:
    """Return a text: the load of each ipu, of whose blocks `cut` has the names."""
    return "\n".join(
        f"  ipu {ipu}: {sum(costs[name] for name in names) * 1e3:.3f} ms: {', '.join(names)}"
        for ipu, names in enumerate(cut)
    )
