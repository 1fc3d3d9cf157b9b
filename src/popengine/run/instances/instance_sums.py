"""Sums over instances: each instance adds up a share of the elements, and sends what they come to.

All send each other's shares at the same time, in pieces, so that adding up goes on while the rest is on its way. An
instance sends and receives 2 (N - 1) / N of the elements, which is what a ring does, in two turns instead of 2 (N - 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .tree_sums import Node, add, nodes_of, total

BUCKET = 1 << 21  # elements that are on their way to an instance at the same time, about
_ALIGNED = 64  # elements; kernels work on whole vectors, so shares begin with one
_AHEAD = 4  # pieces that are received while one is added up


class Instances:
    """One ipu's sums over all instances.

    Args:
        meeting:  how this instance meets the others
        tag:      of the messages, on which nobody else sends
        replicas: in this instance, that have the same weights
    """

    def __init__(self, meeting: Any, tag: int, replicas: int) -> None:
        self._meeting, self._tag = meeting, tag
        self.place, self.size, self.replicas = meeting.place, meeting.size, replicas
        self._nodes = [nodes_of(place * replicas, replicas) for place in range(self.size)]
        self._spare: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._others = meeting.others

    @property
    def nodes(self) -> int:
        """How many sums this instance's replicas come to, which the tree adds up only later."""
        return len(self._nodes[self.place])

    def sum(self, nodes: Sequence[Node]) -> None:
        """Add up the nodes of all instances, into the first one's values; the others' are lost."""
        values = nodes[0].values
        for dtype in dict.fromkeys(value.dtype for value in values):
            chosen = [index for index, value in enumerate(values) if value.dtype == dtype]
            flats = [_flat([node.values[i] for i in chosen]) for node in nodes]
            self.sum_of_flats(flats)
            _unflat(flats[0], [values[i] for i in chosen])

    def sum_of_flats(self, flats: Sequence[Tensor], cuts: Sequence[int] | None = None) -> None:
        """Add up the nodes of all instances, each 1-dimensional, into the first one; the others are lost.

        Args:
            cuts: where the share begins of which each instance alone receives the sum, and the end; None: all receive
                all of it
        """
        here = [flat.cpu() for flat in flats]
        self.reduce(here, cuts or even_cuts(here[0].numel(), self.size), gathers=cuts is None)
        if here[0] is not flats[0]:
            flats[0].copy_(here[0])

    def share(self, values: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Let each value be that of the instance that owns it, everywhere."""
        for chosen, cuts in self._flats(values, owners):
            parts = [[values[i] for i in chosen if owners[i] == place] for place in range(self.size)]
            flat = torch.empty(cuts[-1], dtype=values[chosen[0]].dtype)
            if parts[self.place]:
                flat[cuts[self.place] : cuts[self.place + 1]] = _flat(parts[self.place])
            self.gather(flat, cuts)
            for other in self._others:
                _unflat(flat[cuts[other] : cuts[other + 1]], parts[other])

    def _flats(
        self, values: Sequence[Tensor], owners: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Which values travel together: those of one dtype, in the order of their owners. And where each owner's
        share begins, and the end."""
        for dtype in dict.fromkeys(value.dtype for value in values):
            mine = [index for index, value in enumerate(values) if value.dtype == dtype]
            shares = [[index for index in mine if owners[index] == place] for place in range(self.size)]
            sizes = [sum(values[index].numel() for index in share) for share in shares]
            yield [index for share in shares for index in share], [0, *accumulate(sizes)]

    def reduce(self, flats: Sequence[Tensor], cuts: Sequence[int], gathers: bool) -> None:
        """Add up each instance's share there; `gathers`: then send it to all others.

        Args:
            flats: a node each of this instance's sum, 1-dimensional; the first one takes the result
            cuts:  where shares begin, and the end
        """
        target = flats[0]
        sent = [
            self._meeting.send(flat[start:stop], other, self._tag)
            for other, start, stop in self._in_turn(cuts)
            for flat in flats
        ]
        owned = list(_pieces(cuts[self.place], cuts[self.place + 1], self.size))
        coming: deque[list[tuple[int, Tensor, Any]]] = deque()
        for turn in range(len(owned) + _AHEAD):
            if turn < len(owned):
                coming.append(self._receive_parts(turn % (_AHEAD + 1), target, *owned[turn]))
            if turn >= _AHEAD:
                start, stop = owned[turn - _AHEAD]
                self._add(flats, start, stop, coming.popleft())
                if gathers:
                    sent += [self._meeting.send(target[start:stop], o, self._tag + 1) for o in self._others]
        if gathers:
            self._receive_shares(target, cuts)
        for work, other in sent:
            self._meeting.wait(work, other, "the sum of gradients")

    def gather(self, flat: Tensor, cuts: Sequence[int]) -> None:
        """Send this instance's share to all others, and take theirs."""
        sent = [
            self._meeting.send(flat[start:stop], other, self._tag + 1)
            for start, stop in _pieces(cuts[self.place], cuts[self.place + 1], self.size)
            for other in self._others
        ]
        self._receive_shares(flat, cuts)
        for work, other in sent:
            self._meeting.wait(work, other, "the exchange of weights")

    def _in_turn(self, cuts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The pieces of all other instances' shares, a piece of each at a time: who, start, stop."""
        found = {other: list(_pieces(cuts[other], cuts[other + 1], self.size)) for other in self._others}
        for turn in range(max(map(len, found.values()), default=0)):
            for other, pieces in found.items():
                if turn < len(pieces):
                    yield other, *pieces[turn]

    def _receive_parts(self, slot: int, like: Tensor, start: int, stop: int) -> list[tuple[int, Tensor, Any]]:
        """Begin to receive one piece of this instance's share from all others, one tensor a node."""
        found = []
        for other in self._others:
            for index in range(len(self._nodes[other])):
                key = (slot, other * 64 + index, like.dtype)
                if key not in self._spare or self._spare[key].numel() < stop - start:
                    self._spare[key] = like.new_empty(stop - start)
                value = self._spare[key][: stop - start]
                work, _ = self._meeting.receive(value, other, self._tag)
                found.append((other, value, work))
        return found

    def _add(
        self, flats: Sequence[Tensor], start: int, stop: int, parts: list[tuple[int, Tensor, Any]]
    ) -> None:
        """Add up one piece, in the order of the tree, into the first of `flats`."""
        stack: list[Node] = []
        arriving = iter(parts)
        for place, nodes in enumerate(self._nodes):
            for index, (level, number) in enumerate(nodes):
                if place == self.place:
                    value = flats[index][start:stop]
                else:
                    other, value, work = next(arriving)
                    self._meeting.wait(work, other, "the sum of gradients")
                add(stack, Node(level, number, [value]))
        (result,) = total(stack)
        if result.data_ptr() != flats[0][start:stop].data_ptr():
            flats[0][start:stop].copy_(result)

    def _receive_shares(self, flat: Tensor, cuts: Sequence[int]) -> None:
        # Received in place: whoever sends a sum has had this instance's part of it.
        works = [
            self._meeting.receive(flat[start:stop], other, self._tag + 1)
            for other, start, stop in self._in_turn(cuts)
        ]
        for work, other in works:
            self._meeting.wait(work, other, "the sum of gradients")


def gather_among(meeting: Any, places: Sequence[int], tag: int, mine: Tensor) -> Tensor:
    """The rows of some instances, one after another; each has as many."""
    here = mine.cpu()
    parts = [here if place == meeting.place else torch.empty_like(here) for place in places]
    others = [(place, part) for place, part in zip(places, parts, strict=True) if part is not here]
    begun = [meeting.send(here, place, tag) for place, _ in others]
    begun += [meeting.receive(part, place, tag) for place, part in others]
    for work, other in begun:
        meeting.wait(work, other, "values that replicas gather")
    return torch.cat(parts).to(mine.device)


def even_cuts(elements: int, size: int) -> list[int]:
    """Where equal shares begin, and the end."""
    share = -(-elements // (size * _ALIGNED)) * _ALIGNED
    return [min(place * share, elements) for place in range(size + 1)]


def _pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(BUCKET // size, 1 << 12)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _flat(values: Sequence[Tensor]) -> Tensor:
    """Values of one dtype as one tensor in the host's memory."""
    return torch.cat([value.reshape(-1) for value in values]).cpu()


def _unflat(flat: Tensor, values: Sequence[Tensor]) -> None:
    if values:
        parts = flat.to(values[0].device).split([value.numel() for value in values])
        torch._foreach_copy_(
            list(values), [part.view(v.shape) for part, v in zip(parts, values, strict=True)]
        )
