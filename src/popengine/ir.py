"""The engine's language on one page: the values that flow from pass to pass.

    capture ─► Graph ─ partition ─► Partition ─ tasks ─► Plan ─► Engine

Every value is made once by one pass and changed by none. Tensors appear by name only, but for the
constants that the model's code holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import fx

from .order import After
from .piece import Line, Phase, Piece, Value

__all__ = ["After", "Line", "Phase", "Piece", "Value"]  # and all that is defined here
Role = Literal["parameter", "buffer", "input", "constant", "loss_scale"]
Key = Literal["output", "gradient", "buffer", "input"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that a graph is given: its name in the graph, what it is, and the user's name for it."""

    name: str
    role: Role
    key: str  # parameters, buffers: the canonical name in the module; inputs: their position
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Result:
    """A value that a graph gives: a user's output, a gradient, or the next value of a buffer or input."""

    name: str  # of the node, or of the slot when it's passed through
    kind: Key
    key: str  # outputs and inputs: their position; gradients and buffers: the canonical name
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Visit:
    """One entry into a block, as the forward ran: its name (None: before the first block)."""

    name: str | None
    ipu: int | None
    where: str  # file:line of the user's code


@dataclass(frozen=True)
class Signature:
    """What a captured model takes and gives, the constants of its code, and the blocks it went through."""

    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    constants: dict[str, torch.Tensor]
    visits: tuple[Visit, ...]

    @property
    def weights(self) -> list[Slot]:
        """The slots of parameters and buffers."""
        return [slot for slot in self.slots if slot.role in ("parameter", "buffer")]

    @property
    def changed(self) -> frozenset[str]:
        """The slots of buffers that the forward changes."""
        keys = {result.key for result in self.results if result.kind == "buffer"}
        return frozenset(slot.name for slot in self.slots if slot.role == "buffer" and slot.key in keys)

    @property
    def fixed(self) -> frozenset[str]:
        """The slots whose values are the same for all micro-batches of a step: every ipu has its own."""
        return frozenset(slot.name for slot in self.slots if slot.role != "input") - self.changed


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
    """A graph cut into pieces, and where each parameter and buffer lives."""

    signature: Signature
    pieces: tuple[Piece, ...]  # in order of the data: F0 F1 ... B1 B0
    ipus: tuple[int, ...]  # of each stage
    home: dict[str, int]  # parameter's or buffer's slot name -> stage
    names: tuple[str, ...]  # of each stage: its blocks, for messages
    prepared: dict[str, Piece] = field(default_factory=dict)  # by name, what is made of weights once a step

    @property
    def stages(self) -> int:
        return len(self.ipus)

    def sources(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names, each prepared value's followed by those of the weights that it is made of."""
        for name in names:
            yield name
            if name in self.prepared:
                yield from self.prepared[name].reads


# ---- the table of a step -----------------------------------------------------------------------------------


InstructionKind = Literal[
    "load", "receive", "compute", "send", "accumulate", "keep", "store", "free", "update"
]


class Instruction(NamedTuple):
    """A part of a row as a profile shows it: what an ipu does, if it has memory of its own.

    kind        names                                               with
    load        of inputs, whose rows of this micro-batch it takes  keys: positions of the inputs
    receive     of values that another ipu has computed             channel, peer
    compute     of values that no later piece of this ipu reads     piece
    send        of values for another ipu                           channel, peer
    accumulate  of gradients that it adds to their sums             keys: names of the parameters
    keep        of the next values of buffers                       keys: names of the buffers
    store       of values for the user's results                    keys: positions in `Signature.results`
    free        of values that it forgets
    update                                                          keys: names of the weights
    """

    kind: InstructionKind
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    channel: str = ""  # the same name at both ends
    peer: int = -1  # the ipu at the other end
    piece: int = -1


TaskKind = Literal[
    "copy",  # weights of an ipu that pieces of another one read
    "forward",
    "backward",
    "gather",  # values of the replicas of a group
    "sum",  # gradients over micro-batches; outputs of the mode "sum"
    "exchange",  # all-reduce a bucket of gradient sums over processes
    "norm",  # of a parameter's gradient
    "begin",  # of the updates: from here on the step can't be given up
    "measure",  # the norms of a chunk's step (LAMB, LARS)
    "trust",  # the ratios from these norms
    "update",  # a chunk of parameters: reduce over replicas, divide, clip, apply the rule
    "share",  # weights that another process has updated
    "end",
]
# A row with the index "micro_batch" is done for each micro-batch, one with "step" once a step, the others for each
# parameter or chunk, whose numbers are known when the plan is loaded.
Index = Literal["micro_batch", "step", "parameter", "chunk"]


@dataclass(frozen=True)
class Task:
    """A row of a plan's table: one thing that a step does, for each micro-batch or once.

    `reads` and `frees` name values of the micro-batch; those in `frees` nothing reads afterwards. `instructions`
    say the same as a profile shows it, as if each ipu had memory of its own. `once`: for all replicas together.
    """

    kind: TaskKind
    ipu: int = -1
    stage: int = -1
    phase: Literal["F", "B", ""] = ""
    index: Index = "micro_batch"
    after: tuple[After, ...] = ()
    piece: int = -1
    instructions: tuple[Instruction, ...] = ()
    frees: tuple[str, ...] = ()
    once: bool = False

    def __str__(self) -> str:
        if not self.phase:
            return self.kind
        name = f"{self.phase}{self.stage}"
        return name if self.kind in ("forward", "backward") else f"{self.kind} {name}"


@dataclass(frozen=True)
class Plan:
    """All that the engine needs to run: the pieces, and the table of what a step does with them."""

    partition: Partition
    tasks: tuple[Task, ...]
    micro_batches: int  # of a step and replica
    order: str  # a key of `popengine.order.ORDERS`
    state: dict[int, tuple[str, ...]]  # the slots that each ipu reads or updates in every step

    def held(self, ipu: int) -> list[str]:
        """Return the slots that an ipu with memory of its own holds: its state, and copies of weights of other ipus."""
        copied = (
            name
            for task in self.tasks
            if (task.kind, task.ipu) == ("copy", ipu)
            for instruction in task.instructions
            if instruction.kind == "receive"
            for name in instruction.names
        )
        return [*self.state[ipu], *copied]
