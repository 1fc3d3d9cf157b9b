"""The table of a step, made from pieces: rows, each with the rows that it waits for and the values it frees."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from ..ir import After, Index, Instruction, InstructionKind, Key, Partition, Piece, Plan, Task, TaskKind
from ..settings import Settings
from ..update.optimizer_rules import RULES


def make_plan(partition: Partition, settings: Settings) -> Plan:
    """Return the plan of a partition: with the table of a step, and the slots that each ipu holds."""
    counts, writer = settings.counts, _TableWriter(partition, settings)
    micro_batches = counts.accumulation if settings.training else counts.iterations
    return Plan(partition, writer.write(), micro_batches, settings.strategy.order, writer.state)


class _TableWriter:
    """The writer of a table's rows. Within a micro-batch a row waits for earlier rows only.

    A piece is given by its index in `pieces`, a value by the name of its node or slot in the graph.
    """

    def __init__(self, partition: Partition, settings: Settings) -> None:
        self.partition, self.pieces, self.settings = partition, partition.pieces, settings
        signature = partition.signature
        self.inputs, self.fixed = signature.inputs, signature.constant_slots
        gradients = {result.key for result in signature.results if result.kind == "gradient"}
        # By slot name of each trained weight: its canonical name.
        parameters = (slot for slot in signature.slots if slot.role == "parameter")
        self.trained = {slot.name: slot.key for slot in parameters if slot.key in gradients}
        self.buffers = {slot.key: slot.name for slot in signature.slots if slot.role == "buffer"}
        self.results = [  # kind, name, and the key that instructions have: see `Instruction`
            (r.kind, r.name, r.key if r.kind in ("gradient", "buffer") else str(position))
            for position, r in enumerate(signature.results)
        ]
        modes = (settings.outputs, *(anchor.outputs for anchor in settings.anchors))
        self.adds_outputs = "sum" in modes
        # For each value and ipu, the pieces that read it and don't make it, in order of the data.
        self.readers: dict[tuple[str, int], list[int]] = {}
        # For each ipu, the trained weights that it holds, and the untrained state that its pieces read.
        held: dict[int, set[str]] = {ipu: set() for ipu in sorted(set(partition.ipus))}
        for name in self.trained:
            held[partition.ipus[partition.home[name]]].add(name)
        for i, piece in enumerate(self.pieces):
            ipu = partition.ipus[piece.stage]
            for name in partition.names_read_by(piece):
                if partition.makers.get(name) != i:
                    self.readers.setdefault((name, ipu), []).append(i)
                if name not in self.trained and not partition.is_of_micro_batch(name, i):
                    held[ipu].add(name)
        slots = [slot.name for slot in signature.slots]
        self.state = {ipu: tuple(n for n in slots if n in names) for ipu, names in held.items()}
        self.rows: list[Task] = []
        self.row_of: dict[int, int] = {}  # piece -> its row
        self.sums: dict[int, int] = {}  # piece -> the row of its sums
        self.loader: dict[str, int] = {}  # an input -> the row that loads it
        self.writer: dict[str, int] = {}  # a changed buffer's slot -> the row that writes its next value
        self.receives: dict[int, list[Instruction]] = {}  # piece -> how it receives values of other ipus
        # Of each value of a micro-batch, the rows that make or read it.
        self.users: dict[str, set[int]] = {}

    def write(self) -> tuple[Task, ...]:
        """Write all rows of the table, and return them. May be called once."""
        for source, target in permutations(self.state, 2):
            held = self.state[source]
            names = tuple(n for n in held if n in self.trained and (n, target) in self.readers)
            if names:
                channel = f"weights of {source}"
                send = Instruction("send", names, channel=channel, peer=target)
                receive = Instruction("receive", names, channel=channel, peer=source)
                sent = After(self._append(Task("copy", source, index="step", instructions=(send,))))
                self._append(Task("copy", target, index="step", after=(sent,), instructions=(receive,)))
        for number in range(len(self.pieces)):
            self._add_piece(number)
        self._add_frees()
        if self.trained and self.settings.part.ends_step:
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
        partition, piece = self.partition, self.pieces[number]
        flowing = [name for name in piece.reads if partition.is_of_micro_batch(name, number)]
        makers = [partition.makers[name] for name in flowing if name in partition.makers]
        makers_rows = {self.row_of[maker] for maker in makers}
        makers_rows |= {self.loader[name] for name in flowing if name in self.loader}
        group = max(1, piece.gather_group_size, *(self.pieces[maker].gather_group_size for maker in makers))
        after = [After(row, 0, group) for row in sorted(makers_rows)]
        row = self.row_of[number] = len(self.rows)
        if self.settings.finite_checks or has_side_effects(piece):
            after.append(After(row, 1))
        kind: TaskKind = "forward" if piece.phase == "F" else "backward"
        if piece.gather_group_size:  # and does nothing else: see `cut_pieces`
            kind = "gather"
        stores = _instruction_if_any("store", self._graph_results_of(piece, "output", "input"))
        sums = _instruction_if_any("accumulate", self._graph_results_of(piece, "gradient"))
        sums += stores if self.adds_outputs else []
        own, freed = self._instructions_of_piece(number, [] if self.adds_outputs else stores)
        task = Task(kind, partition.ipus[piece.stage], piece.stage, piece.phase, piece=number)
        instructions = (*own, *(() if sums else freed))
        self._append(replace(task, after=tuple(after), instructions=instructions), [*flowing, *piece.writes])
        for name in flowing:
            if name in self.inputs:
                self.loader.setdefault(name, row)
        self.writer.update({self.buffers[key]: row for _, key in self._graph_results_of(piece, "buffer")})
        if sums:
            task = replace(task, kind="sum", after=(After(row), After(row + 1, 1)))
            added = [name for instruction in sums for name in instruction.names]
            self.sums[number] = self._append(replace(task, instructions=(*sums, *freed)), added)

    def _instructions_of_piece(
        self, number: int, stores: list[Instruction]
    ) -> tuple[list[Instruction], list[Instruction]]:
        """Return the instructions of a piece, then `stores`; and its `free` (in a list), if values are read no more."""
        partition, piece, inputs = self.partition, self.pieces[number], self.inputs
        ipu = partition.ipus[piece.stage]
        readers = {name: self.readers.get((name, ipu), [-1]) for name in (*piece.reads, *piece.writes)}
        loads = [(n, inputs[n]) for n in piece.reads if n in inputs and readers[n][0] == number]
        last = (n for n in piece.reads if partition.is_of_micro_batch(n, number) and readers[n][-1] == number)
        done = tuple(n for n in piece.writes if n in self.fixed or readers[n][-1] <= number)
        found = [*self.receives.get(number, ()), *_instruction_if_any("load", loads)]
        found.append(Instruction("compute", tuple(last), piece=number))
        for other in self.state:
            names = tuple(n for n in piece.writes if n in partition.makers and (n, other) in self.readers)
            if names and other != ipu:
                channel, first = str(piece), min(self.readers[name, other][0] for name in names)
                found.append(Instruction("send", names, channel=channel, peer=other))
                receive = Instruction("receive", names, channel=channel, peer=ipu)
                self.receives.setdefault(first, []).append(receive)
        found += [*_instruction_if_any("keep", self._graph_results_of(piece, "buffer")), *stores]
        return found, [Instruction("free", done)] if done else []

    def _add_frees(self) -> None:
        """Make the last row that uses a value free it, and wait for all other users. Drop edges that others imply. Rows
        that use a changed buffer also wait for the row that writes it in the previous micro-batch."""
        writers: dict[int, set[int]] = {}  # row -> the rows that write the changed buffers which the row uses
        for number, row in self.row_of.items():
            piece = self.pieces[number]
            read = [name for name in piece.reads if not self.partition.is_of_micro_batch(name, number)]
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
            task = self.rows[last]
            if (task.kind, task.phase) == ("backward", "W") and task.piece in self.sums:
                # The sum frees what backwards of other stages read, too: else W would wait for them.
                others = (self.rows[row] for row in rows)
                last += any(other.phase != "F" and other.stage != task.stage for other in others)
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
        settings, counts, optimizer = self.settings, self.settings.counts, self.settings.optimizer
        assert optimizer is not None
        ends = (*self.row_of.values(), *self.sums.values())
        ready = [After(row, None, counts.replicas) for row in ends]
        if counts.instances > 1:
            # One row after another, in the same order in all processes.
            gathers = [(row, task.piece) for row, task in enumerate(self.rows) if task.kind == "gather"]
            several = [row for row, n in gathers if self.pieces[n].gather_group_size > counts.replicas]
            before = [After(row, None) for row in several]
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
            for ipu, names in self.state.items()
            if (keys := tuple(self.trained[n] for n in names if n in self.trained))
        }
        # A process that keeps no optimizer state of an ipu has no chunks there, so later rows wait for `begin`, too.
        first = begin
        if RULES[optimizer.kind].trust_ratios is not None:
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
