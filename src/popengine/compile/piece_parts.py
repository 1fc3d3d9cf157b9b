"""Cut pieces into parts where a task would wait inside a piece, or where other tasks wait for its first half.

A part is a piece itself. A forward or backward is cut
    around an operation that gathers values of other replicas;
    before an operation that reads a buffer which each micro-batch changes (batch norm's running statistics), so that
        micro-batches run in parallel, each one part behind the previous one;
    where a bucket of gradients is complete, so that processes exchange it while the rest of the backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from ..ir import Partition, Piece, Signature
from ..piece import GATHER
from ..settings import Settings

BUCKET = 4 << 20  # bytes of gradients that processes exchange together, roughly
_CLOSE = 4  # lines: one cut serves buffers that are read within this distance


def cut_pieces(partition: Partition, settings: Settings) -> Partition:
    """Return the partition with its pieces cut into parts: around gathers, and on the eager backend also before
    reads of changed buffers (in training with accumulation) and after buckets (with several processes)."""
    changed = partition.signature.changed_buffers
    several = settings.training and settings.counts.accumulation > 1
    chained = changed if several and settings.is_eager and not settings.finite_checks else frozenset()
    sizes = _gradient_sizes(partition.signature, settings) if settings.is_eager else {}
    pieces: list[Piece] = []
    for piece in partition.pieces:
        indices = _cut_indices(piece, chained if piece.phase == "F" else frozenset(), sizes)
        pieces += _cut_piece(piece, sorted(indices - {0, len(piece.lines)}), changed)
    return replace(partition, pieces=tuple(pieces))


def _gradient_sizes(signature: Signature, settings: Settings) -> dict[str, int]:
    """Return the bytes of each gradient's sum, by name; {} unless several processes exchange gradients."""
    if not settings.training or settings.counts.instances == 1 or settings.optimizer is None:
        return {}
    return {
        result.name: torch.Size(result.shape).numel() * settings.optimizer.sum_dtype(result.dtype).itemsize
        for result in signature.results
        if result.kind == "gradient"
    }


def _cut_indices(piece: Piece, chained: frozenset[str], sizes: Mapping[str, int]) -> set[int]:
    """Return the indices of the lines before which a piece is cut.

    Args:
        chained: names of changed buffers: cut before the first read of each (one cut for reads within `_CLOSE` lines)
        sizes:   bytes of gradients, by name: cut where the gradients since the last such cut reach `BUCKET` bytes
    """
    indices: set[int] = set()
    seen: set[str] = set()
    latest, size = -_CLOSE, 0
    for index, line in enumerate(piece.lines):
        if line.call == GATHER:
            indices |= {index, index + 1}
        new = chained.intersection(line.operands()) - seen
        seen |= new
        if new and index - latest >= _CLOSE:
            latest = index
            indices.add(index)
        size += sizes.get(line.name, 0) if line.name in piece.writes else 0
        if size >= BUCKET:
            indices.add(index + 1)
            size = 0
    return indices


def _cut_piece(piece: Piece, indices: Sequence[int], changed: frozenset[str]) -> Iterator[Piece]:
    """Yield the parts of a piece, cut before the lines at `indices`; the piece itself if there are none.

    A value that the piece both reads and writes, and a changed buffer that several parts of a forward read, is
    written by the first part that reads it.
    """
    if not indices:
        yield piece
        return
    bounds = [0, *indices, len(piece.lines)]
    parts = [piece.lines[start:stop] for start, stop in pairwise(bounds)]
    used = [{name for line in lines for name in line.operands()} for lines in parts]
    # A forward reads a changed buffer once, since the next micro-batch may have replaced it meanwhile.
    several = {n for n in changed if piece.phase == "F" and sum(n in names for names in used) > 1}
    handed = [name for name in piece.reads if name in piece.writes or name in several]
    first = {name: next((number for number, names in enumerate(used) if name in names), 0) for name in handed}
    for number, lines in enumerate(parts):
        made = {line.name for line in lines}
        later = set().union(*used[number + 1 :])
        through = [name for name in handed if first[name] == number]
        reads = dict.fromkeys(n for n in piece.reads if n in used[number] or n in through)
        reads |= dict.fromkeys(name for line in lines for name in line.operands() if name not in made)
        writes = [line.name for line in lines if line.name in later or line.name in piece.writes] + through
        yield Piece(piece.phase, piece.stage, tuple(reads), tuple(writes), lines, number)
