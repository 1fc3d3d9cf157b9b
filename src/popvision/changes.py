"""Changes of a program that would make it faster: each is simulated on separate devices and on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from popengine.profile import Profile

from . import memory, virtual
from .virtual import StepModel

_LEAST = 0.05  # gain; two measurements of one program differ by as much
_SAFETY = 0.75  # share of a simulated gain that is promised; caches and memory may take the rest


@dataclass(frozen=True)
class Change:
    """A change, and how many times as fast rows would be computed with it.

    `apart`: on separate devices, `here`: on this host's cores (None: not known). `also`: what else it changes.
    `setting`: the change for programs: `{"accumulation": 8}`, `{"pipelined": True}`, `{"replicas": 2}` ...
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


def least_speedup(spread: float) -> float:
    """Return how many times as fast a change must be to be worth saying, above the measured spread."""
    return 1 + max(_LEAST, spread)


def promised(speedup: float | None, spread: float) -> float | None:
    """Return the part of a simulated speedup that is promised; None if it is too small."""
    sure = 1 + _SAFETY * ((speedup or 1.0) - 1)
    return sure if sure > least_speedup(spread) else None


def changes(profile: Profile, step: StepModel, spread: float) -> list[Change]:
    """Return the changes that would give more than the measured spread, the best first; of each kind the best one."""
    if not sum(step.costs):
        return []
    machines, found = _Machines(profile, step), list[Change]()
    for kind in (_more_micro_batches, _pipeline, _replicas):
        found += [change for change in kind(machines) if promised(change.best, spread) is not None]
    return sorted(found, key=lambda change: -change.best)


class _Machines:
    """Separate devices and this host, for speedups over the step as it is."""

    def __init__(self, profile: Profile, step: StepModel) -> None:
        self.profile, self.step = profile, step
        facts = profile.facts
        # With more tasks, operations that use several cores would use fewer: how fast they are then is not measured.
        is_host = facts.get("device", "cpu") == "cpu" and facts.get("threads_inside", 1) == 1
        self.cores = facts.get("threads", 0) if is_host else 0

    def change(self, kind: str, step: StepModel, what: str, also: str = "", **setting: Any) -> Change:
        here = virtual.speedup_here(self.step, step, self.cores) if self.cores else None
        # On separate devices replicas run side by side.
        before, after = virtual.apart(self.step), virtual.apart(step)
        apart = before / after * step.micro_batches / self.step.micro_batches if after else 1.0
        return Change(kind, what, apart, here, also, setting)


def _more_micro_batches(machines: _Machines) -> Iterator[Change]:
    """Yield the smallest number of micro-batches a step that gives nearly the most."""
    step = machines.step
    option = "options.Training.gradientAccumulation" if step.backward else "options.deviceIterations"
    found = []
    for factor in (2, 4, 8, 16):
        count = factor * step.micro_batches
        also = (
            f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
            if step.backward
            else f"a call takes {factor} times the rows"
        )
        more = replace(step, micro_batches=count)
        setting = {"accumulation" if step.backward else "iterations": count}
        found.append(machines.change("micro-batches", more, f"{option}({count})", also, **setting))
    most = max(change.best for change in found)
    yield from [change for change in found if change.best - 1 >= 0.7 * max(0.0, most - 1)][:1]


def _pipeline(machines: _Machines) -> Iterator[Change]:
    """Yield a pipeline for stages that work in turns."""
    step, stages = machines.step, len(machines.step.ipus)
    enough = 2 * stages - 1 if step.backward else stages
    in_order = list(step.ipus) == sorted(step.ipus)
    if machines.profile.facts.get("mode") == "sharded" and in_order and step.micro_batches >= enough > 1:
        also = "up to as many micro-batches as there are stages are held at the same time"
        pipelined = replace(step, in_turns=False)
        yield machines.change("pipeline", pipelined, "poptorch.PipelinedExecution", also, pipelined=True)


def _replicas(machines: _Machines) -> Iterator[Change]:
    """Yield replicas for cores that a single replica leaves idle."""
    step, profile = machines.step, machines.profile
    count = machines.cores // step.replicas * step.replicas
    factor = count // step.replicas
    limit, _, is_shared = memory.capacity(profile)
    too_large = limit and is_shared and factor * memory.wanted(profile, memory.needs(profile)) > limit
    if factor > 1 and profile.counts.get("instances", 1) == 1 and not too_large:
        also = f"a call takes {factor} times the rows" + (
            ", and the effective batch becomes as many times as large" if step.backward else ""
        )
        more = replace(step, replicas=count)
        change = machines.change(
            "replicas", more, f"options.replicationFactor({count})", also, replicas=count
        )
        yield replace(change, apart=1.0)  # on separate devices it takes that many times more of them
