"""Merged micro-batches: a graph of one micro-batch becomes a graph that computes k of them as one.

Each value of the new graph has one of three forms:

    shared   [*shape]      the same for all micro-batches, such as a weight
    rows     [k, *shape]   a value for each micro-batch
    sum      [*shape]      the sum over the micro-batches: of a gradient of which nothing else is read

Operations on many rows run once, with k folded into the rows. All others run under torch's vmap, which keeps
micro-batches apart: a mean is one of each micro-batch, and an operation without a rule is refused. A random draw
runs k times.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import Error
from ...ir import Graph
from ...settings import Settings
from ...torch_private import decomposition_of, vmap_without_fallback
from ..recording.functional import drop_aliases_and_dead_code, is_random, replay_graph
from ..recording.graph_recorder import run_node

aten = torch.ops.aten
_Values = Mapping[fx.Node, Any]
# Operations that run on k times the rows: the arguments with rows in dimension 0, of which no other argument has values
# of micro-batches, and the results that are sums over rows.
_FOLDED: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys((aten.mm.default, aten.convolution.default, aten.native_group_norm.default), ((0,), ())),
    **dict.fromkeys((aten.max_pool2d_with_indices.default, aten.avg_pool2d.default), ((0,), ())),
    **dict.fromkeys((aten.bmm.default, aten.avg_pool2d_backward.default), ((0, 1), ())),
    aten.addmm.default: ((1,), ()),
    aten.convolution_backward.default: ((0, 1), (1, 2)),
    aten.max_pool2d_with_indices_backward.default: ((0, 1, 7), ()),
    aten.native_layer_norm_backward.default: ((0, 1, 3, 4), (1, 2)),
    aten.native_group_norm_backward.default: ((0, 1, 2, 3), (1, 2)),
    aten.embedding_dense_backward.default: ((0, 1), (0,)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((0, 1, 2), ()),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ((0, 1, 2, 3, 4, 5), ()),
}
_NUMBER_OF_ROWS = {
    aten.native_group_norm.default: 3,
    aten.native_group_norm_backward.default: 5,
}  # an argument
_VIEWS: dict[Any, Any] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), Tensor.reshape)
# What runs in place of operations: for other strides, and for an operation without a rule.
_REPLACED = {**_VIEWS, aten.copy.default: lambda to, value, *_: value.to(to.dtype).expand_as(to).clone()}
# Linear in the first argument, if no other one has values of micro-batches; then linear in all arguments together.
_LINEAR = {
    *(
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.clone.default,
        *_VIEWS,
    ),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.sum.dim_IntList, aten.neg.default),
    *(aten._to_copy.default, aten.slice.Tensor, aten.select.int, aten.slice_backward.default),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.mm.default),
    aten.embedding_dense_backward.default,
}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}


def merge_micro_batches(graph: Graph, k: int) -> Graph:
    """Return the graph that computes k micro-batches as one: inputs and outputs are [k, *shape], gradients are sums.

    Raises: Error, if forward changes a buffer, or an operation has no rule for several micro-batches
    """
    made: Any = graph.code.output_node().args[0]
    for result, node in zip(graph.results, made, strict=True):
        if result.kind == "buffer":
            why = f"forward changes the buffer {result.key}, which the next micro-batch reads"
            raise _refusal(why, node, "a norm without running statistics, such as GroupNorm; or ")
    merger = _Merger(graph, k)
    code = replay_graph(
        graph.code, graph.constants, merger.run, like=merger.placeholder_like, end=merger.results
    ).graph
    runs: dict[Any, int] = {}
    for node in code.nodes:
        if node.op == "call_function" and is_random(node):  # each run of a draw has a number of its own
            first = node.meta["numbers"]
            runs[first] = runs.get(first, -1) + 1
            node.meta["numbers"] = first, runs[first] % k
    drop_aliases_and_dead_code(code)
    shapes = {node.name: tuple(node.meta["val"].shape) for node in code.find_nodes(op="placeholder")}
    slots = tuple(replace(s, shape=shapes[s.name]) for s in graph.slots if s.name in shapes)
    made = code.output_node().args[0]
    pairs = zip(graph.results, made, strict=True)
    results = tuple(replace(r, name=n.name, shape=tuple(n.meta["val"].shape)) for r, n in pairs)
    return replace(graph, code=code, slots=slots, results=results)


def _refusal(why: str, node: fx.Node, fix: str = "") -> Error:
    return Error(
        f"micro-batches can't be merged: {why}\n  at {node.meta.get('where', '?')}\n"
        f"  fix: {fix}options.Training.mergeMicroBatches(False), which is the default"
    )


class _Merger:
    """The functions by which a replay makes the merged graph. `rows`: nodes whose values are not shared; of these,
    the values of `sums` are sums."""

    def __init__(self, graph: Graph, k: int) -> None:
        self.graph, self.k = graph, k
        self.made: Any = graph.code.output_node().args[0]
        self.rows, self.sums = set[Any](), set[Any]()
        for node in graph.code.nodes:
            is_input = node.op == "placeholder" and node.meta["role"] == "input"
            if is_input or "draw" in node.meta or not self.rows.isdisjoint(node.all_input_nodes):
                self.rows.add(node)
        for node in reversed(graph.code.nodes):
            is_computed = node in self.rows and node.op == "call_function" and "val" in node.meta
            if is_computed and all(self._needs_sum(node, user) for user in node.users):
                self.sums.add(node)
        # By id of a value: the value, and the same with k folded into dimension 0.
        self.folded: dict[int, tuple[Tensor, Tensor]] = {}

    def _needs_sum(self, node: fx.Node, user: fx.Node) -> bool:
        """Return whether a use of a node needs no more than the node's sum over the micro-batches."""
        if user.op == "output":
            pairs = zip(self.made, self.graph.results, strict=True)
            return all(result.kind == "gradient" for made, result in pairs if made is node)
        if user.target in _SUMS:
            return user in self.sums and all(isinstance(each, fx.Node) for each in user.args)
        is_first = user.args[0] is node or user.target in (aten.mul.Tensor, aten.mm.default)
        others = {each for each in user.all_input_nodes if each is not node} & self.rows
        return (
            user in self.sums
            and user.target in _LINEAR
            and is_first
            and not others
            and user.args.count(node) == 1
        )

    def placeholder_like(self, node: fx.Node) -> Tensor:
        """Return a tensor like the new value of a placeholder."""
        return self._as_rows(node, node.meta["val"]).contiguous() if node in self.rows else node.meta["val"]

    def results(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the graph's results, given the values of its output's nodes: gradients as sums, all others as rows."""
        pairs = zip(self.graph.results, self.made, values, strict=True)
        return [
            (self._as_sum if r.kind == "gradient" else self._as_rows)(node, value) for r, node, value in pairs
        ]

    def run(self, node: fx.Node, values: _Values) -> Any:
        """Return the value of a node, in its form."""
        if node not in self.rows:
            return run_node(node, values)
        if node.target is operator.getitem:
            made = run_node(node, values)
        elif not self.sums.isdisjoint(node.all_input_nodes):
            if node.target in _SUMS:
                values = {each: self._as_sum(each, values[each]) for each in node.all_input_nodes}
            made = _call(node, values)
        elif "draw" in node.meta:
            made = self._drawn(node, values)
        else:
            made = self._folded(node, values)
            made = self._mapped(node, values) if made is None else made
        is_to_add = node in self.sums and made.dim() > node.meta["val"].dim()
        return made.sum(0) if is_to_add else made

    def _as_sum(self, node: fx.Node, value: Tensor) -> Tensor:
        if node in self.sums:
            return value
        return value.sum(0) if node in self.rows else value * self.k

    def _as_rows(self, node: fx.Node, value: Tensor) -> Tensor:
        is_done = node in self.rows and value.dim() > node.meta["val"].dim()
        return value if is_done else value.expand(self.k, *value.shape)

    def _fold(self, node: fx.Node, value: Tensor) -> Tensor:
        """Return [k * n, *rest] of a value [k, n, *rest]."""
        value = self._as_rows(node, value)
        if id(value) not in self.folded:
            self.folded[id(value)] = value, value.reshape(-1, *value.shape[2:])
        return self.folded[id(value)][1]

    def _unfold(self, value: Tensor) -> Tensor:
        made = value.view(self.k, len(value) // self.k, *value.shape[1:])
        self.folded[id(made)] = made, value
        return made

    def _drawn(self, node: fx.Node, values: _Values) -> Any:
        """Return a draw for each micro-batch, stacked."""
        rows = {each: self._as_rows(each, values[each]) for each in node.all_input_nodes}
        made = [_call(node, {each: value[i] for each, value in rows.items()}) for i in range(self.k)]
        if isinstance(made[0], Tensor):
            return torch.stack(made)
        return tuple(map(torch.stack, zip(*made, strict=True)))

    def _folded(self, node: Any, values: _Values) -> Any:
        """Return the value of a node with k folded into the rows; None if the operation can't be folded."""
        args, target, is_sum = node.args, node.target, node in self.sums
        if target is aten.mm.default and is_sum and self.rows.issuperset(args):  # the gradient of a weight
            left, right = args
            if left.target is aten.t.default:
                turned = self._fold(left.args[0], values[left.args[0]]).t()
            else:
                turned = values[left].permute(1, 0, 2).flatten(1)
            return torch.mm(turned, self._fold(right, values[right]))
        if target is aten.sum.dim_IntList and is_sum and 0 in args[1]:
            return _call(node, values, (self._fold(args[0], values[args[0]]), *args[1:]))
        rank, has_layout = node.meta["val"].dim() if "val" in node.meta else 0, "memory_format" in node.kwargs
        if torch.Tag.pointwise in getattr(target, "tags", ()) and not has_layout:
            rows = self.rows.intersection(node.all_input_nodes)
            if not rank or any(each.meta["val"].dim() < rank for each in rows):
                return None
            is_folded = any(id(values[each]) in self.folded for each in rows)
            if not is_folded or len(rows) < len(node.all_input_nodes):
                return _call(node, values)
            return self._unfold(_call(node, {each: self._fold(each, values[each]) for each in rows}))
        if target in _VIEWS and rank and id(values[args[0]]) in self.folded:
            shape = node.meta["val"].shape
            if args[0].meta["val"].shape[:1] != shape[:1]:
                return None
            return self._unfold(self._fold(args[0], values[args[0]]).reshape(-1, *shape[1:]))
        if target is torch.ops.popengine.with_strides.default:
            sizes = zip(node.meta["val"].shape, args[1], strict=True)
            whole = 1 + sum((size - 1) * stride for size, stride in sizes)
            return _call(node, values, (args[0], [whole, *args[1]]))
        return self._on_rows(node, values, has_layout)

    def _on_rows(self, node: Any, values: _Values, has_layout: bool) -> Any:
        """Return the value of a node of `_FOLDED`, or of a change of the memory layout; None for others."""
        args, target = node.args, node.target
        positions, added = _FOLDED.get(target, ((), ()))
        if target in (aten.clone.default, aten._to_copy.default) and has_layout:
            positions = (0,)
        others = {each for i, each in enumerate(args) if i not in positions and isinstance(each, fx.Node)}
        ranks = [args[i].meta["val"].dim() for i in positions if args[i] is not None]
        normed = len(args[2]) if target is aten.native_layer_norm_backward.default else 0
        users = [node] if "val" in node.meta else [user for user in node.users if user.args[1] in added]
        if not ranks or min(ranks[0] - normed, *ranks) < 1 or not self.rows.isdisjoint(others):
            return None
        if added and not self.sums.issuperset(users):
            return None
        given: list[Any] = [*args]
        for i in positions:
            given[i] = None if args[i] is None else self._fold(args[i], values[args[i]])
        if target in _NUMBER_OF_ROWS:
            given[_NUMBER_OF_ROWS[target]] *= self.k
        if mask := node.kwargs.get("attn_mask"):
            values = {**values, mask: self._folded_mask(mask, values[mask], len(given[0]) // self.k)}
        made = _call(node, values, given)
        if isinstance(made, Tensor):
            return made if added else self._unfold(made)
        return tuple(x if i in added or x is None else self._unfold(x) for i, x in enumerate(made))

    def _folded_mask(self, node: fx.Node, value: Tensor, rows: int) -> Tensor:
        """Return an attention mask for k times `rows` rows; one that is equal for all rows unchanged."""
        shape = node.meta["val"].shape
        if node not in self.rows and (len(shape) == 2 or shape[0] == 1):
            return value
        value = self._as_rows(node, value)
        value = value[:, None, None] if len(shape) == 2 else value
        return value.expand(self.k, rows, *value.shape[2:]).reshape(-1, *value.shape[2:])

    def _mapped(self, node: fx.Node, values: _Values) -> Any:
        """Return the value of a node, by torch's vmap of the operation, or else of its decomposition."""
        operands, failure = node.all_input_nodes, None
        for function in filter(None, (node.target, decomposition_of(node.target))):

            def call(*given: Tensor, function: Any = function) -> Any:
                made = _call(node, dict(zip(operands, given, strict=True)), function=function)
                is_one = isinstance(made, Tensor)
                return made if is_one else tuple(torch.zeros(()) if part is None else part for part in made)

            try:
                dims = tuple(0 if each in self.rows else None for each in operands)
                return vmap_without_fallback(call, dims)(*(values[each] for each in operands))
            except (RuntimeError, ValueError) as error:
                failure = failure or error
        raise _refusal(f"{node.target} has no rule for several micro-batches", node) from failure


def _call(node: fx.Node, values: _Values, args: Any = None, function: Any = None) -> Any:
    """Run a node's operation, or `function`, on a node's arguments, or on `args`: nodes stand for their values."""
    args, kwargs = fx.node.map_arg((node.args if args is None else args, node.kwargs), values.__getitem__)  # type: ignore[misc]
    function = function or node.target
    return _REPLACED.get(function, function)(*args, **kwargs)


def merged_count(wanted: int, settings: Settings, cores: int, least: int, most: int) -> int:
    """Return how many micro-batches are computed as one: a number that divides the accumulation.

    If any number is wanted: of those up to `most` that leave `least` merged micro-batches, the one with which a core
    computes the fewest micro-batches one after another; of several the largest.

    Args:
        wanted: 0: none; -1: any number; else this number
        least:  the merged micro-batches of a step that fill the pipeline
    """
    accumulation, replicas = settings.counts.accumulation, settings.counts.replicas
    if wanted >= 0:
        return gcd(max(1, wanted), accumulation)

    def micro_batches_of_a_core(k: int) -> tuple[int, int]:
        return ceil(accumulation // k * replicas / cores) * k, -k

    largest = max(1, min(most, accumulation // least))
    return min((k for k in range(1, largest + 1) if accumulation % k == 0), key=micro_batches_of_a_core)
