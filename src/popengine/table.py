"""The table of a step: a row for each thing that a step does. Reading it needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .order import Action, After, Phase

InstructionKind = Literal[
    "load", "receive", "compute", "send", "accumulate", "keep", "store", "free", "update"
]


COMPUTING = ("forward", "backward")  # kinds of rows that run operations of the model


class Instruction(NamedTuple):
    """One thing that a row does, as if each ipu had memory of its own. At one place `send`, `receive` and `free` have
    nothing to do: pieces read what others have written, and a row's `frees` says when memory is freed. The first
    instruction of rows "send" and "receive" is the message between two places.

    kind        what `names` name                             other fields
    load        inputs: their rows of this micro-batch        keys: positions of the inputs
    receive     values that another ipu has computed          channel, peer
    compute     values that no later piece of this ipu reads  piece
    send        values that another ipu reads                 channel, peer
    accumulate  gradients to add to their sums                keys: names of the parameters
    keep        the next values of buffers                    keys: names of the buffers
    store       values for the user's results                 keys: positions in `Signature.results`
    free        values: their memory is freed
    update      (nothing)                                     keys: names of the weights; peer: their ipu
    """

    kind: InstructionKind
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    channel: str = ""  # the same name at both ends
    peer: int = -1  # the ipu at the other end
    piece: int = -1
    bytes: int = 0  # of the values; only in a profile


TaskKind = Literal[
    "copy",  # weights of an ipu that pieces of another one at the same place read
    "send",  # a message to another place: values, weights, or nothing
    "receive",  # that message; waits for the row "send"
    "forward",
    "backward",
    "gather",  # values of the replicas of a group
    "sum",  # gradients over micro-batches; outputs of the mode "sum"
    "exchange",  # all-reduce a bucket of gradient sums over processes
    "update",  # prepare all gradients, commit the step, and run the optimizer's `step()`
    "share",  # broadcast weights from the processes that have updated them
]
Index = Literal["micro_batch", "step"]  # what a row runs for each of


@dataclass(frozen=True)
class Task:
    """A row of a plan's table: one thing that a step does, for each micro-batch or once."""

    kind: TaskKind
    ipu: int = -1
    stage: int = -1
    phase: Literal[Phase, ""] = ""
    index: Index = "micro_batch"
    after: tuple[After, ...] = ()
    piece: int = -1
    instructions: tuple[Instruction, ...] = ()  # what the row does, in this order
    frees: tuple[str, ...] = ()  # the values of the micro-batch that no later row reads
    once: bool = False  # for all replicas together, and not for each replica

    @property
    def computes(self) -> bool:
        """Return whether the row runs operations of the model."""
        return self.kind in COMPUTING

    @property
    def runs_piece(self) -> bool:
        """Return whether the row runs a piece: operations of the model, or a gather."""
        return self.computes or self.kind == "gather"

    def __str__(self) -> str:
        if not self.phase:
            return self.kind
        name = f"{self.phase}{self.stage}"
        return name if self.computes else f"{self.kind} {name}"


def actions(tasks: Sequence[Task]) -> tuple[list[Action], list[list[int]]]:
    """Return the actions of a step, one for each phase of each stage, and the row indices of each action."""
    groups: dict[tuple[str, int], list[int]] = {}
    for row, task in enumerate(tasks):
        if task.phase:
            groups.setdefault((task.phase, task.stage), []).append(row)
    number_of = {row: number for number, rows in enumerate(groups.values()) for row in rows}
    step_actions = []
    for number, ((phase, stage), rows) in enumerate(groups.items()):
        edges = [edge for row in rows if tasks[row].kind != "sum" for edge in tasks[row].after]
        # Rows without a phase are no actions: the weights that other ipus send at the begin of a step.
        edges = [edge for edge in edges if edge.behind is not None and edge.row in number_of]
        after = (After(number_of[edge.row], edge.behind) for edge in edges)
        after = dict.fromkeys(edge for edge in after if edge != After(number, 0))
        step_actions.append(Action(phase, stage, tasks[rows[0]].ipu, tuple(after)))
    return step_actions, list(groups.values())
