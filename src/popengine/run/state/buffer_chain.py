"""Buffers that each micro-batch changes, such as batch norm's running statistics, are handed on from one micro-batch to
the next as soon as they are there. So micro-batches run side by side, each a little behind the one before it; else the
forward of one would wait for the end of another's.
"""

from __future__ import annotations

from collections.abc import Mapping

from popengine.ir import Compute, Keep, Piece, Plan
from popengine.settings import Settings

from ..backends import is_eager
from ..backends.eager import Code, build

Chain = Mapping[str, str]  # from a buffer's name in a piece to that of its next value


def chains(plan: Plan, settings: Settings) -> dict[int, Chain]:
    """Of each piece the buffers that it alone reads and changes."""
    if not settings.training or not is_eager(settings) or settings.finite_checks:
        return {}
    slots = {slot.key: slot.name for slot in plan.partition.signature.slots if slot.role == "buffer"}
    changed: dict[int, dict[str, str]] = {}
    readers: dict[str, set[int]] = {}
    for program in plan.programs.values():
        piece = -1
        for instruction in program:
            if isinstance(instruction, Compute):
                piece = instruction.piece
                for name in instruction.held:
                    readers.setdefault(name, set()).add(piece)
            elif isinstance(instruction, Keep):
                new = zip(instruction.keys, instruction.names, strict=True)
                changed.setdefault(piece, {}).update((slots[key], name) for key, name in new)
    pieces, found = plan.partition.pieces, {}
    for piece, names in changed.items():
        made = {line.name for line in pieces[piece].lines}
        chain = {old: new for old, new in names.items() if readers.get(old) == {piece} and new in made}
        if chain and not pieces[piece].gathers:
            found[piece] = chain
    return found


def code_of(piece: Piece, chain: Chain) -> Code:
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
    return build(piece, after=lambda line: after.get(line, ""))
