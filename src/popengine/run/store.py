"""The tensors that an ipu keeps from step to step: weights, buffers, gradient sums, optimizer state.

A failed call must leave no trace, so the first weight update of a call copies what it will change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Store:
    """State by slot name; sums and optimizer state by the parameter's canonical name."""

    def __init__(self, slots: Mapping[str, str]) -> None:
        self.slot = {key: name for name, key in slots.items()}  # canonical name -> slot name
        self.state: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        self.owner: dict[str, int] = {}  # of parameters whose state the replicas share: who has it
        self._before: dict[str, Tensor] = {}  # references: what is replaced, not written to
        self._copies: tuple[list[Tensor], list[Tensor]] | None = None
        self._states_before: dict[str, tuple[str, ...]] = {}
        self._spare: dict[tuple[str, str], Tensor] = {}
        self._scale = 1.0
        self.loss_factor = 1.0  # of automatic loss scaling, on the user's loss scale
        self._factor_before = 1.0

    def begin(self, keeps_copies: bool = True) -> None:
        """A call starts: remember what there is. `keeps_copies` False: its updates will not be undone."""
        self._before, self._factor_before = dict(self.state), self.loss_factor
        self._copies = None if keeps_copies else ([], [])
        self._states_before = {key: tuple(state) for key, state in self.states.items()}

    def back_up(self) -> None:
        """Before the first update of a call: copy what updates write to."""
        if self._copies is not None or not self.sums:
            return
        live = {("weight", key): self.state[self.slot[key]] for key in self.sums}
        live |= {(name, key): value for key, state in self.states.items() for name, value in state.items()}
        for place, value in live.items():
            if place not in self._spare:
                self._spare[place] = torch.empty_like(value)
        self._copies = list(live.values()), [self._spare[place] for place in live]
        torch._foreach_copy_(self._copies[1], self._copies[0])

    def restore(self) -> None:
        """A call failed: everything is as it was at its beginning."""
        self.state.clear()
        self.state.update(self._before)
        self.loss_factor = self._factor_before
        if self._copies is not None:
            if self._copies[0]:
                torch._foreach_copy_(self._copies[0], self._copies[1])
            for key, names in self._states_before.items():
                for name in self.states[key].keys() - set(names):
                    del self.states[key][name]

    def forget_copies(self) -> None:
        """Give the memory back that copies are kept in."""
        self._spare.clear()

    def spare(self) -> Iterable[Tensor]:
        """The memory that holds what a failed call is rolled back to."""
        return self._spare.values()

    def set_loss_scale(self, scale: float) -> None:
        if "loss_scale" in self.state and scale != self._scale:
            self.state["loss_scale"] = torch.full_like(self.state["loss_scale"], scale)
            self._scale = scale

    def held(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The tensors under these canonical names that are here."""
        return {key: self.state[self.slot[key]] for key in keys if self.slot.get(key) in self.state}
