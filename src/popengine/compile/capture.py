"""Capture: a module and one sample micro-batch become one functional forward-backward graph.

The user's forward runs once, on fake tensors, then autograd's backward; a recorder records both. Layers run in the
float type of their input, and the losses are those of torch and of the user's marks.
"""

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..ir import Graph, ResultKind
from ..torch_private import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    modes_restored,
    state_around,
)
from .recording.current_capture import (
    ENDED,
    LOSSES,
    Capture,
    active,
    current_set_to,
    interrupts_delayed,
    tracing_settings,
)
from .recording.fingerprint import fingerprint
from .recording.float_types import call_with_matching_types
from .recording.functional import make_functional_graph
from .recording.graph_recorder import CaptureRecorder, check_dense, empty_like, map_leaves
from .recording.leftovers import Shelves, StoredValue, check_none_left, fake_tensors_in
from .recording.noting import Noting
from .recording.reads import MISSING, Read, Reads, gradient_hooks
from .recording.standins import MadeBuffer, StandIns, made_text, reshaped_buffer_text
from .recording.torch_errors import explaining_torch_errors
from .recording.user_code import user_line

logger = logging.getLogger("poptorch::python")


@interrupts_delayed()
def capture(
    module: nn.Module,
    forward: Callable[[list[Tensor]], Sequence[Tensor]],
    samples: Sequence[Tensor],
    *,
    training: bool,
    device: str = "cpu",
    given: str = "",
    beside: Callable[[], Any] = lambda: None,
    arguments: Sequence[tuple[Any, str]] = (),
) -> Graph:
    """Return one functional graph of `forward` and, in training, of its backward, with what forward has read.

    Args:
        module:   the module; its parameters and buffers become inputs of the graph, each tensor once
        forward:  calls the module on a list of inputs, returns a flat list of outputs; called once, with fake tensors;
                  a second time if it changes what it reads
        samples:  the inputs of one micro-batch; only their shapes, strides and dtypes are read
        device:   where the model will run; if not "cpu", no operations are recorded that only CPUs have
        given:    a description of forward's arguments, for error messages
        arguments: objects that are passed to `forward` beside tensors, with their names
        beside:   returns what the latest run of `forward` has yielded beside tensors, a value that compares by `==`
    Raises: CaptureError, if forward can't be traced, or in training has not exactly one final loss
    """
    fake, dropped = FakeTensorMode(allow_non_fake_inputs=True), set[str]()
    shelves = Shelves(module)
    record = partial(
        _record_forward, module, forward, samples, fake, training, device, given, beside, arguments, shelves
    )
    with shelves.restored():
        recorded = first = record({})
        if first.changed or first.reshaped or first.made:
            recorded, dropped = _record_again(first, record)
    check_none_left(module, first.containers)
    _drop_fake_items(read.args[0] for read in first.changed if read.get in (len, tuple))
    if dropped:
        recorded.reads.drop(dropped)
        recorded.reads.renew()
        recorded.reads.dropped = dropped
    recorded.reads.has_draws = bool(recorded.draws)
    for line, what in recorded.draws.items():
        logger.warning(
            "%s: forward asks for %s: the value is that of the recording, and the same in each call\n"
            "  fix: torch.rand, torch.randint and dropout are drawn anew; or pass the value as a tensor",
            line,
            what,
        )
    return replace(recorded.graph, reads=recorded.reads)


@dataclass
class _RecordedForward:
    """A recorded forward and backward: the graph, the values that forward has read, and those of them that it
    changes."""

    graph: Graph
    reads: Reads
    changed: list[Read]
    lines: dict[str, str]  # by path of a read, the user's line that has changed it
    draws: dict[str, str]  # by the user's line, what it has drawn
    containers: list[tuple[Any, str]]  # that forward and hooks have read, and these hooks, with their paths
    # Fake tensors that forward has stored, if it has changed reads, with the values of constants.
    left: list[tuple[StoredValue, Tensor | None]]
    reshaped: dict[str, Tensor]  # tensors of other shapes or dtypes that forward has assigned to buffers
    made: list[tuple[MadeBuffer, Tensor | None]]  # with the values of constants


def _record_forward(
    module: nn.Module,
    forward: Callable[[list[Tensor]], Sequence[Tensor]],
    samples: Sequence[Tensor],
    fake: FakeTensorMode,
    training: bool,
    device: str,
    given: str,
    beside: Callable[[], Any],
    arguments: Sequence[tuple[Any, str]],
    shelves: Shelves,
    reshaped: Mapping[str, Tensor],
    constant: Container[str] = (),
) -> _RecordedForward:
    """Run the forward once, on stand-ins for the weights, and return the recording. `reshaped`: by name, tensors with
    the shapes and dtypes of some buffers' stand-ins; `constant`: names of buffers that are constants; `shelves`: as of
    `Noting`."""
    with DisableTorchFunctionSubclass(), fake:  # only shapes are read
        stand_ins = StandIns(module, training, reshaped, constant)
        inputs = [empty_like(sample) for sample in samples]
        scale = torch.empty(())
    state, noting = Capture(training, stand_ins, given), Noting(module, shelves)
    recorder = state.recorder
    inputs_by_key = {str(i): value for i, value in enumerate(inputs)}
    roles = {"parameter": stand_ins.parameters, "buffer": stand_ins.buffers, "input": inputs_by_key}
    for role, values in roles.items():
        for key, value in values.items():
            recorder.add_placeholder(f"{role}_{key}".replace(".", "_"), value, role=role, key=key)
    with (
        torch.random.fork_rng(devices=[], device_type="cpu"),
        current_set_to(state),
        tracing_settings(module, training, device),
        fake,
        stand_ins.put_in_module(),
        recorder,
        modes_restored(),
        explaining_torch_errors(given),
    ):
        with (
            recorder.saved_tensors_listed(),
            _tracked_calls(module, state, noting),
            noting.note_reads(state, arguments),
        ):
            outputs = list(forward(list(inputs)))
            buffers, reshaped = state.assigned_buffers()
        gradients = _record_backward(state, scale) if training else {}
    reads = noting.finish(recorder, state.returned)
    reads.all.append(Read("the state of torch", state_around, view=tuple))
    if training:
        tensors = {member.name: member.real for member in stand_ins.members}
        reads.all.append(Read("a hook of a parameter", gradient_hooks, tensors))
    reads.all = [read for read in reads.all if read.path.partition("[")[0] not in state.written_by_host]
    changed = reads.changed()
    stored = [*fake_tensors_in(module), *shelves.stored_elsewhere()] if changed else []
    left = [(leftover, recorder.value_of(leftover.value)) for leftover in stored]
    made = [(buffer, recorder.value_of(buffer.value)) for buffer in stand_ins.made]
    results: list[tuple[ResultKind, str, fx.Node]] = [
        *(("output", str(i), recorder.node_of(value)) for i, value in enumerate(outputs)),
        *(("buffer", name, recorder.node_of(value)) for name, value in buffers.items()),
        *(("gradient", name, _without_copy(recorder.node_of(value))) for name, value in gradients.items()),
    ]
    trained = set(stand_ins.trained_parameters()) if training else set[str]()
    graph = make_functional_graph(recorder, results, tuple(state.visits), trained)
    graph = replace(graph, held=tuple(state.held), beside=beside())
    noted = noting.lines, noting.draws.lines, [*stand_ins.hooks, *noting.containers()]
    return _RecordedForward(graph, reads, changed, *noted, left, reshaped, made)


def _record_again(
    first: _RecordedForward, record: Callable[..., _RecordedForward]
) -> tuple[_RecordedForward, set[str]]:
    """Record a forward that changes what it reads, or the shape of a buffer, or makes a buffer, a second time, with
    what the first recording has left. Return a recording, and the paths of the values that forward changes each time.
    Raise CaptureError if the graphs differ: then the values would be state between calls. (Constants that are made once
    are none.)"""
    names = ", ".join(list(dict.fromkeys(read.path for read in first.changed))[:5])
    left = [(r, r.unviewed()) for r in first.changed if r.get is dict.get and r.view is None]
    where = next((first.lines.get(read.path) or read.where for read in first.changed), "") or "forward"
    text = (
        f"{where} changes {names}, which forward also reads: what a call leaves there would be lost for the next one\n"
        "  why: Python's side of forward runs only when it is recorded, and a second run computes something else\n"
        "  fix: keep the value in a buffer, `self.register_buffer(name, tensor)`, and write into it: `copy_(new)`;"
        " update a metric after the call, with what forward returns"
    )
    if first.reshaped:
        text = reshaped_buffer_text(first.graph, first.reshaped)
    if first.made:
        text = made_text(f"Buffer {first.made[0][0].name}")
    try:
        with _leftovers_in_place(first):
            second = record(first.reshaped, {buffer.name for buffer, real in first.made if real is not None})
    except Exception as error:
        raise CaptureError(text) from error
    without = {*first.reshaped, *(buffer.name for buffer, _ in first.made)}
    is_same = fingerprint(first.graph) == fingerprint(second.graph, without=without)
    if second.reshaped or not is_same or first.graph.beside != second.graph.beside:
        raise CaptureError(text)
    dropped = {read.path for read in second.changed}
    for read, value in left:
        if read.path in dropped and value is not MISSING and not isinstance(value, FakeTensor):
            read.args[0][read.args[1]] = value  # as one run has left it
    if changed_again := list(dict.fromkeys(read.path for read in first.changed if read.path in dropped)):
        logger.warning(
            "%s changes %s: Python's side of forward runs only when it is recorded, and not in each call\n"
            "  fix: count calls outside of forward; or keep a value that each call changes in a buffer",
            where,
            ", ".join(changed_again[:5]),
        )
    if first.reshaped:
        logger.warning(
            "forward assigns tensors of other shapes or types to the buffers %s; no call reads them, and the buffers"
            " stay as they are; return the tensors from forward, if the program needs them",
            ", ".join(first.reshaped),
        )
    return (first if without else second), dropped


@contextlib.contextmanager
def _leftovers_in_place(first: _RecordedForward) -> Iterator[None]:
    """Run the body with the tensors that a recording has left in place: constants with their values, and zeros or 0.5
    for all others that are in buffers made by forward or outside of the module. A second recording that reads these
    other numbers differs from the first."""
    with contextlib.ExitStack() as undo:
        for (_, shelf, key, value), real in first.made:
            undo.callback(shelf.update, dict(shelf))
            undo.callback(shelf.clear)
            shelf[key] = torch.zeros(value.shape, dtype=value.dtype) if real is None else real
        for stored, real in first.left:
            if real is not None:
                stored.put(real)
            elif stored.is_elsewhere:
                undo.callback(stored.put, stored.value)
                stored.put(torch.full(stored.value.shape, 0.5).to(stored.value.dtype))
        yield


def _drop_fake_items(containers: Iterable[Any]) -> None:
    """Remove the fake tensors that forward has put into default values of functions, and other containers."""
    for container in containers:
        if isinstance(container, dict):
            for key in [key for key, value in container.items() if isinstance(value, FakeTensor)]:
                del container[key]
        elif isinstance(container, list):
            container[:] = [value for value in container if not isinstance(value, FakeTensor)]


def _without_copy(gradient: fx.Node) -> fx.Node:
    """Return the node of a gradient; of the copy that autograd makes for `.grad`, the node of the original. Each
    micro-batch would copy all gradients, and a write has the whole graph replayed."""
    aten, operands = torch.ops.aten, gradient.all_input_nodes
    if gradient.target not in (aten.clone.default, aten.copy_.default) or gradient.users:
        return gradient
    original = operands[-1]
    if original.meta["val"].stride() != gradient.meta["val"].stride():
        return gradient
    gradient.graph.erase_node(gradient)
    return original


@contextlib.contextmanager
def _tracked_calls(module: nn.Module, capture: Capture, noting: Noting) -> Iterator[None]:
    """Give torch functions and autograd functions stand-ins in place of weights, and `capture.module` the name of the
    running submodule, while the body runs. Some modules would compute differently if they had hooks."""
    names = {child: name for name, child in module.named_modules()}
    call_module, apply = nn.Module.__call__, Function.__dict__["apply"]

    # Another thread, and code that is hidden from the capture, has another active capture, or none.
    def call_tracked(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if active.get() is not capture:
            return call_module(child, *args, **kwargs)
        around, capture.module = capture.module, names.get(child, capture.module)
        try:
            return call_module(child, *args, **kwargs)
        finally:
            capture.module = around

    def apply_with_stand_ins(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if active.get() is capture:
            args = tuple(map(capture.stand_ins.stand_in_of, args))
            methods = (getattr(cls, name, None) for name in ("forward", "setup_context", "backward"))
            noting.note_functions(methods, cls)
        return apply.__get__(None, cls)(*args, **kwargs)

    nn.Module.__call__ = call_tracked
    Function.apply = classmethod(apply_with_stand_ins)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _TorchFunctions(capture):
            yield
    finally:
        nn.Module.__call__, Function.apply = call_module, apply


_DIFFERENTIATES: Any = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore


class _TorchFunctions(TorchFunctionMode):
    """A function mode that calls torch functions with stand-ins for weights and with matching float types; it records
    the results of loss functions, and copies values that are assigned to `.data`."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(self._capture.stand_ins.stand_in_of, (args, kwargs or {}))
        if func == Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            return _copy_into_data(*args)
        if func in _DIFFERENTIATES:  # in inference gradients are off until forward differentiates
            torch.set_grad_enabled(True)
        result = call_with_matching_types(func, args, kwargs)
        if func in LOSSES:
            self._capture.mark_loss(result)
        return result


def _copy_into_data(target: Tensor, value: Tensor) -> None:
    """Carry out `target.data = value` by copying. Raise CaptureError if shapes or dtypes differ."""
    if target.shape != value.shape or target.dtype != value.dtype:
        raise CaptureError(
            f"`.data` of a {target.dtype} tensor of shape {tuple(target.shape)} is set to a {value.dtype} tensor of"
            f" shape {tuple(value.shape)}, at {user_line()}\n"
            "  fix: keep shape and type: a compiled model's tensors have fixed ones"
        )
    target.detach().copy_(value)


def _record_backward(state: Capture, scale: Tensor) -> dict[str, Tensor]:
    """Record the backward of the final loss, whose gradient is `scale`; return the gradients by parameter."""
    recorder, stand_ins = state.recorder, state.stand_ins
    wanted = stand_ins.trained_parameters()
    loss = state.final_loss()
    recorder.add_placeholder("loss_scale", scale, role="loss_scale", key="loss_scale")
    state.phase, state.block = "B", ENDED
    if (scale.dtype, scale.shape) != (loss.dtype, loss.shape):
        scale = scale.to(loss.dtype).reshape(loss.shape)
    if loss.requires_grad:
        stand_ins.check_orphans(loss, scale)
        # Not `grad`: of a reentrant checkpoint the gradients come from a backward of its own, into `.grad`.
        torch.autograd.backward(loss, scale)
    gradients = {name: value.grad for name, value in wanted.items() if value.grad is not None}
    for name, value in gradients.items():
        check_dense(value, f"the gradient of {name}")
    if not gradients:
        _report_no_gradients(recorder, has_trained=bool(wanted))
    return gradients


def _report_no_gradients(recorder: CaptureRecorder, has_trained: bool) -> None:
    """Log a warning that no parameter gets a gradient; raise CaptureError if forward computes under
    torch.inference_mode."""
    values = (node.meta.get("val") for node in recorder.graph.nodes)
    why = "all of them are frozen, by requires_grad_(False)"
    if has_trained:
        why = (
            "the loss depends on none of those that require one: forward leaves them out, or computes in"
            " torch.no_grad(), with `.detach()` or in integers"
        )
        if any(isinstance(value, Tensor) and value.is_inference() for value in values):
            raise CaptureError(
                "the model would not train: no parameter gets a gradient\n"
                "  why: forward computes under torch.inference_mode\n"
                "  fix: let the loss depend on parameters that require a gradient; or wrap the model with"
                " poptorch.inferenceModel"
            )
    logger.warning("the model does not train: no parameter gets a gradient, since %s", why)
