"""The tensors of a loaded plan: a store for each ipu of each replica, and the ways in and out of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.ir import Plan
from popengine.settings import Settings
from popengine.update.group_update import init_state

from .. import devices
from ..instances.buckets import buckets_of
from .alignment import begins_well
from .state_owners import Owner, owners, owning_instance
from .store import Kept, Store


@dataclass(frozen=True)
class Snapshot:
    """All that lasts from call to call, as one value. Whoever assigns it has done a call, or written weights."""

    kept: Mapping[tuple[int, int], Kept]  # by replica and ipu
    seed: int = 0
    step: int = 0  # weight updates so far
    host_is_stale: bool = False  # calls were done since the host has had a look at the weights


class Tensors:
    """The part of an engine that holds the only mutable state there is: `snapshot`.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        device:  the device where all of them are
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.plan, self.settings, self.device = plan, settings, device
        # Held by whoever reads what is kept, and by a call while it writes there.
        self.still = threading.Lock()
        self.lost: Error | None = None  # why what is kept can't be used any more
        self._slots = {slot.name: slot for slot in plan.partition.signature.slots}
        self.stores: dict[tuple[int, int], Store] = {}  # by replica and ipu
        for replica in range(settings.counts.replicas):
            for ipu in plan.programs:
                keys = {n: s.key for n, s in self._slots.items() if s.role in ("parameter", "buffer")}
                self.stores[replica, ipu] = Store(keys)
                self._fill(ipu, self.stores[replica, ipu])
        self.snapshot = self._drafted()
        self.write(weights)
        for (replica, ipu), store in self.stores.items():
            self._prepare_updates(replica, ipu, store)
        self.snapshot = self._drafted()

    def _fill(self, ipu: int, store: Store) -> None:
        for name in self.plan.state[ipu]:
            slot = self._slots[name]
            if slot.role == "constant":
                constant = self.plan.partition.signature.constants[slot.key].to(self.device)
                store.state[name] = begins_well(constant)
            elif slot.role == "loss_scale":
                store.state[name] = torch.ones(slot.shape, dtype=slot.dtype, device=self.device)
            else:
                store.state[name] = torch.empty(slot.shape, dtype=slot.dtype, device=self.device)

    def _prepare_updates(self, replica: int, ipu: int, store: Store) -> None:
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
        me = Owner(self.settings.counts.instance, replica)
        for key, weight in weights.items():
            store.sums[key] = torch.zeros_like(weight, dtype=optimizer.type_for(weight.dtype))
            if key in updated and store.owner.get(key, me) == me:
                store.states[key] = init_state(optimizer, weight)
        if self.settings.counts.instances > 1:
            store.buckets = buckets_of(
                self.plan,
                ipu,
                store.sums,
                lambda key: self.settings.members(key, replica),
                partial(owning_instance, store.owner, self.settings),
                self.settings.counts.instances,
            )

    def _drafted(self, **changes: Any) -> Snapshot:
        """The drafts of all stores as a snapshot."""
        kept = {place: store.draft() for place, store in self.stores.items()}
        before = self.snapshot if "snapshot" in vars(self) else Snapshot(kept)
        return replace(before, kept=kept, **changes)

    def _begin(self, in_place: bool = False) -> None:
        """Let all stores start a new draft. `in_place`: updates write to what is kept."""
        for place, store in self.stores.items():
            store.begin(self.snapshot.kept[place], in_place)

    # ---- in and out --------------------------------------------------------------------------------------

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers into every replica, all or none."""
        self._write(lambda replica: weights)

    def write_buffers(self, values: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy to each replica its own buffers, all or none; what is not given stays."""
        self._write(values.__getitem__)

    def _write(self, weights_of: Callable[[int], Mapping[str, Tensor]]) -> None:
        before, after = self.snapshot, {}
        names = {slot.key: slot.name for slot in self._slots.values() if slot.role in ("parameter", "buffer")}
        with torch.no_grad():
            for place, kept in before.kept.items():
                state, weights = dict(kept.state), weights_of(place[0])
                for key, name in names.items():
                    if key in weights and name in state:
                        weight = self._row(key, weights[key], place[0]).to(self.device)
                        state[name] = torch.empty_like(state[name]).copy_(weight)
                after[place] = replace(kept, state=state)
        devices.settle(self.device)
        host_is_stale = before.host_is_stale and not names.keys() <= weights_of(0).keys()
        self.snapshot = replace(before, kept=after, host_is_stale=host_is_stale)
        self._begin()

    def read(self) -> dict[str, Tensor]:
        """Replica 0's parameters and buffers, by canonical name: references where they are the host's, so copy
        what you keep, and hold `still` meanwhile where another thread may run a call.

        A parameter with replica groups has one row a group. Raises Error, if they are lost."""
        self._check()
        found: dict[str, Tensor] = {}
        for ipu in self.plan.programs:
            for name in self.plan.state[ipu]:
                slot = self._slots[name]
                if slot.role in ("parameter", "buffer"):
                    values = [self._fetch((r, ipu), name) for r in self._rows(slot.key)]
                    found[slot.key] = torch.stack(values) if self._is_grouped(slot.key) else values[0]
        return found

    def read_buffers(self) -> list[dict[str, Tensor]]:
        """Copies of each replica's buffers, by canonical name."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self.settings.counts.replicas)]
        for place, kept in self.snapshot.kept.items():
            for name in kept.state:
                if self._slots[name].role == "buffer":
                    found[place[0]][self._slots[name].key] = self._fetch(place, name).clone()
        return found

    def _fetch(self, place: tuple[int, int], name: str) -> Tensor:
        return self.snapshot.kept[place].state[name].cpu()

    def host_has_read(self) -> None:
        """The host has got the weights as they are."""
        self.snapshot = replace(self.snapshot, host_is_stale=False)

    @property
    def random_state(self) -> tuple[int, int]:
        """Seed, and weight updates so far."""
        return self.snapshot.seed, self.snapshot.step

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self.snapshot = replace(self.snapshot, seed=state[0], step=state[1])

    @property
    def loss_factor(self) -> float:
        """What automatic loss scaling multiplies the user's loss scale with at the moment."""
        return next(iter(self.snapshot.kept.values())).loss_factor

    def read_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """Copies of a replica's optimizer state, by parameter; one row a group where there are groups.

        Where instances share the state out, what this one keeps."""
        with self.still:
            return self._read_optimizer()

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _read_optimizer(self) -> dict[str, dict[str, Tensor]]:
        self._check()
        found: dict[str, dict[str, Tensor]] = {}
        for ipu in self.plan.programs:
            for key in self.stores[0, ipu].sums:
                keepers = [p for p in self._keepers(ipu, key) if key in self.snapshot.kept[p].states]
                rows = [self._fetch_state(place, key) for place in keepers]
                if rows:
                    found[key] = {
                        name: torch.stack([row[name] for row in rows]) if self._is_grouped(key) else value
                        for name, value in rows[0].items()
                    }
        return found

    def trained(self) -> list[str]:
        """The parameters that have gradients, in the order in which their state is read."""
        return list(dict.fromkeys(key for ipu in self.plan.programs for key in self.stores[0, ipu].sums))

    def _fetch_state(self, place: tuple[int, int], key: str) -> dict[str, Tensor]:
        return {name: value.cpu().clone() for name, value in self.snapshot.kept[place].states[key].items()}

    def write_optimizer(
        self, states: Mapping[str, Mapping[str, Tensor]], loss_factor: float | None = None
    ) -> None:
        """Copy optimizer state into every replica, all or none; what is not given stays."""
        before, after = self.snapshot, {}
        for place, kept in before.kept.items():
            written = {
                key: {**state, **self._written_state(place, key, states.get(key, {}))}
                for key, state in kept.states.items()
            }
            factor = kept.loss_factor if loss_factor is None else loss_factor
            after[place] = replace(kept, states=written, loss_factor=factor)
        devices.settle(self.device)
        self.snapshot = replace(before, kept=after)
        self._begin()

    def _written_state(
        self, place: tuple[int, int], key: str, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A replica's copies of a parameter's state."""
        kept, found = self.snapshot.kept[place], {}
        for name, value in state.items():
            like = kept.states[key].get(name)
            home = (like if like is not None else kept.state[self.stores[place].slot[key]]).device
            dtype = value.dtype if like is None else like.dtype
            found[name] = self._row(key, value, place[0]).detach().to(home, dtype, copy=True)
        return found

    def _is_grouped(self, key: str) -> bool:
        return key in self.settings.replica_groups

    def _rows(self, key: str) -> tuple[int, ...]:
        """The replicas whose values the host receives."""
        return self.settings.replica_groups[key].rows if self._is_grouped(key) else (0,)

    def _keepers(self, ipu: int, key: str) -> list[tuple[int, int]]:
        """The places in this instance that hold what the host receives of a parameter's optimizer state."""
        here = self.settings.counts.instance
        found = [self.stores[row, ipu].owner.get(key, Owner(here, row)) for row in self._rows(key)]
        return [(owner.replica, ipu) for owner in found if owner.instance == here]

    def _row(self, key: str, value: Tensor, replica: int) -> Tensor:
        """A replica's share of a host value."""
        if not self._is_grouped(key):
            return value
        return value[self.settings.replica_groups[key].row_for(replica, len(value))]
