"""Compilation of a model for the arguments of one call, and what it gives: a value that can be saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from popengine.compile import compile_graph, with_work_enough
from popengine.compile.capture import capture
from popengine.compile.recording.current_capture import current
from popengine.compile.rewriting.channels_last import with_layout
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.errors import Error
from popengine.ir import Graph, Plan
from popengine.settings import Settings

from ..annotating.notes import Note, kept
from ..annotating.replica_groups import one_row_each
from ..autocasting import following
from ..enums import OutputMode
from ..options import Options
from ..options.freeze_options import OUTPUTS
from ..reporting.logs import logger
from . import compilation_log
from .anchors import AnchorRequest, Anchors, resolve
from .arguments import BoundCall, CompiledInputs, is_wide, narrowed, sample, weights_of
from .auto_balance import balanced
from .compilation_hooks import call_hooks
from .machine_hints import NO_HINTS, Hints, hints
from .outputs import traced_outputs
from .overlap_rules import check_overlap
from .traced_functions import Traced


@dataclass(frozen=True)
class Executable:
    """A compiled model, without weights and state.

    `template` is what forward returned, with marks where tensors were; `outputs` how many of those the
    graph computes; `notes` what it keeps for the host beside them. `graph` is what was captured: profiles
    read it, and a file can't hold it.
    """

    plan: Plan
    settings: Settings
    inputs: CompiledInputs
    template: Any
    outputs: int
    anchors: Anchors
    notes: tuple[Note, ...] = ()
    graph: Graph | None = None
    memory_format: str = "preserve"  # never "auto"
    hints: Hints = NO_HINTS  # measured for a profile only

    def without_graph(self) -> Executable:
        """The part that runs, and that a file can hold."""
        return replace(self, graph=None)


def compile_model(
    model: nn.Module,
    call: BoundCall,
    options: Options,
    settings: Settings,
    done: Callable[[str], None],
) -> Executable:
    """Capture and lower a model; `done` is called with the name of each finished pass.

    Raises:
        Error: the model can't be captured, or its stages, buffers or anchors don't fit the options
    """
    requests, wide = _requests(options), is_wide(model)
    samples = [narrowed(sample(tensor, settings.counts), wide) for tensor in call.tensors]
    tracing = _Tracing(
        model, call, options, settings.training, {request.long_name for request in requests.values()}
    )
    call_hooks("Pre")
    options._execution_strategy.onStartTracing()
    try:
        with one_row_each(model, settings.replica_groups):
            graph = capture(
                model, tracing.forward, samples, training=settings.training, device=settings.device
            )
    finally:
        options._execution_strategy.onEndTracing()
        call_hooks("Post")
    done("capture")
    if settings.counts.replicas > 1 and options.broadcast_buffers:
        _check_buffers(graph, settings.counts.replicas)
    check_overlap(graph, options)
    graph, anchors = resolve(graph, tracing.traced, requests, settings.training)
    notes = tuple(tracing.notes)
    anchors = replace(anchors, noted=tuple(anchor for note in notes for anchor in note.anchors))
    settings = replace(settings, anchors=anchors.wanted)
    kernels = options.Precision.half_kernels
    if settings.device == "cpu" and kernels != "native":
        chosen = is_faster_in_float32 if kernels == "auto" else lambda operation, dtype: True
        graph, widened = products_in_float32(graph, chosen)
        settings = replace(settings, products_in_float32=widened)
        if widened:
            logger.info("halfKernels %s: computed in float32 are %s", kernels, ", ".join(widened))
    wanted = options.memory_format if options.exists("memory_format") else "preserve"
    graph, memory_format = with_layout(graph, wanted)
    if wanted == "auto":
        logger.info("memoryFormat auto: %s is used", memory_format)
    with one_row_each(model, settings.replica_groups):
        here = (settings.device, settings.backend) == ("cpu", "eager")
        profiled = here and options._profile_directory(settings.training) is not None
        hinted = hints(graph, options, memory_format, model, samples) if profiled else NO_HINTS
    if settings.strategy.auto == "balance":
        settings = balanced(graph, settings, weights_of(model), samples)
    settings = with_work_enough(graph, settings)
    plan = compile_graph(graph, settings, done)
    compilation_log.check_hardware_rules(plan, settings, options.auto_round_num_ipus)
    inputs, template, outputs = (
        CompiledInputs(call, settings.counts, wide),
        tracing.template,
        tracing.returned,
    )
    return Executable(plan, settings, inputs, template, outputs, anchors, notes, graph, memory_format, hinted)


class _Tracing:
    """A model's forward as capture calls it: tensors in, tensors out. It keeps what a call's outputs are made of.

    Args:
        asked: the names of tensors that become outputs, too
    """

    def __init__(
        self, model: nn.Module, call: BoundCall, options: Options, training: bool, asked: set[str]
    ) -> None:
        self._model, self._call, self._asked = model, call, asked
        precision = options.Precision
        self._policy = precision.autocast_policy if precision.autocast_enabled else None
        self._training = training
        self.template: Any = None
        self.returned = 0
        self.traced: dict[str, int] = {}  # the index of the output that a name is; -1: of none
        self.notes: list[Note] = []

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        with following(self._policy), Traced() as traced_functions:
            value = self._call.given_to(self._model, tensors)
        code = getattr(inspect.unwrap(self._model.forward), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "?"
        self.template, outputs = traced_outputs(value, where)
        self.returned = len(outputs)
        if self._training:
            traced_functions.warn_about(outputs)
        state = current()
        assert state is not None
        named = dict(zip(self._call.paths, tensors, strict=True))
        for index, (loss, *_) in enumerate(state.losses):
            named |= {f"loss:{index}": loss, "loss": loss}
        for name, value in named.items():
            self.traced[name] = len(outputs) if name in self._asked else -1
            outputs += [value] if name in self._asked else []
        self.notes.extend(kept(state.notes, outputs, where))
        return outputs


def _requests(options: Options) -> dict[str, AnchorRequest]:
    """What `Options.anchorTensor` asked for."""
    found = {}
    for short, (long_name, use_default, mode, period) in options.anchored_tensors.items():
        if use_default:
            mode, period = options.output_mode, options.output_return_period
        if mode == OutputMode.EveryN and period > options.device_iterations:
            raise Error(
                f"anchorTensor({short!r}, ...): output_return_period {period} is more than the deviceIterations of"
                f" a call, which are {options.device_iterations}: nothing would be kept"
            )
        found[short] = AnchorRequest(long_name, OUTPUTS[OutputMode(mode)], period)
    return found


def _check_buffers(graph: Graph, replicas: int) -> None:
    """Replicas whose buffers drift apart can't be meant to be equal."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    changed = [
        result.key
        for result in graph.results
        if result.kind == "buffer" and result.key.rsplit(".", 1)[-1] not in statistics
    ]
    if changed:
        raise Error(
            f"PopTorch does not support broadcasting buffers that forward updates ({', '.join(changed)})"
            f" on {replicas} replicas\n"
            "  why: each replica sees other data, so its buffers become its own\n"
            "  fix: options.broadcastBuffers(False), if the model tolerates that; the host gets replica 0's"
        )
