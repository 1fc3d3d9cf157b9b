"""An all-gather inside a step: each replica gets the values of all replicas in its group.

A group consists of neighbouring replicas, counted over all instances. A piece that gathers is a generator: it yields,
and its driver runs other tasks until all values are there. Outside a plan all replicas have the same value.
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
    """Return the values [size, ...] of this replica's group, in the order of its replicas, without a gradient."""
    return torch.ops.popengine.gather_over_replicas(value, size)
