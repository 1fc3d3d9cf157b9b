"""The capture in progress: the open block and module, the losses, and the annotations of the user's code."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...ir import Visit
from .graph_recorder import CaptureRecorder, user_line
from .standins import StandIns

aten = torch.ops.aten
active: ContextVar[Capture | None] = ContextVar("capture", default=None)
_SEEDS = (1 << 63) - 1
ENDED = -1  # the index of "no block": after the end of a `with Block(...)`


def current() -> Capture | None:
    """Return the capture in which the calling code runs, or None."""
    return active.get()


@contextlib.contextmanager
def recording_paused() -> Iterator[Any]:
    """Run the body unrecorded. The context's value is the fake mode of the capture, or None without one."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with _disable_current_modes():
        yield fake


@contextlib.contextmanager
def hidden_from_capture() -> Iterator[Any]:
    """Run the body unrecorded, as `recording_paused`, and with `current()` None: for user code outside of the graph."""
    token = active.set(None)
    try:
        with recording_paused() as fake, torch._C.DisableTorchFunction():
            yield fake
    finally:
        active.reset(token)


def is_traced(value: Tensor) -> bool:
    """Return whether a tensor is a fake tensor, such as a capture makes."""
    return isinstance(value, FakeTensor)


@dataclass
class Group:
    """The properties that the user has set for a group of convolutions (`MultiConv`), and its size."""

    properties: dict[str, Any]
    convolutions: int = 0


@dataclass
class Capture:
    """The state of a capture: the open block and module, the losses, the annotations of the user's code."""

    training: bool
    stand_ins: StandIns
    recorder: CaptureRecorder = field(init=False)
    visits: list[Visit] = field(default_factory=lambda: [Visit(None, None, "?")])
    block: int = 0
    phase: str = "F"
    losses: list[tuple[Tensor, str]] = field(default_factory=list)  # with the user's line
    is_marked: bool = False  # the user has marked a loss
    chosen: tuple[Tensor, str] | None = None  # the loss to train, in place of the marked ones
    # For the host, after each call: see `poptorch.compiling.outputs`.
    notes: list[tuple[Any, Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # as `Graph.held`
    # Autograd numbers its nodes in the order of the forward. For each operation: the number after its node's,
    # and its block, line and module. So the number of a backward node leads to these.
    places: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    module: str = ""  # the running module's name, as in `named_modules`
    # Annotations by scopes in the user's code (names, attributes, groups), recorded in the forward's nodes.
    scopes: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    group: Group | None = None

    def __post_init__(self) -> None:
        self.recorder = CaptureRecorder(self.node_meta, self.stand_ins.stand_in_of_operand)

    def enter_block(self, name: str, ipu: int | None) -> None:
        """Open a block, to which the following operations belong."""
        self.block = len(self.visits)
        self.visits.append(Visit(name, ipu, user_line()))

    def leave_block(self) -> None:
        """Close the open block. An operation before the next `enter_block` raises an error."""
        self.block = ENDED

    def mark_loss(self, value: Tensor, is_explicit: bool = False) -> None:
        """Add a loss: the result of a torch loss function, or (`is_explicit`) one that the user marked."""
        self.losses.append((value, user_line()))
        self.is_marked = self.is_marked or is_explicit

    def choose_loss(self, value: Tensor, where: str) -> None:
        """Set the loss to train, in place of the marked ones. `where` is its origin, as errors name it."""
        self.chosen = value, where

    def node_meta(self, func: Any) -> dict[str, Any]:
        """Return the meta of the node for an operation about to run. For a random operation, seed torch's
        generator anew. Raises CaptureError between the end of a block and the next block."""
        meta = self._forward_meta(func) if self.phase == "F" else self._backward_meta()
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Nothing is drawn while tracing, but torch's generator advances: so a checkpoint that restores
            # its state, to recompute, gets the same number here, and the same random numbers later.
            meta["numbers"] = torch.initial_seed()
            torch.default_generator.manual_seed(meta["numbers"] + 1 & _SEEDS)
        return meta

    def _forward_meta(self, func: Any) -> dict[str, Any]:
        where = user_line()
        if self.block == ENDED:
            raise CaptureError(
                "No active Block, all the ops must belong to a Block\n"
                f"  {func} ran at {where}, after the end of a `with poptorch.Block(...)`\n"
                "  fix: move it into a block, or open the next one before it"
            )
        place = {"phase": "F", "block": self.block, "where": where, "module": self.module}
        self.places.append((torch.autograd._get_sequence_nr(), place))  # pyright: ignore
        meta: dict[str, Any] = {**place, "scope": "_".join(self.scopes), "attributes": self.attributes}
        if self.group is not None and func is aten.convolution.default:
            meta["group"] = self.group
            self.group.convolutions += 1
        return meta

    def _backward_meta(self) -> dict[str, Any]:
        node = torch._C._current_autograd_node()
        if node is None or not self.places:  # the sum of two gradients: autograd's own
            return {"phase": "B", "block": None, "where": "?", "module": "?"}
        number = bisect.bisect_right(self.places, node._sequence_nr(), key=lambda entry: entry[0])
        _, place = self.places[min(number, len(self.places) - 1)]
        return {**place, "phase": "B"}
