"""Profiles of models that have not run, from which popvision and `poptorch.plan` estimate for other machines.

A plan needs the shapes of weights and not their values, so the parameters of a model may be on the meta device.

For this machine a small model runs short steps on the engine, with generated weights and inputs. The times of a large
model are computed from its FLOPs and bytes, at rates that are measured.
"""

import contextlib
import json
import math
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from popengine.compile import compile_graph
from popengine.compile.describe import are_sizes_known, describe, held_tensors
from popengine.environment import PLAN_WISH
from popengine.ir import Graph, Plan
from popengine.profile import Profile
from popengine.run.engine import Engine, kept_bytes
from popengine.run.piece_costs import seconds_on_all_threads
from popengine.run.ready_queue import JUDGED
from popengine.run.state import State
from popengine.run.train_state import TrainState
from popengine.settings import Hyper, Settings
from popengine.torch_private import OpOverload

from .compiling.executable import Executable, compile_model
from .compiling.runs import Run
from .options import Options

_BASE_BYTES = 600 << 20  # bytes of Python, torch and the program's other libraries
# Bytes of state, FLOPs of a micro-batch: the engine runs steps of a smaller model within a second or two.
_SMALL = 2**29, 5e10
_SECONDS = 1.5  # no round begins after this time
_ROUNDS = 9


def available_memory() -> int:
    """Return the bytes that the machine, and this process's control group, still allow to allocate."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            files = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, used))
            free = min(free, next(files) - next(files))
    return free


def exit_if_only_planning(*program: Any) -> None:
    """If `popvision plan` runs this program, write the profiles that it requests and raise SystemExit."""
    if wish := os.environ.get(PLAN_WISH):
        wanted = json.loads(wish)
        for kind, profile in make_profiles(*program, kinds=wanted["kinds"]).items():
            profile.save(Path(wanted["folder"]) / f"{kind}.pop")
        raise SystemExit(0)


def make_profiles(
    model: nn.Module,
    run: Run,
    options: Options,
    settings: Settings,
    hyper: Hyper | None,
    kinds: Sequence[str],
) -> dict[str, Profile]:
    """Compile a model for each kind of machine: "apart" (each ipu is an accelerator) or "here" (this
    machine), and return the profiles of the plans by kind."""
    location = options.TensorLocations.location_optimizer.toDict()
    found = {}
    for kind in dict.fromkeys(kinds):
        chosen, kernels = settings, torch.backends.cuda
        may_reduce_in_half = kernels.fp16_bf16_reduction_math_sdp_allowed()
        if kind == "apart":  # attention is products and a softmax
            chosen = replace(settings, device="cuda")
            kernels.allow_fp16_bf16_reduction_math_sdp(True)  # attention has no casts to float32
        try:
            executable = compile_model(model, run, options, chosen, is_plan_only=True)
        finally:
            kernels.allow_fp16_bf16_reduction_math_sdp(may_reduce_in_half)
        counts = executable.settings.counts
        groups = counts.groups * counts.instances
        one = replace(counts, replicas=counts.global_replicas, groups=groups, instances=1, instance=0)
        executable = replace(executable, settings=replace(executable.settings, counts=one))
        graph = executable.graph
        facts = {
            "processes": settings.counts.instances,
            "optimizer_off_chip": location.get("on_chip_storage") is False,
            "shards_optimizer": bool(location.get("replicated_tensor_sharding", False)),
            "device": settings.device,
            "base": _BASE_BYTES,
            "available": available_memory(),
        }
        assert graph is not None
        made = planned_profile(executable.plan, executable.settings, graph, facts)
        if kind == "here":
            made.facts["measured"] = measure_times(executable, hyper, made)
        found[kind] = made
    return found


def planned_profile(
    plan: Plan, settings: Settings, graph: Graph, more: Mapping[str, Any] = MappingProxyType({})
) -> Profile:
    """Return the profile of a plan that has not run, with the tensors that each ipu holds, and `more` facts."""
    found, ipus = describe(plan, settings, graph), sorted(set(plan.partition.ipus))
    facts = {**found.facts, **more, "calls": 0, "steps": 0, "sizes_known": are_sizes_known(graph)}
    weights = {
        slot.key: torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        for slot in plan.partition.signature.parameters_and_buffers
    }
    unsharded = replace(settings, replica_groups={}, shard_optimizer=None)
    state = State(plan, unsharded, TrainState(lambda: weights), torch.device("meta"))
    memory = tuple(kept_bytes(state, 0, ipu) for ipu in ipus)
    return replace(found, facts=facts, memory=memory, tensors=tuple(held_tensors(plan, graph)))


def measure_times(found: Executable, hyper: Hyper | None, planned: Profile) -> dict[str, Any]:
    """Measure a model on this machine; return "steps", of (micro-batches of all replicas, seconds), if it is
    small, else the "rates" of a core."""
    graph = found.graph
    assert graph is not None
    state, flops = sum(slot.nbytes for slot in graph.slots), sum(row.flops for row in planned.operations)
    with torch.random.fork_rng():
        if state < _SMALL[0] and flops < _SMALL[1] and not _calls_user_code(graph):
            return {"steps": _measure_steps(found, graph, hyper)}
        return {"rates": _measure_rates()}


def _calls_user_code(graph: Graph) -> bool:
    called = {node.target for node in graph.code.nodes if node.op == "call_function"} - {operator.getitem}
    return not all(isinstance(t, OpOverload) and t.namespace in ("aten", "prims") for t in called)


def _random_values(shape: Sequence[int], dtype: torch.dtype, key: str = "") -> Tensor:
    """Return random values for a weight with this key, or (key "") for an input; integers are 1, or 0."""
    if not dtype.is_floating_point or key.endswith("running_var"):
        return torch.ones(shape, dtype=dtype) if key else torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float32).mul_(1 / math.sqrt(max(1, math.prod(shape[1:])))).to(dtype)


def _measure_steps(found: Executable, graph: Graph, hyper: Hyper | None) -> list[tuple[int, float]]:
    """Run two shortened steps, or a short one whole; return (micro-batches of all replicas, seconds)."""
    settings, whole = found.settings, found.plan.micro_batches
    few = max(2 * found.plan.partition.stages, torch.get_num_threads())
    rows = []
    for count in (few, 3 * few) if whole > 3 * few else (whole,):
        factors = {"accumulation": count, "iterations": 1} if settings.training else {"iterations": count}
        short = replace(settings, counts=replace(settings.counts, **factors))
        plan, product = compile_graph(graph, short), short.counts.product
        signature = plan.partition.signature
        weights = {s.key: _random_values(s.shape, s.dtype, s.key) for s in signature.parameters_and_buffers}
        inputs = {int(slot.key): slot for slot in signature.slots if slot.role == "input"}
        shapes = [(s.shape[0] * product, *s.shape[1:]) if s.shape else () for _, s in sorted(inputs.items())]
        batch = [_random_values(shape, inputs[index].dtype) for index, shape in enumerate(shapes)]
        # Only after its first tasks does the engine know whether it should use several cores.
        warm = math.ceil(2 * JUDGED / (product * len(plan.partition.pieces)))
        with contextlib.closing(Engine(plan, short, TrainState(weights.copy))) as engine:
            seconds = _median_seconds(partial(engine.run, batch, hyper), warm)
        rows.append((count * short.counts.replicas, seconds))
    return rows


def _median_seconds(work: Callable[[], Any], warm: int) -> float:
    """Call `work` `warm` times as a warm-up, then up to `_ROUNDS` times; return the median of the seconds."""
    for _ in range(warm):
        work()
    began, found = time.perf_counter(), list[float]()
    while len(found) < _ROUNDS and (not found or time.perf_counter() - began < _SECONDS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def _measure_rates() -> dict[str, float]:
    """Return the FLOPs and bytes per second of a core while all cores work, as fields of `popvision`'s `Machine`."""
    threads, side, elements = torch.get_num_threads(), 1024, 1 << 24
    square, row = torch.rand(side, side), torch.rand(elements)
    flops, read = (
        amount / min(seconds_on_all_threads(work, threads) for _ in range(3))
        for amount, work in ((2 * side**3, lambda: square @ square), (8 * elements, lambda: row @ row))
    )
    torch.set_num_threads(threads)  # some libraries have one number of threads for the process
    return {"half": flops, "single": flops, "local": read}
