"""The table of a step, made from pieces: rows, each with the rows that it waits for and the values it frees.

row  task               index        after
 0   forward F0         micro-batch
 1   forward F1         micro-batch  0
 2   backward B1        micro-batch  1
 3   sum B1             micro-batch  2, 3 of the micro-batch before
 4   backward B0        micro-batch  2, 0
 5   sum B0             micro-batch  4, 5 of the micro-batch before
 6   exchange B1        step         3 of all; several processes only
 7   begin              step         all sums and exchanges
 8   update             chunk        7
 9   end                step         8
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from ..ir import After, Index, Instruction, InstructionKind, Key, Partition, Piece, Plan, Task, TaskKind
from ..settings import Settings
from ..update.optimizer_rules import rule_of


def make_plan(partition: Partition, settings: Settings) -> Plan:
    """Return the plan of a partition: with the table of a step, and the slots that each ipu holds."""
    counts, flow = settings.counts, _DataFlow(partition)
    rows = _TableWriter(flow, settings).write()
    micro_batches = counts.accumulation if settings.training else counts.iterations
    return Plan(partition, rows, micro_batches, settings.strategy.mode, flow.state)


class _DataFlow:
    """The data flow of a partition: the piece that makes each value, and the pieces that read it.

    A piece is given by its index in `pieces`, a value by the name of its node or slot in the graph.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition, self.pieces = partition, partition.pieces
        self.ipus = sorted(set(partition.ipus))
        signature = partition.signature
        self.fixed = signature.constant_slots
        self.inputs, self.maker = signature.inputs, partition.makers
        self.is_of_micro_batch = partition.is_of_micro_batch
        gradients = {result.key for result in signature.results if result.kind == "gradient"}
        # By slot name of each trained weight: its canonical name.
        self.trained = {
            s.name: s.key for s in signature.slots if s.role == "parameter" and s.key in gradients
        }
        self.home = {name: partition.ipus[stage] for name, stage in partition.home.items()}
        # For each value and ipu, the pieces that read it and don't make it, in order of the data.
        self.readers: dict[tuple[str, int], list[int]] = {}
        # For each ipu, the trained weights that it holds, and the untrained state that its pieces read.
        state = {ipu: {name for name in self.trained if self.home[name] == ipu} for ipu in self.ipus}
        for i, piece in enumerate(self.pieces):
            for name in partition.names_read_by(piece):
                if self.maker.get(name) != i:
                    self.readers.setdefault((name, self.ipu_of(i)), []).append(i)
                if name not in self.trained and not self.is_of_micro_batch(name, i):
                    state[self.ipu_of(i)].add(name)
        self.state = {
            ipu: tuple(slot.name for slot in signature.slots if slot.name in names)
            for ipu, names in state.items()
        }
        # For each piece, the values that the piece sends to each ipu, and the pieces from which it receives values.
        self.sends: list[dict[int, tuple[str, ...]]] = [{} for _ in self.pieces]
        self.receives: list[list[int]] = [[] for _ in self.pieces]
        for i, piece in enumerate(self.pieces):
            for ipu in self.ipus:
                names = tuple(n for n in piece.writes if n in self.maker and (n, ipu) in self.readers)
                if names and ipu != self.ipu_of(i):
                    self.sends[i][ipu] = names
                    self.receives[min(self.readers[name, ipu][0] for name in names)].append(i)

    def ipu_of(self, piece: int) -> int:
        return self.partition.ipus[self.pieces[piece].stage]


class _TableWriter:
    """The writer of a table's rows. Within a micro-batch a row waits for earlier rows only."""

    def __init__(self, flow: _DataFlow, settings: Settings) -> None:
        self.flow, self.settings = flow, settings
        self.rows: list[Task] = []
        self.row_of: dict[int, int] = {}  # piece -> its row
        self.sums: dict[int, int] = {}  # piece -> the row of its sums
        self.loader: dict[str, int] = {}  # an input -> the row that loads it
        self.writer: dict[str, int] = {}  # a changed buffer's slot -> the row that writes its next value
        # Of each value of a micro-batch, the rows that make or read it.
        self.users: dict[str, set[int]] = {}
        signature = flow.partition.signature
        self.buffers = {slot.key: slot.name for slot in signature.slots if slot.role == "buffer"}
        self.results = [  # kind, name, and the key that instructions have: see `Instruction`
            (r.kind, r.name, r.key if r.kind in ("gradient", "buffer") else str(position))
            for position, r in enumerate(signature.results)
        ]
        modes = (settings.outputs, *(anchor.outputs for anchor in settings.anchors))
        self.adds_outputs = "sum" in modes

    def write(self) -> tuple[Task, ...]:
        """Write all rows of the table, and return them. May be called once."""
        flow = self.flow
        for source, target in permutations(flow.ipus, 2):
            names = tuple(n for n in flow.trained if flow.home[n] == source and (n, target) in flow.readers)
            if names:
                channel = f"weights of {source}"
                send = Instruction("send", names, channel=channel, peer=target)
                receive = Instruction("receive", names, channel=channel, peer=source)
                sent = self._append(Task("copy", source, index="step", instructions=(send,)))
                self._append(
                    Task("copy", target, index="step", after=(After(sent),), instructions=(receive,))
                )
        for number in range(len(flow.pieces)):
            self._add_piece(number)
        self._add_frees()
        if flow.trained and self.settings.part.ends_step:
            self._add_updates()
        return tuple(self.rows)

    def _append(self, task: Task, uses: Iterable[str] = ()) -> int:
        """Append a row, and return its index. `uses`: the values of a micro-batch that the row makes or reads."""
        for name in uses:
            self.users.setdefault(name, set()).add(len(self.rows))
        self.rows.append(task)
        return len(self.rows) - 1

    # ---- pieces --------------------------------------------------------------------------------------------

    def _graph_results_of(self, piece: Piece, *kinds: Key) -> list[tuple[str, str]]:
        """Return (name, key) of each result of the graph, of one of `kinds`, that a piece writes."""
        return [(name, key) for kind, name, key in self.results if kind in kinds and name in piece.writes]

    def _add_piece(self, number: int) -> None:
        """Append the row of a piece; also a `sum` row if the piece writes gradients, or outputs to sum."""
        flow, piece = self.flow, self.flow.pieces[number]
        flowing = [name for name in piece.reads if flow.is_of_micro_batch(name, number)]
        makers = [flow.maker[name] for name in flowing if name in flow.maker]
        makers_rows = {self.row_of[maker] for maker in makers}
        makers_rows |= {self.loader[name] for name in flowing if name in self.loader}
        group = max(1, piece.gather_group_size, *(flow.pieces[maker].gather_group_size for maker in makers))
        after = [After(row, 0, group) for row in sorted(makers_rows)]
        row = self.row_of[number] = len(self.rows)
        if self.settings.finite_checks or has_side_effects(piece):
            after.append(After(row, 1))
        kind: TaskKind = "forward" if piece.phase == "F" else "backward"
        if piece.gather_group_size:  # and does nothing else: see `piece_parts.py`
            kind = "gather"
        stores = _instruction_if_any("store", self._graph_results_of(piece, "output", "input"))
        sums = _instruction_if_any("accumulate", self._graph_results_of(piece, "gradient"))
        sums += stores if self.adds_outputs else []
        own, freed = self._instructions_of_piece(number, [] if self.adds_outputs else stores)
        task = Task(kind, flow.ipu_of(number), piece.stage, piece.phase, piece=number)
        instructions = (*own, *(() if sums else freed))
        self._append(replace(task, after=tuple(after), instructions=instructions), [*flowing, *piece.writes])
        for name in flowing:
            if name in flow.inputs:
                self.loader.setdefault(name, row)
        self.writer.update({self.buffers[key]: row for _, key in self._graph_results_of(piece, "buffer")})
        if sums:
            task = replace(task, kind="sum", after=(After(row), After(row + 1, 1)))
            added = [name for instruction in sums for name in instruction.names]
            self.sums[number] = self._append(replace(task, instructions=(*sums, *freed)), added)

    def _instructions_of_piece(
        self, number: int, stores: list[Instruction]
    ) -> tuple[list[Instruction], list[Instruction]]:
        """Return two lists: the instructions of a piece, which end with `stores`; and the `free` of the values that
        no later piece of its ipu reads (one instruction or none)."""
        flow, ipu, piece = self.flow, self.flow.ipu_of(number), self.flow.pieces[number]
        readers = {name: flow.readers.get((name, ipu), [-1]) for name in (*piece.reads, *piece.writes)}
        fresh = [(n, flow.inputs[n]) for n in piece.reads if n in flow.inputs and readers[n][0] == number]
        last = tuple(n for n in piece.reads if flow.is_of_micro_batch(n, number) and readers[n][-1] == number)
        done = tuple(n for n in piece.writes if n in flow.fixed or readers[n][-1] <= number)
        found = [
            Instruction("receive", flow.sends[i][ipu], channel=str(flow.pieces[i]), peer=flow.ipu_of(i))
            for i in flow.receives[number]
        ]
        found += [*_instruction_if_any("load", fresh), Instruction("compute", last, piece=number)]
        for other, names in flow.sends[number].items():
            found.append(Instruction("send", names, channel=str(piece), peer=other))
        found += [*_instruction_if_any("keep", self._graph_results_of(piece, "buffer")), *stores]
        return found, [Instruction("free", done)] if done else []

    def _add_frees(self) -> None:
        """Make the last row that uses a value free it, and wait for all other users. Drop edges that others imply.

        Rows that use a changed buffer also wait for the row that writes it in the previous micro-batch.
        """
        flow = self.flow
        writers: dict[int, set[int]] = {}  # row -> the rows that write the changed buffers which the row uses
        for number, row in self.row_of.items():
            piece = flow.pieces[number]
            read = [name for name in piece.reads if not flow.is_of_micro_batch(name, number)]
            writers[row] = {self.writer[name] for name in read if name in self.writer}
            writers[row] |= {row}.intersection(self.writer.values())
            if piece.gather_group_size:  # another replica stacks the values that it gathers
                users = set().union(*(self.users[name] for name in piece.writes)) - {row}
                for name in self.users.keys() & set(piece.reads):
                    self.users[name] |= users
        frees: dict[int, list[str]] = {}
        waits: dict[int, set[int]] = {}
        for name, rows in self.users.items():
            last = max(rows)
            frees.setdefault(last, []).append(name)
            waits.setdefault(last, set()).update(rows - {last})
        reach = [0] * len(self.rows)  # of each row, as bits: the rows of the same micro-batch that precede it
        for row, task in enumerate(self.rows):
            after = [edge for edge in task.after if edge.behind != 0 or edge.group > 1]
            after += [After(writer, 1) for writer in sorted(writers.get(row, ()))]
            for edge in after:
                if edge.behind == 0:
                    reach[row] |= 1 << edge.row | reach[edge.row]
            before = {edge.row for edge in task.after if edge.behind == 0} | waits.get(row, set())
            for other in sorted(before, reverse=True):  # an edge that others imply is left out
                if not reach[row] >> other & 1:
                    after.append(After(other))
                    reach[row] |= 1 << other | reach[other]
            frees_here = tuple(frees.get(row, ()))
            self.rows[row] = replace(task, after=tuple(dict.fromkeys(after)), frees=frees_here)

    # ---- the end of a step ---------------------------------------------------------------------------------

    def _add_updates(self) -> None:
        """Append the rows that end a step, from `exchange` to `end`."""
        settings, flow = self.settings, self.flow
        optimizer, counts = settings.optimizer, settings.counts
        assert optimizer is not None
        ends = (*self.row_of.values(), *self.sums.values())
        ready = [After(row, None, counts.replicas) for row in ends]
        if counts.instances > 1:
            # One row after another, in the same order in all processes.
            before = [
                After(row, None)
                for row, t in enumerate(self.rows)
                if t.kind == "gather" and flow.pieces[t.piece].gather_group_size > counts.replicas
            ]
            for number, row in self.sums.items():
                if any(x.kind == "accumulate" for x in self.rows[row].instructions):
                    after = [After(row, None), *before]
                    before = [self._add_step_row("exchange", after, ipu=self.rows[row].ipu, piece=number)]
            ready += before
        if settings.measures_gradients:
            ready.append(self._add_step_row("norm", ready, index="parameter"))
        begin = self._add_step_row("begin", ready)
        updated = {
            ipu: (Instruction("update", keys=keys),)
            for ipu in flow.ipus
            if (keys := tuple(flow.trained[n] for n in flow.state[ipu] if n in flow.trained))
        }
        # A process that keeps no optimizer state of an ipu has no chunks there, so later rows wait for `begin`, too.
        first = begin
        if rule_of(optimizer).trust_ratios is not None:
            measured = [self._add_step_row("measure", [begin], ipu=ipu, index="chunk") for ipu in updated]
            first = self._add_step_row("trust", [begin, *measured])
        done = [begin] + [
            self._add_step_row("update", [first], ipu=ipu, index="chunk", instructions=update)
            for ipu, update in updated.items()
        ]
        if counts.instances > 1 and settings.shard_optimizer is not None:
            done.append(self._add_step_row("share", done))
        self._add_step_row("end", done)

    def _add_step_row(
        self, kind: TaskKind, after: Iterable[After], index: Index = "step", **more: Any
    ) -> After:
        """Append a row that runs once for all replicas, and return the edge to wait for all of its indices."""
        row = self._append(Task(kind, index=index, after=tuple(after), once=True, **more))
        return After(row, 0 if index == "step" else None)


def _instruction_if_any(kind: InstructionKind, pairs: Sequence[tuple[str, str]]) -> list[Instruction]:
    """Return [an instruction for the (name, key) pairs], or [] without pairs."""
    names, keys = tuple(name for name, _ in pairs), tuple(key for _, key in pairs)
    return [Instruction(kind, names, keys)] if pairs else []


def has_side_effects(piece: Piece) -> bool:
    """Return whether a piece calls operations other than torch's, such as prints: their order is observable."""
    return not all(call.startswith(("aten.", "prims.")) for call in piece.calls)
