"""Anchors: values that a call keeps beside its outputs, and the names they are asked for by.

x, b[0], ...          an input, by the name of forward's argument
loss:0, loss:1, ...   the losses in the order in which forward computes them; `loss` is the last
layer.weight          (or model.layer.weight) a parameter or buffer at the start of each weight update
Gradient___<name>     the gradient of each micro-batch, without loss scaling       (training)
UpdatedVar___<name>   a parameter after each weight update                         (training)
finalLossScale        the loss scaling of the call's last weight update            (training)
"""

from collections.abc import Container
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from popengine.errors import Error, did_you_mean
from popengine.ir import Graph, Result
from popengine.run.state.results import Results
from popengine.settings import Anchor, Outputs

GRADIENT, UPDATED, LOSS_SCALE = "Gradient___", "UpdatedVar___", "finalLossScale"


@dataclass(frozen=True)
class AnchorRequest:
    """What the user asked for with `Options.anchorTensor`, with its mode resolved."""

    long_name: str
    outputs: Outputs
    period: int


@dataclass(frozen=True)
class Anchors:
    """What the engine keeps for each short name (None: the loss scaling), and all that it could keep."""

    found: dict[str, Anchor | None]
    names: tuple[str, ...]  # for getTensorNames
    noted: tuple[Anchor, ...] = ()  # those of the forward's notes

    @property
    def wanted(self) -> tuple[Anchor, ...]:
        return (*(anchor for anchor in self.found.values() if anchor is not None), *self.noted)

    def values(self, results: Results) -> dict[str, Tensor]:
        """The values of one call, by short name."""
        return {
            name: torch.tensor(results.loss_scale) if anchor is None else results.anchored(anchor)
            for name, anchor in self.found.items()
        }


def resolve(
    graph: Graph, traced: dict[str, int], requests: dict[str, AnchorRequest], training: bool
) -> tuple[Graph, Anchors]:
    """Find what each request means; the graph returned also gives the gradients that are asked for.

    Args:
        traced: inputs and losses by name, with the position in the graph's outputs where it was asked for
            (else -1)
    Raises:
        Error: nothing has such a name
    """
    weights = [slot.key for slot in graph.slots if slot.role in ("parameter", "buffer")]
    gradients = {result.key: result for result in graph.results if result.kind == "gradient"}
    names = [*traced, *weights]
    if training:
        names += [GRADIENT + key for key in gradients] + [UPDATED + key for key in gradients] + [LOSS_SCALE]
    added: list[Result] = []

    def another(result: Result) -> str:
        """Give a result once more, as an output of its own with a mode of its own; its position."""
        position = len(graph.results) + len(added)
        added.append(replace(result, kind="output", key=str(position)))
        return str(position)

    found: dict[str, Anchor | None] = {}
    for short, request in requests.items():
        mode, period = request.outputs, request.period
        name = _known(request.long_name, names, traced)
        if name is None:
            raise Error(
                f"anchorTensor({short!r}, {request.long_name!r}): no tensor has that name"
                f"{did_you_mean(request.long_name, names)}\n"
                f"  fix: getTensorNames() of the compiled model lists what can be anchored: {', '.join(names)}"
            )
        if name in traced:
            found[short] = Anchor("output", another(graph.results[traced[name]]), mode, period)
        elif name == LOSS_SCALE:
            found[short] = None
        elif name.startswith(GRADIENT):
            found[short] = Anchor("gradient", another(gradients[name.removeprefix(GRADIENT)]), mode, period)
        elif name.startswith(UPDATED):
            found[short] = Anchor("updated", name.removeprefix(UPDATED), mode, period)
        else:
            found[short] = Anchor("weight", name, mode, period)
    graph = replace(graph, results=(*graph.results, *added)) if added else graph
    return graph, Anchors(found, tuple(names))


def _known(name: str, names: list[str], traced: Container[str]) -> str | None:
    """The name of ours for what a program calls so: PopTorch's names of weights may begin with `model.`."""
    if name in names:
        return name
    prefix = next((prefix for prefix in (GRADIENT, UPDATED) if name.startswith(prefix)), "")
    plain = prefix + name.removeprefix(prefix).removeprefix("model.")
    return plain if plain in names and plain not in traced else None
