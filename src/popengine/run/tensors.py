"""The tensors of a loaded plan: a store for each ipu of each replica, and the ways in and out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ir import Plan
from ..settings import Settings
from .devices.base import Device
from .offloading import offloading_of
from .sharing import owners
from .store import Store


class Tensors:
    """The part of an engine that holds the only mutable state there is.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        rules:   the module of update rules (init_state)
        device:  from the number of an ipu to a new device for it
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        rules: Any,
        device: Callable[[int], Device],
    ) -> None:
        self.plan, self.settings, self._rules = plan, settings, rules
        self._slots = {slot.name: slot for slot in plan.partition.signature.slots}
        self.stores: dict[tuple[int, int], Store] = {}  # by replica and ipu
        self.devices: dict[tuple[int, int], Device] = {}
        for replica in range(settings.counts.replicas):
            for ipu in plan.programs:
                keys = {n: s.key for n, s in self._slots.items() if s.role in ("parameter", "buffer")}
                self.stores[replica, ipu] = Store(keys)
                self.devices[replica, ipu] = device(ipu)
        for place, store in self.stores.items():
            self._fill(place, store)
        self.write(weights)
        for place, store in self.stores.items():
            with self.devices[place].running():
                self._prepare_updates(place, store)

    def _fill(self, place: tuple[int, int], store: Store) -> None:
        home = self.devices[place]
        with home.running():
            for name in self.plan.state[place[1]]:
                slot = self._slots[name]
                if slot.role == "constant":
                    store.state[name] = self.plan.partition.signature.constants[slot.key].to(home.place)
                elif slot.role == "loss_scale":
                    store.state[name] = torch.ones(slot.shape, dtype=slot.dtype, device=home.place)
                else:
                    store.state[name] = torch.empty(slot.shape, dtype=slot.dtype, device=home.place)

    def _prepare_updates(self, place: tuple[int, int], store: Store) -> None:
        replica, ipu = place
        offloading = offloading_of(self.devices[place], self.settings, self._rules)
        optimizer = self.settings.optimizer
        if optimizer is None:
            return
        gradients = {
            result.key for result in self.plan.partition.signature.results if result.kind == "gradient"
        }
        slots = [self._slots[name] for name in self.plan.state[ipu]]
        weights = {
            slot.key: store.state[slot.name]
            for slot in slots
            if slot.role == "parameter" and slot.key in gradients
        }
        updated = {key: weight.numel() for key, weight in weights.items() if key in optimizer.group_of}
        store.owner = owners(updated, self.settings, replica)
        for key, weight in weights.items():
            store.sums[key] = torch.zeros_like(weight, dtype=optimizer.accumulator_type)
            if key in updated and store.owner.get(key, replica) == replica:
                store.states[key] = self._rules.init_state(optimizer, weight)
                if offloading is not None:
                    store.states[key] = offloading.on_host(weight, store.states[key])

    def _restore(self) -> None:
        for place, store in self.stores.items():
            with self.devices[place].running():
                store.restore()
        self._settle()

    def _settle(self) -> None:
        """Wait for all devices."""
        for home in self.devices.values():
            home.settle()

    # ---- in and out --------------------------------------------------------------------------------------

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers into every replica."""
        with torch.no_grad():
            for place, store in self.stores.items():
                with self.devices[place].running():
                    for key, value in store.held(weights).items():
                        weight = self._row(key, weights[key], place[0])
                        store.state[store.slot[key]] = torch.empty_like(value).copy_(weight)
        self._settle()

    def read(self) -> dict[str, Tensor]:
        """Replica 0's parameters and buffers, by canonical name: references where they are the host's, so copy
        what you keep.

        A parameter with replica groups has one row a group."""
        found: dict[str, Tensor] = {}
        for ipu in self.plan.programs:
            for name in self.plan.state[ipu]:
                slot = self._slots[name]
                if slot.role in ("parameter", "buffer"):
                    values = [self._fetch((r, ipu), name) for r in self._rows(slot.key)]
                    found[slot.key] = torch.stack(values) if self._is_grouped(slot.key) else values[0]
        return found

    def _fetch(self, place: tuple[int, int], name: str) -> Tensor:
        with self.devices[place].running():
            return self.devices[place].fetch(self.stores[place].state[name])

    @property
    def loss_factor(self) -> float:
        """What automatic loss scaling multiplies the user's loss scale with at the moment."""
        return next(iter(self.stores.values())).loss_factor

    @loss_factor.setter
    def loss_factor(self, factor: float) -> None:
        for store in self.stores.values():
            store.loss_factor = factor

    def read_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """Copies of a replica's optimizer state, by parameter; one row a group where there are groups."""
        found: dict[str, dict[str, Tensor]] = {}
        for ipu in self.plan.programs:
            for key in self.stores[0, ipu].sums:
                keepers = [place for place in self._keepers(ipu, key) if key in self.stores[place].states]
                rows = [self._fetch_state(place, key) for place in keepers]
                if rows:
                    found[key] = {
                        name: torch.stack([row[name] for row in rows]) if self._is_grouped(key) else value
                        for name, value in rows[0].items()
                    }
        return found

    def _fetch_state(self, place: tuple[int, int], key: str) -> dict[str, Tensor]:
        with self.devices[place].running():
            state = self.stores[place].states[key]
            return {name: self.devices[place].fetch(value).clone() for name, value in state.items()}

    def write_optimizer(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy optimizer state into every replica; what is not given stays."""
        for place, store in self.stores.items():
            offloading = offloading_of(self.devices[place], self.settings, self._rules)
            for key, state in store.states.items():
                with self.devices[place].running():
                    for name, value in states.get(key, {}).items():
                        like = state.get(name, value)
                        home = like.device if name in state else store.state[store.slot[key]].device
                        row = self._row(key, value, place[0]).detach()
                        state[name] = row.to(home, like.dtype, copy=True)
                        if offloading is not None:
                            state[name] = offloading.kept(state[name])
        self._settle()

    def _is_grouped(self, key: str) -> bool:
        return key in self.settings.replica_groups

    def _rows(self, key: str) -> tuple[int, ...]:
        """The replicas whose values the host receives."""
        return self.settings.replica_groups[key].rows if self._is_grouped(key) else (0,)

    def _keepers(self, ipu: int, key: str) -> list[tuple[int, int]]:
        """The places that hold what the host receives of a parameter's optimizer state."""
        return [(self.stores[row, ipu].owner.get(key, row), ipu) for row in self._rows(key)]

    def _row(self, key: str, value: Tensor, replica: int) -> Tensor:
        """A replica's share of a host value."""
        if not self._is_grouped(key):
            return value
        return value[self.settings.replica_groups[key].row_for(replica, len(value))]
