"""Marks for the compiler: of the loss, of single tensors, and of all operations in a scope.

A tensor's mark is an identity operation that the captured graph contains under the mark's name. Outside a
compiled model a mark returns its input, and has no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import ConvolutionGroup, current
from popengine.errors import Error
from popengine.torch_private import tree_map

from ..annotating.blocks import Block
from ..checks import checked
from ..enums import MultiConvPlanType, OverlapMode
from .library import REDUCTIONS, check_tensors, register_mark, register_shorthand

register_mark("nop(Tensor input) -> Tensor")
register_mark("recomputation_checkpoint(Tensor input) -> Tensor")
register_mark("set_available_memory(Tensor input, float proportion) -> Tensor")
register_mark("set_matmul_serialization(Tensor matmul, str mode, int factor, bool keep_precision) -> Tensor")
register_mark("set_overlap_for_input(Tensor input, str mode) -> Tensor")
register_mark("set_overlap_for_output(Tensor input, str mode) -> Tensor")


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Reduce a tensor to a scalar, mark it as the loss that training differentiates, and return it.

    >>> loss = poptorch.identity_loss((prediction - target) ** 2, reduction="mean")

    Args:
        x:         a tensor of any shape
        reduction: "mean" or "sum" over all elements, or "none" if `x` is a scalar already
    Returns: a tensor with one element, without dimensions
    Raises: AssertionError, for another reduction
    """
    checked("Unsupported reduction type! identity_loss", reduction, REDUCTIONS)
    loss = {"mean": x.mean, "sum": x.sum, "none": x.clone}[reduction]()
    if (capture := current()) is not None:
        capture.mark_loss(loss, is_explicit=True)
    return loss


def isRunningOnIpu() -> bool:
    """Return whether a model's forward is being captured for an executor."""
    return current() is not None


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, and record an identity operation in the graph."""
    check_tensors("nop takes a tensor", tensor)
    return torch.ops.poptorch.nop(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the tensors unchanged, and mark them to be stored for backward instead of recomputed.

    Args:
        tensors: one tensor (returns a tensor), several (returns a tuple), or one list or tuple (returns
            the same type)
    Raises: ValueError, if an argument is not a tensor
    """
    many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    check_tensors("All inputs must be tensors of recomputationCheckpoint", *many, error=ValueError)
    kept = [torch.ops.poptorch.recomputation_checkpoint(value) for value in many]
    if many is tensors and len(kept) == 1:
        return kept[0]
    return kept if isinstance(many, list) else tuple(kept)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Return the tensor unchanged, and record the proportion in the graph. No other effect.

    Args:
        tensor: result of a matrix product or convolution
        available_memory_proportion: share of an IPU's tile memory for that operation, 0 to 1
    """
    check_tensors(
        "set_available_memory: you may only set available memory on a tensor, the result of a matmul", tensor
    )
    return torch.ops.poptorch.set_available_memory(tensor, float(available_memory_proportion))


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Return the tensors unchanged, in the same structure, and record `mode` in the graph.

    `mode` is the loop whose computation may overlap the transfer of the tensors to the device. Transfers are
    never overlapped here, but a misplaced mark raises Error at compilation.
    """
    return _mark_tensors("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Return the tensors unchanged, and record `mode` as `set_overlap_for_input` does, for the way to the host. A
    tensor that forward does not return raises Error at compilation."""
    return _mark_tensors("set_overlap_for_output", output_tensors, mode)


def _mark_tensors(name: str, tensors: Any, mode: OverlapMode) -> Any:
    """Return a structure with the mark `name` on each tensor. Raises Error if it contains another value."""
    mode = OverlapMode.__members__.get(mode, mode) if isinstance(mode, str) else mode
    checked(name, mode, OverlapMode, Error)

    def mark_tensor(value: Any) -> Tensor:
        check_tensors(f"{name}: you may only set overlap on tensors, in containers", value)
        return getattr(torch.ops.poptorch, name)(value, mode.value)

    return tree_map(mark_tensor, tensors)


class NameScope:
    """Context manager that prefixes the names of operations in the compiled graph; scopes nest.

    >>> with poptorch.NameScope("embedding"):
    ...     x = self.table(tokens)
    """

    def __init__(self, name: str) -> None:
        self.name = checked("NameScope", name, str)

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, *_: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Begin a name scope in the graph that is being captured; no effect outside a capture."""
    if (capture := current()) is not None:
        capture.scopes.append(name)


def pop_name_scope() -> None:
    """End the innermost name scope; no effect if no scope is open, or outside a capture."""
    capture = current()
    if capture is not None and capture.scopes:
        capture.scopes.pop()


class Attribute:
    """Context manager that sets attributes of the operations in the graph that run inside it.

        with poptorch.Attribute(__outline={"layer": "embedding"}):
            x = self.table(tokens)

    Values are recorded as strings. At the end of the `with` the attributes get their previous values again.
    """

    def __init__(self, **attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._outer: list[dict[str, dict[str, str]]] = []

    def __enter__(self) -> None:
        if (capture := current()) is not None:
            self._outer.append(capture.attributes)
            for attribute, entries in self._attributes.items():
                for key, value in entries.items():
                    set_attribute(attribute, key, value)

    def __exit__(self, *_: object) -> None:
        capture = current()
        if capture is not None and self._outer:
            capture.attributes = self._outer.pop()


def set_attribute(attribute: str, key: str, value: Any) -> None:
    """Set `key` of an attribute to a string for the operations captured next; no effect outside a capture."""
    if (capture := current()) is not None:
        entries = {**capture.attributes.get(attribute, {}), key: str(value)}
        capture.attributes = {**capture.attributes, attribute: entries}


def clear_attribute(attribute: str, key: str) -> None:
    """Remove `key` of an attribute, if set, for the operations captured next; no effect outside a capture."""
    if (capture := current()) is not None:
        entries = {k: v for k, v in capture.attributes.get(attribute, {}).items() if k != key}
        unchanged = {k: v for k, v in capture.attributes.items() if k != attribute}
        capture.attributes = {**unchanged, attribute: entries} if entries else unchanged


class MultiConv:
    """Context manager that records convolutions as a group, to run in parallel on an IPU. No other effect.

        with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
            a, b = self.left(x), self.right(y)

    A setter returns the object. Its argument is one value for all convolutions, or None for no value;
    those with a plural name, and `enableConvDithering`, also take a list with a value for each convolution. The
    end of the `with` raises Error if there was no convolution in it, or if a list's length differs from their
    number. Nesting raises Error.
    """

    def __init__(self) -> None:
        self._properties: dict[str, Any] = {}

    def availableMemoryProportions(self, value: float | list[float] | None) -> MultiConv:
        """Set the proportion of tile memory that each convolution may use."""
        words = "Invalid available memory proportion! availableMemoryProportions"
        return self._set_property(
            "available_memory_proportions", _as_tuple(value), words, int | float, least=0
        )

    def partialsTypes(self, value: torch.dtype | list[torch.dtype] | None) -> MultiConv:
        """Set the type of partial sums: torch.float or torch.half."""
        types = torch.float32, torch.float16
        words = "Invalid partials types: partialsTypes"
        return self._set_property("partials_types", _as_tuple(value), words, types, ValueError)

    def enableConvDithering(self, value: bool | list[bool] | None) -> MultiConv:
        """Set whether convolutions with different parameters begin on different tiles of an IPU."""
        words = "Invalid convolution dithering: enableConvDithering"
        return self._set_property("conv_dithering", _as_tuple(value), words, bool, ValueError)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Set whether the convolutions run in parallel or one after another."""
        return self._set_property("plan_type", value, "Invalid plan type! planType", MultiConvPlanType)

    def perConvReservedTiles(self, value: int | None) -> MultiConv:
        """Set the number of tiles that are reserved for each convolution."""
        return self._set_property("per_conv_reserved_tiles", value, "perConvReservedTiles", int, least=0)

    def cycleBackOff(self, value: float | None) -> MultiConv:
        """Set by which share (0.1: 10 %) a convolution may need more cycles than with its fastest plan."""
        return self._set_property("cycle_back_off", value, "cycleBackOff", float)

    def _set_property(self, name: str, value: Any, *check: Any, **limit: int) -> MultiConv:
        """Store a property, or a tuple with a value for each convolution. Raises the error of `checked`."""
        words, *rule = check
        for item in value if isinstance(value, tuple) else (value,):
            if value is not None:
                checked(words, item, *rule, **limit)
        self._properties[name] = value
        return self

    def __enter__(self) -> None:
        capture = current()
        if capture is None:
            return
        if capture.group is not None:
            raise Error(
                "Nested poptorch.MultiConv is not supported: a convolution is in one group\n"
                "  fix: end the outer `with` before the inner begins"
            )
        properties = {name: value for name, value in self._properties.items() if value is not None}
        capture.group = ConvolutionGroup(properties)

    def __exit__(self, cls: Any, *_: object) -> None:
        capture = current()
        if capture is None or capture.group is None:
            return
        group, capture.group = capture.group, None
        if cls is not None:
            return
        if group.convolutions == 0:
            raise Error(
                "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv\n"
                "  fix: call the convolutions inside the `with`"
            )
        lists = {name: value for name, value in group.properties.items() if isinstance(value, tuple)}
        wrong = [f"{n} has {len(v)} values" for n, v in lists.items() if len(v) != group.convolutions]
        if wrong:
            raise Error(
                f"this poptorch.MultiConv has {group.convolutions} convolutions, but {', '.join(wrong)}\n"
                "  fix: one value for each convolution, or a single value for all"
            )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _identity_loss(tensor: Tensor, reduction: int) -> Tensor:
    return identity_loss(tensor, dict(enumerate(REDUCTIONS)).get(reduction, str(reduction)))


register_shorthand("identity_loss(Tensor input, int reduction) -> Tensor", _identity_loss)
register_shorthand("push_name_scope(str name) -> ()", push_name_scope)
register_shorthand("pop_name_scope() -> ()", pop_name_scope)
register_shorthand("set_attribute(str attribute, str key, str value) -> ()", set_attribute)
register_shorthand("clear_attribute(str attribute, str key) -> ()", clear_attribute)
register_shorthand(
    "begin_ipu_block(int stage, int phase, int ipu) -> ()", lambda stage, _, ipu: Block.start(str(stage), ipu)
)
register_shorthand("end_ipu_block() -> ()", Block.end)
# No effect: the group of a parameter comes from the optimizer.
register_shorthand("optimizer_group(int group, Tensor[] tensors) -> ()", lambda group, tensors: None)
