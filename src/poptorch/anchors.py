"""Anchors: values that a call keeps beside its outputs, and the names they are asked for by.

x, b[0], ...          an input, by the name of forward's argument
loss:0, loss:1, ...   the losses in the order in which forward computes them; `loss` is the last
layer.weight          a parameter or buffer at the start of each weight update
Gradient___<name>     the gradient of each micro-batch, without loss scaling       (training)
UpdatedVar___<name>   a parameter after each weight update                         (training)
finalLossScale        the loss scaling of the call                                 (training)
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.ir import Graph, Result
from popengine.run.results import Results
from popengine.settings import Anchor, Hyper, Outputs

GRADIENT, UPDATED, LOSS_SCALE = "Gradient___", "UpdatedVar___", "finalLossScale"


@dataclass(frozen=True)
class Request:
    """What the user asked for with `Options.anchorTensor`, with its mode resolved."""

    long_name: str
    outputs: Outputs
    period: int


@dataclass(frozen=True)
class Anchors:
    """What the engine keeps for each short name (None: the loss scaling), and all that it could keep."""

    found: dict[str, Anchor | None]
    scaled: frozenset[str]  # short names of gradients: the loss scaling is to be divided out
    names: tuple[str, ...]  # for getTensorNames

    @property
    def wanted(self) -> tuple[Anchor, ...]:
        return tuple(anchor for anchor in self.found.values() if anchor is not None)

    def values(self, results: Results, hyper: Hyper | None) -> dict[str, Tensor]:
        """The values of one call, by short name."""
        scaling = 1.0 if hyper is None else hyper.loss_scaling
        values = {}
        for name, anchor in self.found.items():
            if anchor is None:
                values[name] = torch.tensor(scaling)
            else:
                value = results.anchored(anchor)
                values[name] = value / scaling if name in self.scaled and scaling != 1 else value
        return values


def resolve(
    graph: Graph, traced: dict[str, int], requests: dict[str, Request], training: bool
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
    found: dict[str, Anchor | None] = {}
    scaled = set()
    for short, request in requests.items():
        name = request.long_name
        if name not in names:
            raise _unknown(short, name, names)
        source, key = "output", str(traced.get(name, 0))
        if name == LOSS_SCALE:
            found[short] = None
            continue
        if name.startswith(GRADIENT) and name.removeprefix(GRADIENT) in gradients:
            key = str(len(graph.results) + len(added))
            added.append(replace(gradients[name.removeprefix(GRADIENT)], kind="output", key=key))
            scaled.add(short)
        elif name.startswith(UPDATED) and name.removeprefix(UPDATED) in gradients:
            source, key = "updated", name.removeprefix(UPDATED)
        elif name in weights and name not in traced:
            source, key = "weight", name
        found[short] = Anchor(source, key, request.outputs, request.period)
    graph = replace(graph, results=(*graph.results, *added)) if added else graph
    return graph, Anchors(found, frozenset(scaled), tuple(names))


def _unknown(short: str, name: str, names: list[str]) -> Error:
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return Error(
        f"anchorTensor({short!r}, {name!r}): no tensor has that name\n"
        f"  fix: {meant}getTensorNames() of the compiled model lists what can be anchored: {', '.join(names)}"
    )
