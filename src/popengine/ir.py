"""The intermediate representation: the values that passes take and return.

    capture ─► Graph ─ partition ─► Partition ─┐
                          Strategy ─► Schedule ─┴─ lower ─► Plan ─► Engine

Each value is made by one pass and never changed. Tensors appear by name only, except for the constants of the model's
code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import fx

from .piece import Line, Phase, Piece, Value

__all__ = ["Line", "Phase", "Piece", "Value"]  # and all that is defined here
Role = Literal["parameter", "buffer", "input", "constant", "loss_scale"]
Key = Literal["output", "gradient", "buffer", "input"]


@dataclass(frozen=True, slots=True)
class Slot:
    """An input of a graph: its name in the graph, its role, and the user's name."""

    name: str
    role: Role
    key: str  # parameters, buffers: the canonical name in the module; inputs: their position
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Result:
    """An output of a graph: a user's output, a gradient, or the next value of a buffer or input."""

    name: str  # of the node, or of the slot when it's passed through
    kind: Key
    key: str  # outputs and inputs: their position; gradients and buffers: the canonical name
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Visit:
    """One entry of the forward into a block; the name None stands for operations before the first block."""

    name: str | None
    ipu: int | None
    where: str  # file:line of the user's code


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a captured model, the constants of its code, and its entries into blocks."""

    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    constants: dict[str, torch.Tensor]
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class Graph(Signature):
    """One micro-batch of the model: forward, and in training backward, as one functional fx graph.

    Each node's meta holds `phase` ("F" or "B"), `block` (index into `visits`; None where nothing says),
    `where` (the user's line) and, for draws of random numbers, `draw` (its place in the model).
    """

    code: fx.Graph

    @property
    def signature(self) -> Signature:
        return Signature(self.slots, self.results, self.constants, self.visits)

    def __str__(self) -> str:
        return str(self.code)


@dataclass(frozen=True)
class Partition:
    """A graph cut into pieces, with the stage of each parameter and buffer."""

    signature: Signature
    pieces: tuple[Piece, ...]  # in order of the data: F0 F1 ... B1 B0
    ipus: tuple[int, ...]  # of each stage
    home: dict[str, int]  # parameter's or buffer's slot name -> stage
    names: tuple[str, ...]  # of each stage: its blocks, for messages
    prepared: dict[str, Piece] = field(default_factory=dict)  # by name, what is made of weights once a step

    @property
    def stages(self) -> int:
        return len(self.ipus)


class Action(NamedTuple):
    """Run one phase of one stage on one micro-batch. (A tuple, for speed: long schedules have 100,000s.)"""

    phase: Phase
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of one step for each lane, in order. Lanes are ipus, or the cores that all ipus share.

    Args:
        in_flight: micro-batch m starts after micro-batch m - in_flight has ended
    """

    rows: dict[int, tuple[Action, ...]]
    stages: int
    micro_batches: int
    training: bool
    in_flight: int
    name: str = ""
    lanes: Literal["ipu", "core"] = "ipu"

    @property
    def overlaps(self) -> bool:
        """Whether several micro-batches may be computed at the same time, even by one stage on several cores."""
        return self.name != "in turns"


# ---- instructions of an ipu's program; `micro_batch` is within the step --------------------
# (Tuples, for speed: a long program has 100,000s. Tuples of different types may compare equal: check the type.)


class Load(NamedTuple):
    """Take the rows of this micro-batch from the user's inputs."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    micro_batch: int


class Receive(NamedTuple):
    """Wait for values of this micro-batch (None: of the whole step) from another ipu."""

    channel: tuple[str, int]
    names: tuple[str, ...]
    micro_batch: int | None


class Send(NamedTuple):
    """Send values of this micro-batch (None: of the whole step) to another ipu."""

    channel: tuple[str, int]
    names: tuple[str, ...]
    micro_batch: int | None


class Compute(NamedTuple):
    """Run a piece on this micro-batch.

    Reads in `held` come from the ipu's state, others from values of the micro-batch; those in `last` are freed.
    """

    piece: int
    micro_batch: int
    held: tuple[str, ...]
    last: tuple[str, ...]


class Accumulate(NamedTuple):
    """Add gradients to their sums; the first of a step replaces the sum."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    micro_batch: int


class Keep(NamedTuple):
    """Replace buffers by their next value."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    micro_batch: int


class Store(NamedTuple):
    """Put values into the user's results (positions of `Graph.results`)."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    micro_batch: int


class Free(NamedTuple):
    """Drop values of this micro-batch."""

    names: tuple[str, ...]
    micro_batch: int


class Update(NamedTuple):
    """Reduce the gradient sums over the replicas, and update the weights of this ipu."""

    keys: tuple[str, ...]


Instruction = Load | Receive | Send | Compute | Accumulate | Keep | Store | Free | Update


@dataclass(frozen=True)
class Plan:
    """The input of the engine: a program for each ipu, which runs once a step."""

    partition: Partition
    schedule: Schedule
    programs: dict[int, tuple[Instruction, ...]]
    state: dict[int, tuple[str, ...]]  # slots that each ipu keeps from step to step
