"""The table of a step, made from pieces: rows, each with the rows that it waits for and the values it frees."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from ..ir import After, Instruction, InstructionKind, Partition, Piece, Plan, ResultKind, Slot, Task, TaskKind
from ..schedules import bounds_of_rows
from ..settings import Place, Settings
from .partition import BUCKET


def make_plan(partition: Partition, settings: Settings) -> Plan:
    """Return the plan of a partition: with the table of a step, and the slots that each ipu holds.

    The table is the same in all processes. A row reads only values that rows of its own place make, load or receive."""
    return _TableWriter(partition, settings).write()


class _TableWriter:
    """The writer of a table's rows. Within a micro-batch a row waits for earlier rows only.

    A piece is given by its index in `pieces`, a value by the name of its node or slot in the graph.
    """

    def __init__(self, partition: Partition, settings: Settings) -> None:
        self.partition, self.pieces, self.settings = partition, partition.pieces, settings
        signature = partition.signature
        self.inputs, self.fixed = signature.inputs, signature.constant_slots
        weights, trained = signature.parameters_and_buffers, {*signature.trained}
        self.large_gradients = {
            result.name
            for result in signature.results
            if result.kind == "gradient" and prod(result.shape) * result.dtype.itemsize >= BUCKET
        }
        # By slot name of each trained weight: its canonical name.
        self.trained = {slot.name: slot.key for slot in weights if slot.key in trained}
        self.buffers = {slot.key: slot.name for slot in weights if slot.role == "buffer"}
        self.results = [  # kind, name, and the key that instructions have: see `Instruction`
            (r.kind, r.name, r.key if r.kind in ("gradient", "buffer") else str(position))
            for position, r in enumerate(signature.results)
        ]
        modes = (settings.outputs, *(anchor.outputs for anchor in settings.anchors))
        self.adds_outputs = "sum" in modes
        # The weights that one ipu holds and others borrow: trained ones or, if a replica spans several processes, all.
        of_one_ipu = self.trained if settings.counts.parts == 1 else partition.home
        self.holder = {slot.name: self._holder_of(slot) for slot in weights if slot.name in of_one_ipu}
        ipus = sorted({*partition.ipus, *self.holder.values()})
        self.place = {ipu: settings.place_of(ipu) for ipu in ipus}
        self.places = list(dict.fromkeys(self.place.values()))
        self.shifts = settings.shifts(max(partition.ipus) + 1)
        # For each value and ipu, the pieces that read it and don't make it, in order of the data; and the first of
        # these pieces at each place.
        self.readers: dict[tuple[str, int], list[int]] = {}
        self.first_reader: dict[tuple[str, Place], int] = {}
        # For each ipu, the weights that it holds, and the other state that its pieces read; and those that it borrows.
        held = {ipu: {name for name, holder in self.holder.items() if holder == ipu} for ipu in ipus}
        self.borrowed = {ipu: set[str]() for ipu in ipus}
        for i, piece in enumerate(self.pieces):
            ipu = partition.ipus[piece.stage]
            for name in partition.names_read_by(piece):
                if partition.makers.get(name) != i:
                    self.readers.setdefault((name, ipu), []).append(i)
                    self.first_reader.setdefault((name, self.place[ipu]), i)
                if not partition.is_of_micro_batch(name, i) and self.holder.get(name) != ipu:
                    (self.borrowed if name in self.holder else held)[ipu].add(name)
        slots = [slot.name for slot in signature.slots]
        self.slots = {ipu: tuple(n for n in slots if n in names) for ipu, names in held.items()}
        # By name and place, the first ipu that keeps a changed buffer's next value, for itself or other ipus.
        kept = [(n, ipu) for ipu in ipus for n in (held[ipu] | self.borrowed[ipu]) - self.fixed]
        self.keeper = {(name, self.place[ipu]): ipu for name, ipu in reversed(kept)}
        self.rows: list[Task] = []
        self.row_of: dict[int, int] = {}  # piece -> its row
        self.sums: dict[int, int] = {}  # piece -> the row of its sums
        self.rows_of_sums: list[int] = []  # with the sums of gradients of weights that another place holds
        # By name and place: the row that makes or receives a value, that loads an input, that receives a weight, that
        # writes the next value of a changed buffer (its slot); and the rows that make or read a micro-batch's value.
        self.source: dict[tuple[str, Place], int] = {}
        self.loader: dict[tuple[str, Place], int] = {}
        self.weights: dict[tuple[str, Place], int] = {}
        self.writer: dict[tuple[str, Place], int] = {}
        self.users: dict[tuple[str, Place], set[int]] = {}
        # By piece: how it receives values of other ipus, and the rows that send values which it reads first, each with
        # whether the piece only adds them to large gradients.
        self.receives: dict[int, list[Instruction]] = {}
        self.messages: dict[int, list[tuple[int, bool]]] = {}

    def write(self) -> Plan:
        """Write all rows of the table, and return its plan. May be called once."""
        self._add_weights()
        for number in range(len(self.pieces)):
            self._add_piece(number)
        self._add_frees()
        if len(self.places) > 1:
            self._add_bounds()
        if self.trained and self.settings.step_part.ends_step:
            self._add_updates()
        return self._plan()

    def _plan(self) -> Plan:
        counts, order = self.settings.counts, self.settings.strategy.order
        micro_batches = counts.accumulation if self.settings.training else counts.iterations
        places = self.place if len(self.places) > 1 else {}
        return Plan(self.partition, tuple(self.rows), micro_batches, order, self.slots, places, self.shifts)

    def _append(self, task: Task, uses: Iterable[str] = ()) -> int:
        """Append a row, and return its index. `uses`: the values of a micro-batch that the row makes or reads."""
        for name in uses:
            self.users.setdefault((name, self.place[task.ipu]), set()).add(len(self.rows))
        self.rows.append(task)
        return len(self.rows) - 1

    def _holder_of(self, slot: Slot) -> int:
        """Return the ipu that holds a weight: the ipu of its stage if it is in the process that holds the weight, or
        else the first ipu of that process."""
        settings, ipus = self.settings, self.partition.ipus
        ipu = ipus[self.partition.home[slot.name]]
        process = settings.holders.get(slot.key, settings.place_of(ipu).process)
        return next(
            i for i in (ipu, *ipus, *range(len(settings.places))) if settings.place_of(i).process == process
        )

    # ---- messages ------------------------------------------------------------------------------------------

    def _add_weights(self) -> None:
        """Append the rows that send weights to the ipus that read another ipu's weights, as one message to each
        place."""
        for source, held in self.slots.items():
            for place in self.places:
                reads = {
                    ipu: names
                    for ipu in self.slots
                    if ipu != source
                    and self.place[ipu] == place
                    and (names := tuple(n for n in held if n in self.borrowed[ipu]))
                }
                origin, channel = source, f"weights of {source}"
                if reads and place != self.place[source]:
                    names = tuple(dict.fromkeys(chain(*reads.values())))
                    origin = next(iter(reads))
                    is_once = not (self.settings.replica_groups or self.shifts)
                    like = Task("copy", source, index="step", once=is_once)
                    send = self._append_send(like, names, origin, channel)
                    received = self._append_receive(send, like)
                    self.weights.update(((name, place), received) for name in names)
                for target, names in reads.items():
                    if target != origin:
                        send = Instruction("send", names, channel=channel, peer=target)
                        receive = Instruction("receive", names, channel=channel, peer=origin)
                        sent = After(self._append(Task("copy", origin, index="step", instructions=(send,))))
                        self._append(
                            Task("copy", target, index="step", after=(sent,), instructions=(receive,))
                        )

    def _append_send(
        self, like: Task, names: tuple[str, ...], ipu: int, channel: str, after: Iterable[int] = ()
    ) -> int:
        """Append the row that sends a message from the ipu of row `like` to the place of `ipu`; return its index."""
        message = Instruction("send", names, channel=f"{channel} to {ipu}", peer=ipu)
        pieces = {row: self.pieces[self.rows[row].piece] for row in after}
        waits = tuple(After(row, 0, max(1, piece.gather_group_size)) for row, piece in pieces.items())
        row = replace(like, kind="send", piece=-1, after=waits, instructions=(message,), frees=())
        return self._append(row, names if like.index == "micro_batch" else ())

    def _append_receive(self, send: int, like: Task, *keeps: Instruction, after: Iterable[After] = ()) -> int:
        """Append the row that receives the message of row `send`, in the phase and stage of `like`; return its index.
        `keeps`: its `keep` instructions. Other ipus of its place get the values from its ipu."""
        (sent,) = (x for x in self.rows[send].instructions if x.kind == "send")
        message = sent._replace(kind="receive", peer=self.rows[send].ipu)
        names = () if keeps or like.index == "step" else sent.names
        handed = self._local_sends(names, sent.peer, sent.channel)
        instructions = (message, *keeps, *handed)
        waits = (After(send), *after)
        row = replace(like, kind="receive", ipu=sent.peer, piece=-1, after=waits, instructions=instructions)
        received = self._append(row, names)
        self.source.update(((name, self.place[sent.peer]), received) for name in names)
        return received

    def _local_sends(self, names: Iterable[str], ipu: int, channel: str) -> list[Instruction]:
        """Return the instructions by which an ipu sends values to the ipus of its place that read them."""
        sends = []
        for reader in self.slots:
            read = tuple(name for name in names if (name, reader) in self.readers)
            if read and reader != ipu and self.place[reader] == self.place[ipu]:
                sends.append(Instruction("send", read, channel=channel, peer=reader))
                receive = Instruction("receive", read, channel=channel, peer=ipu)
                first = min(self.readers[name, reader][0] for name in read)
                self.receives.setdefault(first, []).append(receive)
        return sends

    def _add_sends(self, number: int) -> None:
        """Append rows that send a piece's values to other places that read them, and next values of buffers to other
        places that hold these. A buffer's receive is in the order of micro-batches, and after earlier readers."""
        task, piece, channel = self.rows[self.row_of[number]], self.pieces[number], str(self.pieces[number])
        for place in self.places:
            if place == self.place[task.ipu]:
                continue
            written = (name for name in piece.writes if name in self.partition.makers)
            firsts = {n: self.first_reader[n, place] for n in written if (n, place) in self.first_reader}
            for is_added in (False, True):
                names = tuple(n for n, first in firsts.items() if self._is_only_added(n, first) == is_added)
                if names:
                    first = min(firsts[name] for name in names)
                    ipu, what = self.partition.ipus[self.pieces[first].stage], channel + " terms" * is_added
                    send = self._append_send(task, names, ipu, what, [self.row_of[number]])
                    self.messages.setdefault(first, []).append((send, is_added))
            if kept := self._kept_buffers(piece, place):
                slots = [self.buffers[key] for _, key in kept]
                here = [ipu for ipu in self.slots if self.place[ipu] == place]
                (keep,) = _instruction_list("keep", kept)
                ipu = self.keeper[slots[0], place]
                send = self._append_send(task, keep.names, ipu, f"{piece} buffers", [self.row_of[number]])
                readers = chain(*(self.readers.get((slot, ipu), ()) for slot in slots for ipu in here))
                earlier = sorted({After(self.row_of[i]) for i in readers if i in self.row_of})
                edges = [*earlier, After(len(self.rows), 1)]
                received = self._append_receive(send, task, keep, after=edges)
                self.writer.update(((slot, place), received) for slot in slots)
            gradients = self._gradients_of(piece, place)
            for ipu in dict.fromkeys(ipu for *_, ipu in gradients):
                pairs = [(name, key) for name, key, holder in gradients if holder == ipu]
                (added,) = _instruction_list("accumulate", pairs)
                send = self._append_send(task, added.names, ipu, f"{piece} gradients", [self.row_of[number]])
                received = self._append_receive(send, task)
                after = After(received), After(len(self.rows), 1)
                row = replace(task, kind="sum", ipu=ipu, after=after, instructions=(added,), frees=())
                self.rows_of_sums.append(self._append(row, added.names))

    def _is_only_added(self, name: str, reader: int) -> bool:
        """Return whether a piece adds a value to large gradients, and does nothing else with it: a term of the gradient
        of a weight that several stages share."""
        lines = (line.name for line in self.pieces[reader].lines if name in line.operands())
        return self.large_gradients.issuperset(names := [*lines]) and bool(names)

    def _add_bounds(self) -> None:
        """Add the bounds of the order to the rows. A bound over places is a message without values."""
        tokens: dict[tuple[int, Place], int] = {}
        for row, bound in bounds_of_rows(plan := self._plan(), self.settings.cores):
            task, end = self.rows[row], self.rows[bound.row]
            place = self.place[task.ipu]
            if bound.behind is not None and bound.behind >= plan.micro_batches:
                continue
            if self.place[end.ipu] != place:
                if (bound.row, place) not in tokens:
                    send = self._append_send(end, (), task.ipu, f"end of {end}", [bound.row])
                    tokens[bound.row, place] = self._append_receive(send, self.rows[send])
                bound = bound._replace(row=tokens[bound.row, place])
            self.rows[row] = replace(task, after=(*task.after, bound))

    # ---- pieces --------------------------------------------------------------------------------------------

    def _results_written_by(self, piece: Piece, *kinds: ResultKind) -> list[tuple[str, str]]:
        """Return (name, key) of each result of the graph, of one of `kinds`, that a piece writes."""
        return [(name, key) for kind, name, key in self.results if kind in kinds and name in piece.writes]

    def _kept_buffers(self, piece: Piece, place: Place) -> list[tuple[str, str]]:
        """Return (name, key) of each next value of a buffer that a piece computes and a place keeps."""
        written = self._results_written_by(piece, "buffer")
        return [(name, key) for name, key in written if (self.buffers[key], place) in self.keeper]

    def _gradients_of(self, piece: Piece, place: Place) -> list[tuple[str, str, int]]:
        """Return (name, key, the weight's ipu) of each gradient of a piece, for the weights that a place holds."""
        slot_of = {key: name for name, key in self.trained.items()}
        gradients = [(n, k, self.holder[slot_of[k]]) for n, k in self._results_written_by(piece, "gradient")]
        return [gradient for gradient in gradients if self.place[gradient[2]] == place]

    def _add_piece(self, number: int) -> None:
        """Append the row of a piece; also a `sum` row if the piece writes gradients, or outputs to sum."""
        partition, piece = self.partition, self.pieces[number]
        ipu = partition.ipus[piece.stage]
        here = self.place[ipu]
        kind: TaskKind = "forward" if piece.phase == "F" else "backward"
        if piece.gather_group_size:  # and does nothing else: see `cut_pieces`
            kind = "gather"
        task = Task(kind, ipu, piece.stage, piece.phase, piece=number)
        messages = self.messages.get(number, ())
        row = self.row_of[number] = len(self.rows) + len(messages)
        for send, is_added in messages:
            # Terms of a large gradient come one micro-batch after another: each has the memory of a weight.
            self._append_receive(send, task, after=[After(row, 1)] if is_added else ())
        flowing = [name for name in piece.reads if partition.is_of_micro_batch(name, number)]
        makers = [partition.makers[name] for name in flowing if name in partition.makers]
        makers_rows = {self.source[name, here] for name in flowing if name in partition.makers}
        makers_rows |= {self.loader[name, here] for name in flowing if (name, here) in self.loader}
        read = {(name, here) for name in partition.names_read_by(piece)}
        makers_rows |= {self.weights[name] for name in read & self.weights.keys()}
        group = max(1, piece.gather_group_size, *(self.pieces[maker].gather_group_size for maker in makers))
        after = [After(row, 0, group) for row in sorted(makers_rows)]
        # The order of operations other than torch's, such as prints, is observable.
        is_silent = all(call.startswith(("aten.", "prims.")) for call in piece.calls)
        if self.settings.finite_checks or not is_silent:
            after.append(After(row, 1))
        stores = _instruction_list("store", self._results_written_by(piece, "output", "input"))
        sums = _instruction_list("accumulate", [(n, key) for n, key, _ in self._gradients_of(piece, here)])
        sums += stores if self.adds_outputs else []
        body, freed = self._instructions_of_piece(number, [] if self.adds_outputs else stores)
        instructions = (*body, *(() if sums else freed))
        self._append(replace(task, after=tuple(after), instructions=instructions), [*flowing, *piece.writes])
        for name in flowing:
            if name in self.inputs:
                self.loader.setdefault((name, here), row)
        self.source.update(((name, here), row) for name in piece.writes)
        buffers = (self.buffers[key] for _, key in self._results_written_by(piece, "buffer"))
        self.writer.update(((slot, here), row) for slot in buffers)
        if sums:
            task = replace(task, kind="sum", after=(After(row), After(row + 1, 1)))
            added = [name for instruction in sums for name in instruction.names]
            self.sums[number] = self._append(replace(task, instructions=(*sums, *freed)), added)
            self.rows_of_sums.append(self.sums[number])
        self._add_sends(number)

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
        instructions = [*self.receives.get(number, ()), *_instruction_list("load", loads)]
        instructions.append(Instruction("compute", tuple(last), piece=number))
        instructions += self._local_sends([n for n in piece.writes if n in partition.makers], ipu, str(piece))
        instructions += [*_instruction_list("keep", self._kept_buffers(piece, self.place[ipu])), *stores]
        return instructions, [Instruction("free", done)] if done else []

    def _add_frees(self) -> None:
        """Make the last row that uses a value free it, and wait for all other users. Drop edges that others imply. Rows
        that use a changed buffer also wait for the row that writes it in the previous micro-batch."""
        writers: dict[int, set[int]] = {}  # row -> the rows that write the changed buffers which the row uses
        for number, row in self.row_of.items():
            piece, here = self.pieces[number], self.place[self.rows[row].ipu]
            read = {(n, here) for n in piece.reads if not self.partition.is_of_micro_batch(n, number)}
            writers[row] = {self.writer[name] for name in read & self.writer.keys()}
            writers[row] |= {row}.intersection(self.writer.values())
            if piece.gather_group_size:  # another replica stacks the values that it gathers
                users = set().union(*(self.users[name, here] for name in piece.writes)) - {row}
                for name in self.users.keys() & {(name, here) for name in piece.reads}:
                    self.users[name] |= users
        frees: dict[int, list[str]] = {}
        waits: dict[int, set[int]] = {}
        for (name, _), rows in self.users.items():
            last = max(rows)
            task = self.rows[last]
            if (task.kind, task.phase) == ("backward", "W") and task.piece in self.sums:
                # The sum frees what backwards of other stages read, too: else W would wait for them.
                tasks = (self.rows[row] for row in rows)
                last += any(reader.phase != "F" and reader.stage != task.stage for reader in tasks)
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
            for earlier in sorted(before, reverse=True):  # an edge that others imply is left out
                if not reach[row] >> earlier & 1:
                    after.append(After(earlier))
                    reach[row] |= 1 << earlier | reach[earlier]
            frees_here = tuple(frees.get(row, ()))
            self.rows[row] = replace(task, after=tuple(dict.fromkeys(after)), frees=frees_here)

    # ---- the end of a step ---------------------------------------------------------------------------------

    def _add_updates(self) -> None:
        """Append the rows that end a step, from `exchange` to `share`."""
        settings, counts = self.settings, self.settings.counts
        ends = (*self.row_of.values(), *self.rows_of_sums)
        ready = [After(row, None, counts.replicas) for row in ends]
        messages = (row for row, task in enumerate(self.rows) if task.kind in ("send", "receive"))
        ready += [After(row, None, counts.replicas) for row in messages]
        if counts.instances > 1 or self.shifts:
            # One row after another, in the same order in all processes, or on all devices, that have the same ipus.
            gathers = [(row, task.piece) for row, task in enumerate(self.rows) if task.kind == "gather"]
            several = [row for row, n in gathers if self.pieces[n].gather_group_size > counts.replicas]
            before = {place: [After(row, None) for row in several] for place in self.places}
            for row in self.rows_of_sums:
                if any(x.kind == "accumulate" for x in self.rows[row].instructions):
                    ipu, piece = self.rows[row].ipu, self.rows[row].piece
                    after = [After(row, None), *before[self.place[ipu]]]
                    before[self.place[ipu]] = [self._add_step_row("exchange", after, ipu=ipu, piece=piece)]
            ready += chain(*before.values())
        updated = tuple(
            Instruction("update", keys=keys, peer=ipu)
            for ipu, names in self.slots.items()
            if (keys := tuple(self.trained[n] for n in names if n in self.trained))
        )
        done = self._add_step_row("update", ready, instructions=updated)
        if counts.instances > 1 and settings.shard_optimizer is not None:
            self._add_step_row("share", [done])

    def _add_step_row(self, kind: TaskKind, after: Iterable[After], **fields: Any) -> After:
        """Append a row that runs once per step for all replicas, and return the edge to wait for it."""
        return After(self._append(Task(kind, index="step", after=tuple(after), once=True, **fields)))


def _instruction_list(kind: InstructionKind, pairs: Sequence[tuple[str, str]]) -> list[Instruction]:
    """Return [an instruction for the (name, key) pairs], or [] without pairs."""
    names, keys = tuple(name for name, _ in pairs), tuple(key for _, key in pairs)
    return [Instruction(kind, names, keys)] if pairs else []
