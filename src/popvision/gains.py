"""One change of a program, and what it gives on both machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popengine.profile import Profile

from . import memory, virtual
from .virtual import Step

_LEAST = 0.05  # gain; what is measured twice differs by as much
_SURE = 0.75  # of a gain that was found; caches, memory and the machine's moods may take the rest


def least(spread: float) -> float:
    """How many times as fast it has to become for a change to be worth saying, above the measured spread."""
    return 1 + max(_LEAST, spread)


def at_most(gain: float, spread: float) -> float:
    """How many times as long a step takes at the most, where virtual time found such a gain (below 1)."""
    return max(least(spread), 1 + (1 / gain - 1) / _SURE)


def promised(gain: float | None, spread: float) -> float | None:
    """What can be promised of a gain that was found in virtual time; None: nothing."""
    sure = 1 + _SURE * ((gain or 1.0) - 1)
    return sure if sure > least(spread) else None


@dataclass(frozen=True)
class Change:
    """One change, and how many times as fast rows would be computed then.

    `apart`: on separate devices, `here`: on this host's cores (None: not known). `also`: what else it changes.
    `setting`: the change for programs: `{"accumulation": 8}`, `{"cut": [["A"], ["B", "C"]]}`, `{"replicas": 2}` ...
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


class Machine:
    """Both machines, and what the step takes on them as it is."""

    def __init__(self, profile: Profile, step: Step) -> None:
        self.profile, self.step = profile, step
        facts = profile.facts
        # Operations that use several cores would use fewer of them if there were more tasks: nobody measured that.
        is_host = facts.get("device", "cpu") == "cpu" and facts.get("threads_inside", 1) == 1
        self.cores = facts.get("threads", 0) if is_host else 0

    @cached_property
    def needs(self) -> list[memory.Need]:
        return memory.needs(self.profile)

    def change(
        self, kind: str, step: Step, what: str, also: str = "", cores: int = 0, **setting: Any
    ) -> Change:
        here = virtual.gain_here(self.step, self.cores, step, cores or self.cores) if self.cores else None
        # On separate devices replicas run side by side.
        before, after = virtual.apart(self.step), virtual.apart(step)
        apart = before / after * step.micro_batches / self.step.micro_batches if after else 1.0
        return Change(kind, what, apart, here, also, setting)
