"""Profiles of plans that have not run: no times, but the peak memory of each ipu."""

from dataclasses import replace

import torch

from popengine import profile
from popengine.compile.describe import describe, peak_bytes
from popengine.ir import Graph, Plan
from popengine.settings import Settings
from popengine.update.group_update import init_state


def planned(plan: Plan, settings: Settings, graph: Graph) -> profile.Profile:
    """Return the profile of a plan that has not run, with each ipu's peak memory as a separate device."""
    found, ipus = describe(plan, settings, graph), sorted(set(plan.partition.ipus))
    alive = {index: -piece.enters for index, piece in enumerate(found.pieces)}
    for operation in found.operations:
        row = operation.piece
        alive[row] = max(alive[row], operation.live - found.pieces[row].enters)
    facts = {
        **found.facts,
        "calls": 0,
        "steps": 0,
        "activations": peak_bytes(graph, plan, alive),
        "between": [_between(found, ipu) for ipu in ipus],
    }
    return replace(found, facts=facts, memory=tuple(_memory(plan, settings, ipu) for ipu in ipus))


def _between(found: profile.Profile, ipu: int) -> int:
    """Return an upper bound, for any timing, of the bytes that were sent to an ipu and not received yet."""
    stages, micro_batches = len(found.ipus), found.facts["schedule_micro_batches"]
    senders = {part.channel: part for part in found.parts if part.kind == "send" and part.peer == ipu}
    total = 0
    for part in found.parts:
        if part.kind != "receive" or part.ipu != ipu:
            continue
        sender, count = senders[part.channel], 1
        if sender.phase and found.facts["mode"] == "pipelined":
            # The number of micro-batches that a stage begins before it ends the first one.
            ahead = stages - (sender.stage if sender.phase == "F" else part.stage)
            count = min(micro_batches, ahead if found.training else found.facts["in_flight"])
        total += count * part.bytes
    return total


def _memory(plan: Plan, settings: Settings, ipu: int) -> profile.Memory:
    """Return the bytes that an ipu of replica 0 keeps between steps."""
    optimizer = settings.optimizer
    weights = others = gradients = states = 0
    kept = set(plan.held(ipu))
    for slot in plan.partition.signature.slots:
        if slot.name not in kept:
            continue
        count = torch.Size(slot.shape).numel()
        if slot.role == "parameter":
            weights += count * slot.dtype.itemsize
        else:
            others += count * slot.dtype.itemsize
        home = plan.partition.home.get(slot.name)
        is_home = home is not None and plan.partition.ipus[home] == ipu
        if settings.training and optimizer is not None and is_home and slot.key in optimizer.group_of:
            gradients += count * optimizer.accumulator_type.itemsize
            state = init_state(optimizer, torch.empty(slot.shape, dtype=slot.dtype, device="meta"))
            states += sum(value.nbytes for value in state.values())
    return profile.Memory(0, ipu, weights, others, gradients, states)
