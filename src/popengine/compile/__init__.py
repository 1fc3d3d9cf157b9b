"""Compilation: the list of passes from a captured graph to a plan. Pure: no device, no thread, no file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..errors import Error
from ..ir import Graph, Partition, Plan
from ..piece import GATHER
from ..settings import Settings
from .partition import partition, used_visits
from .piece_parts import cut
from .placement import check_work, work
from .tasks import tasks

logger = logging.getLogger("poptorch::python")


def compile_graph(graph: Graph, settings: Settings, done: Callable[[str], None] = lambda name: None) -> Plan:
    """Place a captured graph on ipus, cut it into pieces and write the table of a step.

    Args:
        done: called with the name of each finished pass
    Raises:
        PartitionError: see `partition`
    """
    check_work(graph.visits, used_visits(graph), settings.strategy, settings.counts, settings.training)
    parts = partition(graph, settings.strategy, settings.recompute)
    _check_groups(parts, settings)
    parts = cut(parts, settings)
    done("partition")
    plan = tasks(parts, settings)
    done("tasks")
    return plan


def with_work_enough(graph: Graph, settings: Settings) -> Settings:
    """Return settings with a sharded strategy, if a pipeline has too few micro-batches and its user allows that."""
    strategy, counts, training = settings.strategy, settings.counts, settings.training
    if not strategy.or_sharded:
        return settings
    _, needed, given = work(graph.visits, used_visits(graph), strategy, counts, training)
    if given >= needed:
        return settings
    option = "gradient accumulation" if training else "device iterations"
    logger.info(
        "the stages run one after another: with %s of %d they are a pipeline, and it is %d",
        option,
        needed,
        given,
    )
    return replace(settings, strategy=replace(strategy, mode="sharded"))


def _check_groups(partition: Partition, settings: Settings) -> None:
    """Check that the replicas can form the groups of layers in which replicas gather values. Raises: Error."""
    counts = settings.counts
    sizes = {
        line.arguments[1]: line.where
        for piece in partition.pieces
        for line in piece.lines
        if line.call == GATHER
    }
    for size, where in sizes.items():
        here, everywhere = counts.replicas, counts.global_replicas
        if everywhere % size:
            why, fix = f"they don't divide the {everywhere} replicas", "a group size that does"
        elif here % size and size % here:
            why = f"some would lie in parts of several instances, which have {here} replicas each"
            fix = "a group size that divides the replicas of an instance, or is a multiple of it"
        elif size <= here:
            continue
        elif not settings.training:
            why, fix = "instances meet in training only", "eval(), before the model is wrapped"
        elif len(set(partition.ipus)) > 1:
            why = "replicas of several instances can meet only where a replica is on one ipu"
            fix = f"no blocks on other ipus, or groups of at most {here} replicas"
        else:
            continue
        raise Error(f"a layer needs groups of {size} replicas, but {why}\n  at {where}\n  fix: {fix}")
