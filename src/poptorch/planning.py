"""Profiles of models that have not run, from which popvision and `poptorch.plan` estimate for other machines.

A plan needs the shapes of weights and not their values, so the parameters of a model may be on the meta device.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from popengine.compile import compile_graph
from popengine.compile.describe import describe, peak_bytes_by_ipu
from popengine.environment import PLAN_WISH
from popengine.errors import Error
from popengine.ir import Graph, Plan
from popengine.order import ORDERS
from popengine.profile import Profile
from popengine.run.state import State, TrainState
from popengine.settings import Settings, StagePlan

from .compiling.executable import compile_model
from .compiling.runs import Run
from .options import Options


def exit_if_only_planning(*program: Any) -> None:
    """If `popvision plan` runs this program, write the profiles that it requests and raise SystemExit."""
    if wish := os.environ.get(PLAN_WISH):
        wanted = json.loads(wish)
        for number, profile in enumerate(make_profiles(*program, capacity=wanted["capacity"]).values()):
            profile.save(Path(wanted["folder"]) / f"{number}.pop")
        raise SystemExit(0)


def make_profiles(
    model: nn.Module, run: Run, options: Options, settings: Settings, capacity: float
) -> dict[str, Profile]:
    """Compile a model for accelerators, one for each ipu, and return the profile of the plan, by "".

    If it needs more bytes than the `capacity` of an ipu, the result also has plans that may need less, such as one with
    recomputation, by the change of the program; `facts["planned"]` is the key.
    """
    kernels = torch.backends.cuda
    may_reduce_in_half = kernels.fp16_bf16_reduction_math_sdp_allowed()
    # Attention is products and a softmax, without casts to float32.
    kernels.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        found = compile_model(model, run, options, replace(settings, device="cuda"), is_plan_only=True)
    finally:
        kernels.allow_fp16_bf16_reduction_math_sdp(may_reduce_in_half)
    counts, graph = found.settings.counts, found.graph
    assert graph is not None
    groups = counts.groups * counts.instances
    counts = replace(counts, replicas=counts.global_replicas, groups=groups, instances=1, instance=0)
    settings = replace(found.settings, counts=counts)
    location = options.TensorLocations.location_optimizer.toDict()
    facts = {
        "optimizer_off_chip": location.get("on_chip_storage") is False,
        "shards_optimizer": bool(location.get("replicated_tensor_sharding", False)),
    }
    made = planned_profile(found.plan, settings, graph, {**facts, "planned": ""})
    profiles = {"": made}
    if _largest_need(made) > capacity:
        for change, other in _settings_that_need_less(settings, made):
            with contextlib.suppress(Error):  # such as too few micro-batches for more stages
                plan = compile_graph(graph, other)
                profiles[change] = planned_profile(plan, other, graph, {**facts, "planned": change})
    return profiles


def _largest_need(made: Profile) -> int:
    """Return the bytes that the ipu with the largest need holds."""
    held = zip(made.facts["activations"], made.facts["between"], strict=True)
    needs = zip(made.memory, held, strict=True)
    return max(sum(row[2:]) + (kept or 0) + passing for row, (kept, passing) in needs)


def _settings_that_need_less(settings: Settings, made: Profile) -> Iterator[tuple[str, Settings]]:
    """Yield (change, settings) of plans that may need less memory of an ipu: with recomputation; with even
    stages on as many ipus, on twice and on four times as many, with and without recomputation."""
    recomputation = 'options._Popart.set("autoRecomputation", 3)'
    can_recompute = settings.training and not settings.recompute
    if can_recompute:
        yield recomputation, replace(settings, recompute=True)
    blocks = [block for block in made.blocks if block.parameters]
    for count in (len(made.devices) * factor for factor in (1, 2, 4)):
        if not 1 < count <= len(blocks):
            continue
        ends = list(accumulate(block.parameters for block in blocks))
        stages = [list[str]() for _ in range(count)]
        for block, end in zip(blocks, ends, strict=True):
            middle = (end - block.parameters / 2) / ends[-1]
            stages[int(middle * count)].append(block.name)
        if not all(stages):
            continue
        cut = tuple(StagePlan(tuple(names), ipu) for ipu, names in enumerate(stages))
        changed = replace(settings, strategy=replace(settings.strategy, auto=None, stages=cut))
        change = f"{count} stages that begin with the blocks {', '.join(names[0] for names in stages)}"
        yield change, changed
        if can_recompute:
            yield f"{change}; and {recomputation}", replace(changed, recompute=True)


def planned_profile(
    whole: Plan, settings: Settings, graph: Graph, more: Mapping[str, Any] = MappingProxyType({})
) -> Profile:
    """Return the profile of a plan that has not run, with the peak bytes of each ipu, and `more` facts."""
    # More micro-batches need no more memory; popvision computes the times of all micro-batches.
    plan = replace(whole, micro_batches=min(whole.micro_batches, 3 * whole.partition.stages + 8))
    found, ipus = describe(plan, settings, graph), sorted(set(plan.partition.ipus))
    alive = {index: -piece.enters for index, piece in enumerate(found.pieces)}
    for operation in found.operations:
        row = operation.piece
        alive[row] = max(alive[row], operation.live - found.pieces[row].enters)
    facts = {
        **found.facts,
        **more,
        "schedule_micro_batches": whole.micro_batches,
        "calls": 0,
        "steps": 0,
        "activations": peak_bytes_by_ipu(graph, plan, alive),
        "between": [_most_bytes_in_transit(found, ipu) for ipu in ipus],
    }
    weights = {
        slot.key: torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        for slot in plan.partition.signature.parameters_and_buffers
    }
    unsharded = replace(settings, replica_groups={}, shard_optimizer=None)
    state = State(plan, unsharded, TrainState(lambda: weights), torch.device("meta"))
    return replace(found, facts=facts, memory=tuple(state.memory(0, ipu) for ipu in ipus))


def _most_bytes_in_transit(found: Profile, ipu: int) -> int:
    """Return an upper bound of the bytes that are sent to `ipu`, and not received yet, at any time."""
    stages, micro_batches = len(found.ipus), found.facts["schedule_micro_batches"]
    sent = {part.channel: part for part in found.instructions if part.kind == "send" and part.peer == ipu}
    total = 0
    for part in {part for part in found.instructions if part.kind == "receive" and part.ipu == ipu}:
        sender, count = sent[part.channel], 1
        if sender.phase and ORDERS[found.facts["mode"]].overlaps:
            # The number of micro-batches that a stage begins before it ends the first one.
            ahead = stages - (sender.stage if sender.phase == "F" else part.stage)
            count = min(micro_batches, ahead if found.training else found.facts["in_flight"])
        total += count * part.bytes
    return total
