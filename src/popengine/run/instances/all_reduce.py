"""All-reduce over instances in a fixed order: equal bits in however many instances the replicas are.

A sum over replicas is a balanced binary tree over their numbers in all instances:

    0   1   2   3   4   5   6      neighbours add up first, then their sums; a node without a neighbour goes up as it is
    └─┬─┘   └─┬─┘   └─┬─┘   │
      └───┬───┘       └──┬──┘
          └──────┬───────┘

An instance adds up its own replicas, which are whole nodes of the tree. Then reduce-scatter: each instance receives the
others' nodes for its share of the elements, and adds them up; then all-gather: it sends its share to all others. Shares
travel in segments, so that additions and both directions overlap. Each instance sends 2 (N - 1) / N of the elements, as
a ring does, in 2 turns instead of 2 (N - 1). Gloo's all_to_all is not used: it took 2.7 to 3.7 times as long as gloo's
all_reduce, whose own order of additions depends on the number of instances.
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

IN_FLIGHT = 1 << 21  # elements that are on their way to an instance at the same time, about
_ALIGNED = 64  # elements: kernels work on whole vectors, so shares begin at multiples of one
_AHEAD = 4  # segments that are received while one is added up
_SUM, _GATHER = "the sum of gradients", "the exchange of weights"  # what peers are waited for, in warnings
_Incoming = tuple[Tensor, dist.Work, int]  # a node of a segment on its way, and the peer that sends it


# ---- the tree ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TreeNode:
    """The sum over the replicas from index · 2^level on, as tensors that are added to in place."""

    level: int
    index: int
    values: list[Tensor]


def add(stack: list[TreeNode], node: TreeNode) -> None:
    """Put the next node on a stack, and replace neighbours on it by their sum."""
    while stack and node.index % 2 and stack[-1].level == node.level and stack[-1].index == node.index - 1:
        left = stack.pop()
        if left.values:
            torch._foreach_add_(left.values, node.values)
        node = TreeNode(node.level + 1, node.index // 2, left.values)
    stack.append(node)


def total(stack: list[TreeNode]) -> list[Tensor]:
    """Return the sum of all nodes on a stack, once the last one is there."""
    while len(stack) > 1:
        last = stack.pop()
        torch._foreach_add_(stack[-1].values, last.values)
    return stack.pop().values


def nodes_of(start: int, count: int) -> list[tuple[int, int]]:
    """Return level and index of the nodes that successive replicas add up to without any others."""
    stack: list[TreeNode] = []
    for replica in range(start, start + count):
        add(stack, TreeNode(0, replica, []))
    return [(node.level, node.index) for node in stack]


# ---- over instances ------------------------------------------------------------------------------------------


class AllReduce:
    """Sums over all instances of a group.

    Args:
        group:    connections to the other instances
        tag:      of the messages: this one and the next are used by no one else
        replicas: of each instance that take part
    """

    def __init__(self, group: Connections, tag: int, replicas: int) -> None:
        self._group, self._tag = group, tag
        self.rank, self.size = group.rank, group.size
        self._nodes = [nodes_of(rank * replicas, replicas) for rank in range(self.size)]
        self._received: dict[tuple[int, int, int, torch.dtype], Tensor] = {}  # memory of segments

    @property
    def nodes(self) -> int:
        """How many nodes of the tree this instance's replicas add up to."""
        return len(self._nodes[self.rank])

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """Sum the nodes of all instances into the first of this one's, in all of them.

        Args:
            flats: the nodes of this instance, each 1-dimensional; those after the first are overwritten
        """
        self._reduce(flats, even_cuts(flats[0].numel(), self.size), gathers=True)

    def agree(self, commit: Callable[[], None]) -> None:
        """Return when all instances have come here and `commit` has returned in all of them.

        It is called when all have come. Where it raises an exception, or this instance ends before, no instance
        returns: each waits for a share of a sum that every other instance sends after its `commit`.
        """
        zeros = torch.zeros(self.size * _ALIGNED)
        self._reduce([zeros], even_cuts(zeros.numel(), self.size), gathers=True, commit=commit)

    def reduce_scatter(self, flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
        """As `all_reduce`, but each instance has the sum only between its own two cuts.

        Args:
            cuts: where the share of each instance begins, and the end of the last
        """
        self._reduce(flats, cuts, gathers=False)

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> None:
        """Fill a tensor with the shares of all instances; this one's is there."""
        sent = [
            self._group.send(flat[start:stop], peer, self._tag + 1)
            for start, stop in _segments(cuts[self.rank], cuts[self.rank + 1], self.size)
            for peer in self._group.peers
        ]
        self._receive_shares(flat, cuts, _GATHER)
        for work, peer in sent:
            self._group.wait(work, peer, _GATHER)

    def broadcast_by_owners(self, values: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each value by that of the instance that owns it."""
        for chosen in by_dtype(values):
            shares = [[values[i] for i in chosen if owners[i] == rank] for rank in range(self.size)]
            cuts = [0, *accumulate(sum(value.numel() for value in share) for share in shares)]
            flat = values[chosen[0]].new_empty(cuts[-1])
            if shares[self.rank]:
                flat[cuts[self.rank] : cuts[self.rank + 1]] = _flat(shares[self.rank])
            self.all_gather(flat, cuts)
            for peer in self._group.peers:
                _unflat(flat[cuts[peer] : cuts[peer + 1]], shares[peer])

    def _reduce(
        self,
        flats: Sequence[Tensor],
        cuts: Sequence[int],
        gathers: bool,
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Sum this instance's share; `gathers`: and send each segment of the sum to all others at once, after `commit`
        was called."""
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
        """Return (peer, start, stop) of the segments of all other instances' shares, one of each in turn."""
        found = [
            (turn, peer, start, stop)
            for peer in self._group.peers
            for turn, (start, stop) in enumerate(_segments(cuts[peer], cuts[peer + 1], self.size))
        ]
        return [segment for _, *segment in sorted(found)]  # type: ignore[misc]

    def _receive_parts(self, slot: int, like: Tensor, start: int, stop: int) -> list[_Incoming]:
        """Begin to receive a segment of this instance's share from all others."""
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
        """Sum a segment in the order of the tree, into the first of `flats`."""
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
        """Receive the shares of all others, in place: a peer sends its sum after it has received this one's part."""
        works = [
            self._group.receive(flat[start:stop], peer, self._tag + 1)
            for peer, start, stop in self._shares_of_peers(cuts)
        ]
        for work, peer in works:
            self._group.wait(work, peer, what)


def all_gather_rows(group: Connections, ranks: Sequence[int], tag: int, mine: Tensor) -> Tensor:
    """Return the rows of some instances, one after another; each has as many."""
    parts = {rank: mine if rank == group.rank else torch.empty_like(mine) for rank in ranks}
    received = {rank: part for rank, part in parts.items() if rank != group.rank}
    group.exchange(mine, received, tag, "values that replicas gather")
    return torch.cat([*parts.values()])


def even_cuts(elements: int, size: int) -> list[int]:
    """Return where equal shares begin, and the end of the last."""
    share = -(-elements // (size * _ALIGNED)) * _ALIGNED
    return [min(rank * share, elements) for rank in range(size + 1)]


def by_dtype(values: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the values of each dtype."""
    dtypes = dict.fromkeys(value.dtype for value in values)
    return [[i for i, value in enumerate(values) if value.dtype == dtype] for dtype in dtypes]


def _segments(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    step = max(IN_FLIGHT // size, 1 << 12)
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])


def _unflat(flat: Tensor, values: Sequence[Tensor]) -> None:
    """Copy a flat tensor into values of any shapes."""
    if values:
        parts = flat.split([value.numel() for value in values])
        shaped = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        torch._foreach_copy_(list(values), shaped)
