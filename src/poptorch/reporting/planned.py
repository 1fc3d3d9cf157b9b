"""A plan in the words of a profile, before anything has run: no times, and memory as it will be."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from popengine import profile
from popengine.compile.describe import Description
from popengine.compile.stage_memory import held_bytes
from popengine.ir import Graph, Plan
from popengine.settings import Settings
from popengine.update.group_update import init_state


def tables(described: Description, settings: Settings) -> profile.Profile:
    """What follows from a plan alone."""
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
            "schedule_micro_batches": plan.schedule.micro_batches,
            "in_flight": plan.schedule.in_flight,
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


def planned(plan: Plan, settings: Settings, graph: Graph | None) -> profile.Profile:
    """The tables, and the memory that will be held; without the captured graph nobody knows FLOPs and bytes."""
    found = tables(Description(plan, graph), settings)
    held = held_bytes(graph, plan.partition) if graph is not None and settings.training else ()
    memory = tuple(_memory(plan, settings, ipu) for ipu in sorted(set(plan.partition.ipus)))
    return replace(found, facts={**found.facts, "held": list(held), "calls": 0, "steps": 0}, memory=memory)


def _memory(plan: Plan, settings: Settings, ipu: int) -> profile.Memory:
    """What an ipu of replica 0 will keep from step to step."""
    partition, optimizer = plan.partition, settings.optimizer
    sizes = {"parameter": 0, "buffer": 0, "constant": 0}
    gradients = states = 0
    for slot in partition.signature.slots:
        stage = partition.home.get(slot.name)
        if slot.role not in sizes or stage is None or partition.ipus[stage] != ipu:
            continue
        count = torch.Size(slot.shape).numel()
        sizes[slot.role] += count * slot.dtype.itemsize
        if settings.training and optimizer is not None and slot.key in optimizer.group_of:
            gradients += count * optimizer.accumulator_type.itemsize
            state = init_state(optimizer, torch.empty(slot.shape, dtype=slot.dtype, device="meta"))
            states += sum(value.nbytes for value in state.values())
    return profile.Memory(0, ipu, sizes["parameter"], sizes["buffer"] + sizes["constant"], gradients, states)


def stop_where_a_plan_was_asked_for(plan: Plan, settings: Settings, graph: Graph | None) -> None:
    """Where `popvision plan` runs this program: write the plan, and end before anything is computed."""
    if wish := os.environ.get(profile.PLAN_WISH):
        planned(plan, settings, graph).save(Path(wish))
        raise SystemExit(0)
