"""Buffers that each micro-batch changes, such as batch norm's running statistics, are handed on from one micro-batch to
the next as soon as they are there. So micro-batches run side by side, each a little behind the one before it; else the
forward of one would wait for the end of another's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from popengine.ir import Piece, Plan
from popengine.settings import Settings

from ..backends import is_eager
from ..backends.eager import Code, build

Chain = Mapping[str, str]  # from a buffer's name in a piece to that of its next value


def chains(plan: Plan, settings: Settings) -> Mapping[int, Chain]:
    """Of each piece the buffers that it alone reads and changes."""
    if not settings.training or not is_eager(settings) or settings.finite_checks:
        return {}
    signature, pieces = plan.partition.signature, plan.partition.pieces
    slots = {slot.key: slot.name for slot in signature.slots if slot.role == "buffer"}
    changed = {slots[result.key]: result.name for result in signature.results if result.kind == "buffer"}
    readers: dict[str, list[int]] = {name: [] for name in changed}
    for number, piece in enumerate(pieces):
        for name in readers.keys() & piece.reads:
            readers[name].append(number)
    found: dict[int, dict[str, str]] = {}
    for old, new in changed.items():
        for number in readers[old] if len(readers[old]) == 1 else ():
            if not pieces[number].gathers and any(line.name == new for line in pieces[number].lines):
                found.setdefault(number, {})[old] = new
    return found


def code_of(piece: Piece, chain: Chain, device: torch.device) -> Code:
    """The piece as a generator. It yields (a buffer's name, None), and is sent its value; and (the name, its next
    value)."""
    after: dict[int, str] = {}
    asked: set[str] = set()
    old = {new: name for name, new in chain.items()}
    for place, line in enumerate(piece.lines):
        for name in line.operands():
            if name in chain and name not in asked:
                asked.add(name)
                after[place - 1] = after.get(place - 1, "") + f"; {name} = yield {name!r}, None"
        if line.name in old:
            after[place] = after.get(place, "") + f"; yield {old[line.name]!r}, {line.name}"
    return build(piece, device=device, after=after)
