"""Profiles of plans that have not run: no times, but the peak memory of each ipu."""

import os
from dataclasses import replace
from itertools import accumulate

import torch

from popengine import profile
from popengine.compile.describe import Description, peak_bytes
from popengine.ir import Graph, Plan
from popengine.order import ORDERS, timeline
from popengine.programs import actions, programs
from popengine.settings import Settings
from popengine.update.group_update import init_state


def plan_tables(described: Description, settings: Settings) -> profile.Profile:
    """Return a profile with the tables and facts that follow from a plan alone."""
    plan, partition, counts = described.plan, described.partition, settings.counts
    batches = [slot.shape for slot in partition.signature.slots if slot.role == "input" and slot.shape]
    return profile.Profile(
        "training" if settings.training else "inference",
        settings.training,
        partition.names,
        partition.ipus,
        {
            "micro_batch_size": batches[0][0] if batches else 1,
            "iterations": counts.iterations,
            "accumulation": counts.accumulation,
            "replicas": counts.replicas,
            "groups": counts.groups,
            "instances": counts.instances,
        },
        {
            "mode": settings.strategy.mode,
            "schedule_length": described.length,
            "schedule_actions": described.actions,
            "schedule_micro_batches": plan.micro_batches,
            "in_flight": 1 if plan.order != "pipelined" else partition.stages,
            "cores": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
            "device": settings.device,
        },
        described.programs,
        blocks=tuple(described.blocks),
        pieces=tuple(described.pieces),
        operations=tuple(operation for _, operation in described.operations),
        parts=tuple(described.parts),
        schedule=tuple(described.schedule),
    )


def planned(plan: Plan, settings: Settings, graph: Graph) -> profile.Profile:
    """Return the profile of a plan that has not run, with each ipu's peak memory as a separate device."""
    found, ipus = plan_tables(Description(plan, graph), settings), sorted(set(plan.partition.ipus))
    alive = {index: -piece.enters for index, piece in enumerate(found.pieces)}
    for operation in found.operations:
        row = operation.piece
        alive[row] = max(alive[row], operation.live - found.pieces[row].enters)
    own, waiting = programs(plan), _waiting(plan, found)
    facts = {
        **found.facts,
        "calls": 0,
        "steps": 0,
        "activations": [peak_bytes(graph, plan, own[ipu], alive) for ipu in ipus],
        "between": [waiting[ipu] for ipu in ipus],
        "between_most": [_between(found, ipu) for ipu in ipus],
    }
    return replace(found, facts=facts, memory=tuple(_memory(plan, settings, ipu) for ipu in ipus))


def _waiting(plan: Plan, found: profile.Profile) -> dict[int, int]:
    """Return for each ipu the most bytes that were sent to it and not received yet, in a simulated step.

    An operation takes the time of its FLOPs or its bytes at a core's rates, the longer of the two.
    """
    spent: dict[tuple[str, int], float] = {}
    for row in found.operations:
        group = found.pieces[row.piece].phase, found.pieces[row.piece].stage
        spent[group] = spent.get(group, 1e-5) + max(
            row.flops / profile.CORE_FLOPS, row.bytes / profile.CORE_BYTES
        )
    rows, _ = actions(plan)
    costs = [spent.get((row.phase, row.stage), 1e-5) for row in rows]
    # More micro-batches hold no more memory: the pipeline is full.
    micro_batches = min(plan.micro_batches, 3 * plan.partition.stages + 8)
    tasks, times = timeline(rows, micro_batches, ORDERS[plan.order][0], costs=costs, keeps_order=True)
    when = {
        (rows[row].phase, rows[row].stage, m): (start, end)
        for (row, m), start, end in zip(tasks, times.starts, times.ends, strict=True)
    }
    most = {}
    for ipu in found.devices:
        changes: list[tuple[float, int]] = []
        for part, sender in _received(found, ipu):
            for m in range(micro_batches if sender.phase else 1):
                begin = when[sender.phase, sender.stage, m][1] if sender.phase else 0.0
                changes += [(begin, part.bytes)]
                changes += [(when[part.phase, part.stage, m][0], -part.bytes)] if sender.phase else []
        changes.sort(key=lambda row: (row[0], -row[1]))
        most[ipu] = max(accumulate(size for _, size in changes), default=0)
    return most


def _received(found: profile.Profile, ipu: int) -> list[tuple[profile.Part, profile.Part]]:
    """Return the receive and the send instruction of each value that an ipu receives."""
    sent = {part.channel: part for part in found.parts if part.kind == "send" and part.peer == ipu}
    received = {part for part in found.parts if part.kind == "receive" and part.ipu == ipu}
    return [(part, sent[part.channel]) for part in received]


def _between(found: profile.Profile, ipu: int) -> int:
    """Return an upper bound, for any timing, of the bytes that were sent to an ipu and not received yet."""
    stages, micro_batches = len(found.ipus), found.facts["schedule_micro_batches"]
    total = 0
    for part, sender in _received(found, ipu):
        count = 1
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
