"""Changes that trade memory for time: recomputation, and the optimizer's state in the host's memory.

Where memory is enough, what costs time for nothing is advised against; where it is not, what would help has its price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from popengine.profile import Profile

from . import memory
from .costs import moves
from .gains import Change, Machine
from .memory import Need
from .units import size
from .virtual import Step

_FEW = 4  # ipus that a sentence names one by one
_LOCATION = (
    "options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage({}))"
)


@dataclass(frozen=True)
class Saving:
    """A change that needs less memory. `wanted`: bytes, to be held against the capacity."""

    change: Change
    wanted: int
    fits: bool


def keep_activations(machine: Machine) -> Iterator[Change]:
    """Stages recompute, and memory would be enough without it."""
    step = _switched(machine, is_on=False)
    if step is not None:
        after = memory.with_recomputation(machine.profile, False)
        if memory.fits(machine.profile, after):
            yield _recomputation(machine, step, after, 0)


def keep_state(machine: Machine) -> Iterator[Change]:
    """The optimizer's state is in the host's memory, and an ipu has room for it."""
    here = replace(machine.profile, facts={**machine.profile.facts, "off_device": ()})
    if machine.step.moves and memory.fits(here, machine.needs):
        yield _offload(machine, replace(machine.step, moves={}), "True")


def savings(machine: Machine) -> list[Saving]:
    """What needs less memory, the cheapest first."""
    profile, found = machine.profile, list[Saving]()
    step = _switched(machine, is_on=True)
    if step is not None:
        after = memory.with_recomputation(profile, True)
        found.append(_saving(profile, after, _recomputation(machine, step, after, 3)))
    away = moves(profile)
    if any(away.values()) and not machine.step.moves and not memory.capacity(profile)[2]:
        there = replace(profile, facts={**profile.facts, "off_device": ("optimizer",)})
        change = _offload(machine, replace(machine.step, moves=away), "False")
        found.append(_saving(there, machine.needs, change))
    return sorted(found, key=lambda saving: -saving.change.apart)


def _saving(profile: Profile, needs: Sequence[Need], change: Change) -> Saving:
    return Saving(change, memory.wanted(profile, needs), bool(memory.fits(profile, needs)))


def _recomputation(machine: Machine, step: Step, after: Sequence[Need], number: int) -> Change:
    what = f'options._Popart.set("autoRecomputation", {number})'
    totals = [(need.ipu, need.total, then.total) for need, then in zip(machine.needs, after, strict=True)]
    if len(totals) > _FEW:
        totals = [max(totals, key=lambda row: max(row[1:]))]
    also = ", ".join(f"ipu {ipu} needs {size(then)} instead of {size(now)}" for ipu, now, then in totals)
    return machine.change("recomputation", step, what, also, recompute=number > 0)


def _offload(machine: Machine, step: Step, use: str) -> Change:
    states = [(need.ipu, need.optimizer) for need in machine.needs if need.optimizer]
    if len(states) > _FEW:
        states = [max(states, key=lambda row: row[1])]
    more = "more" if use == "True" else "less"
    also = ", ".join(f"ipu {ipu} holds {size(held)} {more}" for ipu, held in states)
    change = machine.change("offload", step, _LOCATION.format(use), also, offloaded=use == "False")
    return replace(change, here=None)  # nothing moves here


def _switched(machine: Machine, is_on: bool) -> Step | None:
    """The step if stages recomputed, or did not; None: they do so already, or nobody knows what that takes."""
    profile, step = machine.profile, machine.step
    known = profile.facts.get("recomputation")
    if not known or known["on"] == is_on or not any(known["again"]):
        return None
    if profile.facts.get("device", "cpu") != "cpu":  # what an operation takes there is not in its times
        return None
    backward = list(step.backward)
    for stage, names in enumerate(known["again"]):
        first = step.forward[stage] * _share(profile, stage, "F", set(names))
        # Shares were measured in one step. What is computed again takes no longer than the first time.
        again = min(first, backward[stage] * _share(profile, stage, "B", set(names)))
        if names and not (first if is_on else again):  # nobody knows the times of its operations
            return None
        backward[stage] += first if is_on else -again
    return replace(step, backward=tuple(backward))


def _share(profile: Profile, stage: int, phase: str, names: set[str]) -> float:
    """What these operations take of a piece's time; 0: its operations have no times."""
    pieces = {i for i, piece in enumerate(profile.pieces) if (piece.phase, piece.stage) == (phase, stage)}
    own = [operation for operation in profile.operations if operation.piece in pieces]
    whole = sum(operation.ns for operation in own)
    return sum(operation.ns for operation in own if operation.name in names) / (whole or 1)
