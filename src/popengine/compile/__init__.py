"""Compilation: the passes from a model to a plan, read as a list. Pure: no device, no thread, no file."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..ir import Graph, Plan
from ..settings import Settings
from . import schedule as schedules
from .lower import lower
from .partition import partition, used_visits
from .placement import check_work, work
from .replica_meetings import check_groups

logger = logging.getLogger("poptorch::python")


def with_work_enough(graph: Graph, settings: Settings) -> Settings:
    """The same settings; but sharded, where a pipeline has too few micro-batches and its user allows that."""
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
    """Cut, order and lower a captured graph; `done` is told the name of each finished pass.

    Raises:
        PartitionError, ScheduleError: see the passes
    """
    counts, training = settings.counts, settings.training
    check_work(graph.visits, used_visits(graph), settings.strategy, counts, training)
    with _without_collector():
        return _compile(graph, settings, done)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A long schedule makes 100,000s of tuples and no cycles: searching them for cycles takes most of the time."""
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
    check_groups(parts, settings)
    done("partition")
    order = schedules.pipelined if settings.strategy.mode == "pipelined" else schedules.sharded
    actions = order(parts.ipus, counts.accumulation if training else counts.iterations, training)
    schedules.check(actions)
    done("schedule")
    plan = lower(parts, actions)
    done("lower")
    return plan
