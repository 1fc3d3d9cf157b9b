"""One call of the engine: its inputs, its progress, its end, and its results.

A turn is the index of a micro-batch in the call: iteration * accumulation + index within the weight update.
The result of an output is concatenated in dimension 0 from the values that its output mode returns: one for
each (turn, replica), replicas fastest; with the modes "sum" and "final" one for each replica.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UnrecoverableError
from ..ir import Result, Signature, Slot
from ..settings import Anchor, Counts, Hyper, Outputs, Settings
from . import devices

logger = logging.getLogger("popengine")

# PopTorch's devices have no 64-bit types: the user receives 32-bit values, if the values fit. Only the outputs of a
# model with float64 weights or buffers, which those devices don't run, stay float64.
_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}


class ResultBuffer:
    """A tensor on the device with a row, like `like`, for each value that an output mode returns (of "every_n" those of
    each `period`-th iteration), and the times at which the copies into the rows began and ended (perf_counter)."""

    def __init__(
        self, counts: Counts, mode: Outputs, period: int, like: Slot | Result, device: torch.device
    ) -> None:
        self._counts, self._mode = counts, mode
        self._period = period if mode == "every_n" else 1
        rows = counts.replicas
        if mode in ("all", "every_n"):
            rows *= counts.iterations // self._period * counts.accumulation
        # A sum counts bools.
        dtype = torch.empty(0, dtype=like.dtype).sum().dtype if mode == "sum" else like.dtype
        self.values = torch.empty((rows, *like.shape), dtype=dtype, device=device)
        if mode == "sum":
            self.values.zero_()
        self.started, self.finished = [0.0] * rows, [0.0] * rows  # perf_counter
        self._transfers = list[tuple[int, devices.Transfer]]()  # rows from other devices

    def put(self, turn: int, replica: int, value: Tensor) -> None:
        """Copy the value of a micro-batch to its row, or add it (mode "sum"), if the mode returns it."""
        counts, row = self._counts, replica
        iteration, micro_batch = divmod(turn, counts.accumulation)
        if self._mode == "final":
            if turn < counts.iterations * counts.accumulation - 1:
                return
        elif self._mode != "sum":
            if (iteration + 1) % self._period:
                return
            row += (iteration // self._period * counts.accumulation + micro_batch) * counts.replicas
        self.started[row] = perf_counter()
        if value.device != self.values.device:
            self._transfers.append((row, devices.Transfer(value, self.values.device)))
        else:
            self._store(row, value)
        self.finished[row] = perf_counter()

    def _store(self, row: int, value: Tensor) -> None:
        if self._mode == "sum":
            self.values[row].add_(value)
        else:
            self.values[row].copy_(value)

    def finish_transfers(self) -> None:
        """Store the rows from other devices."""
        coming, self._transfers = self._transfers, []
        for row, transfer in coming:
            self._store(row, transfer.finish())

    def add_step(self, iteration: int, step: ResultBuffer, replicas: Collection[int]) -> None:
        """Copy the rows of an iteration and of these replicas (or groups) from the buffer of one step."""
        if step._period == 1 and (iteration + 1) % self._period:
            return
        count, every = len(step.values), self._counts.replicas
        start = 0 if self._mode in ("final", "sum") else iteration // self._period * count
        now = perf_counter()
        rows = self.values[start : start + count]
        for first in replicas if len(replicas) < every else ():
            rows[first::every].copy_(step.values[first::every])
        if len(replicas) == every:
            rows.copy_(step.values)
        self.started[start : start + count] = [now] * count
        self.finished[start : start + count] = [perf_counter()] * count

    def copy_to_host(self, is_narrowed: bool = True) -> Tensor:
        """Return a copy of all rows on the CPU, `_as_32_bit` if `is_narrowed`, concatenated in dimension 0. 0-d rows
        become one tensor of shape [rows], or 0-d if there is only one row."""
        with torch.inference_mode(False):  # the user may write to it
            # Pinned memory is rounded up, and never given back.
            values = self.values.clone() if self.values.is_pinned() else self.values.cpu()
        if is_narrowed and values.dtype in _NARROWED:
            values = _as_32_bit(values)
        if values.dim() == 1:
            return values.reshape(()) if len(values) == 1 else values
        return values.flatten(0, 1)


def _as_32_bit(values: Tensor) -> Tensor:
    """Return 64-bit values as 32-bit values; all values unchanged, with a warning, if one is too large."""
    narrow = _NARROWED[values.dtype]
    if values.numel():
        bounds = (torch.finfo if narrow.is_floating_point else torch.iinfo)(narrow)
        low, high = values.nan_to_num(0, 0, 0).aminmax()
        if low < bounds.min or high > bounds.max:
            dtype = values.dtype
            logger.warning("an output has values too large for %s, and is returned as %s", narrow, dtype)
            return values
    return values.to(narrow)


class Results:
    """The results of one call: allocated on the device before the call, copied to the host after it."""

    def __init__(self, signature: Signature, settings: Settings, device: torch.device, inputs: int) -> None:
        self._signature, counts = signature, settings.counts
        self._counts = counts
        self.loss_scale = 1.0  # of the latest step
        # By index of the result in the signature (outputs, and inputs that the forward writes into), or anchor of a
        # weight, of which a turn is an iteration.
        self.buffers: dict[int | Anchor, ResultBuffer] = {}
        self._outputs, self._written = list[ResultBuffer](), list[int]()
        modes: dict[int, tuple[Outputs, int]] = {}
        for anchor in settings.anchors:
            if anchor.source in ("output", "gradient"):
                modes[int(anchor.key)] = anchor.outputs, anchor.return_period
            elif anchor.source != "loss_scale":
                slot = next(slot for slot in signature.parameters_and_buffers if slot.key == anchor.key)
                once = replace(counts, accumulation=1)
                self.buffers[anchor] = ResultBuffer(once, anchor.outputs, anchor.return_period, slot, device)
        for index, result in enumerate(signature.results):
            if result.kind == "output":
                mode = modes.get(index, (settings.outputs, settings.return_period))
                self.buffers[index] = ResultBuffer(counts, *mode, result, device)
                self._outputs.append(self.buffers[index])
            elif result.kind == "input":  # replicas of a group write the same values
                of_groups = replace(counts, replicas=counts.groups)
                self.buffers[index] = ResultBuffer(of_groups, "all", 1, result, device)
                self._written.append(index)
        # By input: when the upload of each micro-batch began and ended; at first the start of the call.
        times = [perf_counter()] * (counts.iterations * counts.accumulation * counts.replicas)
        self.load_started, self.loaded = list[list[float]](), list[list[float]]()
        for _ in range(inputs):
            self.load_started.append(times.copy())
            self.loaded.append(times.copy())

    def put(self, index: int, turn: int, replica: int, value: Tensor) -> None:
        """Store a micro-batch's value of result number `index`: an output, or the new value of an input."""
        row = self._counts.input_group_of(replica) if index in self._written else replica
        self.buffers[index].put(turn, row, value)

    def add_step(self, iteration: int, step: Results, turns: range, replicas: Collection[int]) -> None:
        """Copy the results of an iteration from those of a call with one step of these replicas, whose inputs are
        uploaded now."""
        groups = {self._counts.input_group_of(replica) for replica in replicas}
        for index, buffer in step.buffers.items():
            self.buffers[index].add_step(iteration, buffer, groups if index in self._written else replicas)
        rows = slice(turns.start * self._counts.replicas, turns.stop * self._counts.replicas)
        for times in (*self.load_started, *self.loaded):
            times[rows] = [perf_counter()] * (rows.stop - rows.start)

    def continue_sums(self, earlier: Results) -> None:
        """Set the results with the mode "sum" to those of an earlier part of the call."""
        for buffer, before in zip(self._outputs, earlier._outputs, strict=True):
            if buffer._mode == "sum":
                before.finish_transfers()  # else they would be added after those of later steps
                buffer.values.copy_(before.values)

    def anchor_values(self, anchor: Anchor) -> Tensor:
        """Return the values of an anchor, by `ResultBuffer.copy_to_host`, or the latest step's loss scale."""
        if anchor.source == "loss_scale":
            return torch.tensor(self.loss_scale)
        return self._host_values(self.buffers[int(anchor.key) if anchor.is_output else anchor])

    def parts(self) -> list[tuple[int | Anchor, int, Tensor]]:
        """Return each result, as in `buffers`, with each replica that has rows of it, and these rows, as a view. Of an
        input that forward writes into, the first replica of each group has them."""
        replicas = range(self._counts.replicas)
        firsts = {self._counts.input_group_of(replica): replica for replica in reversed(replicas)}
        groups = [firsts[group] for group in sorted(firsts)]
        return [
            (result, replica, buffer.values[number :: len(owners)])
            for result, buffer in self.buffers.items()
            for owners in [groups if result in self._written else replicas]
            for number, replica in enumerate(owners)
        ]

    def rows(self, anchor: Anchor) -> Tensor:
        """Return the values of an anchored output, of their own type, on the CPU: each value is a row."""
        return self.buffers[int(anchor.key)].values.cpu()

    def outputs(self, count: int | None = None) -> list[Tensor]:
        """Return the outputs of forward, then those of anchors: all outputs, or the first `count`."""
        return [*map(self._host_values, self._outputs[:count])]

    def _host_values(self, buffer: ResultBuffer) -> Tensor:
        """Return a buffer's values on the CPU; float64 values stay so if the model has weights of float64."""
        if buffer.values.dtype != torch.float64:
            return buffer.copy_to_host()
        dtypes = map(attrgetter("dtype"), self._signature.parameters_and_buffers)
        return buffer.copy_to_host(torch.float64 not in dtypes)

    def times(self, count: int) -> list[list[list[float]]]:
        """Return when the loads of each input began and ended, and the copies of each of the first `count` outputs."""
        buffers = self._outputs[:count]
        of_outputs = map(attrgetter("started"), buffers), map(attrgetter("finished"), buffers)
        return [self.load_started, self.loaded, *map(list, of_outputs)]

    def written_inputs(self) -> dict[int, Tensor]:
        """Return the new values of inputs that forward writes into, on the CPU, by index of the input."""
        results = self._signature.results
        return {int(results[i].key): self.buffers[i].values.flatten(0, 1).cpu() for i in self._written}


class Stopped(Exception):
    """The error that ends a call in the engine's threads after an interrupt of the user's thread."""


class Alone:
    """The peers of a process that trains alone: there are none."""

    def abort(self, why: str) -> None:
        """Do nothing, because no peer waits."""

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Call `commit`."""
        commit()


ALONE = Alone()


class Commit:
    """The life of a call's steps, of which `done` are finished, and the lock of the weights. One object for all calls
    of a `TrainState`, which run one at a time:

        begin ─► open ─ commit ─► committed ─ finish_step ─► open ─► ... ─ end ─► ended
                  │                   └─ end, after an error in an update ─► lost
                  └─ end, after an error or an interrupt: the step is abandoned ─► ended

    The user's thread calls `begin` and `settle`, and threads of the engine the others, so Ctrl-C interrupts no change.
    """

    def __init__(self) -> None:
        # Held while updates write to the weights, and by threads that read them.
        self.lock: Any = threading.Lock()
        self.state: Literal["open", "committed", "ended", "lost"] = "ended"
        self.name, self.steps, self.done = "", 0, 0  # the name is for messages
        self.complete_calls = 0
        self.is_stopping = False  # whether no further step should be committed
        self.why_lost: UnrecoverableError
        self._wait: Callable[[], None] | None = None  # of the engine that runs the call
        self._abort: Callable[[str], None] = ALONE.abort

    # ---- of the user's thread ------------------------------------------------------------------------------

    def begin(self, name: str, steps: int, wait: Callable[[], None], abort: Callable[[str], None]) -> None:
        """Begin a call. `wait` returns when the threads have ended it; `abort` wakes the peers."""
        self.name, self.steps, self.done = name, steps, 0
        self.is_stopping, self._wait, self._abort = False, wait, abort
        self.state = "open"

    def settle(self) -> None:
        """Wait until no call runs; first stop one that an interrupt has left running, and wake the peers. A step that
        is committed runs to its end."""
        if self._wait is not None and self.state in ("open", "committed"):
            self.is_stopping = True
            if self.state == "open":
                self._abort(f"was interrupted at {self.name}")
            while True:
                try:
                    self._wait()
                    break
                except KeyboardInterrupt:  # a second Ctrl-C: the call is stopping already
                    continue
            if self.state == "open":  # an interrupt came before the threads had the call
                self.state = "ended"
            if self.done < self.steps:
                self._abort(f"was interrupted at {self.name}")
            # Some libraries have one number of threads for the process, which another thread may have set.
            torch.set_num_threads(torch.get_num_threads())
        self._wait, self._abort = None, ALONE.abort  # the engine may be closed now

    def check_not_lost(self) -> None:
        """Raise UnrecoverableError if the weights are lost."""
        if self.state == "lost":
            raise self.why_lost

    def restore(self) -> None:
        """End the state "lost", after all weights were loaded."""
        if self.state == "lost":
            self.state = "ended"

    # ---- of the engine's threads ---------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the running step, which no interrupt stops from now on, and lock the weights. Raises Stopped if the
        call is to stop."""
        self.lock.acquire()
        self.state = "committed"
        # Read after `state` is set, and `settle` sets it before reading `state`, so one thread reads the other's value.
        if self.is_stopping:
            self.release()
            raise Stopped

    def release(self) -> None:
        """Unlock the weights, if the step is committed: it has finished, or no weight was written."""
        if self.state == "committed":
            self.state = "open"
            self.lock.release()

    def finish_step(self) -> None:
        """Count a finished step, and release the weights. Raises Stopped if the call is to stop and has further
        steps."""
        self.done += 1
        self.release()
        if self.is_stopping and self.done < self.steps:
            raise Stopped

    def end(self, error: BaseException | None) -> BaseException | None:
        """End the call after this error, and return the error for the caller: None for Stopped. If a step is committed,
        the weights are lost."""
        self.complete_calls += self.done == self.steps
        if self.state == "committed":
            self.lose(
                UnrecoverableError(
                    f"the weights are lost: some are those after {self.name}, and some those before"
                    f" ({type(error).__name__}: {error})\n"
                    "  why: an update failed halfway\n"
                    "  fix: load the model's and the optimizer's state from a checkpoint; or start again from one"
                )
            )
        if self.state == "lost":
            return self.why_lost
        self.state = "ended"
        return None if isinstance(error, Stopped) else error

    def lose(self, error: UnrecoverableError) -> None:
        """Mark the weights as lost: this call and later ones raise the error."""
        is_locked, self.why_lost, self.state = self.state == "committed", error, "lost"
        if is_locked:
            self.lock.release()


@dataclass(eq=False)
class EngineCall:
    """One call of the engine. Its progress is in `commit`."""

    inputs: Sequence[Tensor]  # each [turns, groups, micro-batch, ...]
    results: Results
    hyper: Hyper | None
    threads: int  # the caller's torch.get_num_threads(), restored at the end
    commit: Commit
    # Events of the work that the caller has started, with their accelerators.
    begins_after: list[tuple[Any, torch.device]] = field(default_factory=list)
    overflows: list[tuple[int, float]] = field(default_factory=list)  # steps and loss scales
    failure: BaseException | None = None  # with which the call ended
