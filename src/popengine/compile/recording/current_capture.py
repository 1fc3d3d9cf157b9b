"""The capture in progress: its state (blocks, losses, annotations), and the contexts in which it runs.

Ctrl-C is delayed because an exception that is raised where C++ calls a mode's Python ends the process; one
raised while a mode exits leaves the mode on, which would record all later operations.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import CaptureError
from ...ir import Visit
from ...operations import FusedFunctions, with_strides
from ...torch_private import (
    DisableTorchFunction,
    FakeTensor,
    current_autograd_node,
    current_fake_mode,
    disable_dispatch_modes,
    next_sequence_number,
    optimized_module_type,
)
from .graph_recorder import CaptureRecorder, sources_of, storage_of
from .standins import StandIns
from .user_code import TORCH, user_line

logger = logging.getLogger("poptorch::python")
aten = torch.ops.aten
active: ContextVar[Capture | None] = ContextVar("capture", default=None)
_SEED_MASK = (1 << 63) - 1
LOSSES = frozenset(
    function
    for name, function in vars(functional).items()
    if re.fullmatch(r"\w+_loss|\w*cross_entropy\w*|kl_div", name)
)
ENDED = -1  # the index of "no block": after the end of a `with Block(...)`


def current() -> Capture | None:
    """Return the capture in which the calling code runs, or None."""
    return active.get()


@contextlib.contextmanager
def current_set_to(capture: Capture | None) -> Iterator[None]:
    """Run the body with `current()` returning `capture`."""
    token = active.set(capture)
    try:
        yield
    finally:
        active.reset(token)


@contextlib.contextmanager
def recording_paused() -> Iterator[Any]:
    """Run the body with all dispatch modes off: no operation is recorded. Yield the fake mode that was on, or None."""
    fake = current_fake_mode()
    with disable_dispatch_modes():
        yield fake


@contextlib.contextmanager
def hidden_from_capture() -> Iterator[Any]:
    """Run user code that is no part of the graph: as `recording_paused`, and `current()` returns None."""
    with current_set_to(None), recording_paused() as fake, DisableTorchFunction():
        yield fake


def is_traced(value: Tensor) -> bool:
    """Return whether a tensor is a fake tensor: one of a capture in progress, without values."""
    return isinstance(value, FakeTensor)


@dataclass
class ConvolutionGroup:
    """A group of convolutions (`MultiConv`): the properties that the user has set, and its size."""

    properties: dict[str, Any]
    convolutions: int = 0


@dataclass
class Capture:
    """The state of a capture: the open block and module, the losses, the annotations of the user's code."""

    training: bool
    stand_ins: StandIns
    given: str = ""  # forward's arguments, for messages
    recorder: CaptureRecorder = field(init=False)
    visits: list[Visit] = field(default_factory=lambda: [Visit(None, None, "?")])
    block: int = 0
    phase: str = "F"
    forward_line: str = "?"  # file and line of the model's forward, for messages
    losses: list[tuple[Tensor, str]] = field(default_factory=list)  # with the user's line
    marked: list[Tensor] = field(default_factory=list)  # those of the losses that the user has marked
    candidates: list[tuple[Tensor, str]] | None = None  # the losses that are no metrics, if this is known
    allows_autocast: bool = True  # `poptorch.autocast` has an effect
    chosen: tuple[Tensor, str] | None = None  # the loss to train, in place of the marked ones
    # For the host, after each call: see `poptorch.compiling.templates`.
    notes: list[tuple[Any, Any]] = field(default_factory=list)
    # By path, the `__dict__` and the name of attributes that forward sets on layers.
    written: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    returned: list[Tensor] = field(default_factory=list)  # plain tensors that forward returns as they are
    written_by_host: set[str] = field(default_factory=set)  # paths of attributes that the program sets later
    held: list[Any] = field(default_factory=list)  # as `Graph.held`
    # Autograd numbers its nodes in the order of the forward. For each operation: the number after its node's,
    # and its block, line and module. So the number of a backward node leads to these.
    places: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    module: str = ""  # the running module's name, as in `named_modules`
    # Annotations by scopes in the user's code (names, attributes, groups), recorded in the forward's nodes.
    scopes: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    group: ConvolutionGroup | None = None

    def __post_init__(self) -> None:
        # Of torch's generator until now, without those that forward sets.
        self._seeds = {torch.initial_seed()}
        self.recorder = CaptureRecorder(self.node_meta, self.stand_ins.stand_in_of_operand)

    def enter_block(self, name: str, ipu: int | None) -> None:
        """Open a block, to which the operations belong that are recorded until `leave_block`, or the next block."""
        self.block = len(self.visits)
        self.visits.append(Visit(name, ipu, user_line()))

    def leave_block(self) -> None:
        """Close the open block. An operation before the next `enter_block` raises CaptureError."""
        self.block = ENDED

    def mark_loss(self, value: Tensor, is_explicit: bool = False) -> None:
        """Add a tensor to the losses: a result of a torch loss function, or (`is_explicit`) one that the user marks."""
        self.losses.append((value, user_line()))
        if is_explicit:
            self.marked.append(value)

    def choose_loss(self, value: Tensor, where: str) -> None:
        """Set the loss to train, in place of all other losses. `where`: its origin, as errors name it."""
        self.chosen = value, where

    def final_loss(self) -> Tensor:
        """Return the loss to train: the chosen one, else the one recorded loss that no other is computed from."""
        losses = [self.chosen] if self.chosen is not None else list(self.final_losses().values())
        if not losses:
            raise CaptureError(
                f"Couldn't find a loss in graph! (forward: {self.forward_line})\n"
                f"  forward was given {self.given or 'no arguments'}\n"
                "  why: training differentiates one loss, which forward must compute from what it is given\n"
                "  fix: compute a torch.nn loss in forward, or mark your own scalar with"
                ' `poptorch.identity_loss(x, reduction="mean")`; or return your own scalar first, or as "loss"'
            )
        if len(losses) > 1:
            places = "\n".join(f"  a loss at {where}" for _, where in losses)
            raise CaptureError(
                f"Multiple independent losses found in graph\n{places}\n"
                '  fix: join them into one final loss: `poptorch.identity_loss(a + b, reduction="none")`, or return'
                ' their sum as "loss"'
            )
        loss, where = losses[0]
        if loss.numel() != 1:
            raise CaptureError(
                f"the loss at {where} has shape {tuple(loss.shape)}, and training needs a scalar\n"
                '  fix: give the loss reduction="mean" or "sum", or wrap it in'
                ' `poptorch.identity_loss(x, reduction="mean")`'
            )
        return loss

    def final_losses(self) -> dict[fx.Node, tuple[Tensor, str]]:
        """Return (loss, user's line) of each candidate (each recorded loss, if none is chosen as a candidate) that no
        other one is computed from, by its node; those that require no gradient only if there is no other."""
        candidates = self.losses if self.candidates is None else self.candidates
        losses = [loss for loss in candidates if loss[0].requires_grad] or candidates
        nodes = [self.recorder.node_of(value) for value, _ in losses]
        reached = sources_of([operand for node in nodes for operand in node.all_input_nodes])
        return {node: loss for node, loss in zip(nodes, losses, strict=True) if node not in reached}

    def assigned_buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that forward has assigned to buffers, by name: those with the buffer's shape and dtype, in
        its strides and in memory of their own, which are its values for the next micro-batch; and all others."""
        next_values, reshaped = dict[str, Tensor](), dict[str, Tensor]()
        slot_memory = {storage_of(node) for node in self.recorder.graph.find_nodes(op="placeholder")}
        for name, value in self.stand_ins.rebound_buffers().items():
            fake = self.stand_ins.buffers[name]
            if (value.shape, value.dtype) != (fake.shape, fake.dtype):
                reshaped[name] = value
                continue
            node = self.recorder.node_of(value)
            if value.stride() != fake.stride() or node.op == "placeholder" or storage_of(node) in slot_memory:
                self.block = node.meta.get("block", 0)
                value = with_strides(value, fake.stride())
            next_values[name] = value
        return next_values, reshaped

    def node_meta(self, func: Any) -> dict[str, Any]:
        """Return the meta of an operation's new node, before the operation runs; for a random operation, also reseed
        torch's generator. Raise CaptureError after the end of a block, until the next block."""
        meta = self._forward_meta(func) if self.phase == "F" else self._backward_meta()
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Nothing is drawn while tracing, but torch's generator advances: so a checkpoint that restores
            # its state, to recompute, gets the same number here, and the same random numbers later.
            meta["numbers"] = seed = torch.initial_seed()
            if seed not in self._seeds:
                logger.warning(
                    "%s: random numbers are drawn after torch.manual_seed in forward, and differ from call to call\n"
                    "  fix: options.randomSeed(seed); or make constant numbers in __init__",
                    user_line(),
                )
            self._seeds |= {seed, seed + 1 & _SEED_MASK}
            torch.default_generator.manual_seed(seed + 1 & _SEED_MASK)
        return meta

    def _forward_meta(self, func: Any) -> dict[str, Any]:
        where = user_line()
        if self.block == ENDED:
            raise CaptureError(
                "No active Block, all the ops must belong to a Block\n"
                f"  {where} runs {str(func).split('.')[1].strip('_')}, after the end of a `with poptorch.Block(...)`\n"
                "  fix: move it into a block, or open the next one before it"
            )
        place = {"phase": "F", "block": self.block, "where": where, "module": self.module}
        self.places.append((next_sequence_number(), place))
        meta: dict[str, Any] = {**place, "scope": "_".join(self.scopes), "attributes": self.attributes}
        if self.group is not None and func is aten.convolution.default:
            meta["group"] = self.group
            self.group.convolutions += 1
        return meta

    def _backward_meta(self) -> dict[str, Any]:
        node = current_autograd_node()
        has_no_place = node is None or node.name() == "torch::autograd::AccumulateGrad"  # sums gradients
        if has_no_place or not self.places:
            return {"phase": "B", "block": None, "where": "?", "module": "?"}
        number = bisect.bisect_right(self.places, node._sequence_nr(), key=lambda entry: entry[0])
        _, place = self.places[min(number, len(self.places) - 1)]
        return {**place, "phase": "B"}


# ---- contexts of a capture ---------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay SIGINT until the body has run. In threads other than the main thread, only run the body."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # handlers run in the main thread
        return
    delayed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: delayed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(*delayed[0])


# `tracing_settings` sets state of the whole process: threads that capture take turns.
_CAPTURE_LOCK = threading.RLock()


@contextlib.contextmanager
def tracing_settings(module: nn.Module, training: bool, device: str) -> Iterator[None]:
    """Set torch's global state for a capture while the body runs; other threads that capture wait. For an accelerator,
    oneDNN is off, and attention and recurrent layers are operations of Pando, because torch would record the operations
    of CPUs."""
    with _CAPTURE_LOCK, contextlib.ExitStack() as contexts:
        if optimized := optimized_module_type():
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
            modules = module.modules()
            if any(isinstance(m, optimized) or m._compiled_call_impl is not None for m in modules):
                logger.warning("torch.compile is left out of the compiled model, which runs as it is written")
        if device != "cpu":
            mkldnn = torch.backends.mkldnn  # `mkldnn.flags` would also set TF32, and warn
            contexts.callback(mkldnn.set_flags, *mkldnn.set_flags(False)[:1])
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
            contexts.enter_context(FusedFunctions())
        contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Anomaly detection looks for NaN, and fake tensors have no values.
        contexts.enter_context(torch.autograd.set_detect_anomaly(False))
        contexts.enter_context(torch.set_grad_enabled(training))
        is_compiling, reported = torch.compiler.is_compiling, set[str]()
        contexts.callback(setattr, torch.compiler, "is_compiling", is_compiling)
        torch.compiler.is_compiling = lambda: is_compiling() or _is_called_by_torch(reported)
        if gc.isenabled():
            contexts.callback(gc.enable)
        gc.disable()  # the operations of finalizers would be recorded
        yield


def _is_called_by_torch(reported: set[str]) -> bool:
    """Return whether the calling code is torch's: its layers must not branch on data, and the model's own code takes
    the branches of plain PyTorch. Each layer is logged once, and added to `reported`."""
    code = sys._getframe(2).f_code
    if active.get() is None or not code.co_filename.startswith(TORCH):
        return False
    where = f"{code.co_name} in {Path(code.co_filename).name}, called at {user_line()},"
    if where not in reported and code.co_name != "_call_impl":  # which calls hooks of modules that fail
        logger.info("%s takes its branch for compilers: its results may differ from plain PyTorch's", where)
    reported.add(where)
    return True
