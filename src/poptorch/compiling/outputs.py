"""Anchors (`getAnchoredTensor`), and outputs, which have no `backward()`.

Anchors have the names that `Options.anchorTensor` takes:

x, b[0], ...          an input, by the name of forward's argument
loss:0, loss:1, ...   the losses in the order in which forward computes them; `loss` is the last
layer.weight          (or model.layer.weight) a parameter or buffer at the start of each weight update
Gradient___<name>     the gradient of each micro-batch, without loss scaling       (training)
UpdatedVar___<name>   a parameter after each weight update                         (training)
finalLossScale        the loss scaling of the call's last weight update            (training)
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from popengine.errors import Error, did_you_mean, without_internal_frames
from popengine.ir import Graph
from popengine.settings import Anchor

from ..enums import OutputMode
from ..logs import listed
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
            meant = did_you_mean(re.sub(r"^(.*)\.grad$", rf"{GRADIENT}\1", long_name), sources)
            raise Error(
                f"anchorTensor({short!r}, {long_name!r}): no tensor has that name{meant}\n"
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
