"""The tensors that an ipu keeps from call to call, and the draft of them that a call works on.

A call is done or not done. It writes to nothing that is kept: its first weight update goes on in the spare set of
weights and states, and buffers are replaced. What it has made is kept by one assignment (`Tensors.snapshot`); the
tensors that were kept before are then the spare set. So a call that fails has nothing to put back, whatever
interrupts it. The one update of a call that has no other writes to what is kept, once nothing can fail any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..instances.buckets import Bucket
from .state_owners import Owner


@dataclass(frozen=True)
class Kept:
    """What lasts of one ipu: state by slot name, optimizer state by the parameter's canonical name.

    `spare`: memory for the next call's weights and states, by ("weight" or the state's name, parameter).
    """

    state: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    loss_factor: float = 1.0  # of automatic loss scaling, on the user's loss scale
    loss_scale: float = 1.0  # what the state holds as loss scale
    spare: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)


class Store:
    """A draft of what is kept: `state` and `states`, as in `Kept`; and `sums` of gradients by canonical name.

    Args:
        slots: the canonical name of each slot

    `old`: of the parameters that the update at hand is the first of a call for, the values that it begins with: the
    weight's as "weight", and its states' by name.
    """

    def __init__(self, slots: Mapping[str, str]) -> None:
        self.slot = {key: name for name, key in slots.items()}  # canonical name -> slot name
        self.sums: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []  # where there are other instances: the memory of the sums
        self.owner: dict[str, Owner] = {}  # of parameters whose state the replicas share: who has it
        self.old: dict[str, dict[str, Tensor]] = {}
        self.begin(Kept({}, {}))

    def begin(self, kept: Kept, in_place: bool = False) -> None:
        """Start a draft. `in_place`: its updates write to what is kept, as they will not be undone."""
        self.state = dict(kept.state)
        self.states = {key: dict(state) for key, state in kept.states.items()}
        self.loss_factor, self._loss_scale = kept.loss_factor, kept.loss_scale
        self._spare, self.old = {} if in_place else kept.spare, {}
        self._is_renewed = in_place

    def draft(self) -> Kept:
        """The draft as a value."""
        return Kept(self.state, self.states, self.loss_factor, self._loss_scale, self._spare)

    def renew(self, keys: Iterable[str]) -> None:
        """Before the first update of a call: let all that updates of these parameters write be in the spare set.

        What is to be copied there first is in `old`, for whoever updates it: so a value is copied when a core needs it.
        """
        self.old = {}
        if self._is_renewed:
            return
        spare = dict(self._spare)
        for key in keys:
            state, slot = self.states.get(key, {}), self.slot[key]
            self.old[key] = {"weight": self.state[slot], **state}
            for name, value in self.old[key].items():
                new = self._spare.get((name, key))
                if new is None:
                    new = torch.empty_like(value)
                spare[name, key] = value
                if name == "weight":
                    self.state[slot] = new
                else:
                    state[name] = new
        self._spare, self._is_renewed = spare, True

    def spare(self) -> Iterable[Tensor]:
        """The memory that an update does not write to, so that a failed call finds what was before."""
        return self._spare.values()

    def set_loss_scale(self, scale: float) -> None:
        if "loss_scale" in self.state and scale != self._loss_scale:
            self.state["loss_scale"] = torch.full_like(self.state["loss_scale"], scale)
            self._loss_scale = scale
