"""Profiles of models that have not run, from which popvision and `poptorch.plan` estimate for other machines.

A plan needs the shapes of weights and not their values, so the parameters of a model may be on the meta device.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from popengine.compile.describe import describe, peak_bytes_by_ipu
from popengine.environment import PLAN_WISH
from popengine.ir import Graph, Plan
from popengine.order import ORDERS
from popengine.profile import Profile
from popengine.run.state import State, TrainState
from popengine.settings import Settings

from .compiling.executable import compile_model
from .compiling.runs import Run
from .options import Options


def exit_if_only_planning(*program: Any) -> None:
    """If `popvision plan` runs this program, write the profile to the file that it names, and raise SystemExit."""
    if path := os.environ.get(PLAN_WISH):
        make_profile(*program).save(Path(path))
        raise SystemExit(0)


def make_profile(model: nn.Module, run: Run, options: Options, settings: Settings) -> Profile:
    """Compile a model for accelerators, one for each ipu, and return the profile of the plan."""
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
    location = options.TensorLocations.location_optimizer.toDict()
    facts = {
        "optimizer_off_chip": location.get("on_chip_storage") is False,
        "shards_optimizer": bool(location.get("replicated_tensor_sharding", False)),
    }
    return planned_profile(found.plan, replace(found.settings, counts=counts), graph, facts)


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
