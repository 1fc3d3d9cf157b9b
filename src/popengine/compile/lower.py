"""Lowering: from pieces and their schedule to a program of instructions for each ipu.

The instructions say when a value is loaded, sent, received, summed, kept and freed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import (
    Accumulate,
    Compute,
    Free,
    Instruction,
    Keep,
    Load,
    Partition,
    Piece,
    Plan,
    Receive,
    Schedule,
    Send,
    Store,
    Update,
)


def lower(partition: Partition, schedule: Schedule) -> Plan:
    """Return the plan of a partition and its schedule; each step (one weight update) runs each program once."""
    flow = _Flow(partition, schedule)
    programs = {ipu: tuple(flow.program(ipu)) for ipu in sorted(set(partition.ipus))}
    state = {ipu: flow.state(ipu) for ipu in programs}
    return Plan(partition, schedule, programs, state)


class _Flow:
    """The producer and the readers of each value."""

    def __init__(self, partition: Partition, schedule: Schedule) -> None:
        self.partition, self.schedule = partition, schedule
        self.pieces = partition.pieces
        self.piece_at = {(piece.phase, piece.stage): i for i, piece in enumerate(self.pieces)}
        signature = partition.signature
        # State that no piece writes may be a result, but is never sent: each piece reads it on its own ipu. A sent
        # value is no copy, and a weight changes at the end of the step.
        written = {result.key for result in signature.results if result.kind == "buffer"}
        self.fixed = {
            slot.name
            for slot in signature.slots
            if slot.role != "input" and (slot.role != "buffer" or slot.key not in written)
        }
        self.maker = {
            name: i for i, piece in enumerate(self.pieces) for name in piece.writes if name not in self.fixed
        }
        self.inputs = {slot.name: slot.key for slot in signature.slots if slot.role == "input"}
        trained = {result.key for result in signature.results if result.kind == "gradient"}
        self.trained = {
            slot.name: slot.key
            for slot in signature.slots
            if slot.role == "parameter" and slot.key in trained
        }
        # For each value and ipu, the pieces that read it and don't make it, in order of the data.
        self.readers: dict[tuple[str, int], list[int]] = {}
        for i, piece in enumerate(self.pieces):
            for name in self.sources(piece):
                if name in self.inputs or self.maker.get(name) != i:
                    self.readers.setdefault((name, self.ipu(i)), []).append(i)
        # For each piece, the values it makes for other ipus; and the pieces it is the first to need.
        self.sends: list[dict[int, tuple[str, ...]]] = []
        self.receives: list[list[int]] = [[] for _ in self.pieces]
        ipus = sorted(set(partition.ipus))
        for i, piece in enumerate(self.pieces):
            others = {
                ipu: tuple(
                    name
                    for name in piece.writes
                    if name not in self.inputs and name not in self.fixed and (name, ipu) in self.readers
                )
                for ipu in ipus
                if ipu != self.ipu(i)
            }
            self.sends.append({ipu: names for ipu, names in others.items() if names})
            for ipu, names in self.sends[i].items():
                self.receives[min(self.readers[name, ipu][0] for name in names)].append(i)

    def sources(self, piece: Piece) -> Iterator[str]:
        """Yield the names that a piece reads, and the weights from which its prepared values are made."""
        prepared = self.partition.prepared
        return (source for n in piece.reads for source in (n, *(prepared[n].reads if n in prepared else ())))

    def ipu(self, piece: int) -> int:
        return self.partition.ipus[self.pieces[piece].stage]

    def flows(self, name: str, piece: int) -> bool:
        """Return whether a read belongs to the micro-batch, and not to the ipu's state."""
        return name in self.inputs or self.maker.get(name, piece) != piece

    def state(self, ipu: int) -> tuple[str, ...]:
        """Return the slots that an ipu keeps from step to step: trained weights whose home it is, and the untrained
        state that its pieces read."""
        names = {name for name in self.trained if self.partition.ipus[self.partition.home[name]] == ipu}
        for i, piece in enumerate(self.pieces):
            if self.ipu(i) == ipu:
                names |= {
                    name
                    for name in self.sources(piece)
                    if not self.flows(name, i) and name not in self.trained
                }
        return tuple(slot.name for slot in self.partition.signature.slots if slot.name in names)

    def program(self, ipu: int) -> list[Instruction]:
        program: list[Instruction] = list(self._weights(ipu))
        parts = {place: self._around(i) for place, i in self.piece_at.items() if self.ipu(i) == ipu}
        for action in self.schedule.rows[ipu]:
            place = (action.phase, action.stage)
            if place in parts:
                program += [make(action.micro_batch) for make in parts[place]]
        keys = tuple(self.trained[name] for name in self.state(ipu) if name in self.trained)
        if self.trained:  # also without weights on this ipu: the norm and the loss scale need all ipus
            program.append(Update(keys))
        return program

    def _weights(self, ipu: int) -> list[Instruction]:
        """Return the transfers of trained weights to the other ipus that read them, at the start of a step."""
        moves: list[Instruction] = []
        for other in sorted(set(self.partition.ipus) - {ipu}):
            for give, source, target in ((True, ipu, other), (False, other, ipu)):
                names = tuple(
                    name
                    for name, home in self.partition.home.items()
                    if name in self.trained
                    and self.partition.ipus[home] == source
                    and (name, target) in self.readers
                )
                if names:
                    moves.append((Send if give else Receive)((f"weights of {source}", target), names, None))
        return sorted(moves, key=lambda move: isinstance(move, Receive))  # sends come before receives

    def _around(self, index: int) -> list:
        """Return the instructions of a piece, as functions of the micro-batch."""
        piece, ipu = self.partition.pieces[index], self.ipu(index)
        parts = []
        for maker in self.receives[index]:
            channel, names = (str(self.pieces[maker]), ipu), self.sends[maker][ipu]
            parts.append(lambda m, c=channel, n=names: Receive(c, n, m))
        readers = {name: self.readers.get((name, ipu), [-1]) for name in (*piece.reads, *piece.writes)}
        if fresh := tuple(name for name in piece.reads if name in self.inputs and readers[name][0] == index):
            keys = tuple(self.inputs[name] for name in fresh)
            parts.append(lambda m: Load(fresh, keys, m))
        held = tuple(name for name in piece.reads if not self.flows(name, index))
        last = tuple(name for name in piece.reads if self.flows(name, index) and readers[name][-1] == index)
        parts.append(lambda m: Compute(index, m, held, last))
        for other, names in self.sends[index].items():
            parts.append(lambda m, c=(str(piece), other), n=names: Send(c, n, m))
        parts += self._results(piece)
        if done := tuple(n for n in piece.writes if n in self.fixed or readers[n][-1] <= index):
            parts.append(lambda m: Free(done, m))
        return parts

    def _results(self, piece: Piece) -> list:
        parts = []
        results = self.partition.signature.results
        written = [(i, result) for i, result in enumerate(results) if result.name in piece.writes]
        if gradients := [result for _, result in written if result.kind == "gradient"]:
            names, keys = tuple(r.name for r in gradients), tuple(r.key for r in gradients)
            parts.append(lambda m: Accumulate(names, keys, m))
        if buffers := [result for _, result in written if result.kind == "buffer"]:
            kept, kept_keys = tuple(r.name for r in buffers), tuple(r.key for r in buffers)
            parts.append(lambda m: Keep(kept, kept_keys, m))
        if outputs := [(i, result) for i, result in written if result.kind in ("output", "input")]:
            stored, positions = tuple(r.name for _, r in outputs), tuple(i for i, _ in outputs)
            parts.append(lambda m: Store(stored, positions, m))
        return parts
