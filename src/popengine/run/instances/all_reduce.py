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
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .connections import Connections, Message

IN_FLIGHT = 1 << 21  # elements in transit to an instance at the same time, about
_ALIGNED = 64  # elements: shards begin at multiples, as kernels work on whole vectors
_AHEAD = 4  # segments that are received while one is added up
_SUM, _GATHER = "the sum of gradients", "the exchange of weights"  # purposes of waits, for warnings
_Incoming = list[tuple[Tensor, Message]]  # the peers' nodes of a segment, in the order of the tree


# ---- the tree ------------------------------------------------------------------------------------------------


class TreeNode(NamedTuple):
    """The sum over the 2^level replicas from index · 2^level on, as a list of tensors."""

    level: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  hides the method of tuples
    values: list[Tensor]


def leaves(replicas: Iterable[list[Tensor]], first: int = 0) -> Iterator[TreeNode]:
    """Yield a node for the tensors of each replica; `first` is the number of the first replica."""
    return (TreeNode(0, number, values) for number, values in enumerate(replicas, first))


def merged(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """Return the nodes that remain when complete pairs are replaced by their sums, in the left tensors."""
    found: list[TreeNode] = []
    for node in nodes:
        while found and node.index % 2 and found[-1][:2] == (node.level, node.index - 1):
            left = found.pop().values
            if left:
                torch._foreach_add_(left, node.values)
            node = TreeNode(node.level + 1, node.index // 2, left)
        found.append(node)
    return found


def tree_sum(nodes: Iterable[TreeNode]) -> list[Tensor]:
    """Return the sum of nodes, given from left to right: the first node's tensors, overwritten. The tensors
    of other nodes are overwritten by partial sums."""
    found = merged(nodes)
    while len(found) > 1:
        last = found.pop()
        torch._foreach_add_(found[-1].values, last.values)
    return found[0].values


Shapes = tuple[tuple[tuple[int, int], ...], ...]  # (level, index) of the nodes of each instance


@cache
def nodes_of(instances: int, replicas: int) -> Shapes:
    """Return, for each instance, (level, index) of the tree nodes to which its replicas add up.

    Args:
        replicas: number of replicas in each instance
    """
    return tuple(
        tuple(node[:2] for node in merged(leaves([[]] * replicas, instance * replicas)))
        for instance in range(instances)
    )


# ---- over instances ------------------------------------------------------------------------------------------


class AllReduce:
    """The all-reduce over all instances of a group, and its two halves: reduce-scatter and all-gather.

    Args:
        group: connections to the other instances
        tag:   tag of the messages; no other messages may use `tag` and `tag + 1`
    """

    def __init__(self, group: Connections, tag: int) -> None:
        self._group, self._tag = group, tag
        self._rank, self._size = group.rank, group.size
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}  # memory of segments under way

    def all_reduce(self, flats: Sequence[Tensor]) -> None:
        """Sum over the replicas of all instances; every instance receives the sum in its `flats[0]`.

        Args:
            flats: the values of each replica of this instance that takes part, 1-d; every instance has the
                same number of them; all are overwritten
        """
        elements = flats[0].numel()
        share = -(-elements // (self._size * _ALIGNED)) * _ALIGNED
        cuts = [min(rank * share, elements) for rank in range(self._size + 1)]
        begun = self._reduce(flats, cuts, gathers=True) + self._receive_shards(flats[0], cuts)
        self._group.wait(begun, _SUM)

    def reduce_scatter(self, flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
        """Sum as `all_reduce` does, but each instance receives only its shard of the sum, in `flats[0]`.

        Args:
            cuts: element offsets at which the shard of each instance begins, and the end of the last
        """
        self._group.wait(self._reduce(flats, cuts, gathers=False), _SUM)

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> None:
        """Receive the shards of all peers into `flat`, which holds this instance's shard already."""
        begun = [
            message for own in self._segments(cuts, self._rank) for message in self._send_to_all(flat, *own)
        ]
        self._group.wait(begun + self._receive_shards(flat, cuts), _GATHER)

    def broadcast_by_owners(self, values: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each value, in place, by the value of the instance that owns it; `owners` are ranks."""
        for dtype in dict.fromkeys(value.dtype for value in values):
            shards: list[list[Tensor]] = [[] for _ in range(self._size)]
            for value, owner in zip(values, owners, strict=True):
                if value.dtype == dtype:
                    shards[owner].append(value)
            cuts = [0, *accumulate(sum(value.numel() for value in shard) for shard in shards)]
            flat = torch.empty(cuts[-1], dtype=dtype)
            flats = flat.tensor_split(cuts[1:-1])
            if shards[self._rank]:
                torch.cat([value.reshape(-1) for value in shards[self._rank]], out=flats[self._rank])
            self.all_gather(flat, cuts)
            for peer in self._group.peers:
                parts = flats[peer].split([value.numel() for value in shards[peer]])
                for value, part in zip(shards[peer], parts, strict=True):
                    value.copy_(part.view(value.shape))

    def _reduce(self, flats: Sequence[Tensor], cuts: Sequence[int], gathers: bool) -> list[Message]:
        """Sum this instance's shard, into `flats[0]`; with `gathers` also start to send it to all peers.

        Returns: the messages that are being sent
        """
        first = self._rank * len(flats)
        nodes = [node.values[0] for node in merged(leaves(([flat] for flat in flats), first))]
        target = nodes[0]
        begun = [
            self._group.send(node[start:stop], peer, self._tag)
            for peer, start, stop in self._shards_of_peers(cuts)
            for node in nodes
        ]
        owned, shapes = self._segments(cuts, self._rank), nodes_of(self._size, len(flats))
        coming: deque[_Incoming] = deque()
        for turn in range(len(owned) + _AHEAD):
            if turn < len(owned):
                coming.append(self._receive_nodes(shapes, turn % (_AHEAD + 1), target, *owned[turn]))
            if turn >= _AHEAD:
                start, stop = owned[turn - _AHEAD]
                self._add_nodes(shapes, [node[start:stop] for node in nodes], coming.popleft())
                begun += self._send_to_all(target, start, stop) if gathers else ()
        return begun

    def _receive_nodes(self, shapes: Shapes, slot: int, like: Tensor, start: int, stop: int) -> _Incoming:
        """Start to receive a segment of this instance's shard from all peers, into buffer number `slot`."""
        senders = [peer for peer in self._group.peers for _ in shapes[peer]]
        size, room = len(senders) * (stop - start), self._buffers.get((slot, like.dtype))
        if room is None or room.numel() < size:
            room = self._buffers[slot, like.dtype] = like.new_empty(size)
        return [
            (value, self._group.receive(value, peer, self._tag))
            for peer, value in zip(senders, room[:size].chunk(len(senders)), strict=True)
        ]

    def _add_nodes(self, shapes: Shapes, own: Sequence[Tensor], coming: _Incoming) -> None:
        """Wait for the peers' nodes of a segment, and sum all nodes in the order of the tree, into `own[0]`.

        Args:
            own: this instance's nodes of the segment
        """
        self._group.wait([message for _, message in coming], _SUM)
        mine, others = iter(own), iter([value for value, _ in coming])
        (result,) = tree_sum(
            TreeNode(*place, [next(mine if rank == self._rank else others)])
            for rank, places in enumerate(shapes)
            for place in places
        )
        if result is not own[0]:
            own[0].copy_(result)

    def _send_to_all(self, flat: Tensor, start: int, stop: int) -> list[Message]:
        return [self._group.send(flat[start:stop], peer, self._tag + 1) for peer in self._group.peers]

    def _receive_shards(self, flat: Tensor, cuts: Sequence[int]) -> list[Message]:
        """Start to receive all peers' shards into `flat`. A peer sends its shard after it has summed it."""
        return [
            self._group.receive(flat[start:stop], peer, self._tag + 1)
            for peer, start, stop in self._shards_of_peers(cuts)
        ]

    def _shards_of_peers(self, cuts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (peer, start, stop) of all segments of peers' shards, ordered by segment, then by peer."""
        found = [
            (turn, peer, *segment)
            for peer in self._group.peers
            for turn, segment in enumerate(self._segments(cuts, peer))
        ]
        return [(peer, start, stop) for _, peer, start, stop in sorted(found)]

    def _segments(self, cuts: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the segments in which an instance's shard is sent."""
        step, stop = max(IN_FLIGHT // self._size, 1 << 12), cuts[rank + 1]
        return [(start, min(start + step, stop)) for start in range(cuts[rank], stop, step)]


def all_gather_rows(group: Connections, ranks: Sequence[int], tag: int, mine: Tensor) -> Tensor:
    """Return `mine` of all instances in `ranks`, of one shape and dtype, concatenated in dimension 0."""
    parts = {rank: mine if rank == group.rank else torch.empty_like(mine) for rank in ranks}
    received = {rank: part for rank, part in parts.items() if rank != group.rank}
    group.exchange(mine, received, tag, "values that replicas gather")
    return torch.cat([*parts.values()])
