"""The intermediate representation: the values that flow from pass to pass. Every value is made once, by one pass, and
never changed. Tensors appear by name only, except the constants of the model's code."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from .order import After, Phase
from .piece import Line, Piece, Value
from .settings import Place
from .table import Index, Instruction, InstructionKind, Task, TaskKind

# Beside the names defined here.
__all__ = ["After", "Index", "Instruction", "InstructionKind", "Line", "Phase"]
__all__ += ["Piece", "Task", "TaskKind", "Value"]
Role = Literal["parameter", "buffer", "input", "constant", "loss_scale"]
ResultKind = Literal["output", "gradient", "buffer", "input"]


@dataclass(frozen=True, slots=True)
class Slot:
    """An input of a graph: its name in the graph, its role, its key (the user's name), shape and dtype."""

    name: str
    role: Role
    key: str  # of a parameter or buffer: its canonical name; of an input: its position; else a name
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Result:
    """An output of a graph: a user's output, a gradient, or the next value of a buffer or input."""

    name: str  # of the node, or of the slot when it's passed through
    kind: ResultKind
    key: str  # outputs and inputs: their position; gradients and buffers: the canonical name
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit to a block in the forward: the block's name (None: before any block), and its ipu, if any."""

    name: str | None
    ipu: int | None
    where: str  # file:line of the user's code


@dataclass(frozen=True)
class Signature:
    """The inputs (`slots`), outputs (`results`), constants and block visits of a captured model."""

    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    constants: dict[str, torch.Tensor]
    visits: tuple[Visit, ...]

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Return the position of each input of the model, as text, by the name of its slot."""
        return {slot.name: slot.key for slot in self.slots if slot.role == "input"}

    @property
    def parameters_and_buffers(self) -> list[Slot]:
        """Return the slots of parameters and buffers."""
        return [slot for slot in self.slots if slot.role in ("parameter", "buffer")]

    @property
    def trained(self) -> list[str]:
        """Return the canonical names of the parameters that have a gradient."""
        return [result.key for result in self.results if result.kind == "gradient"]

    @property
    def changed_buffers(self) -> frozenset[str]:
        """Return the slot names of buffers that the forward changes."""
        keys = {result.key for result in self.results if result.kind == "buffer"}
        return frozenset(slot.name for slot in self.slots if slot.role == "buffer" and slot.key in keys)

    @property
    def constant_slots(self) -> frozenset[str]:
        """Return the names of slots that don't change during a step: all but inputs and changed buffers."""
        return frozenset(slot.name for slot in self.slots if slot.role != "input") - self.changed_buffers


@dataclass(frozen=True)
class Graph(Signature):
    """One micro-batch of the model: forward, and in training backward, as one functional fx graph.

    An operation's meta holds `phase` ("F" or "B"), `block` (index into `visits`; None: autograd's sum of two
    gradients), `where` (the user's line) and, for draws of random numbers, `draw` (the index of the draw).
    """

    code: fx.Graph
    # (number, object) of each object to which the code refers by a number.
    held: tuple[tuple[int, Any], ...] = field(default=(), repr=False)
    reads: Any = field(default=None, repr=False)  # `Reads`: what forward has read from Python
    beside: Any = field(default=None, repr=False)  # values that forward returns beside tensors: see `capture`

    @property
    def signature(self) -> Signature:
        return Signature(self.slots, self.results, self.constants, self.visits)

    def __str__(self) -> str:
        return str(self.code)


@dataclass(frozen=True)
class Partition:
    """A graph cut into pieces, and the stage that holds each parameter and buffer."""

    signature: Signature
    pieces: tuple[Piece, ...]  # in order of the data: F0 F1 ... B1 B0
    ipus: tuple[int, ...]  # of each stage
    home: dict[str, int]  # parameter's or buffer's slot name -> stage
    names: tuple[str, ...]  # of each stage: its blocks, for messages
    prepared: dict[str, Piece] = field(default_factory=dict)  # by name, casts of weights, run once per step

    @property
    def stages(self) -> int:
        return len(self.ipus)

    def names_read_by(self, piece: Piece) -> Iterator[str]:
        """Yield the names that a piece reads; after a prepared cast, also the names that the cast reads."""
        for name in piece.reads:
            yield name
            yield from self.prepared[name].reads if name in self.prepared else ()

    @cached_property
    def makers(self) -> dict[str, int]:
        """Return the index of the piece that writes each value, by name, without inputs and constant slots."""
        given = self.signature.constant_slots | self.signature.inputs.keys()
        return {name: i for i, piece in enumerate(self.pieces) for name in piece.writes if name not in given}

    def is_of_micro_batch(self, name: str, piece: int) -> bool:
        """Return whether a value that a piece (an index) reads is an input, or comes from another piece."""
        return name in self.signature.inputs or self.makers.get(name, piece) != piece


# ---- the table of a step -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The input of the engine: the pieces, and the table of the actions of a step."""

    partition: Partition
    tasks: tuple[Task, ...]
    micro_batches: int  # per step and replica
    order: str  # a key of `popengine.order.ORDERS`
    slots_of: dict[int, tuple[str, ...]]  # the slots that each ipu reads or updates in every step
    # Of each ipu, of replica 0 if replicas are on several devices; {}: all ipus are at one place.
    places: dict[int, Place] = field(default_factory=dict)
    shifts: tuple[int, ...] = ()  # of replicas on several devices: `Settings.shifts`

    def is_elsewhere(self, row: int, place: Place) -> bool:
        """Return whether a row runs at another place than `place`. Rows without an ipu run at each place."""
        return self.places.get(self.tasks[row].ipu, place) != place

    def slots_at(self, place: Place) -> dict[int, tuple[str, ...]]:
        """Return the slots of each ipu at a place."""
        return {ipu: names for ipu, names in self.slots_of.items() if self.places.get(ipu, place) == place}

    def holders(self) -> dict[str, int]:
        """Return the process (in the replica) that holds each parameter and buffer, by canonical name; {} if all
        processes of a replica run this plan alone."""
        process_of = {name: self.places[ipu].process for ipu in self.places for name in self.slots_of[ipu]}
        slots = self.partition.signature.parameters_and_buffers
        return {slot.key: process_of[slot.name] for slot in slots if slot.name in process_of}
