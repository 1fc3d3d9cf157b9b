"""The operation that gathers the values of all replicas of a group inside a step.

A group is some neighbours among the replicas of all processes. In a plan the operation is a task of its own; run
outside a plan it returns `size` copies of its value, as if all replicas had the same.
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
