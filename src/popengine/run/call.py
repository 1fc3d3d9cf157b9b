"""One call of the engine: what its tasks read, how far it is, how it ends, and where its outputs are put.

For each output tensor the (iteration, accumulation, replica) that the output mode asks for stand after one another in
dimension 0, in the contract's order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from ..ir import Result, Signature, Slot
from ..settings import Anchor, Counts, Hyper, Outputs, Settings

logger = logging.getLogger("popengine")

# Devices have no 64-bit types in this model; what returns to the user is narrower, where it fits.
_RETURNED = {torch.int64: torch.int32, torch.float64: torch.float32}


class Rows:
    """The values of one tensor that a mode asks for, and when each began and ended to arrive."""

    def __init__(
        self, counts: Counts, mode: Outputs, period: int, like: Slot | Result, device: torch.device
    ) -> None:
        self._counts, self._mode = counts, mode
        self._period = period if mode == "every_n" else 1
        copies = counts.replicas
        if mode in ("all", "every_n"):
            copies *= counts.iterations // self._period * counts.accumulation
        self.values = torch.empty((copies, *like.shape), dtype=like.dtype, device=device)
        if mode == "sum":
            self.values.zero_()
        self.started, self.finished = [0.0] * copies, [0.0] * copies

    def put(self, iteration: int, accumulation: int, replica: int, value: Tensor) -> None:
        """Copy one micro-batch's value to its row, if the mode wants it."""
        row = self._row(iteration, accumulation, replica)
        if row is None:
            return
        self.started[row] = perf_counter()
        if self._mode == "sum":
            self.values[row].add_(value)
        else:
            self.values[row].copy_(value)
        self.finished[row] = perf_counter()

    def _row(self, iteration: int, accumulation: int, replica: int) -> int | None:
        counts = self._counts
        if self._mode == "sum":
            return replica
        if self._mode == "final":
            last = (counts.iterations - 1, counts.accumulation - 1)
            return replica if (iteration, accumulation) == last else None
        if (iteration + 1) % self._period:
            return None
        iteration //= self._period
        return (iteration * counts.accumulation + accumulation) * counts.replicas + replica

    @property
    def joined(self) -> Tensor:
        """[copies * d0, ...]; a 0-d value is [copies], or 0-d if alone."""
        values = _narrowed(self.values.cpu())
        if values.dim() == 1:
            return values.reshape(()) if len(values) == 1 else values
        return values.flatten(0, 1)


def _narrowed(values: Tensor) -> Tensor:
    """64-bit values as 32-bit ones; as they are, with a warning, where one of them is too large for that."""
    narrow = _RETURNED.get(values.dtype)
    if narrow is None:
        return values
    if values.numel():
        bounds = (torch.finfo if narrow.is_floating_point else torch.iinfo)(narrow)
        low, high = values.nan_to_num(0, 0, 0).aminmax()
        if low < bounds.min or high > bounds.max:
            dtype = values.dtype
            logger.warning("an output has values too large for %s, and is returned as %s", narrow, dtype)
            return values
    return values.to(narrow)


class Results:
    """Result tensors of one call, allocated before it on the device; the host gets them after the call."""

    def __init__(self, signature: Signature, settings: Settings, device: torch.device) -> None:
        counts = self._counts = settings.counts
        self.loss_scale = 1.0  # in the latest step
        self._rows: dict[int, Rows] = {}  # of outputs, by position
        self._written: dict[int, Tensor] = {}  # of inputs that forward writes into, by position
        self._anchors: dict[Anchor, Rows] = {}  # of weights
        modes: dict[int, tuple[Outputs, int]] = {
            int(a.key): (a.outputs, a.return_period) for a in settings.anchors if not a.is_weight
        }
        for position, result in enumerate(signature.results):
            if result.kind == "output":
                mode, period = modes.get(position, (settings.outputs, settings.return_period))
                self._rows[position] = Rows(counts, mode, period, result, device)
            elif result.kind == "input":  # every micro-batch's value goes back
                shape = (counts.iterations, counts.accumulation, counts.groups, *result.shape)
                self._written[position] = torch.empty(shape, dtype=result.dtype, device=device)
        for anchor in settings.anchors:
            if anchor.is_weight:
                slot = next(slot for slot in signature.weights if slot.key == anchor.key)
                once = replace(counts, accumulation=1)
                self._anchors[anchor] = Rows(once, anchor.outputs, anchor.return_period, slot, device)
        inputs = sum(slot.role == "input" for slot in signature.slots)
        # By input: when each micro-batch was staged; at first the beginning of the call.
        times = [perf_counter()] * (counts.iterations * counts.accumulation * counts.replicas)
        self.load_started, self.loaded = ([times.copy() for _ in range(inputs)] for _ in range(2))

    def load(self, key: int, iteration: int, accumulation: int, replica: int, started: float) -> None:
        """Note that an input's micro-batch has been staged."""
        counts = self._counts
        row = (iteration * counts.accumulation + accumulation) * counts.replicas + replica
        self.load_started[key][row], self.loaded[key][row] = started, perf_counter()

    def put(self, position: int, iteration: int, accumulation: int, replica: int, value: Tensor) -> None:
        """Copy one micro-batch's value of a result."""
        if position in self._written:
            group = self._counts.group_of(replica)
            self._written[position][iteration, accumulation, group].copy_(value)
        else:
            self._rows[position].put(iteration, accumulation, replica, value)

    def put_weight(self, anchor: Anchor, iteration: int, replica: int, value: Tensor) -> None:
        """Copy a weight's value to an anchor's rows."""
        self._anchors[anchor].put(iteration, 0, replica, value)

    def anchored(self, anchor: Anchor) -> Tensor:
        """Return what an anchor has kept, joined as outputs are."""
        return (self._anchors[anchor] if anchor.is_weight else self._rows[int(anchor.key)]).joined

    def outputs(self) -> list[Tensor]:
        """Return the outputs in the forward's order, then those made for anchors."""
        return [rows.joined for rows in self._rows.values()]

    def arrivals(self) -> list[tuple[list[float], list[float]]]:
        """For each output, when its values began to arrive and when they were there (host clock, seconds)."""
        return [(rows.started, rows.finished) for rows in self._rows.values()]

    def inputs(self) -> dict[int, Tensor]:
        """Return the new values of inputs that the forward wrote into, by position of the result."""
        return {position: rows.flatten(0, 3).cpu() for position, rows in self._written.items()}


_PATIENCE = 0.2  # seconds; an interrupt that comes without a signal wakes no thread that waits


class Stopped(Exception):
    """The caller was interrupted: nothing more is computed."""


@dataclass
class EngineCall:
    """One call.

    A step is given up only before its updates: `commit` is the last moment. `done` counts the steps that were finished.
    """

    inputs: Sequence[Tensor]  # each [iterations, accumulation, groups, micro-batch, ...]
    results: Results
    hyper: Hyper | None
    steps: int
    seed: int
    first_step: int
    threads: int  # the caller's number for one operation, to be put back
    name: str  # for messages
    done: int = 0
    overflows: list[tuple[int, float]] = field(default_factory=list)  # steps and loss scales
    failure: BaseException | None = None
    is_over: bool = False
    is_committed: bool = False
    _is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: SimpleQueue[None] = field(default_factory=SimpleQueue)

    @property
    def step(self) -> int:
        """The weight updates before the step that runs, over all calls."""
        return self.first_step + self.done

    @property
    def is_stopped(self) -> bool:
        """Whether the call is given up, once a step that updates weights has ended."""
        return self._is_stopped and not self.is_committed

    def stop(self) -> None:
        """Give the call up as soon as possible."""
        with self._lock:
            self._is_stopped = True

    def commit(self) -> None:
        """From here on the step goes to its end. Raises Stopped, if the call was given up before."""
        with self._lock:
            if self._is_stopped and not self.is_committed:
                raise Stopped
            self.is_committed = True

    def step_done(self) -> None:
        """The step is finished. Raises Stopped, if the call was given up meanwhile."""
        with self._lock:
            self.done += 1
            self.is_committed = False
            if self._is_stopped and self.done < self.steps:
                raise Stopped

    def end(self, error: BaseException | None) -> None:
        """The call is over; `error` is what it has failed with."""
        self.failure = None if isinstance(error, Stopped) else error
        self.is_over = True
        self._over.put(None)

    def wait(self) -> None:
        """Wait for the end of the call."""
        while not self.is_over:
            with suppress(Empty):
                self._over.get(timeout=_PATIENCE)
