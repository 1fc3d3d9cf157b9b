"""Buckets: the gradients that instances exchange together, and the memory in which these lie one after another.

The gradients of a bucket are complete at about the same time. So it can be on its way while the rest of the backward
runs; and nothing is copied together before it is sent, nor apart when the sum is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from popengine.ir import Plan
from popengine.piece import forgotten

from ..backends.eager import Code, build

SIZE = 4 << 20  # bytes, about
_ALIGNED = 64  # bytes; a gradient begins as torch's own memory does

Owner = Callable[[str], int | None]


class Gradient(NamedTuple):
    """A gradient as a piece makes it: the number of the line (-1: it is given), its name there, its parameter."""

    line: int
    name: str
    key: str


@dataclass(frozen=True)
class Bucket:
    """Gradients of one piece and one dtype, of parameters that have one value in the same replicas.

    cuts: where the share of each instance begins, and the end; None: it needs the sum of all of them
    """

    piece: int
    gradients: tuple[Gradient, ...]  # in the order of their memory
    members: tuple[int, ...]
    flat: Tensor
    cuts: tuple[int, ...] | None

    @property
    def complete(self) -> int:
        """The line of the piece after which all of its gradients are there."""
        return max(gradient.line for gradient in self.gradients)


def buckets_of(
    plan: Plan,
    ipu: int,
    sums: dict[str, Tensor],
    members: Callable[[str], tuple[int, ...]],
    owner: Owner,
    instances: int,
) -> list[Bucket]:
    """The buckets of an ipu, in the order in which they are complete. Puts the sums into their memory.

    Args:
        sums:    by parameter
        members: the replicas of this instance that have the same value of a parameter
        owner:   the instance that alone needs the sum of a parameter's gradients; None: all do
    """
    found: list[Bucket] = []
    for piece, gradients in _gradients(plan, ipu):
        kinds: dict[tuple[tuple[int, ...], torch.dtype, bool], list[Gradient]] = {}
        for one in gradients:
            kind = members(one.key), sums[one.key].dtype, owner(one.key) is not None
            kinds.setdefault(kind, []).append(one)
        mine = [
            _bucket(piece, part, together, sums, owner if is_owned else None, instances)
            for (together, _, is_owned), some in kinds.items()
            for part in _parts(some, sums)
        ]
        found += sorted(mine, key=lambda bucket: bucket.complete)
    return found


def _gradients(plan: Plan, ipu: int) -> Iterator[tuple[int, list[Gradient]]]:
    """The gradients that each piece makes, in the order of its lines."""
    partition = plan.partition
    results = [result for result in partition.signature.results if result.kind == "gradient"]
    for number, piece in enumerate(partition.pieces):
        if partition.ipus[piece.stage] == ipu:
            lines = {line.name: place for place, line in enumerate(piece.lines)}
            mine = [r for r in results if r.name in piece.writes]
            yield number, sorted(Gradient(lines.get(r.name, -1), r.name, r.key) for r in mine)


def _parts(gradients: Sequence[Gradient], sums: Mapping[str, Tensor]) -> Iterator[list[Gradient]]:
    part: list[Gradient] = []
    size = 0
    for one in gradients:
        part.append(one)
        size += sums[one.key].nbytes
        if size >= SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _bucket(
    piece: int,
    gradients: Sequence[Gradient],
    members: tuple[int, ...],
    sums: dict[str, Tensor],
    owner: Owner | None,
    instances: int,
) -> Bucket:
    like = sums[gradients[0].key]
    step = max(1, _ALIGNED // like.element_size())
    shares: list[list[Gradient]] = [list(gradients)]
    if owner is not None:
        shares = [[one for one in gradients if owner(one.key) == place] for place in range(instances)]
    cuts, starts = [0], []
    for share in shares:
        end = cuts[-1]
        for one in share:
            starts.append(end)
            end += -(-sums[one.key].numel() // step) * step
        cuts.append(end)
    flat = torch.zeros(cuts[-1], dtype=like.dtype, device=like.device)
    ordered = tuple(one for share in shares for one in share)
    for one, start in zip(ordered, starts, strict=True):
        old = sums[one.key]
        sums[one.key] = torch.as_strided(flat, old.shape, old.stride(), start)
    return Bucket(piece, ordered, members, flat, None if owner is None else tuple(cuts))


def handing(
    plan: Plan,
    buckets: Sequence[Bucket],
    freed: frozenset[str],
    hand_over: Callable[[int, tuple[Tensor, ...]], None],
) -> dict[int, Code]:
    """The pieces that make gradients, as they run on the last micro-batch of a step: each bucket is handed over as soon
    as it is complete, and its gradients are forgotten.

    Args:
        freed: names that nobody asks a piece for but to add them up
    """
    calls: dict[int, dict[int, str]] = {}
    for number, bucket in enumerate(buckets):
        lines = plan.partition.pieces[bucket.piece].lines[bucket.complete + 1 :]
        later = {name for line in lines for name in line.operands()}
        later |= {gradient.name for other in buckets[number + 1 :] for gradient in other.gradients}
        names = [gradient.name for gradient in bucket.gradients]
        dying = freed.intersection(names) - later  # two parameters may have one gradient
        after = calls.setdefault(bucket.piece, {})
        call = f"; hand_over({number}, ({', '.join(names)},))" + forgotten(sorted(dying))
        after[bucket.complete] = after.get(bucket.complete, "") + call
    return {
        piece: build(plan.partition.pieces[piece], after=after, hand_over=hand_over)
        for piece, after in calls.items()
    }
