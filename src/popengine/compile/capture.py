"""Capture: a module and one sample micro-batch become one functional forward-backward graph.

The user's forward runs once, on fake tensors put in place of its parameters and buffers, and autograd
runs on what it did; a recorder writes both down. Nothing of the user's is computed or changed. All the
unstable parts of torch that the engine needs are used in this file and in `recorder.py`.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..ir import Block, Graph, Result, Slot
from .functional import drop_what_does_nothing, functionalized, is_mutable
from .losses import LossFinder
from .mixed import MixedPrecision
from .recorder import Recorder, line_of, user_line

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
    visits: list[Block] = field(default_factory=lambda: [Block(None, None, "?")])
    block: int = 0
    phase: str = "F"
    losses: list[tuple[Tensor, str]] = field(default_factory=list)  # with the user's line
    chosen: tuple[Tensor, str] | None = None  # the loss, whatever is marked
    notes: list[tuple[Any, Any]] = field(
        default_factory=list
    )  # for the host, after each call: see `poptorch.notes`
    # Every autograd node has a number that grows as forward runs. `starts` holds the first number of each
    # entry into a block, `lines` those of each operation: so a backward node finds its block and line.
    starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    lines: list[tuple[int, str]] = field(default_factory=list)
    # What scopes in the user's code say about the operations inside; recorded in the nodes of the forward.
    scopes: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    group: Group | None = None

    def enter(self, name: str, ipu: int | None) -> None:
        """Open a block: what runs from now on belongs to it."""
        self.visits.append(Block(name, ipu, user_line()))
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
    state = Capture(training)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(state.describe)

    def pretend(like: Tensor) -> Tensor:
        # A shape is all there is to ask for: what a tensor subclass does when it is used has no place here.
        with torch._C.DisableTorchFunctionSubclass(), fake:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)

    parameters = {
        name: nn.Parameter(pretend(value), requires_grad=value.requires_grad)
        for name, value in module.named_parameters()
    }
    buffers = {name: pretend(value) for name, value in module.named_buffers()}
    inputs = [pretend(sample) for sample in samples]
    for role, values in (
        ("parameter", parameters),
        ("buffer", buffers),
        ("input", {str(i): value for i, value in enumerate(inputs)}),
    ):
        for key, value in values.items():
            recorder.placeholder(f"{role}_{key}".replace(".", "_"), value, role=role, key=key)
    scale = pretend(torch.empty(()))
    token = _active.set(state)
    random = torch.get_rng_state()
    try:
        with (
            _tracing(training, device),
            fake,
            _in_place_of(module, parameters, buffers),
            recorder,
            _explained(),
        ):
            with LossFinder(state), MixedPrecision():
                outputs = list(forward(list(inputs)))
            if training:
                wanted = {name: value for name, value in parameters.items() if value.requires_grad}
                loss = _final_loss(state, recorder)
                recorder.placeholder("loss_scale", scale, role="loss_scale", key="loss_scale")
                state.phase, state.block = "B", _ENDED
                if scale.dtype != loss.dtype:
                    scale = scale.to(loss.dtype)
                gradients = dict(
                    zip(
                        wanted,
                        torch.autograd.grad(loss, list(wanted.values()), scale, allow_unused=True)
                        if loss.requires_grad and wanted
                        else [None] * len(wanted),
                        strict=True,
                    )
                )
            else:
                gradients = {}
    finally:
        _active.reset(token)
        torch.set_rng_state(random)
    results = [("output", str(i), recorder.node(value)) for i, value in enumerate(outputs)]
    results += [
        ("gradient", name, recorder.node(value)) for name, value in gradients.items() if value is not None
    ]
    return _finish(recorder, results, fake, tuple(state.visits))


# ---- what runs around the forward ------------------------------------------------------------------------


_CAPTURING = threading.RLock()  # the flag is one for the process: threads that compile take turns


@contextlib.contextmanager
def _tracing(training: bool, device: str) -> Iterator[None]:
    """torch's own "is compiling" flag, without which models branch on data; and autograd in one thread, without its
    search for NaN, which would read values.

    For another device than the CPU also without oneDNN: it makes a recurrent layer one operation that only CPUs have.
    """
    with _CAPTURING:
        before, onednn = torch.compiler._is_compiling_flag, torch._C._get_mkldnn_enabled()
        torch.compiler._is_compiling_flag = True
        torch._C._set_mkldnn_enabled(onednn and device == "cpu")  # pyright: ignore
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.autograd.set_detect_anomaly(False),
                torch.set_grad_enabled(training),
            ):
                yield
        finally:
            torch.compiler._is_compiling_flag = before
            torch._C._set_mkldnn_enabled(onednn)  # pyright: ignore


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """torch's own words about fake tensors, said in ours."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _reads_a_value(error.func, line_of(error)) from None


def _reads_a_value(func: Any, where: str) -> CaptureError:
    return CaptureError(
        "the forward reads a value out of a tensor, which has none while the model is compiled\n"
        f"  {func} at {where}\n"
        "  why: `tensor.item()`, `.tolist()`, `if tensor:` and shapes that depend on data (nonzero, a boolean"
        " mask, one_hot without num_classes: num classes must be specified) can't be part of one compiled graph\n"
        "  fix: compute with tensors (torch.where, masks that keep the shape), branch with poptorch.cond, or"
        " pass the number as a Python argument of forward"
    )


@contextlib.contextmanager
def _in_place_of(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Tensor]) -> Iterator[None]:
    """The fake tensors stand in the module while its forward runs; then the user's are put back."""
    fakes = {id(real): parameters[name] for name, real in module.named_parameters()}
    fakes |= {id(real): buffers[name] for name, real in module.named_buffers()}
    shelves = [
        (child, attribute, dict(getattr(child, attribute)))
        for child in module.modules()
        for attribute in ("_parameters", "_buffers")
    ]
    try:
        for child, attribute, before in shelves:
            shelf = getattr(child, attribute)
            shelf.update({name: fakes[id(real)] for name, real in before.items() if real is not None})
        _refresh_flat_weights(module)
        yield
        _check_rebound(module, shelves, fakes)
    finally:
        for child, attribute, before in shelves:
            shelf = getattr(child, attribute)
            shelf.clear()
            shelf.update(before)
        _refresh_flat_weights(module)


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent layers read their weights from a list of their own."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name, None) for name in child._flat_weights_names]


def _check_rebound(module: nn.Module, shelves: list[Any], fakes: dict[int, Tensor]) -> None:
    prefix = {id(child): name + "." if name else "" for name, child in module.named_modules()}
    for child, attribute, before in shelves:
        kind = "Buffer" if attribute == "_buffers" else "Parameter"
        shelf = getattr(child, attribute)
        for name, real in before.items():
            full = prefix[id(child)] + name
            if name not in shelf:
                raise CaptureError(
                    f"{kind} {full} is removed from the model by its forward\n"
                    "  fix: keep it; a compiled model's state has a fixed set of names"
                )
            if real is None or shelf[name] is fakes[id(real)]:
                continue
            if name == "num_batches_tracked" and shelf[name] is not None:
                fakes[id(real)].copy_(shelf[name])  # BatchNorm's counter is exempt from the rule
                continue
            raise CaptureError(
                f"{kind} {full} is reassigned within the model\n"
                "  why: a compiled model keeps its state in place; a new tensor under the old name is lost\n"
                f"  fix: write into it with `self.{name}.copy_(src)`"
            )


def _final_loss(state: Capture, recorder: Recorder) -> Tensor:
    """The chosen loss, else the one marked loss that no later marked loss is computed from."""
    if state.chosen is not None:
        return _scalar(*state.chosen)
    if not state.losses:
        raise CaptureError(
            "Couldn't find a loss in graph!\n"
            "  why: training differentiates one loss, which forward must compute\n"
            "  fix: compute a torch.nn loss in forward, or mark your own scalar with"
            ' `poptorch.identity_loss(x, reduction="mean")`, and return it'
        )
    nodes = [recorder.node(value) for value, _ in state.losses]
    reached: set[fx.Node] = set()  # everything that some marked loss is computed from
    stack = [operand for node in nodes for operand in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    final = {node: loss for node, loss in zip(nodes, state.losses, strict=True) if node not in reached}
    if len(final) > 1:
        places = "\n".join(f"  a loss at {where}" for _, where in final.values())
        raise CaptureError(
            f"Multiple independent losses found in graph\n{places}\n"
            '  fix: join them into one final loss: `poptorch.identity_loss(a + b, reduction="none")`'
        )
    return _scalar(*next(iter(final.values())))


def _scalar(loss: Tensor, where: str) -> Tensor:
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss at {where} has shape {tuple(loss.shape)}, and training needs a scalar\n"
            '  fix: give the loss reduction="mean" or "sum", or wrap it in'
            ' `poptorch.identity_loss(x, reduction="mean")`'
        )
    return loss


# ---- from the record to a functional graph ---------------------------------------------------------------


def _finish(recorder: Recorder, results: list[Any], fake: FakeTensorMode, visits: tuple[Block, ...]) -> Graph:
    graph = recorder.graph
    graph.output(tuple(node for _, _, node in results))
    kinds = [(kind, key) for kind, key, _ in results]
    constants = recorder.constants
    if is_mutable(graph):
        functional = functionalized(graph, constants, fake)
        for node, value in functional.written.items():
            role, key = node.meta["role"], node.meta["key"]
            if role == "parameter":
                raise CaptureError(
                    f"Parameter {key} is changed in place by the forward\n"
                    "  why: its value belongs to the optimizer while the model trains\n"
                    "  fix: keep a value that forward changes in a buffer (`register_buffer`)"
                )
            if role in ("buffer", "input"):
                kinds.append((role, key))
                (output,) = (n for n in functional.graph.nodes if n.op == "output")
                output.args = ((*output.args[0], value),)  # type: ignore[misc]
        graph, constants = functional.graph, functional.constants
    drop_what_does_nothing(graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    slots = tuple(
        Slot(
            node.name,
            node.meta["role"],
            node.meta["key"],
            tuple(node.meta["val"].shape),
            node.meta["val"].dtype,
        )
        for node in graph.nodes
        if node.op == "placeholder"
    )
    return Graph(
        slots,
        tuple(
            Result(node.name, kind, key, tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for (kind, key), node in zip(kinds, output.args[0], strict=True)
        ),
        {slot.key: constants[slot.key] for slot in slots if slot.role == "constant"},
        visits,
        graph,
    )
