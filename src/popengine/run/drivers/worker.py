"""One ipu of one replica: runs its instructions, and has the tensors that live there. Who runs which says `driver.py`.

Values of a micro-batch live in a frame, from the instruction that makes them to the last that needs them.
What lives from step to step is in the `Store`. Workers meet only in channels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from popengine import ir
from popengine.errors import Error, RunError
from popengine.settings import Settings

from ..backends import is_eager
from ..backends.eager import Code, user_line
from ..devices import upload
from ..instances.buckets import handing
from ..instances.ordered_sums import AFTER_OTHERS, AT_THE_END, Gathering, take_in
from ..instances.process_group import ProcessGroup
from ..measure.float_exceptions import FiniteCheck
from ..state.alignment import check
from ..state.buffer_chain import chains, code_of
from ..state.gradient_sums import begin_sums, freed_at_once
from ..state.prepared_weights import Prepared
from ..state.random_draws import mix
from ..state.store import Store
from ..updating import Updater
from .one_call import Run, Stopped

_MOMENTS = AFTER_OTHERS, AT_THE_END  # nothing comes


class Worker:
    """Runs one ipu's program on a device."""

    def __init__(
        self,
        ipu: int,
        replica: int,
        plan: ir.Plan,
        settings: Settings,
        store: Store,
        group: ProcessGroup | None,
        codes: Sequence[Code],
        device: torch.device,
    ) -> None:
        self.ipu, self.replica, self.plan, self.settings = ipu, replica, plan, settings
        self.store, self.device = store, device
        self._updater = Updater(ipu, replica, plan, settings, store, group)
        self.frames: dict[int, dict[str, Tensor]] = {}
        self._prepared = Prepared(plan, ipu, store, device)
        self._gathering = Gathering(ipu, replica, settings.counts, group)
        self._checks = FiniteCheck if settings.finite_checks else nullcontext
        self.run: Run
        self.step = 0
        pieces = plan.partition.pieces
        self._code = {i: codes[i] for i, p in enumerate(pieces) if plan.partition.ipus[p.stage] == ipu}
        self._chained = {
            i: code_of(pieces[i], chain, device)
            for i, chain in chains(plan, settings).items()
            if i in self._code
        }
        handlers: dict[type, Callable[[Any], Any]] = {
            ir.Load: self._load,
            ir.Receive: self._receive,
            ir.Send: self._send,
            ir.Compute: self._compute,
            ir.Accumulate: self._accumulate,
            ir.Keep: self._keep,
            ir.Store: self._store,
            ir.Free: self._free,
            ir.Update: self.updating,
        }
        self.program = [(handlers[type(instruction)], instruction) for instruction in plan.programs[ipu]]
        homes: dict[str, int] = {}
        for other, names in plan.state.items():
            for name in names:
                homes.setdefault(name, other)
        self._weights_asked_for = [
            anchor
            for anchor in settings.anchors
            if anchor.is_weight and homes.get(store.slot[anchor.key]) == ipu
        ]
        freed = freed_at_once(plan.programs[ipu])
        self._freed = frozenset() if store.buckets else freed
        hands_over = settings.counts.replicas == 1 and is_eager(settings)
        self._handing = handing(plan, store.buckets, freed, self._hand_over) if hands_over else {}
        self._given = {slot.name for slot in plan.partition.signature.slots}
        self._scaled = {int(anchor.key) for anchor in settings.anchors if anchor.source == "gradient"}

    def begin(self, run: Run) -> None:
        """A call starts."""
        self.run = run

    def begin_step(self, step: int) -> None:
        self.step = step
        self._anchor("weight")
        if self.run.hyper is not None:
            scale = self.run.hyper.loss_scaling * self.store.loss_factor
            self.store.set_loss_scale(scale)
            self.run.results.loss_scale = scale

    def end(self) -> None:
        """The call is over, or has failed: let go of what was made in it."""
        self._updater.exchange.give_up()
        self.frames.clear()
        self._prepared.forget()
        vars(self).pop("run", None)

    def _anchor(self, source: str) -> None:
        """Hand out the weights that somebody wants to see at this moment of the step."""
        for anchor in self._weights_asked_for:
            if anchor.source == source:
                value = self.store.state[self.store.slot[anchor.key]]
                steps = (self.step,) if self.settings.training else range(self.settings.counts.iterations)
                for iteration in steps:
                    self.run.results.put_weight(anchor, iteration, self.replica, value)

    # ---- the instructions --------------------------------------------------------------------------------

    def _load(self, instruction: ir.Load) -> None:
        frame = self.frames.setdefault(instruction.micro_batch, {})
        place = self._iteration(instruction.micro_batch)
        group = self.settings.counts.group_of(self.replica)
        for name, key in zip(instruction.names, instruction.keys, strict=True):
            started = perf_counter()
            frame[name] = upload(self.run.inputs[int(key)][place][group], self.device)
            self.run.results.load(int(key), *place, self.replica, started)

    def _iteration(self, micro_batch: int) -> tuple[int, int]:
        """Device iteration and accumulation step: in inference a step is the whole call."""
        return (self.step, micro_batch) if self.settings.training else (micro_batch, 0)

    def _receive(self, instruction: ir.Receive) -> None:
        values = self.take((instruction.channel, self.replica, instruction.micro_batch))
        if instruction.micro_batch is None:
            self.store.state.update(zip(instruction.names, values, strict=True))
        else:
            frame = self.frames.setdefault(instruction.micro_batch, {})
            frame.update(zip(instruction.names, values, strict=True))

    def _send(self, instruction: ir.Send) -> None:
        if instruction.micro_batch is None:  # weights: a copy, since they change at the end of the step
            values = [self.store.state[name].clone() for name in instruction.names]
        else:
            frame = self.frames[instruction.micro_batch]
            values = [frame[name] for name in instruction.names]
        self.give((instruction.channel, self.replica, instruction.micro_batch), values)

    def give(self, name: Any, value: Any) -> None:
        self.run.channels.put(name, value)

    def take(self, name: Any) -> Any:
        return self.run.channels.receive(name)

    def _compute(self, instruction: ir.Compute) -> Generator[Any, Any, None] | None:
        if self.run.channels.stopped:
            raise Stopped
        piece = self.plan.partition.pieces[instruction.piece]
        frame = self.frames.setdefault(instruction.micro_batch, {})
        prepared = self._prepared.take(instruction.piece)
        state, held = {**self.store.state, **prepared} if prepared else self.store.state, instruction.held
        values: list[Any] = [state[name] if name in held else frame[name] for name in piece.reads]
        if self.settings.check_alignment:
            reads = dict(zip(piece.reads, values, strict=True))
            given = {name: value for name, value in reads.items() if name in self._given}
            check(given, {name: value for name, value in reads.items() if name not in given}, str(piece))
            del reads, given
        del prepared, state  # tensors die in the piece
        for name in instruction.last:
            del frame[name]
        if piece.draws:
            step, counts = self.run.first_step + self.step, self.settings.counts
            replica = counts.instance * counts.replicas + self.replica
            values.append(mix(self.run.seed, step, instruction.micro_batch, replica))
        if instruction.piece in self._chained and self.run.recorder is None:
            return self._answering(instruction, self._chained[instruction.piece](values), self._handed_on)
        code = self._code_for(instruction)
        if piece.gathers:
            return self._answering(instruction, code(values), self._gathered)
        try:
            with self._checks():
                made = code(values)
        except Exception as error:
            raise self._explained(error, piece, instruction.micro_batch) from error
        frame.update(zip(piece.writes, made, strict=True))
        return None

    def _answering(
        self, instruction: ir.Compute, code: Any, answer: Callable[..., Generator[Any, Any, Any]]
    ) -> Generator[Any, Any, None]:
        """Run a piece that asks others for values; yields the name of each channel that it waits for."""
        piece, micro_batch = self.plan.partition.pieces[instruction.piece], instruction.micro_batch
        given = None
        while True:
            try:
                with self._checks():
                    asked = code.send(given)
            except StopIteration as done:
                self.frames[micro_batch].update(zip(piece.writes, done.value, strict=True))
                return
            except Exception as error:
                raise self._explained(error, piece, micro_batch) from error
            given = yield from answer(instruction, *asked)

    def _gathered(
        self, instruction: ir.Compute, value: Tensor, size: int, name: str
    ) -> Generator[Any, Any, Tensor]:
        """The values of all replicas of a group: [replicas, ...]."""
        place = (instruction.piece, name, instruction.micro_batch)
        return (yield from self._gathering(value, size, place, self.give))

    def _handed_on(
        self, instruction: ir.Compute, name: str, value: Tensor | None
    ) -> Generator[Any, Any, Tensor | None]:
        """A buffer as the micro-batch before left it; or nothing, after giving its next value to the next one."""
        micro_batch = instruction.micro_batch
        if value is not None:
            self.give(("buffer", name, self.replica, micro_batch), value)
            self.run.offered()
            return None
        if micro_batch:
            return (yield "buffer", name, self.replica, micro_batch - 1)
        return self.store.state[name]

    def _explained(self, error: Exception, piece: ir.Piece, micro_batch: int) -> Error:
        phase = "forward" if piece.phase == "F" else "backward"
        return RunError(
            f"{phase} of stage {piece.stage} (blocks {self.plan.partition.names[piece.stage]}) failed on ipu"
            f" {self.ipu}, micro-batch {micro_batch}, replica {self.replica}: {type(error).__name__}: {error}\n"
            f"  at {user_line(piece, error)}\n"
            "  the weights are as they were before the call; the executor can be called again"
        )

    def _code_for(self, instruction: ir.Compute) -> Code:
        if self._hands_over(instruction.micro_batch) and instruction.piece in self._handing:
            return self._handing[instruction.piece]
        return self._code[instruction.piece]

    def _hands_over(self, micro_batch: int) -> bool:
        """Whether pieces add up their gradients themselves. (A profile shows who waits for other instances.)"""
        is_last = micro_batch == self.plan.schedule.micro_batches - 1
        return is_last and bool(self._handing) and self.run.recorder is None

    def _hand_over(self, number: int, gradients: Sequence[Tensor]) -> None:
        """A piece has made the last gradients of a bucket."""
        keys = [gradient.key for gradient in self.store.buckets[number].gradients]
        self._add_up(keys, list(gradients), self.plan.schedule.micro_batches - 1)
        self._updater.exchange.begin(number)

    def _accumulate(self, instruction: ir.Accumulate) -> None:
        if self._hands_over(instruction.micro_batch):
            return
        frame = self.frames[instruction.micro_batch]
        if instruction.micro_batch == 0:
            begin_sums(self.store.sums, instruction.keys, frame, instruction.names, self._freed)
        else:
            gradients = [frame[name] for name in instruction.names]
            self._add_up(instruction.keys, gradients, instruction.micro_batch)

    def _add_up(self, keys: Sequence[str], gradients: list[Tensor], micro_batch: int) -> None:
        sums = [self.store.sums[key] for key in keys]
        if micro_batch == 0:
            torch._foreach_copy_(sums, gradients)
        elif self.settings.reduction == "running":
            take_in(sums, gradients, micro_batch + 1)
        else:
            torch._foreach_add_(sums, gradients)

    def _keep(self, instruction: ir.Keep) -> None:
        frame = self.frames[instruction.micro_batch]
        for name, key in zip(instruction.names, instruction.keys, strict=True):
            # A new tensor: backwards that are still to come read the old one.
            self.store.state[self.store.slot[key]] = frame[name].clone()

    def _store(self, instruction: ir.Store) -> None:
        frame = self.frames[instruction.micro_batch]
        iteration, accumulation = self._iteration(instruction.micro_batch)
        for name, position in zip(instruction.names, instruction.positions, strict=True):
            value = frame[name]
            if position in self._scaled and self.run.hyper is not None:
                value = value / (self.run.hyper.loss_scaling * self.store.loss_factor)
            self.run.results.put(position, iteration, accumulation, self.replica, value)

    def _free(self, instruction: ir.Free) -> None:
        frame = self.frames[instruction.micro_batch]
        for name in instruction.names:
            del frame[name]

    def performing(self, body: Sequence[tuple[Callable[[Any], Any], Any]]) -> Generator[Any, Any, None]:
        """Perform instructions; yields the name of each channel that one of them waits for."""
        for handle, instruction in body:
            if (work := handle(instruction)) is not None:
                yield from work

    def go_on(self, work: Any, name: Any) -> Any:
        """Go on with a task that waits for a channel (None: it has not begun), as far as there is no wait.

        Returns: the channel that it waits for now; None at its end
        """
        try:
            name = next(work) if name is None else work.send(self._taken(name))
            while name not in _MOMENTS and self.run.channels.has(name):
                name = work.send(self.take(name))
        except StopIteration:
            return None
        return name

    def _taken(self, name: Any) -> Any:
        return None if name in _MOMENTS else self.take(name)

    def updating(self, instruction: ir.Update) -> Generator[Any, Any, None]:
        """The weight update; yields the name of each channel that it waits for, and is sent what came there."""
        run = self.run
        assert run.hyper is not None
        key = mix(run.seed, run.first_step + self.step)
        scale = run.hyper.loss_scaling * self.store.loss_factor
        commit = partial(run.commit, run) if run.commit is not None else None
        if not (
            yield from self._updater.update(instruction.keys, run.hyper, key, self.give, run.share, commit)
        ):
            run.overflows.append((run.first_step + self.step, scale))
        self._anchor("updated")
