"""Capture: a module and one sample micro-batch become one functional forward-backward graph.

The user's forward runs once, on fake tensors put in place of its parameters and buffers, and autograd
runs on what it did; a recorder writes both down. Nothing of the user's is computed or changed. All the
unstable parts of torch that the engine needs are used in this file and in `recording/graph_recorder.py`.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..ir import Graph, Key, Visit
from .recording.functional import as_graph
from .recording.graph_recorder import user_line
from .recording.known_values import CaptureRecorder, explained, value_of
from .recording.leftovers import Attributes
from .recording.loss_finder import LossFinder, final_loss
from .recording.standins import StandIns, adoption
from .rewriting.mixed_types import MixedPrecision

aten = torch.ops.aten
_active: ContextVar[Capture | None] = ContextVar("capture", default=None)
_SEEDS = (1 << 63) - 1
_ENDED = -1  # the index of "no block": behind the end of a `with Block(...)`


def current() -> Capture | None:
    """The capture that the calling code runs in, or None."""
    return _active.get()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """What runs inside is no part of the model, also while a capture is on."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def suspended() -> Iterator[Any]:
    """Nothing is recorded inside; gives the mode under which tensors stay fake."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with _disable_current_modes():
        yield fake


@contextlib.contextmanager
def hidden() -> Iterator[Any]:
    """As `suspended`, and no capture is current: for code of the user's that isn't a part of the graph."""
    token = _active.set(None)
    try:
        with suspended() as fake, torch._C.DisableTorchFunction():
            yield fake
    finally:
        _active.reset(token)


def is_traced(value: Tensor) -> bool:
    """Whether a capture made this tensor."""
    return isinstance(value, FakeTensor)


@dataclass
class Group:
    """Convolutions that belong together, and what was asked for them."""

    properties: dict[str, Any]
    convolutions: int = 0


@dataclass
class Capture:
    """What is known while a forward runs: which block is open, and which tensors are losses."""

    training: bool
    visits: list[Visit] = field(default_factory=lambda: [Visit(None, None, "?")])
    block: int = 0
    phase: str = "F"
    losses: list[tuple[Tensor, str]] = field(default_factory=list)  # with the user's line
    chosen: tuple[Tensor, str] | None = None  # the loss, whatever is marked
    notes: list[tuple[Any, Any]] = field(
        default_factory=list
    )  # for the host, after each call: see `poptorch.annotating.notes`
    # Every autograd node has a number that grows as forward runs. `starts` holds the first number of each
    # entry into a block, `lines` those of each operation: so a backward node finds its block and line.
    starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    lines: list[tuple[int, str]] = field(default_factory=list)
    # What scopes in the user's code say about the operations inside; recorded in the nodes of the forward.
    scopes: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    group: Group | None = None
    recorder: CaptureRecorder | None = None
    members: list[tuple[str, Tensor]] = field(default_factory=list)  # the user's own parameters and buffers

    def adopted(self, value: Tensor) -> Tensor:
        """What stands in for a tensor of the module; anything else as it is."""
        return self.recorder.adopted(value) if self.recorder is not None else value

    def value_of(self, value: Tensor) -> Tensor | None:
        """A copy of a tensor's value, if it is computed from constants alone."""
        known = value_of(self.recorder, value) if self.recorder is not None else None
        with torch._C.DisableTorchFunction(), paused():
            return None if known is None else known.clone()

    def enter(self, name: str, ipu: int | None) -> None:
        """Open a block: what runs from now on belongs to it."""
        self.visits.append(Visit(name, ipu, user_line()))
        self._open(len(self.visits) - 1)

    def leave(self) -> None:
        """End the open block: what runs before the next one belongs to none."""
        self._open(_ENDED)

    def _open(self, block: int) -> None:
        self.block = block
        self.starts.append((torch.autograd._get_sequence_nr(), block))  # pyright: ignore

    def mark_loss(self, value: Tensor) -> None:
        self.losses.append((value, user_line()))

    def choose_loss(self, value: Tensor, where: str) -> None:
        """Train this loss, whatever the forward has marked or will mark."""
        self.chosen = value, where

    def note(self, what: Any, value: Any) -> None:
        """Keep a nested value of each micro-batch for the host."""
        self.notes.append((what, value))

    def describe(self, func: Any) -> dict[str, Any]:
        """The meta of a node for an operation that is about to run."""
        meta = self._place(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Nothing is drawn while tracing, but torch's generator is moved on as if. A checkpoint that puts its
            # state back, to compute something again, so gets the same number: the same random numbers.
            meta["numbers"] = torch.initial_seed()
            torch.default_generator.manual_seed(meta["numbers"] + 1 & _SEEDS)
        return meta

    def _place(self, func: Any) -> dict[str, Any]:
        if self.phase == "F":
            where = user_line()
            if self.block == _ENDED:
                raise CaptureError(
                    "No active Block, all the ops must belong to a Block\n"
                    f"  {func} ran at {where}, after the end of a `with poptorch.Block(...)`\n"
                    "  fix: move it into a block, or open the next one before it"
                )
            self.lines.append((torch.autograd._get_sequence_nr(), where))  # pyright: ignore
            return {"phase": "F", "block": self.block, "where": where, **self._annotations(func)}
        node = torch._C._current_autograd_node()
        if node is None:  # the sum of two gradients: autograd's own
            return {"phase": "B", "block": None, "where": "?"}
        number = node._sequence_nr()
        block = self.starts[bisect.bisect_right(self.starts, number, key=lambda start: start[0]) - 1][1]
        line = bisect.bisect_right(self.lines, number, key=lambda line: line[0])
        where = self.lines[min(line, len(self.lines) - 1)][1] if self.lines else "?"
        return {"phase": "B", "block": block, "where": where}

    def _annotations(self, func: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if self.scopes:
            meta["scope"] = "_".join(self.scopes)
        if self.attributes:
            meta["attributes"] = self.attributes
        if self.group is not None and func is aten.convolution.default:
            meta["group"] = self.group
            self.group.convolutions += 1
        return meta


def capture(
    module: nn.Module,
    forward: Callable[[list[Tensor]], Sequence[Tensor]],
    samples: Sequence[Tensor],
    *,
    training: bool,
    device: str = "cpu",
) -> Graph:
    """Trace `forward` and, in training, its backward, into one functional graph.

    Args:
        module:   whose parameters and buffers become inputs of the graph, each once, by its canonical name
        forward:  calls the module on the sample inputs given to it and returns its flat tensor outputs
        samples:  one micro-batch; only shapes, strides and dtypes are read
        training: append the backward of the model's one final loss, for all parameters that require it
        device:   where the model will run; on another than the CPU nothing may need kernels that only CPUs have

    Raises:
        CaptureError: the forward reads a value out of a tensor, makes a shape that depends on data,
            rebinds or removes a buffer, or in training does not have exactly one final loss
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def pretend(like: Tensor) -> Tensor:
        # A shape is all there is to ask for: what a tensor subclass does when it is used has no place here.
        with torch._C.DisableTorchFunctionSubclass(), fake:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)

    stand_ins = StandIns(module, pretend)
    state = Capture(training)
    state.members = stand_ins.members()
    recorder = state.recorder = CaptureRecorder(state.describe, stand_ins.of_operand)
    inputs = [pretend(sample) for sample in samples]
    for role, values in (
        ("parameter", stand_ins.parameters),
        ("buffer", stand_ins.buffers),
        ("input", {str(i): value for i, value in enumerate(inputs)}),
    ):
        for key, value in values.items():
            recorder.placeholder(f"{role}_{key}".replace(".", "_"), value, role=role, key=key)
    scale = pretend(torch.empty(()))
    attributes = Attributes(module)
    token = _active.set(state)
    random = torch.get_rng_state()
    try:
        with _tracing(training, device), fake, stand_ins.in_place(), recorder, explained():
            with adoption(stand_ins), LossFinder(state), MixedPrecision():
                outputs = list(forward(list(inputs)))
            gradients = _gradients(state, stand_ins, scale) if training else {}
    finally:
        _active.reset(token)
        torch.set_rng_state(random)
        attributes.put_back(lambda value: recorder.has_met(value) or stand_ins.has_met(value))
    attributes.check()
    results: list[tuple[Key, str, fx.Node]] = [
        *(("output", str(i), recorder.node(value)) for i, value in enumerate(outputs)),
        *(("gradient", name, recorder.node(value)) for name, value in gradients.items()),
    ]
    trained = {name for name, value in stand_ins.parameters.items() if value.requires_grad}
    graph = as_graph(recorder, results, fake, tuple(state.visits), trained)
    stand_ins.check_shared({result.key for result in graph.results if result.kind in ("gradient", "buffer")})
    return graph


def _gradients(state: Capture, stand_ins: StandIns, scale: Tensor) -> dict[str, Tensor]:
    """The backward: the gradient of the model's one loss, for each parameter that has one."""
    recorder = state.recorder
    assert recorder is not None
    wanted = {name: value for name, value in stand_ins.parameters.items() if value.requires_grad}
    loss = final_loss(state.losses, state.chosen, recorder)
    recorder.placeholder("loss_scale", scale, role="loss_scale", key="loss_scale")
    state.phase, state.block = "B", _ENDED
    if scale.dtype != loss.dtype:
        scale = scale.to(loss.dtype)
    orphans = [value for value, _ in stand_ins.orphans]
    leaves = [*wanted.values(), *orphans]
    if not loss.requires_grad or not leaves:
        return {}
    made = torch.autograd.grad(loss, leaves, scale, allow_unused=True)
    for (value, where), gradient in zip(stand_ins.orphans, made[len(wanted) :], strict=True):
        if gradient is not None:
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} needs a gradient, but is no parameter of the model, and"
                " nobody would update it\n"
                f"  forward uses it at {where}\n"
                "  fix: make it a parameter, `self.name = nn.Parameter(...)`, and keep parameters and layers in"
                " nn.ParameterList and nn.ModuleList, not in lists; compute in forward what depends on parameters;"
                " or say `.detach()`, if it is meant as a constant"
            )
    return {name: value for name, value in zip(wanted, made, strict=False) if value is not None}


# ---- what runs around the forward ------------------------------------------------------------------------


_CAPTURING = threading.RLock()  # the flag is one for the process: threads that compile take turns


@contextlib.contextmanager
def _tracing(training: bool, device: str) -> Iterator[None]:
    """torch's own "is compiling" flag, without which models branch on data; autograd in one thread and quiet.

    For another device than the CPU also without oneDNN: it makes a recurrent layer one operation that only CPUs have.
    """
    with _CAPTURING:
        before, onednn = torch.compiler._is_compiling_flag, torch._C._get_mkldnn_enabled()
        torch.compiler._is_compiling_flag = True
        collects = gc.isenabled()
        gc.disable()  # what it finalizes (executors that write their weights back) would be recorded
        torch._C._set_mkldnn_enabled(onednn and device == "cpu")  # pyright: ignore
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.autograd.set_detect_anomaly(False),  # it would look for NaN in tensors without values
                torch.set_grad_enabled(training),
            ):
                yield
        finally:
            torch.compiler._is_compiling_flag = before
            if collects:
                gc.enable()
            torch._C._set_mkldnn_enabled(onednn)  # pyright: ignore
