"""What a call returns: the forward's outputs in their structure, anchors (`getAnchoredTensor`), and notes.

Anchors have the names that `Options.anchorTensor` takes:

x, b[0], ...          an input, by the name of forward's argument
loss:0, loss:1, ...   the losses in the order in which forward computes them; `loss` is the last
layer.weight          (or model.layer.weight) a parameter or buffer at the start of each weight update
Gradient___<name>     the gradient of each micro-batch, without loss scaling       (training)
UpdatedVar___<name>   a parameter after each weight update                         (training)
finalLossScale        the loss scaling of the call's last weight update            (training)
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import Capture, is_traced, recording_paused
from popengine.compile.recording.graph_recorder import check_dense
from popengine.compile.recording.leftovers import fake_tensors_in
from popengine.errors import CaptureError, Error, did_you_mean, without_internal_frames
from popengine.ir import Graph
from popengine.run.call import Results
from popengine.settings import Anchor

from ..enums import OutputMode
from ..logs import listed, logger
from ..nested_values import constants_of, tensors_of, with_tensors
from ..options import Options
from ..options.freeze_options import OUTPUTS

GRADIENT, UPDATED, LOSS_SCALE = "Gradient___", "UpdatedVar___", "finalLossScale"
_BEFORE_WEIGHT = re.compile(f"^({GRADIENT}|{UPDATED})?model[.]")  # a name of a weight may begin with "model."
Anchors = dict[str, Anchor]  # by short name


def resolve_anchors(
    graph: Graph, traced: Iterable[str], indices: dict[str, int], options: Options, training: bool
) -> tuple[Graph, Anchors, tuple[str, ...]]:
    """Return the graph with the requested gradients as further outputs, the requested anchors, and all names
    of anchors. `traced`, `indices`: `names`, `indices` of a `_TracedForward`."""
    gradients = {result.key: result for result in graph.results if result.kind == "gradient"}
    # By name: the source of an anchor, and the weight's name.
    sources: dict[str, tuple[Any, str]] = {name: ("output", "") for name in traced}
    for slot in graph.parameters_and_buffers:
        sources.setdefault(slot.key, ("weight", slot.key))
    if training:
        sources |= {GRADIENT + key: ("gradient", key) for key in gradients}
        sources |= {UPDATED + key: ("updated", key) for key in gradients}
        sources[LOSS_SCALE] = "loss_scale", ""
    results = list(graph.results)
    anchors: Anchors = {}
    for short, (long_name, use_default, mode, period) in options.anchored_tensors.items():
        if use_default:
            mode, period = options.output_mode, options.output_return_period
        if mode == OutputMode.EveryN and period > options.device_iterations:
            raise Error(
                f"anchorTensor({short!r}, ...): output_return_period {period} is more than the deviceIterations of"
                f" a call, which are {options.device_iterations}: nothing would be kept"
            )
        name = long_name if long_name in sources else _BEFORE_WEIGHT.sub(r"\1", long_name)
        source, key = sources.get(name, ("", ""))
        if not source or (source == "output" and short not in indices):
            raise Error(
                f"anchorTensor({short!r}, {long_name!r}): no tensor has that name{did_you_mean(long_name, sources)}\n"
                f"  fix: {listed(list(sources))}; without this anchor, executor.getTensorNames() returns all names"
            )
        if source == "gradient":
            gradient, key = gradients[key], str(len(results))
            results.append(replace(gradient, kind="output", key=key))
        elif source == "output":
            key = str(indices[short])
        outputs = "final" if source == "loss_scale" else OUTPUTS[mode]
        anchors[short] = Anchor(source, key, outputs, period)
    return replace(graph, results=tuple(results)), anchors, tuple(sources)


# ---- outputs ----------------------------------------------------------------------------------------------


def split_outputs(value: Any, capture: Capture) -> tuple[Any, list[Tensor]]:
    """Return the template of a forward's return value, and its outputs. Warn of tensors that are no outputs."""
    template, traced = split_traced(value, capture)
    for tensor in traced:
        check_dense(tensor, f"an output of forward, at {capture.forward_line},")
    if len(traced) < len(tensors_of(template)):
        warnings.warn(
            "Output expected to be on the IPU, but is a constant of the host: returned as it is", stacklevel=2
        )
    return template, traced


def refuse_backward_of(value: Tensor) -> Tensor:
    """Return an output, after replacing `backward` of a floating point tensor by one that raises Error."""
    if value.is_floating_point():
        value.backward = _refuse_backward
        value.__getstate__ = lambda: None  # so that a saved output is a plain tensor
    return value


@without_internal_frames
def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on a model's output: it has no graph of gradients\n"
        "  why: a call of an executor of poptorch.trainingModel has computed the gradients and updated the weights\n"
        "  fix: leave backward(), clip_grad_norm_ and optimizer.step() out (optimizer.max_grad_norm = 1.0 clips), and"
        " compute in forward whatever belongs to the loss"
    )


# ---- notes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """A note of a compiled model: its key (`what`), and the anchors that return its tensors."""

    what: Any
    template: Any  # the value, with an empty "meta" tensor in place of each tensor of a call
    anchors: tuple[Anchor, ...]

    def value(self, results: Results) -> Any:
        """Return the noted value of a call, with tensors [micro-batches of all replicas, *shape]."""
        return fill_template(self.template, map(results.rows, self.anchors))


def split_traced(value: Any, capture: Capture) -> tuple[Any, list[Tensor]]:
    """Return a copy of a nested value, with an empty "meta" tensor in place of each traced tensor, and the
    traced tensors. For objects that hold some and are no containers see `_clear_traced_tensors`."""
    for part, path, is_named in constants_of(value, "output"):
        _clear_traced_tensors(part, path, is_named, capture.forward_line)
    tensors = [capture.recorder.stand_in_of(tensor) for tensor in tensors_of(value)]
    with recording_paused():
        marks = [torch.empty(0, device="meta") if is_traced(t) else t.detach() for t in tensors]
    return with_tensors(value, iter(marks)), [tensor for tensor in tensors if is_traced(tensor)]


def _clear_traced_tensors(part: Any, path: str, is_named: bool, where: str) -> None:
    """Replace traced tensors in `part`, an object that is no container, by "meta" tensors, in place, and
    warn: no call fills them, but programs often do not read them (a language model's cache). Raises
    CaptureError if its key is no string (`is_named` is False), or it has no `__dict__`."""
    found = fake_tensors_in(part, path)
    if not found:
        return
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    what = f"{path}, a {kind}, holds tensors: {', '.join(leftover.path for leftover in found[:3])}"
    fix = (
        "return tensors in tuples, lists, dictionaries or dataclasses, or make the type known with"
        " poptorch.registerCustomArgParser"
    )
    if not is_named or not hasattr(part, "__dict__"):
        raise CaptureError(
            f"what forward returns can't be filled with a call's values: {what}\n"
            f"  returned by the function at {where}\n"
            "  why: only containers can be filled with each call's values; elsewhere a tensor would have none\n"
            f"  fix: {fix}"
        )
    logger.warning("%s; they have no values outside of the compiled model\n  fix: %s", what, fix)
    with recording_paused():
        for leftover in found:
            leftover.put(torch.empty(leftover.value.shape, dtype=leftover.value.dtype, device="meta"))


def fill_template(template: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a template with `tensors`, in their order, in place of its "meta" tensors."""
    return with_tensors(template, (next(tensors) if t.is_meta else t for t in tensors_of(template)))


def make_notes(capture: Capture, outputs: list[Tensor]) -> tuple[Note, ...]:
    """Return the notes of a capture, after appending their tensors, in place, to the graph's `outputs`."""
    notes = []
    for what, value in capture.notes:
        template, tensors = split_traced(value, capture)
        places = range(len(outputs), len(outputs) + len(tensors))
        anchors = tuple(Anchor("output", str(place), "all") for place in places)
        notes.append(Note(what, template, anchors))
        outputs += tensors
    return tuple(notes)
