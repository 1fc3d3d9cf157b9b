"""Sums over replicas, instances and ipus, in a fixed order, so that every run gives the same bits.

What waits for others is a generator: it yields the name of a channel and is sent what came there. So a thread
of its own may wait, and a thread that drives many workers goes on with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from popengine.settings import Counts

from .all_reduce import AllReduce, TreeNode, add, all_gather_rows, total
from .process_group import ProcessGroup

_GATHER_TAG = 8
K = TypeVar("K")
V = TypeVar("V")


Give = Callable[[Any, Any], None]  # put a value into the channel of this name
Waits = Generator[Any, Any, None]
# In place of a channel: go on
AFTER_OTHERS = "after others"  # once all that need not wait any more can do so
AT_THE_END = "at the end"  # once all that is left of the step waits for this


def reduce_over_replicas(
    sums: list[Tensor],
    replica: int,
    members: Sequence[int],
    name: Any,
    give: Give,
    instances: AllReduce | None = None,
    cuts: Sequence[Sequence[int] | None] = (),
) -> Waits:
    """Replace each member's gradient sums by the total, which the first adds up in the order of a tree.

    Args:
        instances: the way to the same members of other instances, whose sums are added, too; sums are 1-dimensional
        cuts:      where the share of a sum begins that each instance alone needs, and the end; None: it needs all
    """
    first, *others = members
    if replica == first:
        start = 0 if instances is None else instances.rank * len(members)
        nodes: list[TreeNode] = []
        add(nodes, TreeNode(0, start, sums))
        for place, other in enumerate(others, start + 1):
            add(nodes, TreeNode(0, place, (yield name, other)))
        if instances is not None:
            for index, share in enumerate(cuts):
                flats = [node.values[index] for node in nodes]
                if share is None:
                    instances.all_reduce(flats)
                else:
                    instances.reduce_scatter(flats, share)
        else:
            total(nodes)
        # A copy: this replica writes to its sums again at once.
        result = [value.clone() for value in sums] if others else []
        for other in others:
            give((name, "total", other), result)
    else:
        give((name, replica), sums)
        torch._foreach_copy_(sums, (yield name, "total", replica))


def share_over_instances(
    values: list[Tensor],
    owners: Sequence[int],
    replica: int,
    members: Sequence[int],
    name: Any,
    give: Give,
    instances: AllReduce,
) -> Waits:
    """Let each value be that of the instance that owns it, in all members of all instances.

    In the owning instance every member has it already.
    """
    first, *others = members
    theirs = [value for value, owner in zip(values, owners, strict=True) if owner != instances.rank]
    if replica == first:
        # What this thread has given may be all that others here wait for, and other instances for them.
        yield AFTER_OTHERS
        instances.broadcast_by_owners(values, owners)
        for other in others if theirs else ():
            give((name, "shared", other), theirs)
    elif theirs:
        torch._foreach_copy_(theirs, (yield name, "shared", replica))


class Gathering:
    """How one ipu of one replica gets the values of its group, and gives them its own.

    Groups are neighbours among the replicas of all instances. Of those in this instance the first exchanges values with
    other instances, where the group has some there; then all replicas here are its members, and nothing else is sent
    meanwhile.
    """

    def __init__(self, ipu: int, replica: int, counts: Counts, group: ProcessGroup | None) -> None:
        self._ipu, self._replica, self._counts, self._group = ipu, replica, counts, group

    def __call__(self, value: Tensor, size: int, place: Any, give: Give) -> Generator[Any, Any, Tensor]:
        """The values [size, ...] of the group.

        Args:
            size:  replicas of a group
            place: in the program, and the micro-batch
        """
        here, mine = self._counts.replicas, self._replica
        before = self._counts.instance * here  # replicas of other instances
        start = (before + mine) // size * size - before  # of the group
        members = range(max(start, 0), min(start + size, here))
        first, name = members[0], ("gather", self._ipu, place)
        if size <= here:
            for other in members:
                if other != mine:
                    give((name, mine, other), value)
            found = []
            for other in members:
                found.append(value if other == mine else (yield name, other, mine))
            return torch.stack(found)
        if mine != first:
            give((name, mine), value)
            return (yield name, "all", mine)
        found = [value]
        for other in members[1:]:
            found.append((yield name, other))
        assert self._group is not None
        places = [(before + start) // here + i for i in range(size // here)]
        everything = all_gather_rows(self._group, places, _GATHER_TAG, torch.stack(found))
        for other in members[1:]:
            give((name, "all", other), everything)
        return everything


def take_in(means: list[Tensor], values: list[Tensor], count: int) -> None:
    """Let means of `count` - 1 values each take in one more: a mean is never larger than what it is of. Each is
    computed in float32 at least, and rounded once."""
    for mean, value in zip(means, values, strict=True):
        wide = torch.promote_types(torch.promote_types(mean.dtype, value.dtype), torch.float32)
        mean.copy_(torch.lerp(mean.to(wide), value.to(wide), 1 / count))


def average(sums: list[Tensor], divisor: float) -> None:
    """Divide the sums in place; by 1 is no division."""
    if divisor != 1 and sums:
        torch._foreach_div_(sums, divisor)


def exchange(
    mine: Mapping[K, V], what: str, ipu: int, replica: int, ipus: Sequence[int], give: Give
) -> Generator[Any, Any, dict[K, V]]:
    """Everything that the ipus of one replica have to say, joined."""
    for other in ipus:
        if other != ipu:
            give((what, ipu, other, replica), mine)
    everything = dict(mine)
    for other in ipus:
        if other != ipu:
            everything |= yield what, other, ipu, replica
    return everything


def total_norm(norms: Mapping[str, Tensor], place: Mapping[str, int]) -> Tensor:
    """The norm of all gradients from the norm of each, as torch.nn.utils.get_total_norm: the norm of the norms,
    stacked in the order of the model's parameters, whichever ipus they are on."""
    ordered = [norms[key] for key in sorted(norms, key=place.__getitem__)]
    return torch.linalg.vector_norm(torch.stack([norm.to(ordered[0].device) for norm in ordered]))
