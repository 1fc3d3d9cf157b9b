"""The rules for layers in which replicas meet: their groups have to fit the layout."""

from __future__ import annotations

from ..errors import Error
from ..ir import Partition
from ..piece import GATHER
from ..settings import Settings


def check_groups(partition: Partition, settings: Settings) -> None:
    """Raises Error, where replicas don't make groups of the size that a layer asks for."""
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
