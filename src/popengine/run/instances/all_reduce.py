"""All-reduce over instances in a fixed order: the same bits for every division of replicas into instances.

A sum over replicas is a balanced binary tree over their global numbers:

    0   1   2   3   4   5   6      neighbours add up first, then their sums; a single node moves up
    └─┬─┘   └─┬─┘   └─┬─┘   │
      └───┬───┘       └──┬──┘
          └──────┬───────┘

An instance adds up its own replicas, into whole nodes of the tree. Then reduce-scatter: each instance
receives the peers' nodes for its shard of the elements, and adds them up; then all-gather: it sends its shard
to all peers. Shards are sent in segments, so that additions and both directions overlap. Each instance sends
2 (N - 1) / N of the elements, as in a ring, but in 2 turns instead of 2 (N - 1). Gloo's all_to_all took 2.7
to 3.7 times as long as its all_reduce, whose order of additions depends on the number of instances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from .connections import Connections

IN_FLIGHT = 1 << 21  # elements in transit to an instance at the same time, about
_ALIGNED = 64  # elements: shards begin at multiples, as kernels work on whole vectors
_AHEAD = 4  # segments that are received while one is added up
_SUM, _GATHER = "the sum of gradients", "the exchange of weights"  # purposes of waits, for warnings
_Incoming = tuple[Tensor, dist.Work, int]  # a segment of a tree node, its receive operation, and the sender


# ---- the tree ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TreeNode:
    """The sum over the 2^level replicas from index · 2^level on. `add` and `total` overwrite its values."""

    level: int
    index: int
    values: list[Tensor]


def add(stack: list[TreeNode], node: TreeNode) -> None:
    """Push the next node onto a stack, and replace each complete pair of neighbours by its sum."""
    while stack and node.index % 2 and stack[-1].level == node.level and stack[-1].index == node.index - 1:
        left = stack.pop()
        if left.values:
            torch._foreach_add_(left.values, node.values)
        node = TreeNode(node.level + 1, node.index // 2, left.values)
    stack.append(node)


def total(stack: list[TreeNode]) -> list[Tensor]:
    """Return the sum of all nodes on a stack and empty the stack. Call it after the last node was added."""
    while len(stack) > 1:
        last = stack.pop()
        torch._foreach_add_(stack[-1].values, last.values)
    return stack.pop().values


def nodes_of(start: int, count: int) -> list[tuple[int, int]]:
    """Return (level, index) of the tree nodes that the replicas start, ..., start + count - 1 add up to."""
    stack: list[TreeNode] = []
    for replica in range(start, start + count):
        add(stack, TreeNode(0, replica, []))
    return [(node.level, node.index) for node in stack]


# ---- over instances ------------------------------------------------------------------------------------------


class AllReduce:
    """The all-reduce over all instances of a group, and its two halves: reduce-scatter and all-gather.

    Args:
        group:    connections to the other instances
        tag:      tag of the messages; no other messages may use `tag` and `tag + 1`
        replicas: number of replicas in each instance that take part
    """

    def __init__(self, group: Connections, tag: int, replicas: int) -> None:
        self._group, self._tag = group, tag
        self.rank, self.size = group.rank, group.size
        self._nodes = [nodes_of(rank * replicas, replicas) for rank in range(self.size)]
        self._received: dict[tuple[int, int, int, torch.dtype], Tensor] = {}  # memory of segments

    @property
    def nodes(self) -> int:
        """The number of tree nodes that this instance's replicas add up to."""
        return len(self._nodes[self.rank])

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """Sum the nodes of all instances; every instance receives the sum in its `flats[0]`.

        Args:
            flats: the nodes of this instance, each 1-d; those after the first are overwritten
        """
        self._reduce(flats, even_cuts(flats[0].numel(), self.size), gathers=True)

    def agree(self, commit: Callable[[], None]) -> None:
        """Wait for all instances, call `commit`, and return when it has returned in all of them.

        If `commit` raises an exception in an instance, or the instance ends before, `agree` returns in none:
        each waits for a shard of a sum that every other instance sends after its `commit`.
        """
        zeros = torch.zeros(self.size * _ALIGNED)
        self._reduce([zeros], even_cuts(zeros.numel(), self.size), gathers=True, commit=commit)

    def reduce_scatter(self, flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
        """Sum the nodes of all instances; each instance receives its shard of the sum, in its `flats[0]`.

        Args:
            cuts: element offsets at which the shard of each instance begins, and the end of the last
        """
        self._reduce(flats, cuts, gathers=False)

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> None:
        """Receive the shards of all peers into `flat`, which holds this instance's shard already."""
        sent = [
            self._group.send(flat[start:stop], peer, self._tag + 1)
            for start, stop in _segments(cuts[self.rank], cuts[self.rank + 1], self.size)
            for peer in self._group.peers
        ]
        self._receive_shares(flat, cuts, _GATHER)
        for work, peer in sent:
            self._group.wait(work, peer, _GATHER)

    def broadcast_by_owners(self, values: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each value by that of the instance that owns it; `owners` are ranks."""
        for chosen in by_dtype(values):
            shares = [[values[i] for i in chosen if owners[i] == rank] for rank in range(self.size)]
            cuts = [0, *accumulate(sum(value.numel() for value in share) for share in shares)]
            flat = values[chosen[0]].new_empty(cuts[-1])
            if shares[self.rank]:
                flat[cuts[self.rank] : cuts[self.rank + 1]] = flattened(shares[self.rank])
            self.all_gather(flat, cuts)
            for peer in self._group.peers:
                copy_from_flat(flat[cuts[peer] : cuts[peer + 1]], shares[peer])

    def _reduce(
        self,
        flats: Sequence[Tensor],
        cuts: Sequence[int],
        gathers: bool,
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Sum this instance's shard; with `gathers` also send it to all peers and receive theirs. Calls
        `commit` after the sum of the first segment, and before that is sent."""
        target, group = flats[0], self._group
        sent = [
            group.send(flat[start:stop], peer, self._tag)
            for peer, start, stop in self._shares_of_peers(cuts)
            for flat in flats
        ]
        owned = _segments(cuts[self.rank], cuts[self.rank + 1], self.size)
        coming: deque[list[_Incoming]] = deque()
        for turn in range(len(owned) + _AHEAD):
            if turn < len(owned):
                coming.append(self._receive_parts(turn % (_AHEAD + 1), target, *owned[turn]))
            if turn >= _AHEAD:
                start, stop = owned[turn - _AHEAD]
                self._add(flats, start, stop, coming.popleft())
                if turn == _AHEAD:
                    commit()
                if gathers:
                    sent += [group.send(target[start:stop], peer, self._tag + 1) for peer in group.peers]
        if gathers:
            self._receive_shares(target, cuts, _SUM)
        for work, peer in sent:
            group.wait(work, peer, _SUM)

    def _shares_of_peers(self, cuts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (peer, start, stop) of all segments of peers' shards, ordered by segment, then by peer."""
        found = [
            (turn, peer, start, stop)
            for peer in self._group.peers
            for turn, (start, stop) in enumerate(_segments(cuts[peer], cuts[peer + 1], self.size))
        ]
        return [segment for _, *segment in sorted(found)]  # type: ignore[misc]

    def _receive_parts(self, slot: int, like: Tensor, start: int, stop: int) -> list[_Incoming]:
        """Start to receive a segment of this instance's shard from all peers, into the buffers `slot`."""
        found = []
        for peer in self._group.peers:
            for index in range(len(self._nodes[peer])):
                key = slot, peer, index, like.dtype
                if key not in self._received or self._received[key].numel() < stop - start:
                    self._received[key] = like.new_empty(stop - start)
                value = self._received[key][: stop - start]
                found.append((value, *self._group.receive(value, peer, self._tag)))
        return found

    def _add(self, flats: Sequence[Tensor], start: int, stop: int, parts: list[_Incoming]) -> None:
        """Wait for the parts of a segment, and sum them in the order of the tree into `flats[0]`."""
        stack: list[TreeNode] = []
        arriving = iter(parts)
        for rank, nodes in enumerate(self._nodes):
            for index, (level, number) in enumerate(nodes):
                if rank == self.rank:
                    value = flats[index][start:stop]
                else:
                    value, work, peer = next(arriving)
                    self._group.wait(work, peer, _SUM)
                add(stack, TreeNode(level, number, [value]))
        (result,) = total(stack)
        if result.data_ptr() != flats[0][start:stop].data_ptr():
            flats[0][start:stop].copy_(result)

    def _receive_shares(self, flat: Tensor, cuts: Sequence[int], what: str) -> None:
        """Receive all peers' shards into `flat`. A peer sends its shard after it has received the nodes."""
        works = [
            self._group.receive(flat[start:stop], peer, self._tag + 1)
            for peer, start, stop in self._shares_of_peers(cuts)
        ]
        for work, peer in works:
            self._group.wait(work, peer, what)


def all_gather_rows(group: Connections, ranks: Sequence[int], tag: int, mine: Tensor) -> Tensor:
    """Return the rows of the instances `ranks`, concatenated; all have the shape and dtype of `mine`."""
    parts = {rank: mine if rank == group.rank else torch.empty_like(mine) for rank in ranks}
    received = {rank: part for rank, part in parts.items() if rank != group.rank}
    group.exchange(mine, received, tag, "values that replicas gather")
    return torch.cat([*parts.values()])


def even_cuts(elements: int, size: int) -> list[int]:
    """Return the offsets at which equal shards begin, and the end of the last."""
    share = -(-elements // (size * _ALIGNED)) * _ALIGNED
    return [min(rank * share, elements) for rank in range(size + 1)]


def by_dtype(values: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the values of each dtype."""
    dtypes = dict.fromkeys(value.dtype for value in values)
    return [[i for i, value in enumerate(values) if value.dtype == dtype] for dtype in dtypes]


def _segments(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    step = max(IN_FLIGHT // size, 1 << 12)
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def flattened(values: Sequence[Tensor]) -> Tensor:
    """Return the elements of all values in one new tensor, one after another."""
    return torch.cat([value.reshape(-1) for value in values])


def copy_from_flat(flat: Tensor, values: Sequence[Tensor]) -> None:
    """Copy the elements of a flat tensor into the values, one after another."""
    if values:
        parts = flat.split([value.numel() for value in values])
        shaped = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        torch._foreach_copy_(list(values), shaped)
