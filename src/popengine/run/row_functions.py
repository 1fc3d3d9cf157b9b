"""The functions of a plan's rows: each is bound to the tensors of a replica, and takes the row's index.

The values of a micro-batch are in a frame (a dict for each replica and micro-batch), from the row that makes
them to the last row that reads them. All ipus share a frame without copies: pieces have no side effects.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .. import ir
from ..errors import Error, RunError
from ..settings import Anchor, Place
from ..texts import hint_for
from ..torch_private import storage_use_count
from . import devices
from .backends.eager import Code, FiniteCheck, user_line
from .call import EngineCall, Stopped
from .instances.all_reduce import all_gather_rows
from .instances.connections import Connections, PeerFailed, PeerLost, Tag
from .mailbox import MessageKey, ProcessMailbox
from .prepared_values import PreparedValues
from .random_draws import hash_integers, new_generator
from .state import DeviceTensors, device_of_place
from .updating import Updates, Work

Transfers = dict[MessageKey, list[devices.Transfer]]  # messages between the devices of a process

_FRAME, _STATE, _BUFFER, _PREPARED = range(4)  # where a piece reads a value; _BUFFER: the step's new buffers


class RowFunctions:
    """The functions that run a device's rows of a plan, and the frames that they read and write."""

    def __init__(
        self,
        state: DeviceTensors,
        codes: Sequence[Code],
        updates: Updates,
        group: Connections | None,
        mail: ProcessMailbox | None,
        sent: Transfers,
    ) -> None:
        self.state, self.updates = state, updates
        self.plan, self.settings = plan, settings = state.plan, state.settings
        self._group, self._where, self._sent = group, state.where, sent
        self.mail = mail  # None: all ipus are in this process
        replicas = range(settings.counts.replicas)
        # By replica and piece. A recorder replaces the functions of replica 0.
        self.codes: list[list[Code]] = [list(codes) for _ in replicas]
        self.frames: list[dict[int, dict[str, Tensor]]] = [{} for _ in replicas]
        self._prepared = [PreparedValues(plan, state, r) for r in replicas if plan.partition.prepared]
        # Of an accelerator's draws, by row and replica. They continue from one micro-batch to the next.
        self.generators: dict[tuple[int, int], list[torch.Generator]] = {}
        self._changed = plan.partition.signature.changed_buffers
        # Indices of the results that are gradients: they are divided by the loss scale.
        self._scaled = {int(anchor.key) for anchor in settings.anchors if anchor.source == "gradient"}
        # The factor of each gradient in the sum. A running mean weights its values itself.
        self._weight = settings.step_part.weight if settings.reduction == "mean" else 1.0
        self._checks = FiniteCheck if settings.finite_checks else nullcontext
        weights = (a for a in settings.anchors if a.source in ("weight", "updated"))
        self._anchored_weights = [a for a in weights if self._place_of(a) == self._where.place]

    def bind(self, row: int, replica: int) -> Work | None:
        """Return the function that runs a row for a replica (0 for a row that runs once for all); None: nothing to do
        here."""
        if replica not in self._where.replicas or self.plan.is_elsewhere(row, self._where.place):
            return None
        match self.plan.tasks[row].kind:
            case "send":
                return partial(self._send, row, replica)
            case "receive":
                return partial(self._receive, row, replica)
            case "forward" | "backward":
                return self._compute_function(row, replica)
            case "gather":
                return self._gather_function(row, replica)
            case "sum":
                return self._sum_function(row, replica)
        return self.updates.bind(row)

    def communicates(self, row: int) -> bool:
        """Return whether a row waits for messages of other processes."""
        task = self.plan.tasks[row]
        if task.kind == "gather":
            return self.plan.partition.pieces[task.piece].gather_group_size > self.settings.counts.replicas
        is_alone = self._group is None and self.mail is None
        return task.kind in ("exchange", "share", "update") and not is_alone

    # ---- a call --------------------------------------------------------------------------------------------

    def begin_step(self, call: EngineCall) -> None:
        """Begin a step: reset the state's buffers, copy the weights that are anchors, set the loss scale."""
        if self.mail is not None:
            self.mail.begin_step()
        self.state.begin_step()
        self.seed_generators()
        if self._anchored_weights:
            self._copy_anchored_weights(call, "weight")
        if call.hyper is not None:
            scale = call.hyper.loss_scaling
            if self.settings.automatic_loss_scaling:
                scale *= float(self.state.train_state.loss_factor)
            self.state.set_loss_scale(scale * self._weight)
            call.results.loss_scale = scale

    def seed_generators(self, are_new: bool = False) -> None:
        """Seed the generator of each draw of an accelerator for the first micro-batch of the step; with `are_new` new
        ones, because those of a capture that failed can't be used."""
        for (row, replica), generators in self.generators.items():
            if are_new:
                generators[:] = [new_generator(self.state.device) for _ in generators]
            key, piece = self._key_of_draws(0, replica), self.plan.tasks[row].piece
            for generator, draw in zip(generators, self.plan.partition.pieces[piece].draws, strict=True):
                generator.manual_seed(hash_integers(key, draw))

    def _key_of_draws(self, micro_batch: int, replica: int) -> int:
        """Return the key of a micro-batch's draws, for a local replica."""
        counts = self.settings.counts
        numbers = self.settings.step_part.before + micro_batch, counts.instance * counts.replicas + replica
        return hash_integers(*self.state.train_state.random_state, *numbers)

    def end_step(self, call: EngineCall) -> None:
        """End a step: write the new buffers; without updates hold gradient sums and new buffers."""
        for prepared in self._prepared:
            prepared.clear()
        if not self.settings.step_part.ends_step:
            self.state.hold_sums_and_buffers()
            return
        self.state.end_step()
        if self._anchored_weights and self.settings.training:
            self._copy_anchored_weights(call, "updated")  # before the next step begins

    def wake_peers(self, error: BaseException) -> None:
        """Close the connections after an error, which wakes peers. Ignore Stopped, and errors from peers."""
        if not isinstance(error, (PeerFailed, PeerLost, Stopped)):
            self.updates.peers.abort(f"failed at {self.state.train_state.commit.name}: {error}")

    def clear(self) -> None:
        """Drop all frames, prepared values and gradients, after each call, also a failed one."""
        for held in (*self.frames, *self._prepared, self._sent):
            held.clear()
        self.updates.clear_step()

    def _copy_anchored_weights(self, call: EngineCall, source: str) -> None:
        """Copy this place's weights with an anchor of this source ("weight" or "updated") to the results."""
        iterations = [call.commit.done] if self.settings.training else range(self.settings.counts.iterations)
        for anchor in (a for a in self._anchored_weights if a.source == source):
            for replica in self._where.replicas:
                for iteration in iterations:
                    value = self.state.values[replica][self.state.slot_of[anchor.key]]
                    call.results.buffers[anchor].put(iteration, replica, value.clone())

    def _place_of(self, result: int | Anchor) -> Place:
        """Return the place that has a result: where a row stores the output, or where the ipu of the anchored weight
        is."""
        if isinstance(result, int):
            kept = ((task.ipu, key) for task in self.plan.tasks for _, key in _names_and_keys(task, "store"))
            stored = (ipu for ipu, key in kept if key == str(result))
        else:
            slot = self.state.slot_of[result.key]
            stored = (ipu for ipu, names in self.plan.slots_of.items() if slot in names)
        return self.plan.places.get(next(stored), self._where.place)

    def share_results(self, call: EngineCall) -> None:
        """Send the results of this process to the other processes of the replica, and receive theirs. Start to download
        them."""
        for buffer in call.results.buffers.values():
            buffer.finish_transfers()
        if self.mail is not None:
            parts = call.results.parts()
            owners = [(self._place_of(result), replica) for result, replica, _ in parts]
            self.mail.share([values for *_, values in parts], owners)
        for buffer in call.results.buffers.values() if self.state.has_queue else ():
            buffer.values = devices.download(buffer.values)

    # ---- forward and backward --------------------------------------------------------------------------------

    def _compute_function(self, row: int, replica: int) -> Work:
        """Return a function that loads inputs, runs a row's piece, stores outputs, and frees values."""
        task, partition = self.plan.tasks[row], self.plan.partition
        piece, number = partition.pieces[task.piece], task.piece
        frames, codes = self.frames[replica], self.codes[replica]
        prepared = self._prepared[replica] if {*piece.reads} & partition.prepared.keys() else None
        before = [i for i in range(row) if not self.plan.is_elsewhere(i, self._where.place)]
        earlier = {name for i in before for name, _ in _names_and_keys(self.plan.tasks[i], "load")}
        loads = [(name, int(key)) for name, key in _names_and_keys(task, "load") if name not in earlier]
        stores = _names_and_keys(task, "store")
        slots = [(name, self.state.slot_of[key]) for name, key in _names_and_keys(task, "keep")]
        reads = [(self._source_of_value(name, number), name) for name in piece.reads]
        flowing = {name for source, name in reads if source == _FRAME} - {*piece.writes}
        before = [name for name in task.frees if name in flowing]
        after = [name for name in task.frees if name not in flowing]
        device, counts, micro_batches = self.state.device, self.settings.counts, self.plan.micro_batches
        group = counts.input_group_of(replica)
        generators = [new_generator(device) for _ in piece.draws if self.state.has_queue]
        if generators:
            self.generators[row, replica] = generators

        def compute(call: EngineCall, micro_batch: int) -> None:
            if call.commit.is_stopping:
                raise Stopped
            frame, turn = frames.setdefault(micro_batch, {}), call.commit.done * micro_batches + micro_batch
            for name, key in loads:
                begun, ended = call.results.load_started[key], call.results.loaded[key]
                begun[turn * counts.replicas + replica] = perf_counter()
                frame[name] = devices.upload(call.inputs[key][turn, group], device)
                ended[turn * counts.replicas + replica] = perf_counter()
            state = self.state
            made_once = prepared.values_for(number) if prepared is not None else frame
            sources = frame, state.values[replica], state.new_buffers[replica], made_once
            values: list = [sources[source][name] for source, name in reads]
            del sources, made_once  # the piece frees values while it runs
            for name in before:
                del frame[name]
            if piece.draws:
                values.append(iter(generators) if generators else self._key_of_draws(micro_batch, replica))
            try:
                with self._checks():
                    made = codes[number](values)
            except Exception as error:
                raise self._error_of_piece(error, task, micro_batch, replica) from None
            frame.update(zip(piece.writes, made, strict=True))
            del made
            for name, slot in slots:  # new tensors, because later backwards still read the old ones
                state.new_buffers[replica][slot] = frame[name].clone()
            if stores:
                self._store_results(call, stores, frame, micro_batch, replica)
            for name in after:
                del frame[name]

        return compute

    def _source_of_value(self, name: str, piece: int) -> int:
        """Return where piece number `piece` reads value `name`: _FRAME, _STATE, _BUFFER or _PREPARED."""
        partition = self.plan.partition
        if name in partition.prepared:
            return _PREPARED
        if partition.is_of_micro_batch(name, piece):
            return _FRAME
        return _BUFFER if name in self._changed else _STATE

    def _error_of_piece(self, error: Exception, task: ir.Task, micro_batch: int, replica: int) -> Error:
        """Return the error for a failed piece: stage, ipu, user's line, cause, and which weights remain."""
        piece, commit = self.plan.partition.pieces[task.piece], self.state.train_state.commit
        left = "the weights are as they were before the call"
        if self.settings.training and commit.done:
            done = f"{commit.done} of the {commit.steps} weight updates of this call were done"
            left = f"{done}, and the weights are those after them"
        names = self.plan.partition.names[task.stage]
        blocks = f" (blocks {names})" if names != "no block" else ""
        return RunError(
            f"{task.kind} of stage {task.stage}{blocks} failed on ipu {task.ipu},"
            f" micro-batch {micro_batch}, replica {replica}: {type(error).__name__}: {error}\n"
            f"  at {user_line(piece, error)}\n"
            f"  {left}; the executor can be called again{hint_for(str(error))}"
        )

    # ---- messages --------------------------------------------------------------------------------------------

    def message_key(self, row: int, index: int, replica: int) -> MessageKey:
        """Return the key of the message that a row sends or receives."""
        return self.plan.tasks[row].instructions[0].channel, index, replica

    def _send(self, row: int, replica: int, _: EngineCall, index: int) -> None:
        """Send the values that a row "send" names to another place."""
        message = (task := self.plan.tasks[row]).instructions[0]
        is_of_step = task.index == "step"
        source = self.state.values[replica] if is_of_step else self.frames[replica][index]
        first = self.state.first_buffers[replica] if is_of_step else {}
        values = [first.get(name, source[name]) for name in message.names]
        place, key = self.plan.places[message.peer], self.message_key(row, index, replica)
        if place.process == self._where.place.process:
            device = device_of_place(self.plan, self.settings, place, replica)
            self._sent[key] = [devices.Transfer(value, device) for value in values]
        else:
            assert self.mail is not None
            self.mail.send(place, key, values)
        for name in task.frees:
            del source[name]

    def _receive(self, row: int, replica: int, _: EngineCall, index: int) -> None:
        """Put the values of a message, which is here, into the frame, the new buffers or, of the step, the weights."""
        task, key = self.plan.tasks[row], self.message_key(row, index, replica)
        names = task.instructions[0].names
        if self.mail is None:
            values: Sequence[Tensor] = [transfer.finish() for transfer in self._sent.pop(key)]
        else:
            values = self.mail.take(key)
        if task.index == "step":
            received, everywhere = dict(zip(names, values, strict=True)), range(len(self.state.values))
            for number in everywhere if task.once else [replica]:
                self.state.values[number].update(received)
                buffers = received.keys() & self._changed
                self.state.new_buffers[number].update((name, received[name]) for name in buffers)
        elif kept := _names_and_keys(task, "keep"):
            slots = [self.state.slot_of[key] for _, key in kept]
            self.state.new_buffers[replica].update(zip(slots, values, strict=True))
        else:
            self.frames[replica].setdefault(index, {}).update(zip(names, values, strict=True))

    # ---- sums and results ------------------------------------------------------------------------------------

    def _store_results(
        self,
        call: EngineCall,
        stores: Sequence[tuple[str, str]],
        frame: Mapping[str, Tensor],
        micro_batch: int,
        replica: int,
    ) -> None:
        """Copy values of a frame (name, index of the result), gradients without the loss scale, to the results."""
        results, turn = call.results, call.commit.done * self.plan.micro_batches + micro_batch
        for name, key in stores:
            value, index = frame[name], int(key)
            if index in self._scaled:
                value = value / (results.loss_scale * self._weight)
            results.put(index, turn, replica, value)

    def _sum_function(self, row: int, replica: int) -> Work:
        """Return a function that adds a micro-batch's gradients to the sums or means, and stores outputs."""
        task, frames, sums = self.plan.tasks[row], self.frames[replica], self.state.sums[replica]
        optimizer: Any = self.settings.optimizer  # None in inference, where nothing is added
        dtypes = {slot.key: slot.dtype for slot in self.plan.partition.signature.parameters_and_buffers}
        added = [(n, k, optimizer.sum_dtype(dtypes[k])) for n, k in _names_and_keys(task, "accumulate")]
        stores = _names_and_keys(task, "store")
        part, frees = self.settings.step_part, task.frees

        def add(call: EngineCall, micro_batch: int) -> None:
            frame = frames[micro_batch]
            self._store_results(call, stores, frame, micro_batch, replica)
            if micro_batch + part.before == 0:
                self._begin_sums(added, frame, replica, frees)
            elif added:
                targets, gradients = [sums[key] for _, key, _ in added], [frame[name] for name, *_ in added]
                if self.settings.reduction == "running":
                    update_means(targets, gradients, micro_batch + 1 + part.before / part.weight)
                else:
                    torch._foreach_add_(targets, gradients)
            for name in frees:
                del frame[name]

        return add

    def _begin_sums(
        self, added: Sequence[tuple[str, str, torch.dtype]], frame: Any, replica: int, frees: Iterable[str]
    ) -> None:
        """Set the gradient sums of a step to its first micro-batch's: (name in the frame, parameter, the sum's dtype).

        A gradient with the sum's layout that only the frame refers to, and that the caller frees (its name is in
        `frees`), becomes the sum: a copy would take a fifth of the update.
        """
        sums = self.state.sums[replica]
        for name, key, dtype in added:
            gradient, like = frame[name], self.state.values[replica][self.state.slot_of[key]]
            may_become = name in frees and _has_layout(gradient, like, dtype)
            if key in sums:  # in a bucket
                sums[key].copy_(gradient)
            elif may_become and _reference_counts(gradient) == _ONLY_IN_FRAME:
                sums[key] = gradient
            else:
                sums[key] = torch.empty_like(like, dtype=dtype).copy_(gradient)
            del gradient

    # ---- gathering -------------------------------------------------------------------------------------------

    def _gather_function(self, row: int, replica: int) -> Work:
        """Return a function that stacks a value of all replicas of a group, [replicas, ...], in all their frames. Only
        the group's first replica in this process does so."""
        task, counts = self.plan.tasks[row], self.settings.counts
        line = self.plan.partition.pieces[task.piece].lines[0]
        value, size = line.arguments[0].name, line.arguments[1]
        before = counts.instance * counts.replicas  # replicas of other processes
        start = (before + replica) // size * size - before
        members = range(max(start, 0), min(start + size, counts.replicas))

        def gather(_: EngineCall, micro_batch: int) -> None:
            if replica != members[0]:
                return
            stacked = torch.stack([self.frames[member][micro_batch][value] for member in members])
            if size > counts.replicas:
                assert self._group is not None
                ranks = [(before + start) // counts.replicas + i for i in range(size // counts.replicas)]
                stacked = all_gather_rows(self._group, ranks, Tag.GATHER, stacked)
            for member in members:
                self.frames[member][micro_batch][line.name] = stacked

        return gather


def _names_and_keys(task: ir.Task, kind: ir.InstructionKind) -> list[tuple[str, str]]:
    """Return (name, key) of each value in the instructions of a row that have this kind."""
    return [pair for x in task.instructions if x.kind == kind for pair in zip(x.names, x.keys, strict=True)]


def update_means(means: list[Tensor], values: list[Tensor], count: float) -> None:
    """Update means of `count` - 1 values by one more, in float32. No mean exceeds its values, so none overflows."""
    for mean, value in zip(means, values, strict=True):
        wide = torch.promote_types(torch.promote_types(mean.dtype, value.dtype), torch.float32)
        mean.copy_(torch.lerp(mean.to(wide), value.to(wide), 1 / count))


def _has_layout(gradient: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a gradient has this dtype and the weight's shape and strides, and fills its storage."""
    layout = gradient.dtype, gradient.shape, gradient.stride(), gradient.untyped_storage().nbytes()
    return layout == (dtype, weight.shape, weight.stride(), gradient.nbytes)


def _reference_counts(value: Tensor) -> tuple[int, int]:
    """Return the numbers of references to a tensor and to its storage, including those by this call."""
    return sys.getrefcount(value), storage_use_count(value.untyped_storage()._cdata)


def _reference_counts_in_frame() -> tuple[int, int]:
    """Return the `_reference_counts` that `_begin_sums` finds for a tensor to which only a frame refers."""
    frame = {"": torch.empty(1)}
    gradient = frame[""]
    return _reference_counts(gradient)


_ONLY_IN_FRAME = _reference_counts_in_frame()
