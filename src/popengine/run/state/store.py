"""The tensors that an ipu keeps from call to call, and the draft of them that a call works on.

A call is done or not done. It writes to nothing that is kept: its first weight update goes on in the spare set of
weights and states, and buffers are replaced. What it has made is kept by one assignment (`Tensors.snapshot`); the
tensors that were kept before are then the spare set. So a call that fails has nothing to put back, whatever
interrupts it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..devices.base import Device


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
    """

    def __init__(self, slots: Mapping[str, str], device: Device) -> None:
        self.slot = {key: name for name, key in slots.items()}  # canonical name -> slot name
        self.sums: dict[str, Tensor] = {}
        self.owner: dict[str, int] = {}  # of parameters whose state the replicas share: who has it
        self._device = device
        self._targets: dict[tuple[str, str], Tensor] = {}
        self.begin(Kept({}, {}))

    def begin(self, kept: Kept, in_place: bool = False) -> None:
        """Start a draft. `in_place`: its updates write to what is kept, as they will not be undone."""
        self.state = dict(kept.state)
        self.states = {key: dict(state) for key, state in kept.states.items()}
        self.loss_factor, self._loss_scale = kept.loss_factor, kept.loss_scale
        self._spare, self._targets = {} if in_place else kept.spare, {}
        self._is_renewed = in_place

    def draft(self) -> Kept:
        """The draft as a value."""
        return Kept(self.state, self.states, self.loss_factor, self._loss_scale, self._spare)

    def renew(self, off_device: Container[tuple[str, str]] = ()) -> None:
        """Before the first update of a call: let all that updates write to be copies, in the spare set.

        Args:
            off_device: (name, parameter) of states that an update reads from the host's memory and writes back
                there: they are not copied, but written to other memory (`target`)
        """
        if self._is_renewed or not self.sums:
            return
        old = {("weight", key): self.state[self.slot[key]] for key in self.sums}
        old |= {(name, key): value for key, state in self.states.items() for name, value in state.items()}
        new = {place: self._spare.get(place) for place in old}
        new = {
            place: self._like(old[place], place in off_device) if value is None else value
            for place, value in new.items()
        }
        self._targets = {place: value for place, value in new.items() if place in off_device}
        new = {place: value for place, value in new.items() if place not in off_device}
        if new:
            torch._foreach_copy_(list(new.values()), [old[place] for place in new])
        for (name, key), value in new.items():
            if name == "weight":
                self.state[self.slot[key]] = value
            else:
                self.states[key][name] = value
        self._spare, self._is_renewed = {**old, **self._targets}, True

    def target(self, key: str, name: str, like: Tensor) -> Tensor:
        """Where an update writes a state that is off the device; it is the state from now on."""
        state, place = self.states[key], (name, key)
        if place in self._targets:
            self._spare = {**self._spare, place: state[name]}
            state[name] = self._targets.pop(place)
        elif name not in state:  # the update has begun it
            state[name] = self._device.host_empty(like.shape, like.dtype)
        return state[name]

    def _like(self, value: Tensor, off_device: bool) -> Tensor:
        if off_device or value.device != self._device.place:
            return self._device.host_empty(value.shape, value.dtype)
        return torch.empty_like(value)

    def spare(self) -> Iterable[Tensor]:
        """The memory that an update does not write to, so that a failed call finds what was before."""
        return self._spare.values()

    def set_loss_scale(self, scale: float) -> None:
        if "loss_scale" in self.state and scale != self._loss_scale:
            self.state["loss_scale"] = torch.full_like(self.state["loss_scale"], scale)
            self._loss_scale = scale
