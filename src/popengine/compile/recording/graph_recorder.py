"""Record the tensor operations of Python code as nodes of an fx graph.

A dispatch mode receives every operation below autograd, once, in the order in which it runs. Where the forward reads a
value, by `.item()`, a boolean mask or a shape that depends on a value, the recorded operations run on the real
constants (`CaptureRecorder.value_of`).
"""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ...errors import CaptureError
from ...operations import with_strides
from ...torch_private import (
    VALUE_READS,
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    disable_dispatch_modes,
    leaves_of,
    storage_id,
    tree_leaves,
    tree_map,
)
from .user_code import user_line

logger = logging.getLogger("poptorch::python")
aten = torch.ops.aten
PLACE = ("phase", "block", "where", "module")  # keys of a node's meta: its place in the user's model
# Operations that update running statistics in place without declaring it, and equal ones that declare it.
_DECLARED_IN_PLACE = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with `change` applied to each leaf.

    A `torch.Size` is a leaf: torch's tree_map would make it a tuple, which `Tensor.new` reads as data.
    """
    return tree_map(change, value, is_leaf=lambda part: type(part) is torch.Size)


def empty_like(value: Tensor) -> Tensor:
    """Return an uninitialized tensor with the size, strides and dtype of `value`; under a fake mode, a fake one."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def materialized_copy(constant: Tensor) -> Tensor:
    """Return a detached copy of a real tensor, with torch's lazy conjugation and negation applied."""
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
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_pure(node: fx.Node) -> bool:
    """Return whether a node is an operation of torch that draws no random numbers; others may have side effects."""
    target: Any = node.target
    is_torch = target is operator.getitem or target.namespace == "aten"
    return is_torch and torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())


def run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a node's operation, run on the values of its operands (`values`: by node)."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[misc]
    target: Any = node.target
    return target(*args, **kwargs)


def storage_of(node: fx.Node) -> int | None:
    """Return the address of the storage of a node's tensor (of several results: the first that is used), equal for
    nodes that share memory; None without a dense tensor."""
    value = node.meta.get("val")
    if value is None and node.users:
        value = next(iter(node.users)).meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None  # a sparse tensor has several memories
    return storage_id(value)


def _empty_grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an uninitialized result of `aten._grouped_mm` (torch's shape function takes bfloat16 only)."""
    dtype = out_dtype or a.dtype
    size = [a.size(-2), b.size(-1)]
    if a.dim() == b.dim():
        size = [a.size(0) if offs is None else offs.size(0), *size]
    row = -(-size[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    return a.new_empty_strided(size, [size[-2] * row, row, 1][-len(size) :], dtype=dtype)


def sources_of(nodes: Iterable[fx.Node], among: Container[fx.Node] | None = None) -> set[fx.Node]:
    """Return `nodes` and all nodes from which these are computed. With `among`, follow and return only nodes in it."""
    sources = set(nodes)
    stack = list(sources)
    while stack:
        new = {n for n in stack.pop().all_input_nodes if n not in sources and (among is None or n in among)}
        sources |= new
        stack += new
    return sources


class GraphRecorder(TorchDispatchMode):
    """A dispatch mode that appends a node to `graph`, with a meta by `node_meta`, for each operation. Tensors that it
    has not made become inputs of the role `outer_role`: "constant", or "outer" (of a surrounding forward)."""

    def __init__(self, node_meta: Callable[[Any], dict[str, Any]], outer_role: str = "constant") -> None:
        super().__init__()
        self._outer_role = outer_role
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
        """Set the tensor of a node to `value`, by which `node_of` finds the node, and return `value`."""
        node.meta["val"] = value
        self._node_by_id[id(value)] = node
        return value

    def node_of(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor. A real tensor without a node is added as an input of the graph."""
        node = self._node_by_id.get(id(value))
        if node is not None:
            return node
        if self._outer_role == "constant" and isinstance(value, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} that is used or returned at {user_line()} has no value, and"
                " no operation of this forward has computed it\n"
                "  why: it was made where operations are not recorded: by code that torch.compile has compiled, in"
                " another thread, by an earlier compilation, or in the body of a poptorch.for_loop or poptorch.cond\n"
                "  fix: compute it in forward, in the thread that runs forward; return it from the body"
            )
        name = f"{self._outer_role}_{len(self.constants)}"
        self.constants[name] = value
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):  # placeholders stand first in a graph
            return self.add_placeholder(name, value, role=self._outer_role, key=name)

    def add_constant(self, real: Tensor, fake: Tensor | None = None) -> Tensor:
        """Add a real tensor that forward has made to the constants; return the fake tensor that stands for it."""
        node = self.node_of(real)
        self.fresh.add(node.meta["key"])
        return self.assign_tensor(node, empty_like(real) if fake is None else fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.returns and not func._schema.is_mutable:  # a hint to the compiler, no operation
            return func(*args, **kwargs)
        if func in _DECLARED_IN_PLACE and args[3] is not None and args[5]:  # it has statistics, and trains
            func = _DECLARED_IN_PLACE[func]
        if torch.Tag.nondeterministic_seeded in func.tags:
            func, args, kwargs = _without_generator(func, args, kwargs)
        meta = self._node_meta(func)
        out = (_empty_grouped_mm if func is aten._grouped_mm.default else func)(*args, **kwargs)
        if func is aten.lift_fresh.default:  # torch.tensor(...); or over an array's memory
            with disable_dispatch_modes():
                return self.add_constant(args[0].clone(), out)
        if func is aten.copy_.default and self.node_of(args[0]).op == "placeholder" and meta.get("replay"):
            self.written[self.node_of(args[0])] = self.node_of(args[1])
            return out
        if not isinstance(out, (Tensor, tuple, list)) and not func._schema.is_mutable:
            return out  # a device, a size: known while tracing
        if isinstance(out, Tensor) and _has_default_dtype(func) and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": out.dtype}  # `torch.set_default_dtype` may change the default
        as_nodes = map_aggregate(
            (args, kwargs), lambda leaf: self.node_of(leaf) if isinstance(leaf, Tensor) else leaf
        )
        name = f"{meta['scope']}_{func.overloadpacket.__name__}" if meta.get("scope") else None
        node = self.graph.create_node("call_function", func, *as_nodes, name=name)
        node.meta.update(meta)
        if isinstance(out, Tensor):
            return self.assign_tensor(node, out)
        for position, leaf in enumerate(out or ()):  # an operation on lists in place returns None
            if isinstance(leaf, Tensor):
                item = self.graph.call_function(operator.getitem, (node, position))
                item.meta.update(meta)
                self.assign_tensor(item, leaf)
        return out


@functools.cache
def _has_default_dtype(func: Any) -> bool:
    """Return whether the operation makes a tensor of no other one, with a keyword argument for the dtype."""
    arguments = func._schema.arguments
    takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensors and "dtype" in [argument.name for argument in arguments if argument.kwarg_only]


def _without_generator(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a random operation and its arguments without a `torch.Generator`; log a warning if there is one."""
    given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
    if given:
        logger.warning(
            "%s is given a generator, which has no effect in a compiled model\n"
            "  why: each micro-batch draws numbers of its own, which depend on options.randomSeed\n"
            "  fix: options.randomSeed(seed); or draw the numbers outside of forward, and pass them as an input",
            user_line(),
        )
    args = tuple(leaf for leaf in args if not isinstance(leaf, torch.Generator))
    words = [word for word in func._overloadname.split("_") if word != "generator"]
    func = getattr(func.overloadpacket, "_".join(words) or "default")
    return func, args, {name: value for name, value in kwargs.items() if name != "generator"}


# ---- the forward ------------------------------------------------------------------------------------------

_CHANGES_MEMORY = (aten.set_, aten.resize_, aten.resize_as_)


class CaptureRecorder(GraphRecorder):
    """The recorder of a forward, in which a value that depends on constants alone may be read (`.item()`, a mask).

    Args: stand_in_of: returns the stand-in of a weight, and any other tensor unchanged (see `standins.py`)
    """

    def __init__(self, node_meta: Callable[[Any], dict[str, Any]], stand_in_of: Callable[[Any], Any]) -> None:
        super().__init__(node_meta)
        self.stand_in_of = stand_in_of
        # By memory, lists of one tensor each, which autograd saved for its backward.
        self._saved: dict[int, list[list[Tensor]]] = {}
        self.values_read: list[Tensor] = []  # constants whose values forward has read
        # The values of the nodes that `value_of` has run; None if they depend on more than constants.
        self._values: dict[fx.Node, Any] = {}

    @contextlib.contextmanager
    def saved_tensors_listed(self) -> Iterator[None]:
        """Run the body, and keep the tensors that autograd saves for backward in `_saved`, by autograd's hooks.

        torch.func refuses to run under hooks, so its check is replaced. The tensors that it saves are no fake tensors.
        """

        def pack(value: Tensor) -> list[Tensor]:
            saved = [value]
            if isinstance(value, FakeTensor):
                self._saved.setdefault(storage_id(value), []).append(saved)
            return saved

        autograd: Any = torch.autograd.graph
        disable = autograd.disable_saved_tensors_hooks
        autograd.disable_saved_tensors_hooks = lambda message: contextlib.nullcontext()
        try:
            with autograd.saved_tensors_hooks(pack, lambda saved: saved[0]):
                yield
        finally:
            autograd.disable_saved_tensors_hooks = disable

    def _copy_saved_tensors(self, func: Any, args: Any, kwargs: Any) -> None:
        """Before an operation runs, replace the tensors that autograd has saved in the memory it writes by copies."""
        for value in written_arguments(func, args, kwargs):
            if isinstance(value, FakeTensor):
                for saved in self._saved.pop(storage_id(value), ()):
                    saved[0] = with_strides(saved[0], saved[0].stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls; nothing is computed
            return args[0].device
        if func is aten.resize_.default and tuple(args[1]) == args[0].shape:  # by an `out=`
            return args[0]
        if func.overloadpacket in _CHANGES_MEMORY:
            raise CaptureError(
                f"{func} gives a tensor another memory or size, at {user_line()}\n"
                "  why: a compiled model has the shapes of its capture, and its tensors keep their memory\n"
                "  fix: compute a new tensor, or write values with `copy_`"
            )
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and device.type not in ("cpu", "meta"):
            raise RuntimeError(f"{func} makes a tensor on {device.type}")  # `torch_errors` explains it
        operands = leaves_of(Tensor, (args, kwargs))
        has_real = not all(isinstance(value, FakeTensor) for value in operands)
        if has_real and any(value.layout is not torch.strided for value in operands):
            if func._schema.is_mutable or any(isinstance(value, FakeTensor) for value in operands):
                for value in operands:
                    check_dense(value, f"an operand of {func}, at {user_line()},")
            with self:
                return self._run_on_real_values(func, args, kwargs)
        if func is not aten.lift_fresh.default and (has_real or func._schema.is_mutable):
            with self:  # a view that is made now is recorded
                args, kwargs = map_leaves(self._fake_tensor_of, (args, kwargs))
                if func._schema.is_mutable:
                    self._copy_saved_tensors(func, args, kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except VALUE_READS as error:
            with self:
                return self._run_on_constants(func, args, kwargs, error)

    def _fake_tensor_of(self, value: Any) -> Any:
        """Return the stand-in of a weight, the fake tensor of a constant that is not 0-d, or any other value
        unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        stand_in = self.stand_in_of(value)
        # A tensor without dimensions may be a number, and torch promotes numbers and tensors differently.
        if stand_in is not value or not value.dim():
            return stand_in
        node = self.node_of(value)
        return self.assign_tensor(node, empty_like(value)) if node.meta["val"] is value else node.meta["val"]

    def _run_on_constants(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the result of an operation that reads constants, or raise `error` if it reads other values. Of an
        index operation only the masks are read: they become tensors of positions."""

        def constant_value(leaf: Any) -> Any:
            value = self.value_of(leaf) if isinstance(leaf, Tensor) else leaf
            if value is None and leaf is not None:
                raise error
            return value

        if func not in (aten.index.Tensor, aten.masked_select.default):
            return self._run_on_real_values(func, *tree_map(constant_value, (args, kwargs)))
        value, indices = args
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(value.shape, indices.shape)
            value, indices = value.expand(shape), [indices.expand(shape)]
        read_indices: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                with disable_dispatch_modes():
                    positions = constant_value(index).nonzero().unbind(1)
                read_indices += map(self.add_constant, positions)
            else:
                read_indices.append(index)
        return aten.index.Tensor(value, read_indices)

    def _run_on_real_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on real tensors, unrecorded; return the result, with a constant for each dense tensor."""
        with disable_dispatch_modes():
            result = func(*args, **kwargs)

        def as_constant(leaf: Any) -> Any:
            is_dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            return self.add_constant(leaf) if is_dense else leaf

        return tree_map(as_constant, result)

    def value_of(self, value: Tensor) -> Tensor | None:
        """Return a copy of the value of a recorded tensor; None if the tensor depends on more than constants."""
        with DisableTorchFunction(), disable_dispatch_modes():
            wanted = self.node_of(value)
            for node in self.graph.nodes:
                if node not in self._values:
                    self._compute_value(node)
            keys = (node.meta["key"] for node in sources_of([wanted]) if node.op == "placeholder")
            self.values_read += [self.constants[key] for key in keys if key in self.constants]
            return None if self._values[wanted] is None else self._values[wanted].clone()

    def _compute_value(self, node: fx.Node) -> None:
        """Set a node's value in `_values`, None if it is unknown; then the values in memory that it writes are, too."""
        if node.op == "placeholder":  # a copy, since operations in place are run, too
            is_constant = node.meta["role"] == "constant"
            self._values[node] = materialized_copy(self.constants[node.meta["key"]]) if is_constant else None
            return
        target: Any = node.target
        if all(self._values[n] is not None for n in node.all_input_nodes) and is_pure(node):
            self._values[node] = run_node(node, self._values)
            return
        self._values[node] = None
        if is_write(node):
            written = written_arguments(target, node.args, node.kwargs)
            memory = {storage_of(operand) for operand in written if isinstance(operand, fx.Node)} - {None}
            self._values.update(dict.fromkeys([n for n in self._values if storage_of(n) in memory]))


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments into which an operation writes, as a flat list."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return tree_leaves([given.get(argument.name) for argument in func._schema.arguments if argument.is_write])
