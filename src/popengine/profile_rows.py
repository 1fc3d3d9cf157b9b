"""The rows of a profile's tables: plain values, one kind for each table. `docs/profile-format.md` describes them.

A program's instructions are the same in every step, so a `Track` holds only how long each took; `programs`
says what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """A pass of the compiler."""

    name: str
    seconds: float


class Block(NamedTuple):
    """A block of the model, where it was placed, and the line that opened it."""

    name: str
    stage: int
    ipu: int
    where: str
    parameters: int = 0  # numbers in its weights


class Piece(NamedTuple):
    """One phase of one stage."""

    phase: str  # F or B
    stage: int
    ipu: int
    where: str  # the first of the user's lines in it
    enters: int = 0  # bytes it is handed for good: they die while it runs


class Operation(NamedTuple):
    """One operation of a piece; times are of replica 0 in the step that `facts["detailed_step"]` names."""

    piece: int
    name: str
    kind: str
    block: str
    where: str
    calls: int = 0
    ns: int = 0  # of all calls together
    flops: int = 0  # of one call
    bytes: int = 0  # read and written by one call
    live: int = 0  # bytes alive in the piece after it
    module: str = "?"  # as `named_modules` names it; "": the model's own forward, "?": not known


class Part(NamedTuple):
    """An instruction of an ipu's program, whatever its micro-batch."""

    ipu: int
    kind: str  # compute, receive, send, load, accumulate, keep, store, free, update
    phase: str = ""
    stage: int = -1
    peer: int = -1  # the ipu at the other end of a send or receive
    bytes: int = 0  # moved by a load, send, receive, store; read by an update
    channel: str = ""  # of a send or receive: the same name at both ends

    @property
    def often_and_when(self) -> tuple[str, str]:
        """How often a transfer happens, a "micro-batch" or a "step", and when."""
        if self.phase:
            return "micro-batch", f"after {self.phase}{self.stage}"
        return "step", "at its start (shared weights)"


class Track(NamedTuple):
    """One step of one ipu: when it began, how long each instruction of its program took, the time before each in
    which the ipu had nothing to do, the core that ran it, and for how long that core computed in it: less than the
    duration where another program had the core. (None: no such time, no such core. 0 computed: not measured.)"""

    call: int
    step: int  # weight updates (calls, in inference) since the executor was compiled
    replica: int
    ipu: int
    start: int  # ns since the profile's origin
    durations: list[int]  # ns
    gaps: list[int] | None = None  # ns
    cores: list[int] | None = None
    computed: list[int] | None = None  # ns

    def spans(self) -> Iterator[tuple[int, int]]:
        """When each instruction began and ended."""
        at = self.start
        for index, duration in enumerate(self.durations):
            at += self.gaps[index] if self.gaps else 0
            yield at, at + duration
            at += duration


class Call(NamedTuple):
    """One call of the executor as the host saw it; ns since the profile's origin."""

    call: int
    start: int
    end: int
    steps: int


class HostEvent(NamedTuple):
    """Something the host did or waited for; ns since the profile's origin."""

    kind: str  # loader, weights to device, weights to host
    start: int
    end: int
    bytes: int = 0


class Memory(NamedTuple):
    """Bytes that live on an ipu from step to step."""

    replica: int
    ipu: int
    weights: int = 0
    buffers: int = 0  # and constants
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0  # of earlier versions: what a failed call was rolled back to


class Tensor(NamedTuple):
    """Memory of a micro-batch on replica 0: held after instructions [born, died) of the detailed step."""

    ipu: int
    name: str
    kind: str  # input, activation
    micro_batch: int
    bytes: int
    born: int
    died: int


class Tick(NamedTuple):
    """An action of the schedule, and its tick if each action took one."""

    ipu: int
    phase: str
    stage: int
    micro_batch: int
    tick: int


class Option(NamedTuple):
    """An option that differs from its default."""

    name: str
    value: str
    default: str


class Event(NamedTuple):
    """One instruction of one ipu as it ran: `Track` and `Part` joined."""

    ipu: int
    replica: int
    kind: str
    start: int
    end: int
    phase: str = ""
    stage: int = -1
    micro_batch: int = -1
    step: int = 0
    call: int = 0
    peer: int = -1
    bytes: int = 0
    core: int = -1
    computed: int = 0
    channel: str = ""

    @property
    def cost(self) -> int:
        """ns of work: without what other programs did meanwhile, where that was measured."""
        return self.computed or self.end - self.start


TABLES: dict[str, type[Any]] = {
    "passes": Pass,
    "blocks": Block,
    "pieces": Piece,
    "operations": Operation,
    "parts": Part,
    "tracks": Track,
    "calls": Call,
    "host": HostEvent,
    "memory": Memory,
    "tensors": Tensor,
    "schedule": Tick,
    "options": Option,
}
