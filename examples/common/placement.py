"""Which ipu runs which layer, and how many stages and micro-batches that makes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from .flags import Flags

SPREAD = -1  # in --layers-per-ipu: an even share of the layers that are left


def spread(parser: argparse.ArgumentParser, flags: Flags) -> list[int]:
    """The layers on each ipu, with one number and -1 written out. A usage error, where they don't add up."""
    given, layers = flags.layers_per_ipu, flags.num_hidden_layers
    if len(given) == 1 and given[0] > 0:
        given = given * (layers // given[0])
    elif given == [SPREAD]:
        given = given * flags.ipus_per_replica
    left = layers - sum(n for n in given if n != SPREAD)
    open_ipus = [ipu for ipu, n in enumerate(given) if n == SPREAD]
    found = list(given)
    for place, ipu in enumerate(open_ipus):  # the last ones have one more each
        found[ipu] = left // len(open_ipus) + (len(open_ipus) - place <= left % len(open_ipus))
    if sum(found) != layers or min(found) < 0:
        parser.error(
            "layers_per_ipu not compatible with number of hidden layers: "
            f"{flags.named('layers_per_ipu', 'num_hidden_layers')}\n"
            "  fix: numbers that add up to the layers; -1 stands for an even share of those that are left"
        )
    return found


def layer_ipus(layers_per_ipu: Sequence[int]) -> list[int]:
    """The ipu of each layer."""
    return [ipu for ipu, layers in enumerate(layers_per_ipu) for _ in range(layers)]


def stages_along(path: Sequence[int]) -> int:
    """Forward stages of blocks on these ipus, one after another: neighbours on one ipu are one stage."""
    return 1 + sum(a != b for a, b in itertools.pairwise(path))


def least_accumulation(stages: int) -> int:
    """Micro-batches that fill a pipeline in training."""
    return 2 * stages - 1
