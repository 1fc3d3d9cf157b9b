"""Records the tensor operations of Python code as nodes of an fx graph.

A dispatch mode sees every operation below autograd, once, in the order in which it runs: forward and
backward alike. So a model's forward runs exactly once to be captured.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, tree_map

from ...errors import CaptureError

aten = torch.ops.aten
PLACE = ("phase", "block", "where", "module")  # of a node's meta: where in the user's model it comes from

# Operations that update running statistics in place without saying so in their schema.
_SAID_IN_PLACE = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}

_OURS = tuple(
    str(folder) + "/"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],
        Path(__file__).parents[3] / "poptorch",
    )
)
_ours_by_file: dict[str, bool] = {}


def user_line() -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def line_of(error: BaseException) -> str:
    """`file:line` of the innermost frame behind an error that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (f"{f.filename}:{f.lineno}" for f in reversed(frames) if not _is_ours(f.filename)), user_line()
    )


def _is_ours(file: str) -> bool:
    ours = _ours_by_file.get(file)
    if ours is None:
        ours = _ours_by_file[file] = file.startswith(_OURS) or "contextlib" in file
    return ours


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested arguments with `change` applied to each leaf; `value` itself, if no leaf changes.

    A `torch.Size` is a leaf: torch's tree_map makes a tuple of it, which `Tensor.new` takes as data.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        changed = [map_leaves(change, item) for item in value]
        same = all(new is old for new, old in zip(changed, value, strict=True))
        return value if same else kind(changed)
    if kind is dict:
        made = {key: map_leaves(change, item) for key, item in value.items()}
        return value if all(made[key] is item for key, item in value.items()) else made
    if kind is torch.Size or (kind not in SUPPORTED_NODES and not hasattr(value, "_fields")):
        return change(value)
    return tree_map(change, value, is_leaf=lambda part: type(part) is torch.Size)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments, which are lists at the most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def is_write(node: fx.Node) -> bool:
    """Return whether an operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def memory_of(node: fx.Node) -> int | None:
    """Return what is equal for values that share memory. Of an operation with several results: that of the first."""
    value = node.meta.get("val")
    if value is None and node.users:
        value = next(iter(node.users)).meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None  # a sparse tensor has several memories
    return value.untyped_storage()._cdata


def _like_grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor like the result of `aten._grouped_mm`: its shape function in torch takes bfloat16 only."""
    dtype = out_dtype or a.dtype
    size = [a.size(-2), b.size(-1)]
    if a.dim() == b.dim():
        size = [a.size(0) if offs is None else offs.size(0), *size]
    row = -(-size[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    return a.new_empty_strided(size, [size[-2] * row, row, 1][-len(size) :], dtype=dtype)


class Recorder(TorchDispatchMode):
    """Appends a node to `graph` for each operation that runs under it; `describe` gives the node's meta."""

    def __init__(self, describe: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.fresh: set[str] = set()  # the constants that the recorded code itself has made
        self.written: dict[fx.Node, fx.Node] = {}  # placeholder -> the last value copied into it
        self._describe = describe
        self._node_of: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that no id is used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ and loads all of torch._dynamo, a second of it

    def placeholder(self, name: str, value: Tensor, **meta: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(meta, val=value)
        self.bind(value, node)
        return node

    def bind(self, value: Tensor, node: fx.Node) -> None:
        self._node_of[id(value)] = node
        self._alive.append(value)

    def has_met(self, value: Tensor) -> bool:
        return id(value) in self._node_of

    def node(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor; one that the graph has not made becomes a constant."""
        known = self._node_of.get(id(value))
        if known is None and isinstance(value, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} that is used or returned at {user_line()} has no value, and"
                " no operation of this forward has computed it\n"
                "  why: it was made where operations are not recorded: by code that torch.compile has compiled, in"
                " another thread, or by an earlier compilation\n"
                "  fix: compute it in forward, in the thread that runs forward"
            )
        return known if known is not None else self.stranger(value, "constant")

    def stranger(self, value: Tensor, role: str) -> fx.Node:
        """Return a placeholder for a tensor from outside."""
        name = f"{role}_{len(self.constants)}"
        self.constants[name] = value
        return self._outside(name, value, role)

    def _outside(self, name: str, value: Tensor, role: str) -> fx.Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):  # placeholders stand first in a graph
            return self.placeholder(name, value, role=role, key=name)

    def constant(self, real: Tensor) -> Tensor:
        """Return a fake tensor for a real one that the code has made."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = real
        self.fresh.add(name)
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype)
        self._outside(name, fake, "constant")
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.returns and not func._schema.is_mutable:  # an order to the compiler, no operation
            return func(*args, **kwargs)
        if func in _SAID_IN_PLACE and args[3] is not None and args[5]:  # it has statistics, and trains
            func = _SAID_IN_PLACE[func]
        meta = self._describe(func)
        out = (_like_grouped_mm if func is aten._grouped_mm.default else func)(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a fresh torch.tensor(...): a constant
            made = self.node(args[0])
            self.fresh.add(made.meta["key"])
            made.meta["val"] = out
            self.bind(out, made)
            return out
        if func is aten.copy_.default and self.node(args[0]).op == "placeholder" and meta.get("replay"):
            self.written[self.node(args[0])] = self.node(args[1])
            return out
        if not isinstance(out, (Tensor, tuple, list)):
            return out  # a device, a size: known while tracing
        as_nodes = map_leaves(
            lambda leaf: self.node(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        scope = meta.get("scope")
        name = f"{scope}_{func.overloadpacket.__name__}" if scope else None
        node = self.graph.create_node("call_function", func, *as_nodes, name=name)
        node.meta.update(meta)
        if isinstance(out, Tensor):
            node.meta["val"] = out
            self.bind(out, node)
            return out
        for position, leaf in enumerate(out):
            if isinstance(leaf, Tensor):
                item = self.graph.call_function(operator.getitem, (node, position))
                item.meta.update(meta, val=leaf)
                self.bind(leaf, item)
        return out
