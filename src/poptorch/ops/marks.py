"""Marks for the compiler: of the loss, of single tensors, and of all operations in a scope.

A mark of a tensor is an identity that stays in the captured graph under its own name. On plain PyTorch a mark computes
what its name says, or nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

from ..enums import OverlapMode, by_name
from .library import mark

mark("nop(Tensor input) -> Tensor")
mark("recomputation_checkpoint(Tensor input) -> Tensor")
mark("set_available_memory(Tensor input, float proportion) -> Tensor")
mark("set_matmul_serialization(Tensor matmul, str mode, int factor, bool keep_precision) -> Tensor")
mark("set_overlap_for_input(Tensor input, str mode) -> Tensor")
mark("set_overlap_for_output(Tensor input, str mode) -> Tensor")


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark a tensor as the loss that training differentiates.

    Args:
        reduction: "mean" or "sum" over all elements, or "none" for a tensor that is a scalar already
    """
    assert reduction in ("mean", "sum", "none"), (
        f"Unsupported reduction type! found {reduction!r}; identity_loss takes 'mean', 'sum' or 'none'"
    )
    loss = {"mean": x.mean, "sum": x.sum, "none": x.clone}[reduction]()
    capture = current()
    if capture is not None:
        capture.mark_loss(loss)
    return loss


def isRunningOnIpu() -> bool:
    """Return whether a model's forward is being captured for an executor."""
    return current() is not None


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor itself, by an operation that is kept in the graph."""
    if not isinstance(tensor, Tensor):
        raise Error(f"nop takes a tensor; found {type(tensor).__name__}\n  fix: poptorch.nop(x)")
    return torch.ops.poptorch.nop(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the tensors themselves; with recomputation on they are stored, and not computed again.

    Args:
        tensors: one tensor (returns a tensor), several (returns a tuple), or one list or tuple (returns
            the same kind)
    Raises:
        ValueError: something is not a tensor
    """
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return torch.ops.poptorch.recomputation_checkpoint(tensors[0])
    many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    wrong = [type(value).__name__ for value in many if not isinstance(value, Tensor)]
    if wrong:
        raise ValueError(
            f"All inputs must be tensors: recomputationCheckpoint found {', '.join(wrong)}\n"
            "  fix: give it the tensors only: poptorch.recomputationCheckpoint(x, y)"
        )
    kept = [torch.ops.poptorch.recomputation_checkpoint(value) for value in many]
    return kept if isinstance(many, list) else tuple(kept)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Return the tensor itself, and record the proportion in the graph; it has no effect here, where memory is shared.

    Args:
        tensor: what a matrix product or convolution has returned
        available_memory_proportion: how much of an IPU's tile memory it might have used, 0 to 1
    """
    if not isinstance(tensor, Tensor):
        raise Error(
            "poptorch.set_available_memory: you may only set available memory on a tensor, the result of a matmul"
            f" or convolution; found {type(tensor).__name__}\n"
            "  fix: y = poptorch.set_available_memory(torch.matmul(a, b), 0.3)"
        )
    return torch.ops.poptorch.set_available_memory(tensor, float(available_memory_proportion))


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Return the same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked("input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Return the same structure of tensors; `mode` is the loop with which their transfer may overlap."""
    return _marked("output", output_tensors, mode)


def _marked(kind: str, tensors: Any, mode: OverlapMode) -> Any:
    mode = by_name(OverlapMode, mode)
    if not isinstance(mode, OverlapMode):
        raise Error(f"the mode must be one of poptorch.OverlapMode's; found {mode!r}")

    def marked(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise Error(
                f"poptorch.set_overlap_for_{kind}: you may only set overlap on tensors, in tuples, lists and"
                f" dictionaries; found {type(value).__name__}\n  fix: pass the tensors only"
            )
        return getattr(torch.ops.poptorch, f"set_overlap_for_{kind}")(value, mode.value)

    return tree_map(marked, tensors)


class NameScope:
    """Give the operations inside this prefix in the compiled graph; scopes nest.

    with poptorch.NameScope("embedding"):
        x = self.table(tokens)
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"the name of a NameScope must be a string; found {name!r}"
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, *_: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Open a name scope."""
    capture = current()
    if capture is not None:
        capture.scopes.append(name)


def pop_name_scope() -> None:
    """Close the innermost name scope."""
    capture = current()
    if capture is not None and capture.scopes:
        capture.scopes.pop()


class Attribute:
    """Give the operations inside these attributes in the compiled graph, in each node's `attributes`.

        with poptorch.Attribute(__outline={"layer": "embedding"}):
            x = self.table(tokens)

    Scopes nest; leaving one restores the values of the outer.
    """

    def __init__(self, **attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._outer: list[dict[str, dict[str, str]]] = []

    def __enter__(self) -> None:
        capture = current()
        if capture is not None:
            self._outer.append(capture.attributes)
            for attribute, entries in self._attributes.items():
                for key, value in entries.items():
                    set_attribute(attribute, key, value)

    def __exit__(self, *_: object) -> None:
        capture = current()
        if capture is not None and self._outer:
            capture.attributes = self._outer.pop()


def set_attribute(attribute: str, key: str, value: Any) -> None:
    """Set one entry of an attribute for the operations that follow."""
    capture = current()
    if capture is not None:
        entries = {**capture.attributes.get(attribute, {}), key: str(value)}
        capture.attributes = {**capture.attributes, attribute: entries}


def clear_attribute(attribute: str, key: str) -> None:
    """Remove one entry of an attribute for the operations that follow."""
    capture = current()
    if capture is not None:
        entries = {k: v for k, v in capture.attributes.get(attribute, {}).items() if k != key}
        others = {k: v for k, v in capture.attributes.items() if k != attribute}
        capture.attributes = {**others, attribute: entries} if entries else others
