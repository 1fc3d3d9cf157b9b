"""Measure a model's times on this machine, with generated weights and inputs.

A small model runs short steps on the engine. The operations of a large model run alone; equal ones run once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from popengine.compile import compile_graph
from popengine.ir import Line, Piece, Value
from popengine.piece import GETITEM
from popengine.run.engine import Engine
from popengine.run.piece_costs import Sample, sharing, with_threads
from popengine.run.ready_queue import JUDGED
from popengine.settings import Hyper
from popengine.update.group_update import init_state, update

from .compiling.executable import Executable
from .compiling.tune import calls_user_code

# Bytes of state, FLOPs of a micro-batch: the engine runs steps of a smaller model within a second or two.
_SMALL = 2**29, 5e10
_SECONDS = 1.5  # no round begins after this time
_ROUNDS = 9
_SOME = 1 << 22  # elements of the update that is measured, at most


def measured(found: Executable, hyper: Hyper | None, flops: int) -> dict[str, Any]:
    """Return measured times: "steps" of a small model, or "pieces", "updates" and "sharing" of a large one.

    steps    rows (micro-batches of all replicas, seconds of a step)
    pieces   seconds of each piece, for one micro-batch on one core
    updates  seconds of each ipu's weight update on one core
    sharing  rows (threads, their least and their largest speed-up)

    Args:
        flops: FLOPs of one micro-batch
    """
    graph = found.graph
    assert graph is not None
    state = sum(slot.nbytes for slot in graph.slots)
    with torch.random.fork_rng():
        if state < _SMALL[0] and flops < _SMALL[1] and not calls_user_code(graph):
            return {"steps": _step_seconds(found, hyper)}
        return _operation_seconds(found, hyper)


def _made_up(shape: Sequence[int], dtype: torch.dtype, key: str = "") -> Tensor:
    if not dtype.is_floating_point or key.endswith("running_var"):
        return torch.ones(shape, dtype=dtype) if key else torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float32).mul_(1 / math.sqrt(max(1, math.prod(shape[1:])))).to(dtype)


# ---- short steps on the engine ---------------------------------------------------------------------------


def _step_seconds(found: Executable, hyper: Hyper | None) -> list[tuple[int, float]]:
    """Return rows (micro-batches, seconds) of two shortened steps, or of the whole step if it is short."""
    assert found.graph is not None
    settings, whole = found.settings, found.plan.micro_batches
    few = max(2 * found.plan.partition.stages, torch.get_num_threads())
    rows = []
    for count in (few, 3 * few) if whole > 3 * few else (whole,):
        factors = {"accumulation": count, "iterations": 1} if settings.training else {"iterations": count}
        short = replace(settings, counts=replace(settings.counts, **factors))
        plan = compile_graph(found.graph, short)
        slots = plan.partition.signature.slots
        weights = {s.key: _made_up(s.shape, s.dtype, s.key) for s in plan.partition.signature.weights}
        inputs = sorted((slot for slot in slots if slot.role == "input"), key=lambda slot: int(slot.key))
        product = short.counts.product
        batch = [
            _made_up((slot.shape[0] * product, *slot.shape[1:]) if slot.shape else (), slot.dtype)
            for slot in inputs
        ]
        # Only after its first tasks does the engine know whether it should use several cores.
        warm = math.ceil(2 * JUDGED / (product * len(plan.partition.pieces)))
        engine = Engine(plan, short, weights, seed=0)
        try:
            rows.append((count * short.counts.replicas, _seconds(partial(engine.run, batch, hyper), warm)))
        finally:
            engine.close()
    return rows


def _seconds(work: Callable[[], Any], warm: int = 1) -> float:
    """Return the median seconds of `work` in a few rounds, after `warm` rounds of warm-up."""
    for _ in range(warm):
        work()
    began, found = time.perf_counter(), list[float]()
    while len(found) < _ROUNDS and (not found or time.perf_counter() - began < _SECONDS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


# ---- single operations -----------------------------------------------------------------------------------


def _single(piece: Piece, line: Line, values: dict[str, Any]) -> Sample:
    """Return a sample that runs one operation, with constant operands."""
    reads = tuple(dict.fromkeys(line.operands()))
    given = {
        name: torch.empty_strided(v.size(), v.stride(), dtype=v.dtype).fill_(v.dtype.is_floating_point / 2)
        for name in reads
        for v in [values[name]]
    }
    return Sample([Piece(piece.phase, piece.stage, reads, (line.name,), (line,))], given)


def _operation_seconds(found: Executable, hyper: Hyper | None) -> dict[str, Any]:
    assert found.graph is not None
    values = {node.name: node.meta.get("val") for node in found.graph.code.nodes}
    known: dict[Any, float] = {}
    longest: list[tuple[float, Sample]] = []

    def seconds(piece: Piece, line: Line) -> float:
        operands = [values.get(name) for name in line.operands()]
        if line.call == GETITEM or not line.call.startswith(("aten.", "prims.")):
            return 0.0
        if not all(isinstance(value, Tensor) for value in operands):
            return 0.0  # an operand that is no tensor, such as a kernel's workspace
        shapes = [(tuple(v.shape), v.stride(), v.dtype) for v in operands if v is not None]
        key = line.call, repr(_without_names((line.arguments, line.named))), repr(shapes)
        if key not in known:
            operation = _single(piece, line, values)
            once = operation.several(1)
            known[key] = once if once > 0.2 else min(operation.several(1) for _ in range(3))
            longest[:] = [max([*longest, (known[key], operation)], key=lambda row: row[0])]
        return known[key]

    pieces = found.plan.partition.pieces
    costs = with_threads(1, lambda: [sum(seconds(piece, line) for line in piece.lines) for piece in pieces])
    threads = torch.get_num_threads()
    shared = (
        [(threads, *sharing(longest[0][1].several, threads, longest[0][0])[0])]
        if threads > 1 and longest
        else []
    )
    return {"pieces": costs, "updates": _update_seconds(found, hyper), "sharing": shared}


def _without_names(argument: Any) -> Any:
    if isinstance(argument, Value):
        return "_"
    return [*map(_without_names, argument)] if isinstance(argument, list | tuple) else argument


def _update_seconds(found: Executable, hyper: Hyper | None) -> list[float]:
    """Return the seconds in which one core updates the weights of each ipu, scaled up from an update of at
    most _SOME elements."""
    optimizer, partition = found.settings.optimizer, found.plan.partition
    elements = dict.fromkeys(sorted(set(partition.ipus)), 0)
    if optimizer is None or hyper is None:
        return [0.0 for _ in elements]
    dtype = torch.float32
    for slot in partition.signature.slots:
        if slot.key in optimizer.group_of and slot.name in partition.home:
            elements[partition.ipus[partition.home[slot.name]]] += torch.Size(slot.shape).numel()
            dtype = slot.dtype
    some = max(1, min(_SOME, max(elements.values())))
    weight, gradient = _made_up((some,), dtype), _made_up((some,), optimizer.type_for(dtype))
    state = init_state(optimizer, weight)
    seeds = [0] if found.settings.stochastic_rounding else None
    with torch.no_grad():
        spent = _seconds(
            lambda: update(optimizer, hyper.groups[0], [weight], [gradient.clone()], [state], seeds)
        )
    return [spent * count / some for count in elements.values()]
