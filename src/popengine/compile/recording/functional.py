"""Make a recorded graph functional: without in-place operations, aliases and dead code; number its random draws.

The same holds for sub-graphs: the bodies of branches and loops, traced while the surrounding forward is traced.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional

from ...errors import CaptureError
from ...ir import Graph, Result, ResultKind, Slot, Visit
from ...operations import Body, with_strides
from ...torch_private import DisableTorchFunction, FakeTensor, tree_leaves
from ..partition import NO_STAGE, make_piece
from .current_capture import Capture, recording_paused
from .graph_recorder import (
    PLACE,
    GraphRecorder,
    empty_like,
    is_write,
    materialized_copy,
    run_node,
    storage_of,
    written_arguments,
)
from .writes import replace_writes

logger = logging.getLogger("poptorch::python")
aten = torch.ops.aten
_REPLAYED_META = (*PLACE, "scope", "attributes", "group", "numbers")  # what a replay copies of a node's meta
_OVERWRITES = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default)
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


class ReplayRecorder(GraphRecorder):
    """The recorder of a replay: a new operation has the meta of the node that is replayed. An operation in place of an
    in-place operation returns the strides of the tensor that the in-place operation writes, and the same bits."""

    def __init__(self) -> None:
        super().__init__(lambda func: {**self._meta, "replay": True})
        self._node: fx.Node | None = None
        self._meta: dict[str, Any] = {}

    def set_node(self, node: fx.Node) -> None:
        """Set the node to which the operations that run from now on belong."""
        self._node = node if is_write(node) else None
        self._meta = {key: node.meta[key] for key in _REPLAYED_META if key in node.meta}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._node is None or func._schema.is_mutable or func.is_view:
            return out
        target: Any = self._node.target
        if func._schema.name.endswith("_scatter") and func is not target:  # of the memory around a view
            return out
        written = tree_leaves(written_arguments(target, self._node.args, self._node.kwargs))
        results = list(out) if isinstance(out, tuple | list) else [out]
        first = len(results) - len(written)
        for index, operand in enumerate(written if first >= 0 else (), first):
            value, like = results[index], operand.meta["val"]
            is_value = isinstance(value, Tensor) and (value.shape, value.dtype) == (like.shape, like.dtype)
            if is_value and value.stride() != like.stride():
                with self:
                    results[index] = _computed_in_strides(
                        target, func, args, kwargs or {}, value, like.stride()
                    )
        return type(out)(results) if isinstance(out, tuple | list) else results[0]


def _computed_in_strides(
    target: Any, func: Any, args: Any, kwargs: Any, value: Tensor, strides: Sequence[int]
) -> Tensor:
    """Return `value`, which is `func(*args, **kwargs)`, in other strides, with the bits of the in-place operation
    `target`. Kernels that do more than compute each element from those at its place write into a new tensor."""
    schema = target._schema
    is_out = schema.name == func._schema.name
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    writes_one = sum(argument.is_write for argument in schema.arguments) == len(schema.returns) == 1
    if is_random or not writes_one or not (is_out or schema.name == f"{func._schema.name}_"):
        return with_strides(value, strides)
    if is_out:
        names = {argument.name for argument in schema.arguments}  # of a factory, not the dtype
        given = {name: value for name, value in kwargs.items() if name in names}
        return target(*args, **given, out=with_strides(value, strides))
    if torch.Tag.pointwise in target.tags:
        return with_strides(value, strides)
    return target(with_strides(args[0], strides), *args[1:], **kwargs)


def replay_graph(
    graph: fx.Graph,
    constants: dict[str, Tensor],
    run: Callable[[fx.Node, Mapping[fx.Node, Any]], Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda replay: replay,
) -> GraphRecorder:
    """Run a graph on new fake tensors, and return a recorder of the operations that run: `run(node, values of earlier
    nodes)` returns a node's value, `around(function that runs the graph)` the function to call in its place."""
    recorder = ReplayRecorder()
    recorder.constants.update(constants)
    placeholders, results = graph.find_nodes(op="placeholder"), graph.output_node().args[0]

    def replay(*inputs: Tensor) -> Any:
        values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                recorder.set_node(node)
                values[node] = run(node, values)
        return map_arg(results, values.__getitem__)

    values = (node.meta.get("val") for node in graph.nodes)
    with next(value.fake_mode for value in values if isinstance(value, FakeTensor)), torch.no_grad():
        inputs = [empty_like(node.meta["val"]) for node in placeholders]
        for node, value in zip(placeholders, inputs, strict=True):
            recorder.add_placeholder(node.name, value, role=node.meta["role"], key=node.meta["key"])
        with recorder:
            outputs = around(replay)(*inputs)
    recorder.graph.output(tuple(recorder.node_of(value) for value in outputs))
    return recorder


def functionalize_graph(graph: fx.Graph, constants: dict[str, Tensor]) -> GraphRecorder:
    """Return a recorder of the graph without in-place operations, made by torch's functionalization."""
    around = partial(torch.func.functionalize, remove="mutations")
    return replay_graph(graph, constants, _run_to_functionalize, around)


def _run_to_functionalize(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run a node. For one operation, torch.func has a formula with other bits: run the formula of torch's kernel."""
    if node.target is not aten.binary_cross_entropy_with_logits.default:
        return run_node(node, values)
    given: Any = map_arg((*node.args, None, None), values.__getitem__)
    score, target, weight, positive = given[:4]
    log = functional.logsigmoid(score)
    if positive is not None:
        log = log * ((positive - 1) * target + 1)
    loss = (1 - target) * score - log
    loss = loss if weight is None else loss * weight
    reduction = node.args[4] if len(node.args) > 4 else 1
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def with_nodes_replaced(graph: Graph, run: Callable[[fx.Node, Mapping[fx.Node, Any]], Any]) -> Graph:
    """Return the graph with each node replaced by the operations that `run` runs (see `replay_graph`)."""
    code = replay_graph(graph.code, graph.constants, run).graph
    drop_aliases_and_dead_code(code)
    outputs: list[Any] = [version.output_node().args[0] for version in (graph.code, code)]
    names = {old.name: new.name for old, new in zip(*outputs, strict=True)}
    results = [replace(result, name=names[result.name]) for result in graph.results]  # an anchor's too
    return replace(graph, code=code, results=tuple(results))


def drop_aliases_and_dead_code(graph: fx.Graph) -> None:
    """Remove aliases, double transposes, dead code and unused constants in place; number random operations (`draw`)."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])  # backward transposes what forward transposed
    _copy_inputs_before_as_strided(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.meta["role"] in ("constant", "loss_scale"):
            graph.erase_node(node)
    draws: dict[Any, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _is_random(node):
            # A recomputed operation has the "numbers" of its first run: see `Capture.node_meta`.
            node.meta["draw"] = draws.setdefault(node.meta.get("numbers", node), len(draws))
    graph.lint()


# By operation, the position of its offset from the begin of the memory.
_OFFSETS = {aten.as_strided.default: 3, aten.as_strided_copy.default: 3, aten.as_strided_scatter.default: 4}


def _copy_inputs_before_as_strided(graph: fx.Graph) -> None:
    """Insert copies of the graph's inputs before operations with an offset from the begin of the memory. In a run an
    input's memory begins elsewhere, because a micro-batch is a slice of a batch, and a weight may be a view."""
    for node in graph.nodes:
        position = _OFFSETS.get(node.target, len(node.args))
        if node.op != "call_function" or position >= len(node.args) or node.args[position] is None:
            continue
        operand = base = node.args[0]
        while base.op == "call_function" and any(
            storage_of(n) == storage_of(base) for n in base.all_input_nodes[:1]
        ):
            base = base.all_input_nodes[0]
        if base.op != "placeholder":
            continue
        read = operand if node.target is aten.as_strided_scatter.default else base
        value, strides = read.meta["val"], list(read.meta["val"].stride())
        with graph.inserting_before(node), value.fake_mode, torch.no_grad():
            copy = graph.call_function(torch.ops.popengine.with_strides.default, (read, strides))
            copy.meta.update({key: node.meta[key] for key in PLACE}, val=with_strides(value, strides))
        offset = node.args[position] - value.storage_offset()
        node.args = (copy, *node.args[1:position], offset)


def _is_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers; False if it has a dropout argument of 0."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0)
            return bool(given)
    return True


def make_functional_graph(
    recorder: GraphRecorder,
    results: Sequence[tuple[ResultKind, str, fx.Node]],
    visits: tuple[Visit, ...],
    trained: set[str],
) -> Graph:
    """Return a functional `Graph` of the recorded operations, whose graph is changed in place. `results` are (kind,
    key, node) of each output and gradient; new values of buffers and inputs are added to them."""
    recorder.graph.output(tuple(node for _, _, node in results))
    pairs: list[tuple[ResultKind, str]] = [(kind, key) for kind, key, _ in results]
    fresh = recorder.fresh
    if any(map(is_write, recorder.graph.nodes)) and not replace_writes(recorder):
        recorder = functionalize_graph(recorder.graph, recorder.constants)
    graph, constants, written = recorder.graph, recorder.constants, recorder.written
    output: Any = graph.output_node()
    for node, value in written.items():
        kind = _result_kind(node, value, trained)
        if kind is not None and (kind, node.meta["key"]) not in pairs:  # it may be assigned as well
            pairs.append((kind, node.meta["key"]))
            output.args = ((*output.args[0], value),)
    drop_aliases_and_dead_code(graph)
    _check_lost_writes({node: value for node, value in written.items() if node.meta["key"] not in fresh})

    def shape_and_dtype(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(node.meta["val"].shape), node.meta["val"].dtype

    placeholders = graph.find_nodes(op="placeholder")
    keys = [node.meta["key"] for node in placeholders if node.meta["role"] == "constant"]
    # The program may change a tensor that forward has not made.
    fixed = {key: constants[key] if key in fresh else materialized_copy(constants[key]) for key in keys}
    return Graph(
        tuple(Slot(n.name, n.meta["role"], n.meta["key"], *shape_and_dtype(n)) for n in placeholders),
        tuple(
            Result(n.name, *pair, *shape_and_dtype(n)) for pair, n in zip(pairs, output.args[0], strict=True)
        ),
        fixed,
        visits,
        graph,
    )


def _result_kind(node: fx.Node, value: fx.Node, trained: set[str]) -> ResultKind | None:
    """Return the kind of the result `value`, the new value of a placeholder that forward changes in place; None for a
    constant. A frozen parameter becomes a buffer; a trained one is an error."""
    role, key = node.meta["role"], node.meta["key"]
    if role == "parameter" and key in trained:
        raise CaptureError(
            f"Parameter {key} is changed in place by the forward, at {value.meta.get('where', '?')}\n"
            "  why: its value belongs to the optimizer while the model trains\n"
            f"  fix: keep a value that forward changes in a buffer (`register_buffer`), or take the parameter"
            " out of the training with `requires_grad_(False)`; in place of Embedding(max_norm=) scale the rows that"
            " forward has looked up; a layer that initializes itself by its first batch runs once in plain PyTorch,"
            " `model(*micro_batch)`, before the model is wrapped"
        )
    if role == "parameter":  # no update changes it
        node.meta["role"] = role = "buffer"
    return role if role in ("buffer", "input") else None


def _check_lost_writes(written: dict[fx.Node, fx.Node]) -> None:
    """Raise CaptureError if forward both writes and reads a constant; log a warning if it only writes the constant."""
    for node, value in written.items():
        if node.meta["role"] != "constant":
            continue
        read = [user for user in node.users if not (user.target in _OVERWRITES and user.args[0] is node)]
        text = (
            f"a tensor of shape {tuple(node.meta['val'].shape)} is changed in place by the forward, at"
            f" {value.meta.get('where', '?')}, and is neither a buffer nor made by forward\n"
            "  why: a compiled model starts with the same value at every micro-batch; what was written is lost\n"
            "  fix: `self.register_buffer(name, tensor)`, which makes it a part of the model's state"
        )
        if read:
            raise CaptureError(text)
        logger.warning(text)


def _lost_write_error(node: fx.Node, value: fx.Node) -> CaptureError:
    return CaptureError(
        f"the body of a poptorch.for_loop or poptorch.cond changes a tensor of shape"
        f" {tuple(node.meta['val'].shape)} that is not its own, at {value.meta.get('where', '?')}\n"
        "  why: a body is recorded once, and only what it returns leaves it\n"
        "  fix: give the tensor to the body as an input, and return its new value; a buffer is written after that:"
        " `self.name.copy_(value)`; or put a layer that changes its buffers into eval() mode"
    )


# ---- the bodies of branches and loops -----------------------------------------------------------------------


def trace_body(
    capture: Capture, body: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[Body, list[Tensor]]:
    """Run the body of a branch or loop once, on new tensors like `inputs`; return it, and the tensors of the
    surrounding forward that it reads. In-place operations of the body change no tensors outside of it: its inputs are
    copies, and a change of any other tensor is an error."""
    block = capture.block
    with recording_paused() as fake, fake:
        recorder = GraphRecorder(capture.node_meta, outer_role="outer")
        given = [empty_like(value) for value in inputs]
        for position, value in enumerate(given):
            recorder.add_placeholder(f"input_{position}", value, role="input", key=str(position))
        with recorder:
            outputs = list(body(given))
        nodes = [recorder.node_of(value) for value in outputs]
        capture.block = block
        recorder.graph.output(tuple(nodes))
        graph, outer = recorder.graph, recorder.constants
        if any(map(is_write, graph.nodes)):
            with DisableTorchFunction():
                replayed = functionalize_graph(graph, {})
            graph = replayed.graph
            for node, value in replayed.written.items():
                if node.meta["role"] == "outer":
                    raise _lost_write_error(node, value)
    drop_aliases_and_dead_code(graph)
    name_of = {node.meta["key"]: node.name for node in graph.find_nodes(op="placeholder")}
    reads = [name_of[key] for key in (*map(str, range(len(inputs))), *outer)]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    draws = [node.meta.pop("draw") for node in calls if "draw" in node.meta]  # the whole body has one key
    results: Any = graph.output_node().args[0]
    # Without a stage: a failing line is looked up in the piece that runs the body.
    piece = make_piece("F", NO_STAGE, reads, [node.name for node in results], calls)
    shapes = tuple((tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in results)
    return Body(piece, shapes, bool(draws)), list(outer.values())
