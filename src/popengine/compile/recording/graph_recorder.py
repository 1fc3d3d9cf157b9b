"""Record the tensor operations of Python code as nodes of an fx graph.

A dispatch mode receives every operation below autograd, once, in the order in which it runs: forward and
backward alike. So a model's forward runs exactly once to be captured.
"""

from __future__ import annotations

import functools
import operator
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...errors import CaptureError

aten = torch.ops.aten
PLACE = (
    "phase",
    "block",
    "where",
    "module",
)  # keys of a node's meta: where in the user's model it comes from

# Operations that update running statistics in place without declaring it in their schema, and equal ones that
# declare it.
_DECLARED_IN_PLACE = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}

TORCH = str(Path(torch.__file__).parent)
_SRC = Path(__file__).parents[3]
_PANDO_AND_TORCH = (f"{TORCH}/", f"{_SRC}/popengine/", f"{_SRC}/poptorch/")


def user_line(error: BaseException | None = None) -> str:
    """Return `file:line` of the innermost frame outside of torch and Pando; "?" if there is none.

    Args: error: the frames of its traceback are searched before those of the caller
    """
    raised = [*traceback.walk_tb(error.__traceback__)] if error is not None else []
    for frame, line in chain(reversed(raised), traceback.walk_stack(sys._getframe(1))):
        if not _is_pando_or_torch(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


@functools.cache
def _is_pando_or_torch(file: str) -> bool:
    return file.startswith(_PANDO_AND_TORCH) or "contextlib" in file


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested arguments with `change` applied to each leaf.

    A `torch.Size` is a leaf: torch's tree_map would make it a tuple, which `Tensor.new` reads as data.
    """
    return tree_map(change, value, is_leaf=lambda part: type(part) is torch.Size)


def empty_like(value: Tensor) -> Tensor:
    """Return an uninitialized tensor with a tensor's size, strides and dtype; under a fake mode, a fake tensor."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def materialized_copy(constant: Tensor) -> Tensor:
    """Return a copy of a real tensor, with torch's lazy conjugation and negation applied."""
    return constant.detach().clone().resolve_conj().resolve_neg()


def check_dense(value: Tensor, what: str) -> None:
    """Raise CaptureError if a tensor is sparse; `what` names the tensor in the message."""
    if value.layout is not torch.strided:
        raise CaptureError(
            f"{what} is a sparse tensor of shape {tuple(value.shape)}\n"
            "  why: a compiled model's inputs, gradients and outputs are dense tensors\n"
            "  fix: use `to_dense()`, or keep `indices()` and `values()` in place of the tensor; and"
            " nn.Embedding(..., sparse=False)"
        )


def is_write(node: fx.Node) -> bool:
    """Return whether a node is an operation that writes into an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a node's operation for the values of its operands."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[misc]
    target: Any = node.target
    return target(*args, **kwargs)


def memory_of(node: fx.Node) -> int | None:
    """Return the address of a node's storage, equal for nodes that share memory; None if it has no dense tensor.

    For an operation with several results: the storage of the first result that is used.
    """
    value = node.meta.get("val")
    if value is None and node.users:
        value = next(iter(node.users)).meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None  # a sparse tensor has several memories
    return value.untyped_storage()._cdata


def _empty_grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an uninitialized result of `aten._grouped_mm` (torch's shape function takes bfloat16 only)."""
    dtype = out_dtype or a.dtype
    size = [a.size(-2), b.size(-1)]
    if a.dim() == b.dim():
        size = [a.size(0) if offs is None else offs.size(0), *size]
    row = -(-size[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    return a.new_empty_strided(size, [size[-2] * row, row, 1][-len(size) :], dtype=dtype)


def sources_of(nodes: Iterable[fx.Node], among: Container[fx.Node] | None = None) -> set[fx.Node]:
    """Return the nodes, and all nodes that they are computed from, directly or not.

    Args: among: leave out nodes that are not in it, and what only these are computed from (None: all nodes)
    """
    found = set(nodes)
    stack = list(found)
    while stack:
        new = {n for n in stack.pop().all_input_nodes if n not in found and (among is None or n in among)}
        found |= new
        stack += new
    return found


class Recorder(TorchDispatchMode):
    """A dispatch mode that appends a node to `graph` for each operation. `node_meta` returns the node's meta."""

    def __init__(self, node_meta: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.fresh: set[str] = set()  # the names of constants that the recorded code itself has made
        self.written: dict[fx.Node, fx.Node] = {}  # placeholder -> the last value copied into it
        self._node_meta = node_meta
        # By the id of a tensor, which its node or `constants` keeps alive.
        self._node_by_id: dict[int, fx.Node] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ and imports torch._dynamo, which takes a second

    def add_placeholder(self, name: str, value: Tensor, **meta: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(meta)
        self.assign_tensor(node, value)
        return node

    def assign_tensor(self, node: fx.Node, value: Tensor) -> Tensor:
        """Set the fake tensor of a node, and return it."""
        node.meta["val"] = value
        self._node_by_id[id(value)] = node
        return value

    def node_of(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor. A real tensor without a node is added as a constant.

        Raises: CaptureError, if the tensor is fake, and no recorded operation has made it.
        """
        known = self._node_by_id.get(id(value))
        if known is None and isinstance(value, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} that is used or returned at {user_line()} has no value, and"
                " no operation of this forward has computed it\n"
                "  why: it was made where operations are not recorded: by code that torch.compile has compiled, in"
                " another thread, or by an earlier compilation\n"
                "  fix: compute it in forward, in the thread that runs forward"
            )
        return known if known is not None else self.add_outer_tensor(value, "constant")

    def add_outer_tensor(self, value: Tensor, role: str) -> fx.Node:
        """Add a tensor that no recorded operation has made to `constants`; return a new placeholder for it."""
        name = f"{role}_{len(self.constants)}"
        self.constants[name] = value
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):  # placeholders stand first in a graph
            return self.add_placeholder(name, value, role=role, key=name)

    def add_constant(self, real: Tensor) -> Tensor:
        """Add a real tensor that forward has made to the graph, as a constant, and return its fake tensor."""
        node = self.add_outer_tensor(real, "constant")
        self.fresh.add(node.meta["key"])
        return self.assign_tensor(node, empty_like(real))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.returns and not func._schema.is_mutable:  # a hint to the compiler, no operation
            return func(*args, **kwargs)
        if func in _DECLARED_IN_PLACE and args[3] is not None and args[5]:  # it has statistics, and trains
            func = _DECLARED_IN_PLACE[func]
        meta = self._node_meta(func)
        out = (_empty_grouped_mm if func is aten._grouped_mm.default else func)(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a fresh torch.tensor(...): a constant
            made = self.node_of(args[0])
            self.fresh.add(made.meta["key"])
            return self.assign_tensor(made, out)
        if func is aten.copy_.default and self.node_of(args[0]).op == "placeholder" and meta.get("replay"):
            self.written[self.node_of(args[0])] = self.node_of(args[1])
            return out
        if not isinstance(out, (Tensor, tuple, list)):
            return out  # a device, a size: known while tracing
        as_nodes = map_leaves(
            lambda leaf: self.node_of(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        scope = meta.get("scope")
        name = f"{scope}_{func.overloadpacket.__name__}" if scope else None
        node = self.graph.create_node("call_function", func, *as_nodes, name=name)
        node.meta.update(meta)
        if isinstance(out, Tensor):
            return self.assign_tensor(node, out)
        for position, leaf in enumerate(out):
            if isinstance(leaf, Tensor):
                item = self.graph.call_function(operator.getitem, (node, position))
                item.meta.update(meta)
                self.assign_tensor(item, leaf)
        return out
