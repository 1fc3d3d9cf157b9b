"""The operation by which replicas meet inside a step: each gets the values of all replicas of its group.

A group is some neighbours among the replicas of all instances. Where a piece gathers, its Python yields: a driver
goes on with something else until the others' values are there. Outside a plan every replica has the same value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .control_flow import LIBRARY

LIBRARY.define("gather_over_replicas(Tensor value, int size) -> Tensor")
LIBRARY.impl(
    "gather_over_replicas",
    lambda value, size: value.unsqueeze(0).repeat(size, *[1] * value.dim()),
    "CompositeExplicitAutograd",
)


@torch.library.register_fake("popengine::gather_over_replicas", lib=LIBRARY)
def _pretend(value: Tensor, size: int) -> Tensor:
    return value.new_empty((size, *value.shape))


def gather_over_replicas(value: Tensor, size: int) -> Tensor:
    """The values [size, ...] of this replica's group, in the order of its replicas. It has no gradient."""
    return torch.ops.popengine.gather_over_replicas(value, size)
