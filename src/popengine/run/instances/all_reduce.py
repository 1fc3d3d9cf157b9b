"""All-reduce over instances in a fixed order: the same bits for every division of replicas into instances.

A sum over replicas is a balanced binary tree over their global numbers:

    0   1   2   3   4   5   6      neighbours add up first, then their sums; a single node moves up
    └─┬─┘   └─┬─┘   └─┬─┘   │
      └───┬───┘       └──┬──┘
          └──────┬───────┘

An instance adds up its own replicas, into whole nodes of the tree. Then reduce-scatter: each instance
receives the peers' nodes for its shard of the elements, and adds them up; then all-gather: it sends its shard
to all peers. Shards are sent in segments, so that additions and both directions overlap. Each instance sends
2 (N - 1) / N of the elements, as in a ring, but in 2 turns instead of 2 (N - 1).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .connections import Connections, Message

_SEGMENT = 1 << 21  # elements that are sent to all instances in a segment, about
_ALIGNED = 64  # elements: shards begin at multiples, as kernels work on whole vectors
_AHEAD = 4  # segments that are received while another segment is added up
_SUM, _GATHER = "the sum of gradients", "the exchange of weights"  # purposes of waits, for warnings
_Incoming = list[tuple[Tensor, Message]]  # the peers' nodes for one segment, in the order of the tree


# ---- the tree ------------------------------------------------------------------------------------------------


class TreeNode(NamedTuple):
    """A node of the tree: the sums, one per tensor, over the 2^level replicas from index · 2^level on."""

    level: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  hides the method of tuples
    values: list[Tensor]


def leaf_nodes(replicas: Iterable[list[Tensor]], first: int = 0) -> Iterator[TreeNode]:
    """Yield a tree node for each replica's tensors; `first` is the first replica's global number."""
    return (TreeNode(0, number, values) for number, values in enumerate(replicas, first))


def sum_siblings(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """Sum pairs of siblings into their parents, in the left one's tensors, and return the nodes that remain."""
    roots: list[TreeNode] = []
    for node in nodes:
        while roots and node.index % 2 and roots[-1][:2] == (node.level, node.index - 1):
            left = roots.pop().values
            _add_values(left, node.values)
            node = TreeNode(node.level + 1, node.index // 2, left)
        roots.append(node)
    return roots


def tree_sum(nodes: Iterable[TreeNode]) -> list[Tensor]:
    """Sum all nodes, from left to right, into the first node's tensors, and return these; others may be overwritten."""
    roots = sum_siblings(nodes)
    while len(roots) > 1:
        last = roots.pop()
        _add_values(roots[-1].values, last.values)
    return roots[0].values


def _add_values(sums: list[Tensor], values: list[Tensor]) -> None:
    """Add values, which may be on another device, to sums, which are all on one."""
    if sums and sums[0].device != values[0].device:
        values = [value.to(sums[0].device) for value in values]
    if sums:
        torch._foreach_add_(sums, values)


_Positions = tuple[tuple[tuple[int, int], ...], ...]  # by instance, (level, index) of each of its nodes


@cache
def _node_positions(instances: int, replicas: int) -> _Positions:
    """Return for each instance (level, index) of the nodes into which it sums its `replicas` replicas."""
    starts = range(0, instances * replicas, replicas)
    nodes = [sum_siblings(leaf_nodes([[]] * replicas, start)) for start in starts]
    return tuple(tuple(node[:2] for node in of_instance) for of_instance in nodes)


# ---- over instances ------------------------------------------------------------------------------------------


class AllReduce:
    """The all-reduce, reduce-scatter and broadcast over a group, or over the instances with these `ranks` in it, which
    are numbered from 0 here. No other messages may have `tag` and `tag + 1`."""

    def __init__(self, group: Connections, tag: int, ranks: Sequence[int] = ()) -> None:
        self._group, self._tag, self._ranks = group, tag, ranks or range(group.size)
        self._rank, self._size = self._ranks.index(group.rank), len(self._ranks)
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        # By (number, dtype): memory for the segments that are being received.
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """Sum over the replicas of all instances, and write the sum into `flats[0]` of every instance. `flats`, 1-d,
        are the values of this instance's replicas (in all instances the same number); they are overwritten."""
        elements = flats[0].numel()
        share = -(-elements // (self._size * _ALIGNED)) * _ALIGNED
        cuts = [min(rank * share, elements) for rank in range(self._size + 1)]
        begun = self._reduce(flats, cuts, gathers=True)
        begun += [
            self._receive(flats[0][start:stop], peer, self._tag + 1)
            for peer, start, stop in self._shards_of_peers(cuts)
        ]
        self._group.wait(begun, _SUM)

    def reduce_scatter(self, flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
        """Sum as `all_reduce` does, but write only this instance's shard, k's from `cuts[k]` to `cuts[k + 1]`."""
        self._group.wait(self._reduce(flats, cuts, gathers=False), _SUM)

    def broadcast_by_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each contiguous tensor by its owner's. `owners` are ranks, and must be equal in all instances."""
        begun: list[Message] = []
        for tensor, owner in zip(tensors, owners, strict=True):
            if owner == self._rank:
                begun += self._send_to_all(tensor)
            else:
                begun.append(self._receive(tensor, owner, self._tag + 1))
        self._group.wait(begun, _GATHER)

    def _reduce(self, flats: Sequence[Tensor], cuts: Sequence[int], gathers: bool) -> list[Message]:
        """Sum this instance's shard over all replicas into `flats[0]`, and return the messages that are still being
        sent: this instance's terms of the peers' shards, and with `gathers` the sum, to all peers."""
        first = self._rank * len(flats)
        nodes = [node.values[0] for node in sum_siblings(leaf_nodes(([flat] for flat in flats), first))]
        target = nodes[0]
        begun = [
            self._send(node[start:stop], peer, self._tag)
            for peer, start, stop in self._shards_of_peers(cuts)
            for node in nodes
        ]
        owned, positions = self._segments(cuts, self._rank), _node_positions(self._size, len(flats))
        coming: deque[_Incoming] = deque()
        for turn in range(len(owned) + _AHEAD):
            if turn < len(owned):
                start, stop = owned[turn]
                coming.append(self._receive_nodes(positions, turn % (_AHEAD + 1), target, stop - start))
            if turn >= _AHEAD:
                start, stop = owned[turn - _AHEAD]
                self._add_nodes(positions, [node[start:stop] for node in nodes], coming.popleft())
                begun += self._send_to_all(target[start:stop]) if gathers else ()
        return begun

    def _receive_nodes(self, positions: _Positions, number: int, like: Tensor, length: int) -> _Incoming:
        """Start to receive the peers' nodes of a segment of `length` elements into buffer number `number`."""
        senders = [peer for peer in self._peers for _ in positions[peer]]
        size, buffer = len(senders) * length, self._buffers.get((number, like.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[number, like.dtype] = like.new_empty(size)
        return [
            (value, self._receive(value, peer, self._tag))
            for peer, value in zip(senders, buffer[:size].chunk(len(senders)), strict=True)
        ]

    def _add_nodes(self, positions: _Positions, local: Sequence[Tensor], coming: _Incoming) -> None:
        """Wait for the peers' nodes of a segment, and sum these and this instance's nodes into `local[0]`."""
        self._group.wait([message for _, message in coming], _SUM)
        local_values, received = iter(local), iter([value for value, _ in coming])
        (result,) = tree_sum(
            TreeNode(*position, [next(local_values if rank == self._rank else received)])
            for rank, of_instance in enumerate(positions)
            for position in of_instance
        )
        if result is not local[0]:
            local[0].copy_(result)

    def _send_to_all(self, value: Tensor) -> list[Message]:
        """Start to send a tensor to all peers, and return the messages."""
        return [self._send(value, peer, self._tag + 1) for peer in self._peers]

    def _send(self, value: Tensor, peer: int, tag: int) -> Message:
        return self._group.send(value, self._ranks[peer], tag)

    def _receive(self, value: Tensor, peer: int, tag: int) -> Message:
        return self._group.receive(value, self._ranks[peer], tag)

    def _shards_of_peers(self, cuts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (peer, start, stop) of all segments of peers' shards, ordered by segment, then by peer."""
        segments = [
            (turn, peer, *segment)
            for peer in self._peers
            for turn, segment in enumerate(self._segments(cuts, peer))
        ]
        return [(peer, start, stop) for _, peer, start, stop in sorted(segments)]

    def _segments(self, cuts: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each segment in which the shard of instance `rank` is sent."""
        step, stop = max(_SEGMENT // self._size, 1 << 12), cuts[rank + 1]
        return [(start, min(start + step, stop)) for start in range(cuts[rank], stop, step)]


def all_gather_rows(group: Connections, ranks: Sequence[int], tag: int, local: Tensor) -> Tensor:
    """Return the tensors `local` of all instances in `ranks` (all must call this), concatenated in dimension 0."""
    values = {rank: local if rank == group.rank else torch.empty_like(local) for rank in ranks}
    group.all_gather(values, tag, "values that replicas gather")
    return torch.cat([*values.values()])
