"""Constant folding during a capture: the values of tensors that the forward computes from constants alone.

A value is computed where the forward reads it, by `.item()`, a boolean mask or a shape that depends on a
value: then the recorded operations run on the real constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ...errors import CaptureError
from .graph_recorder import (
    Recorder,
    check_dense,
    copied,
    is_write,
    like,
    map_leaves,
    memory_of,
    run_node,
    tensors_in,
    user_line,
    written_arguments,
)

aten = torch.ops.aten
_OTHER_MEMORY = (aten.set_, aten.resize_, aten.resize_as_)
# The errors that torch raises where a value is missing.
READS = (DataDependentOutputException, DynamicOutputShapeException)


class CaptureRecorder(Recorder):
    """The recorder of a forward. Reading a value (`.item()`, a mask) fails unless it follows from constants.

    Args: stand_in_of: returns the stand-in of a real tensor, or the tensor itself (see `standins.py`)
    """

    def __init__(self, node_meta: Callable[[Any], dict[str, Any]], stand_in_of: Callable[[Any], Any]) -> None:
        super().__init__(node_meta)
        self.stand_in_of = stand_in_of
        self._saved: dict[int, list[list[Tensor]]] = {}  # by memory, what autograd saved for its backward
        # The values of the operations that `value_of` has run; None if they depend on more than constants.
        self._values: dict[fx.Node, Any] = {}
        self._calls_run = 0

    def saved_before_writes(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which tensors that autograd saves keep their values if they are overwritten."""

        def pack(value: Tensor) -> list[Tensor]:
            saved = [value]
            if isinstance(value, FakeTensor):
                self._saved.setdefault(value.untyped_storage()._cdata, []).append(saved)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0])

    def _copy_saved(self, func: Any, args: Any, kwargs: Any) -> None:
        """Replace the tensors that autograd saved by copies, if an operation is about to overwrite them."""
        for value in tensors_in(written_arguments(func, args, kwargs)):
            if isinstance(value, FakeTensor):
                for saved in self._saved.pop(value.untyped_storage()._cdata, ()):
                    saved[0] = saved[0].clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls; nothing is computed
            return args[0].device
        if func.overloadpacket in _OTHER_MEMORY:
            raise CaptureError(
                f"{func} gives a tensor another memory or size, at {user_line()}\n"
                "  why: a compiled model has the shapes of its capture, and its tensors keep their memory\n"
                "  fix: compute a new tensor, or write values with `copy_`"
            )
        kwargs = kwargs or {}
        operands = tensors_in((args, kwargs))
        has_real = not all(isinstance(value, FakeTensor) for value in operands)
        if has_real and any(value.layout is not torch.strided for value in operands):
            if func._schema.is_mutable or any(isinstance(value, FakeTensor) for value in operands):
                for value in operands:
                    check_dense(value, f"an operand of {func}, at {user_line()},")
            with self:
                return self._run_on_real_values(func, args, kwargs)
        if func is not aten.lift_fresh.default and (has_real or func._schema.is_mutable):
            with self:  # a view that is made now is recorded
                args, kwargs = map_leaves(self._as_fake, (args, kwargs))
                if func._schema.is_mutable:
                    self._copy_saved(func, args, kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except READS as error:
            with self:
                return self._run_on_constants(func, args, kwargs, error)

    def _as_fake(self, value: Any) -> Any:
        """Return the fake tensor of a real tensor; fake tensors, and 0-d ones without stand-in, unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        found = self.stand_in_of(value)
        # A tensor without dimensions may be a number, and torch promotes numbers and tensors differently.
        if found is not value or not value.dim():
            return found
        node = self.node(value)
        return self.bind(node, like(value)) if node.meta["val"] is value else node.meta["val"]

    def _run_on_constants(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the result of an operation that reads values. Raises `error` if a value is unknown."""
        if func is aten.index.Tensor:
            value, indices = args
            return aten.index.Tensor(value, self._without_masks(indices, error))
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(*(value.shape for value in args))
            value, mask = (value.expand(shape) for value in args)
            return aten.index.Tensor(value, self._without_masks([mask], error))
        args, kwargs = tree_map(lambda leaf: self._known_value(leaf, error), (args, kwargs))
        return self._run_on_real_values(func, args, kwargs)

    def _run_on_real_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on real values, and return its result; dense tensors become constants."""
        with _disable_current_modes():
            result = func(*args, **kwargs)

        def as_constant(leaf: Any) -> Any:
            return (
                self.add_constant(leaf) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else leaf
            )

        return tree_map(as_constant, result)

    def _known_value(self, value: Any, error: Exception) -> Any:
        """Return a tensor's value; another argument unchanged. Raises `error` if the value is unknown."""
        known = self.value_of(value) if isinstance(value, Tensor) else value
        if known is None and value is not None:
            raise error
        return known

    def _without_masks(self, indices: Any, error: Exception) -> list[Any]:
        """Return the indices, with index tensors in place of masks. Raises `error` if a mask is unknown."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                with _disable_current_modes():
                    places = self._known_value(index, error).nonzero().unbind(1)
                found += [self.add_constant(place) for place in places]
            else:
                found.append(index)
        return found

    def value_of(self, value: Tensor) -> Tensor | None:
        """Return a copy of a recorded tensor's value; None if it depends on more than constants."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            calls = [node for node in self.graph.nodes if node.op == "call_function"]
            for node in calls[self._calls_run :]:
                self._compute_value(node)
            self._calls_run = len(calls)
            known = self._value_if_known(self.node(value))
            return None if known is None else known.clone()

    def _compute_value(self, node: fx.Node) -> None:
        """Set a node's value in `_values`. A write of an unknown value makes all in that memory unknown."""
        operands = [self._value_if_known(operand) for operand in node.all_input_nodes]
        is_known = all(value is not None for value in operands)
        if is_known and _is_deterministic(node.target):
            self._values[node] = run_node(node, self._values)
            return
        self._values[node] = None
        if is_write(node):
            into = written_arguments(node.target, node.args, node.kwargs)
            memory = {memory_of(operand) for operand in into if isinstance(operand, fx.Node)} - {None}
            self._values.update(dict.fromkeys([n for n in self._values if memory_of(n) in memory]))

    def _value_if_known(self, node: fx.Node) -> Any:
        if node not in self._values:  # a placeholder; a copy, since operations in place are run, too
            is_constant = node.meta["role"] == "constant"
            self._values[node] = copied(self.constants[node.meta["key"]]) if is_constant else None
        return self._values[node]


def _is_deterministic(operation: Any) -> bool:
    """Return whether an operation is torch's own, and draws no random numbers."""
    if operation is operator.getitem:
        return True
    return operation.namespace == "aten" and torch.Tag.nondeterministic_seeded not in operation.tags
