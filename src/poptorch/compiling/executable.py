"""Compilation of a model for the arguments of a call: the result is an `Executable`."""

import functools
import inspect
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.compile.partition import visits_with_operations
from popengine.compile.placement import sharded_if_too_few_micro_batches
from popengine.compile.recording.current_capture import current
from popengine.compile.recording.fingerprint import fingerprint, graph_lines
from popengine.compile.recording.graph_recorder import check_dense
from popengine.compile.recording.leftovers import fake_tensors_in
from popengine.compile.recording.reads import Reads
from popengine.compile.recording.user_code import is_users
from popengine.compile.rewriting.memory_layout import in_wanted_layout, with_fixed_strides
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.errors import Error
from popengine.ir import Graph, Plan
from popengine.settings import Anchor, Settings

from ..annotating.blocks import layers_as_blocks, marked_layers
from ..annotating.replica_groups import first_rows_only
from ..annotating.strategies import PipelinedExecution
from ..enums import OutputMode, OverlapMode
from ..logs import logger
from ..nested_values import parts_of, tensors_of
from ..options import Options
from . import compilation_log
from .arguments import (
    BoundCall,
    CompiledInputs,
    check_written_inputs,
    has_float64_weights,
    is_within,
    weights_of,
)
from .losses import choose_loss
from .outputs import Anchors, resolve_anchors
from .runs import Run, first_micro_batches
from .templates import Template, arguments_by_id, make_template
from .traced_functions import replace_untraceable_functions
from .tune import with_balanced_stages

_MOST_VALUES = 8  # plans for one shape and other values of what forward reads
_MOST_RECORDINGS = 64  # that are compared to find the plan for a value


@dataclass(frozen=True)
class RecordedCall:
    """A recording of forward, beside its graph: what it has read and yielded, and the arguments without tensors."""

    reads: Reads
    template: Template
    call: BoundCall
    forward_line: str
    # Paths of arguments whose values do not matter, of all recordings of an executor.
    unread: set[str]
    is_known: bool = False  # whether it yields what an earlier recording of the graph yields

    def holds(self, call: BoundCall) -> bool:
        """Return whether forward would read and yield the same in this call, whose tensors have the same kind."""
        return self.reads.hold() and not self.changed_arguments(call)

    def changed_arguments(self, call: BoundCall) -> dict[str, str]:
        """Return, by path and in words, the changes of arguments that have no tensors."""
        was, now = self.call.constant_parts, call.constant_parts
        return {
            path: f"{path} is {now.get(path, part).constant}, and was {part.constant}"
            for path, part in was.items()
            if now.get(path) != part and not is_within(path, self.unread)
        }

    def changes(self, call: BoundCall) -> tuple[str, set[str]]:
        """Return in words what has changed since this recording, and the paths of changed values that forward reads."""
        changed = self.reads.changed()
        words = [*map(str, changed), *self.changed_arguments(call).values()]
        return "; ".join(words[:3]), {read.path for read in changed}


@dataclass(frozen=True)
class Executable:
    """A compiled model, without weights and state. `outputs` is the number of tensors that forward returns; those of
    notes have `note_anchors`."""

    plan: Plan
    settings: Settings
    inputs: CompiledInputs
    outputs: int
    anchors: Anchors
    anchor_names: tuple[str, ...]
    note_anchors: tuple[Anchor, ...]
    graph: Graph
    memory_format: str  # never "auto"
    key: Any = None  # `Run.key`
    weights: Any = None  # `Run.frozen` and `Run.tied`
    # The recordings of this graph, the latest one that was used first.
    recordings: deque[RecordedCall] = field(default_factory=lambda: deque(maxlen=_MOST_RECORDINGS))

    def holds(self, call: BoundCall) -> bool:
        """Return whether there is a recording for what forward would read in this call; it moves to the front."""
        for index, recording in enumerate(self.recordings):
            if recording.holds(call):
                self.recordings.rotate(-index)
                return True
        return False

    def present_tensors(self) -> dict[str, Tensor]:
        """Return the plain tensors that forward reads, by key of the graph's constants."""
        return {key: find() for key, find in self.recordings[0].reads.tensors.items()}

    def add_recording(self, new: "Executable") -> None:
        """Add the recording of an equal graph. If it yields what an earlier one yields, arguments that have changed in
        between do not matter."""
        if self.recordings is new.recordings:
            return
        recording = new.recordings[0]
        for earlier in self.recordings:
            if (template := earlier.template.joined(recording.template)) is not None:
                recording.unread.update(earlier.changed_arguments(recording.call))
                recording = replace(recording, template=template, is_known=True)
                break
        self.recordings.appendleft(recording)

    def check_recording(self, new: "Executable") -> None:
        """Raise Error if a recording with the same reads has another graph, or yields something else."""
        before, recording = self.recordings[0], new.recordings[0]
        lines, new_lines = (graph_lines(executable.graph, before.reads.tensors) for executable in (self, new))
        pairs = zip_longest(lines, new_lines, fillvalue=("", ""))
        where = next((a[0] or b[0] for a, b in pairs if a[1] != b[1]), None)
        what = before.template.difference(recording.template)
        if where is None and not what and self.graph_code() == new.graph_code():
            return
        raise Error(
            f"{where or recording.forward_line}: forward computes something else now than when it was recorded"
            f"{f': {what} differs' if what else ''}; earlier calls had the recorded value\n"
            "  why: forward reads a value there that can't be followed: a file, the environment, an object of C, or an"
            " argument that seemed not to matter\n"
            "  fix: keep the value in an attribute of the model or in a buffer, or pass it as an argument; the next"
            " call records forward anew. options.checkRecording(False) leaves this check out"
        )

    def graph_code(self) -> str:
        """Return a text that is equal for graphs that compute, return and note equal tensors."""
        code = fingerprint(self.graph, self.recordings[0].reads.tensors)
        return f"{code} {self.outputs} {self.note_anchors}"


def compile_model(
    model: nn.Module,
    run: Run,
    options: Options,
    settings: Settings,
    done: Callable[[str], None] = lambda name: None,
    earlier: Sequence[Executable] = (),
    is_plan_only: bool = False,
) -> Executable:
    """Compile the plan of a run: capture the model, unless `earlier` has the graph, and lower the graph.

    `settings` are those of a complete combined batch. A plan has the stages of `earlier` plans and, if the
    micro-batch is equal, and what forward reads, their graph. If a forward that is recorded again has the graph of an
    earlier plan, return this plan. If it `is_plan_only`, other instances do not compile.
    """
    if earlier:
        settings = replace(settings, strategy=earlier[0].settings.strategy)
    of_key = [e for e in earlier if e.key == run.key]
    settings, weights, call = run.settings(settings), (run.frozen, run.tied), run.call
    inputs = CompiledInputs(call.kind, call.specs, call.positional, run.counts, has_float64_weights(model))
    layout = inputs.micro_batch, weights
    alike = [e for e in earlier if (e.inputs.micro_batch, e.weights) == layout]
    new = next((e for e in alike if e.holds(run.call)), None)
    if new is None:
        new = record_model(model, run, options, settings, earlier)
    graph, code = new.graph, new.graph_code()
    for executable in of_key:
        if executable.graph_code() == code:
            executable.add_recording(new)
            return executable
    unread = new.recordings[0].unread
    changed = [e.recordings[0].changed_arguments(call) for e in of_key]
    if of_key and all(changed) and not options.exists("new_shapes"):
        latest = of_key[-1].recordings[0]
        like = replace(run, call=latest.call.with_tensors(call.tensors))
        # If other values have changed, too, the graph may depend on these alone.
        if (
            not latest.reads.changed()
            or record_model(model, like, options, settings, earlier).graph_code() != code
        ):
            of_key[-1].inputs.check_call(call, unread)
    if changed.count({}) >= _MOST_VALUES:
        raise Error(
            f"there are {_MOST_VALUES} plans for values that forward reads, and one changes again:"
            f" {of_key[-1].recordings[0].changes(call)[0]}\n"
            "  why: each value is a part of a plan, which is compiled for it\n"
            '  fix: pass it as a tensor, with options.batchDims({"name": None}), or keep it in a buffer'
            " (`register_buffer`), and write into it"
        )
    unread.clear()  # the new graph may depend on them
    anchors = (*new.anchors.values(), *new.note_anchors)
    settings = replace(settings, anchors=anchors, products_in_float32=new.settings.products_in_float32)
    if settings.counts.replicas > 1 and options.broadcast_buffers:
        _check_buffers(graph, settings.counts.replicas)
    done("capture")
    if settings.strategy.auto == "balance":
        samples, values = first_micro_batches(run.call, run.counts, inputs.has_float64), weights_of(model)
        settings = with_balanced_stages(graph, settings, values, samples, together=not is_plan_only)
    settings = sharded_if_too_few_micro_batches(graph, visits_with_operations(graph), settings)
    plan = compile_graph(graph, settings, done)
    compilation_log.check_hardware_rules(plan, settings)
    return replace(new, plan=plan, settings=settings, inputs=inputs, key=run.key, weights=weights)


def record_model(
    model: nn.Module,
    run: Run,
    options: Options,
    settings: Settings,
    earlier: Sequence[Executable] = (),
) -> Executable:
    """Capture a model between the compile hooks, and return an executable without plan and inputs. The graph is
    rewritten for half precision and memory format. Arguments as of `compile_model`."""
    call, forward = run.call, _TracedForward(model, run.call, options)
    samples = first_micro_batches(call, run.counts, has_float64_weights(model))
    _call_hooks("Pre")
    options._execution_strategy.onStartTracing()
    try:
        with first_rows_only(model, settings.replica_groups), layers_as_blocks(model, settings.strategy):
            graph = capture(
                model,
                forward,
                samples,
                training=settings.training,
                device=settings.device,
                given=call.in_words(samples),
                beside=lambda: forward.template,
                arguments=[
                    (value, path) for path, value in call.constants.items() if parts_of(value) is None
                ],
            )
    finally:
        options._execution_strategy.onEndTracing()
        _call_hooks("Post")
    _check_overlap(graph, options)
    begun = {visit.name for visit in graph.visits}
    if unused := [path for path, name in marked_layers(model).items() if name not in begun]:
        logger.warning(
            "no block begins at %s: forward doesn't call it, so its mark has no effect", ", ".join(unused)
        )
    paths = call.kind.paths
    written = [int(result.key) for result in graph.results if result.kind == "input"]
    check_written_inputs(call, written)
    if moved := sorted({paths[index] for index in written} & call.rearranged):
        raise Error(
            f"forward writes into {', '.join(moved)}, which options.batchDims splits or repeats: the caller's tensor"
            " would not change\n  fix: return the new value"
        )
    graph, anchors, names = resolve_anchors(graph, forward.names, forward.indices, options, settings.training)
    kernels = options.Precision.half_kernels
    if settings.device == "cpu" and kernels != "native":
        is_chosen = is_faster_in_float32 if kernels == "auto" else lambda operation, dtype: True
        graph, widened = products_in_float32(graph, is_chosen)
        settings = replace(settings, products_in_float32=widened)
        if widened:
            logger.info("halfKernels %s: computed in float32 are %s", kernels, ", ".join(widened))
    chosen = options.memory_format if options.exists("memory_format") else "preserve"
    graph, memory_format = in_wanted_layout(graph, earlier[0].memory_format if earlier else chosen)
    if chosen == "auto":
        logger.info("memoryFormat auto: %s is used", memory_format)
    if settings.device != "cpu":
        graph = with_fixed_strides(graph)
    unknown: Any = None  # `compile_model` sets plan and inputs
    outputs = forward.returned, anchors, names, forward.note_anchors
    executable = Executable(unknown, settings, unknown, *outputs, graph, memory_format)
    template = graph.beside.without(graph.reads.dropped)
    unread = earlier[0].recordings[0].unread if earlier else set[str]()
    call = call.with_tensors(tensor.to("meta") for tensor in call.tensors)  # the recording holds no batch
    executable.recordings.append(RecordedCall(graph.reads, template, call, forward.line, unread))
    return executable


@dataclass
class _TracedForward:
    """A callable for `capture`: runs forward, returns the graph's outputs, and sets the fields below;
    `indices`: by short name, the index of an anchored input or loss in the outputs."""

    model: nn.Module
    call: BoundCall
    options: Options
    template: Template | None = None
    returned: int = 0
    names: tuple[str, ...] = ()
    indices: dict[str, int] = field(default_factory=dict)
    note_anchors: tuple[Anchor, ...] = ()
    line: str = "forward"

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        bound, state = self.call.with_tensors(tensors).bound, current()
        # Before forward fills its default values.
        named = dict(zip(self.call.named_tensors, tensors, strict=True))
        assert state is not None
        state.allows_autocast = self.options.Precision.autocast_enabled
        with replace_untraceable_functions():
            value = self.model(*bound.args, **bound.kwargs)
        code = getattr(inspect.unwrap(self.model.forward), "__code__", None)
        if code is not None:
            self.line = f"{code.co_filename}:{code.co_firstlineno}"
            if not is_users(code.co_filename):
                self.line = f"that of torch.nn.{type(self.model).__name__}"
            state.forward_line = self.line
        if value is None and state.training:
            logger.warning(
                "%s: forward returns nothing; the loss that it marks is trained all the same, and calls return None\n"
                "  fix: return the loss",
                state.forward_line,
            )
        template = functools.partial(make_template, capture=state, arguments=arguments_by_id(self.call))
        returned, outputs = template(value, "output")
        for tensor in outputs:
            check_dense(tensor, f"an output of forward, at {state.forward_line},")
        if len(outputs) < len(tensors_of(returned)):
            words = "Output expected to be on the IPU, but is a constant of the host: returned as it is"
            warnings.warn(words, stacklevel=2)
        self.returned = len(outputs)
        if state.training:
            choose_loss(value, state, self.options)
        for index, (loss, *_) in enumerate(state.losses):
            named |= {f"loss:{index}": loss, "loss": loss}
        self.names = tuple(named)
        for short, (long_name, *_) in self.options.anchored_tensors.items():
            if long_name in named:
                self.indices[short] = len(outputs)
                outputs.append(named[long_name])
        notes, noted = template(state.notes, "notes")
        places = range(len(outputs), len(outputs) + len(noted))
        self.note_anchors = tuple(Anchor("output", str(place), "all") for place in places)
        owners = {path: owner for path, owner in state.written.items() if path not in state.written_by_host}
        written = {path: owner[name] for path, (owner, name) in owners.items() if name in owner}
        written = {path: value for path, value in written.items() if not fake_tensors_in(value)}
        self.template = Template(returned, notes, template(written, "attributes")[0], state.written)
        return outputs + noted


def _check_buffers(graph: Graph, replicas: int) -> None:
    """Raise Error if forward changes buffers other than running statistics, since replicas would differ."""
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


# ---- overlapped input and output -----------------------------------------------------------------------

_INPUT, _OUTPUT = "poptorch.set_overlap_for_input.default", "poptorch.set_overlap_for_output.default"


def _check_overlap(graph: Graph, options: Options) -> None:
    """Raise Error if `set_overlap_for_input` or `_output` is misplaced, or the options forbid overlap."""
    nodes: Any = graph.code.nodes
    marks = [node for node in nodes if str(node.target) in (_INPUT, _OUTPUT)]
    marks = [node for node in marks if node.args[1] != OverlapMode.NoOverlap.value]
    if not marks:
        return
    (output,) = graph.code.find_nodes(op="output")
    results = zip(output.args[0], graph.results, strict=True)
    outputs = [value for value, result in results if result.kind == "output"]
    for node in marks:
        source = node.args[0]
        if str(node.target) == _INPUT:
            place = "the first operation on an input of the model, and its only use"
            fits = source.op == "placeholder" and source.meta["role"] == "input" and len(source.users) == 1
        else:
            place, fits = "on an output of the model that is returned once", outputs.count(node) == 1
        if not fits:
            raise Error(
                f"{str(node.target).removesuffix('.default')} is misplaced, at {node.meta.get('where', '?')}\n"
                f"  why: it must be {place}: only then can the transfer overlap with computation\n"
                "  fix: move it there"
            )
    if isinstance(options._execution_strategy, PipelinedExecution):
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution\n"
            "  fix: options.setExecutionStrategy(poptorch.ShardedExecution(...))"
        )
    if not options.TensorLocations.exists("num_io_tiles"):
        raise Error(
            "overlapped IO needs at least 32 tiles for it, and numIOTiles is not set\n"
            "  fix: options.TensorLocations.numIOTiles(32)"
        )
    has_output = any(str(node.target) == _OUTPUT for node in marks)
    if has_output and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            "set_overlap_for_output needs OutputMode.All or OutputMode.Sum; it is OutputMode."
            f"{OutputMode(options.output_mode).name}\n  fix: options.outputMode(poptorch.OutputMode.All)"
        )


# ---- hooks ---------------------------------------------------------------------------------------------

_hooks: dict[str, OrderedDict[int, Callable[[], Any]]] = {"Pre": OrderedDict(), "Post": OrderedDict()}


def _register_hook(time: Literal["Pre", "Post"], hook: Callable[[], Any]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{time}-compile hook must be callable; found {hook!r}")
    handle = RemovableHandle(_hooks[time])
    _hooks[time][handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()`, without arguments, before each compilation of a model's forward; return a handle, whose
    `remove()` takes the hook back. A plan for other replicas that reuses a compiled forward does not count."""
    return _register_hook("Pre", hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()` after each compilation, also a failed one; else as `registerPreCompileHook`."""
    return _register_hook("Post", hook)


def _call_hooks(time: Literal["Pre", "Post"]) -> None:
    for hook in list(_hooks[time].values()):
        hook()
