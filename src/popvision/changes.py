"""Changes of a program that would make it faster: each is simulated on separate devices and on this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from popengine.profile import Profile

from . import memory, virtual
from .virtual import StepModel

_LEAST = 0.05  # smallest gain that is promised: two measurements of one program differ by as much
_SAFETY = 0.75  # share of a simulated gain that is promised; caches and memory may take the rest


@dataclass(frozen=True)
class Change:
    """A change of a program, and the simulated speedup per row of data.

    `apart`: speedup on separate devices; `here`: on this host's cores (None: unknown). `also`: other effects.
    `setting`: the change as data: `{"accumulation": 8}`, `{"pipelined": True}`, `{"replicas": 2}` ...
    """

    kind: str
    what: str
    apart: float
    here: float | None
    also: str
    setting: Mapping[str, Any]

    @property
    def best(self) -> float:
        return max(self.apart, self.here or 0.0)


def promised(speedup: float | None, spread: float) -> float | None:
    """Return the part of a simulated speedup that is promised; None, if it is below 5 % or the spread."""
    sure = 1 + _SAFETY * ((speedup or 1.0) - 1)
    return sure if sure > 1 + max(_LEAST, spread) else None


def changes(profile: Profile, step: StepModel, spread: float) -> list[Change]:
    """Return the changes with a speedup beyond the measured spread, one per kind at most, the best first."""
    if not sum(step.costs):
        return []
    facts = profile.facts
    # With more tasks, operations that use several cores would use fewer: how fast they are then is not measured.
    is_host = facts.get("device", "cpu") == "cpu" and facts.get("threads_inside", 1) == 1
    cores = facts.get("threads", 0) if is_host else 0
    length = virtual.apart(step)

    def change(kind: str, changed: StepModel, what: str, also: str, **setting: Any) -> Change:
        here = virtual.speedup_here(step, changed, cores) if cores else None
        apart = length / virtual.apart(changed) * changed.micro_batches / step.micro_batches
        # On separate devices more replicas take more devices.
        return Change(kind, what, apart if changed.replicas == step.replicas else 1.0, here, also, setting)

    found = [
        *_more_micro_batches(step, change),
        *_pipeline(profile, step, change),
        *_replicas(profile, step, cores, change),
    ]
    return sorted((one for one in found if promised(one.best, spread) is not None), key=lambda one: -one.best)


def _more_micro_batches(step: StepModel, change: Callable[..., Change]) -> list[Change]:
    """Return the change (or none) to the fewest micro-batches per step with 70 % of the largest gain."""
    found = []
    for factor in (2, 4, 8, 16):
        count, option, setting = factor * step.micro_batches, "options.deviceIterations", "iterations"
        also = f"a call takes {factor} times the rows"
        if step.backward:
            option, setting = "options.Training.gradientAccumulation", "accumulation"
            also = f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
        more = replace(step, micro_batches=count)
        found.append(change("micro-batches", more, f"{option}({count})", also, **{setting: count}))
    most = max(one.best for one in found)
    return [one for one in found if one.best - 1 >= 0.7 * max(0.0, most - 1)][:1]


def _pipeline(profile: Profile, step: StepModel, change: Callable[..., Change]) -> list[Change]:
    """Return the change from sharded stages to a pipeline; nothing, if a pipeline is impossible."""
    stages = len(step.ipus)
    enough = 2 * stages - 1 if step.backward else stages
    is_in_order = list(step.ipus) == sorted(step.ipus)
    if profile.facts.get("mode") != "sharded" or not is_in_order or not step.micro_batches >= enough > 1:
        return []
    also = "up to as many micro-batches as there are stages are held at the same time"
    pipelined = replace(step, mode="pipelined")
    return [change("pipeline", pipelined, "poptorch.PipelinedExecution", also, pipelined=True)]


def _replicas(profile: Profile, step: StepModel, cores: int, change: Callable[..., Change]) -> list[Change]:
    """Return the change to more replicas, for idle cores; nothing, if cores or memory are too few."""
    factor, held_by = cores // step.replicas, profile.facts.get("capacity") or {}
    limit, wanted = memory.capacity(profile, memory.needs(profile))
    is_too_large = limit and held_by.get("shared") and factor * wanted > limit
    if factor < 2 or profile.counts.get("instances", 1) > 1 or is_too_large:
        return []
    count = factor * step.replicas
    also = f"a call takes {factor} times the rows"
    also += ", and the effective batch becomes as many times as large" if step.backward else ""
    more = replace(step, replicas=count)
    return [change("replicas", more, f"options.replicationFactor({count})", also, replicas=count)]
