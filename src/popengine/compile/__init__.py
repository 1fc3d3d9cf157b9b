"""Compilation: the list of passes from a captured graph to a plan. Pure: no device, no thread, no file."""

import logging
from collections.abc import Callable
from dataclasses import replace

from ..errors import Error
from ..ir import Graph, Partition, Plan
from ..order import order_named
from ..piece import GATHER
from ..settings import Settings
from .partition import cut_backwards, cut_pieces, partition
from .tasks import make_plan

logger = logging.getLogger("popengine")


def compile_graph(graph: Graph, settings: Settings, done: Callable[[str], None] = lambda name: None) -> Plan:
    """Return the plan of a captured graph: its pieces, their ipus, and the table of a step.

    Args: done: called with the name of each pass, "partition" and "tasks", when the pass has ended
    """
    parts = partition(graph, settings.strategy, settings.recompute)
    _check_replica_groups(parts, settings)
    if order_named(settings.strategy.order).cuts_backwards:
        parts = cut_backwards(parts)
    parts = cut_pieces(parts, settings)
    done("partition")
    plan = make_plan(parts, _with_possible_places(parts, settings))
    done("tasks")
    return plan


def _with_possible_places(partition: Partition, settings: Settings) -> Settings:
    """Return the settings, with replicas that share devices if the model needs that. Raises Error if it can't be at
    several places."""
    last_ipu, is_one_process = max(partition.ipus), settings.counts.parts == 1
    shifts = settings.shifts(last_ipu + 1)
    is_local = is_one_process and len({settings.place_of(ipu) for ipu in partition.ipus}) == 1 and not shifts
    if not settings.places or (is_local and (settings.spreads or last_ipu < len(settings.places))):
        return settings
    whole = "poprun --num-instances with at most as many instances as replicas"
    count = "as many ipus in ipus_per_replica as the model uses"
    if is_one_process:
        whole = "options.device() with one device"
        count = f"options.device() with a device for each of {last_ipu + 1} ipus"
    gathers = any(piece.gather_group_size for piece in partition.pieces)
    reasons = (  # whether it is so, why, fix
        (
            last_ipu >= len(settings.places) and not settings.spreads,
            f"the model uses ipu {last_ipu}, and a replica has {len(settings.places)} ipus",
            f"{count}, or another ipu_id of its blocks",
        ),
        (
            bool(settings.replica_groups) and not is_one_process,
            "parameters with a value for each replica are in one process",
            f"no replicaGrouping(); or {whole}",
        ),
        (
            gathers and not is_one_process,
            "layers that gather values of several replicas need these in one process",
            f"nn.BatchNorm2d for GroupedBatchNorm2d, and no all-gather of replicas; or {whole}",
        ),
        (
            not settings.is_eager and (not is_one_process or "cpu" in settings.devices),
            "inductor compiles whole models only",
            'options.compiler("eager"), without POPTORCH_BACKEND',
        ),
    )
    for why, fix in ((why, fix) for is_so, why, fix in reasons if is_so):
        what = "devices" if is_one_process else "processes"
        raise Error(
            f"a replica spans {len(set(settings.places))} {what}, which this model can't\n"
            f"  why: {why}\n"
            f"  fix: {fix}"
        )
    if shifts and (gathers or settings.replica_groups):
        what = (
            "layers gather values of several replicas"
            if gathers
            else "parameters have a value for each replica"
        )
        logger.info("replicas share devices: %s", what)
        return replace(settings, places=tuple(map(settings.place_of, range(last_ipu + 1))), spreads=False)
    return settings


def _check_replica_groups(partition: Partition, settings: Settings) -> None:
    """Raise Error if the replicas can't form groups of a size over which a layer gathers values."""
    counts = settings.counts
    lines = (line for piece in partition.pieces for line in piece.lines if line.call == GATHER)
    sizes = {line.arguments[1]: line.where for line in lines}
    for size, where in sizes.items():
        here, everywhere = counts.replicas, counts.global_replicas
        is_even = not everywhere % size and (not here % size or not size % here)
        can_meet = size <= here or (settings.training and len(set(partition.ipus)) == 1)
        if not is_even or not can_meet:
            raise Error(
                f"a layer needs groups of {size} replicas, of {everywhere}, with {here} in each instance\n"
                f"  at {where}\n"
                "  why: a group is a part of an instance, or whole instances; these meet in training only, and where a"
                " replica is on one ipu\n"
                f"  fix: a group size that divides {here}, or is a multiple of it that divides {everywhere}; for an"
                " inference eval(), before the model is wrapped"
            )
