"""Compilation: the list of passes from a captured graph to a plan. Pure: no device, no thread, no file."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import Error
from ..ir import Graph, Partition, Plan
from ..piece import GATHER
from ..settings import Settings
from . import schedule as schedules
from .lower import lower
from .partition import partition, used_visits
from .placement import check_work, work

logger = logging.getLogger("poptorch::python")


def with_work_enough(graph: Graph, settings: Settings) -> Settings:
    """Return settings whose strategy is sharded, if a pipeline has too few micro-batches and its user allows that."""
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


def compile_graph(graph: Graph, settings: Settings, done: Callable[[str], None] = lambda name: None) -> Plan:
    """Cut, order and lower a captured graph; `done` is called with the name of each finished pass.

    Raises:
        PartitionError, ScheduleError: see the passes
    """
    counts, training = settings.counts, settings.training
    check_work(graph.visits, used_visits(graph), settings.strategy, counts, training)
    with _without_collector():
        return _compile(graph, settings, done)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the cyclic garbage collector off: it would search 100,000s of tuples of a long schedule for cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compile(graph: Graph, settings: Settings, done: Callable[[str], None]) -> Plan:
    counts, training = settings.counts, settings.training
    parts = partition(graph, settings.strategy, settings.recompute)
    _check_groups(parts, settings)
    done("partition")
    order = schedules.pipelined if settings.strategy.mode == "pipelined" else schedules.sharded
    actions = order(parts.ipus, counts.accumulation if training else counts.iterations, training)
    schedules.check(actions)
    done("schedule")
    plan = lower(parts, actions)
    done("lower")
    return plan


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
