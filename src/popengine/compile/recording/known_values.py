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
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import CaptureError
from .graph_recorder import (
    Recorder,
    check_dense,
    empty_like,
    is_write,
    map_leaves,
    materialized_copy,
    memory_of,
    run_node,
    user_line,
)

aten = torch.ops.aten
_OTHER_MEMORY = (aten.set_, aten.resize_, aten.resize_as_)
# The errors that torch raises if an operation reads a fake tensor's values.
VALUE_READS = (DataDependentOutputException, DynamicOutputShapeException)


class CaptureRecorder(Recorder):
    """The recorder of a forward. Reading a value (`.item()`, a mask) fails unless it follows from constants.

    Args: stand_in_of: returns the stand-in of a weight, or another tensor itself (see `standins.py`)
    """

    def __init__(self, node_meta: Callable[[Any], dict[str, Any]], stand_in_of: Callable[[Any], Any]) -> None:
        super().__init__(node_meta)
        self.stand_in_of = stand_in_of
        # By memory, lists of one tensor each, which autograd saved for its backward.
        self._saved: dict[int, list[list[Tensor]]] = {}
        # The values of the operations that `value_of` has run; None if they depend on more than constants.
        self._values: dict[fx.Node, Any] = {}
        self._calls_run = 0

    def saved_tensors_noted(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which the tensors that autograd saves are noted, for `_copy_saved`."""

        def pack(value: Tensor) -> list[Tensor]:
            saved = [value]
            if isinstance(value, FakeTensor):
                self._saved.setdefault(value.untyped_storage()._cdata, []).append(saved)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0])

    def _copy_saved(self, func: Any, args: Any, kwargs: Any) -> None:
        """Replace tensors that autograd saved by copies, if an operation is about to overwrite their memory."""
        for value in _written_arguments(func, args, kwargs):
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
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
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
        except VALUE_READS as error:
            with self:
                return self._run_on_constants(func, args, kwargs, error)

    def _as_fake(self, value: Any) -> Any:
        """Return the fake tensor of a real tensor. Other values, and 0-d tensors that are no weights, are
        returned unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        found = self.stand_in_of(value)
        # A tensor without dimensions may be a number, and torch promotes numbers and tensors differently.
        if found is not value or not value.dim():
            return found
        node = self.node_of(value)
        return self.assign_tensor(node, empty_like(value)) if node.meta["val"] is value else node.meta["val"]

    def _run_on_constants(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run an operation that reads values, and return its result. Raises `error` if a value is unknown."""
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
        """Run an operation on real tensors, and return its result, with dense tensors added as constants."""
        with _disable_current_modes():
            result = func(*args, **kwargs)

        def as_constant(leaf: Any) -> Any:
            is_dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            return self.add_constant(leaf) if is_dense else leaf

        return tree_map(as_constant, result)

    def _known_value(self, value: Any, error: Exception) -> Any:
        """Return the value of a tensor; another argument unchanged. Raises `error` if the value is unknown."""
        known = self.value_of(value) if isinstance(value, Tensor) else value
        if known is None and value is not None:
            raise error
        return known

    def _without_masks(self, indices: Any, error: Exception) -> list[Any]:
        """Return indices of a tensor, with index tensors in place of masks. Raises `error` if a mask's value is
        unknown."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                with _disable_current_modes():
                    positions = self._known_value(index, error).nonzero().unbind(1)
                found += map(self.add_constant, positions)
            else:
                found.append(index)
        return found

    def value_of(self, value: Tensor) -> Tensor | None:
        """Return a copy of a recorded tensor's value; None if the value depends on more than constants."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            calls = [node for node in self.graph.nodes if node.op == "call_function"]
            for node in calls[self._calls_run :]:
                self._compute_value(node)
            self._calls_run = len(calls)
            known = self._value_if_known(self.node_of(value))
            return None if known is None else known.clone()

    def _compute_value(self, node: fx.Node) -> None:
        """Set a node's value in `_values`. If it writes an unknown value, all values in that memory become None."""
        operands = [self._value_if_known(operand) for operand in node.all_input_nodes]
        is_known = all(value is not None for value in operands)
        if is_known and _is_deterministic(node.target):
            self._values[node] = run_node(node, self._values)
            return
        self._values[node] = None
        if is_write(node):
            written = _written_arguments(node.target, node.args, node.kwargs)
            memory = {memory_of(operand) for operand in written if isinstance(operand, fx.Node)} - {None}
            self._values.update(dict.fromkeys([n for n in self._values if memory_of(n) in memory]))

    def _value_if_known(self, node: fx.Node) -> Any:
        if node not in self._values:  # a placeholder; a copy, since operations in place are run, too
            is_constant = node.meta["role"] == "constant"
            self._values[node] = materialized_copy(self.constants[node.meta["key"]]) if is_constant else None
        return self._values[node]


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes into: single values, and the items of lists."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return tree_leaves([given.get(argument.name) for argument in func._schema.arguments if argument.is_write])


def _is_deterministic(operation: Any) -> bool:
    """Return whether an operation is torch's own, and draws no random numbers."""
    if operation is operator.getitem:
        return True
    return operation.namespace == "aten" and torch.Tag.nondeterministic_seeded not in operation.tags
