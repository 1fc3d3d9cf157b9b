"""What a call returns: the forward's outputs in their structure, and anchors, which `getAnchoredTensor` returns.

Anchors have the names that `Options.anchorTensor` takes:

x, b[0], ...          an input, by the name of forward's argument
loss:0, loss:1, ...   the losses in the order in which forward computes them; `loss` is the last
layer.weight          (or model.layer.weight) a parameter or buffer at the start of each weight update
Gradient___<name>     the gradient of each micro-batch, without loss scaling       (training)
UpdatedVar___<name>   a parameter after each weight update                         (training)
finalLossScale        the loss scaling of the call's last weight update            (training)
"""

import warnings
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.graph_recorder import check_dense
from popengine.errors import Error, did_you_mean
from popengine.ir import Graph, Result
from popengine.run.call import Results
from popengine.settings import Anchor, Outputs

from ..annotating.notes import filled, without_values
from ..enums import OutputMode
from ..nested_values import tensors_of
from ..options import Options
from ..options.freeze_options import OUTPUTS

GRADIENT, UPDATED, LOSS_SCALE = "Gradient___", "UpdatedVar___", "finalLossScale"


Request = tuple[str, Outputs, int]  # of `Options.anchorTensor`: the long name, the output mode and its period


def requests_of(options: Options) -> dict[str, Request]:
    """Return the anchors that `Options.anchorTensor` requested, by short name.

    Raises: Error, if an output_return_period is more than the device iterations of a call
    """
    requests = {}
    for short, (long_name, use_default, mode, period) in options.anchored_tensors.items():
        if use_default:
            mode, period = options.output_mode, options.output_return_period
        if mode == OutputMode.EveryN and period > options.device_iterations:
            raise Error(
                f"anchorTensor({short!r}, ...): output_return_period {period} is more than the deviceIterations of"
                f" a call, which are {options.device_iterations}: nothing would be kept"
            )
        requests[short] = long_name, OUTPUTS[OutputMode(mode)], period
    return requests


@dataclass(frozen=True)
class Anchors:
    """The anchors of a compiled model.

    Args:
        by_name: the anchor of each short name; None: the loss scaling
        names:   all names that could be anchored, for `getTensorNames`
        noted:   the anchors of the forward's notes
    """

    by_name: dict[str, Anchor | None]
    names: tuple[str, ...]
    noted: tuple[Anchor, ...] = ()

    @property
    def wanted(self) -> tuple[Anchor, ...]:
        """Return all anchors whose values the engine has to keep."""
        return (*(anchor for anchor in self.by_name.values() if anchor is not None), *self.noted)

    def values(self, results: Results) -> dict[str, Tensor]:
        """Return the anchors' values in one call, by short name."""
        return {
            name: torch.tensor(results.loss_scale) if anchor is None else results.anchored(anchor)
            for name, anchor in self.by_name.items()
        }


def resolve(
    graph: Graph, traced: dict[str, int], requests: dict[str, Request], training: bool
) -> tuple[Graph, Anchors]:
    """Resolve the requests' names, and return the graph with their values as further outputs, and the anchors.

    Args:
        traced: by name, the index of each input and loss in the graph's outputs; -1, if it was not requested
    Raises:
        Error: no tensor has the requested name
    """
    gradients = [result for result in graph.results if result.kind == "gradient"]
    # By name: the kind of anchor, and the result to be returned as an output, or the weight.
    sources: dict[str, tuple[Any, Result | str]] = {
        name: ("output", graph.results[index] if index >= 0 else name) for name, index in traced.items()
    }
    for slot in graph.weights:
        sources.setdefault(slot.key, ("weight", slot.key))
    if training:
        sources |= {GRADIENT + result.key: ("gradient", result) for result in gradients}
        sources |= {UPDATED + result.key: ("updated", result.key) for result in gradients}
        sources[LOSS_SCALE] = "", ""
    added: list[Result] = []
    by_name: dict[str, Anchor | None] = {}
    for short, (long_name, mode, period) in requests.items():
        name = _known(long_name, sources, traced)
        if name is None:
            raise Error(
                f"anchorTensor({short!r}, {long_name!r}): no tensor has that name{did_you_mean(long_name, sources)}\n"
                f"  fix: getTensorNames() of the compiled model lists what can be anchored: {', '.join(sources)}"
            )
        kind, source = sources[name]
        if isinstance(source, Result):  # once more, as an output with its own mode
            position = str(len(graph.results) + len(added))
            added.append(replace(source, kind="output", key=position))
            source = position
        by_name[short] = None if name == LOSS_SCALE else Anchor(kind, source, mode, period)
    graph = replace(graph, results=(*graph.results, *added)) if added else graph
    return graph, Anchors(by_name, tuple(sources))


def _known(name: str, names: Container[str], traced: Container[str]) -> str | None:
    """Return the entry of `names` for a name, which may have PopTorch's prefix `model.`; else None."""
    if name in names:
        return name
    prefix = next((prefix for prefix in (GRADIENT, UPDATED) if name.startswith(prefix)), "")
    plain = prefix + name.removeprefix(prefix).removeprefix("model.")
    return plain if plain in names and plain not in traced else None


# ---- outputs ----------------------------------------------------------------------------------------------


def traced_outputs(value: Any, where: str) -> tuple[Any, list[Tensor]]:
    """Return the structure of a forward's return value, and the traced tensors in it.

    A tensor that forward does not compute is no output: it stays in the structure, with a warning.

    Args:
        where: the line of forward
    """
    template, traced = without_values(value, where)
    for tensor in traced:
        check_dense(tensor, f"an output of forward, at {where},")
    if len(traced) < len(tensors_of(template)):
        warnings.warn(
            "Output expected to be on the IPU, but is a constant of the host: returned as it is", stacklevel=2
        )
    return template, traced


def returned(template: Any, outputs: list[Tensor]) -> Any:
    """Return what forward returns, with a call's outputs in place of the empty tensors of `template`."""
    return filled(template, map(_marked_as_output, outputs))


def _marked_as_output(value: Tensor) -> Tensor:
    """Return the same tensor; if it is floating point, its `backward()` now raises an Error with a fix."""
    if value.is_floating_point():
        value.backward = _refuse_backward
        value.__getstate__ = _no_state  # so that a saved output is a plain tensor
    return value


def _no_state() -> None:
    return None


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on a model's output: the call of the model has trained it\n"
        "  fix: leave it out; wrap the model with poptorch.trainingModel to have it trained"
    )
