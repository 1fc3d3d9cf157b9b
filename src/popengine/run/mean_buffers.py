"""Means of buffers over the replicas of all instances: running statistics that have seen all rows, and not a share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..settings import Counts
from .instances.all_reduce import AllReduce, TreeNode, add, total
from .instances.process_group import ProcessGroup

_TAG = 10  # of messages
_WHAT = "the mean of running statistics"


def mean_over_replicas(
    values: Sequence[Mapping[str, Tensor]], counts: Counts, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the mean of each buffer, made in float64, in the order of a binary tree: the same bits in every layout.

    Args:
        values: of each replica of this instance
    """
    nodes: list[TreeNode] = []
    for replica, buffers in enumerate(values, counts.instance * counts.replicas):
        add(nodes, TreeNode(0, replica, [value.double() for value in buffers.values()]))
    if group is None:
        sums = total(nodes)
    else:
        shapes = {name: str(tuple(value.shape)) for name, value in values[0].items()}
        reduction = AllReduce(group, _TAG, counts.replicas)
        group.after_barrier(_WHAT, {"buffers": shapes}, lambda: reduction.all_reduce_nodes(nodes))
        sums = nodes[0].values
    return {
        name: (value / counts.global_replicas).to(values[0][name].dtype)
        for name, value in zip(values[0], sums, strict=True)
    }
