"""The tensors that tasks share: weights, buffers, gradient sums and optimizer state, each held once.

Local replicas that have the same value of a parameter hold the same tensor, and so do all ipus of a replica:
all are in one memory. Updates write in place. The attributes of `State`:

    values[replica]      parameters, buffers, constants and the loss scale, by slot
    new_buffers[replica] new values of the buffers that forward changes; `values` gets them when the step ends
    sums[replica]        gradient sums of the running step, by parameter
    optimizer[unit]      optimizer state of a parameter. A unit is a parameter of a group of replicas.
    owner[key]           if processes shard the optimizer state: the process that has a parameter's state
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Error
from ..ir import Plan
from ..profile import Memory
from ..settings import Settings
from ..update.group_update import init_state
from . import devices
from .devices import begins_well

OptimizerState = dict[str, Tensor]


class Unit(NamedTuple):
    """A parameter in the local replicas that have the same value of it; `replica` is the first of these."""

    key: str
    replica: int
    ipu: int


class _OpenStep(NamedTuple):
    """Gradient sums and new buffers of replica 0, by canonical name, of a step that another plan ends."""

    sums: dict[str, Tensor]
    buffers: dict[str, Tensor]


class State:
    """The tensors of a loaded plan, with the methods by which the host reads and writes them.

    Args:
        weights:  parameters and buffers by canonical name; they are copied
        previous: the state of another plan of the model; this one shares its tensors
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        device: torch.device,
        previous: State | None = None,
    ) -> None:
        self.plan, self.settings, self.device = plan, settings, device
        # Held while updates write to the weights, and by threads that read them.
        self.still = threading.Lock()
        self.lost: Error | None = None  # why the weights can't be used any more
        # (seed, number of weight updates so far): one value, so that an interrupt changes both or none.
        self.random_state: tuple[int, int] = (0, 0)
        self.host_is_stale = False  # the weights have changed since the host read them
        self.loss_factor = 1.0  # of automatic loss scaling: multiplies the user's loss scale
        self._loss_scale = 1.0
        signature = plan.partition.signature
        self._slots = {slot.name: slot for slot in signature.slots}
        self.slot_of = {slot.key: slot.name for slot in signature.weights}
        self._held: _OpenStep | None = None  # of a step that another plan has begun
        names = [name for names in plan.state.values() for name in names]
        if settings.several_plans:  # they may read slots that this plan does not
            names += self.slot_of.values()
        self._names = list(dict.fromkeys(names))  # of the slots that are held here
        self._changed = [name for name in self._names if name in signature.changed]
        self.trained = [r.key for r in signature.results if r.kind == "gradient"]
        replicas = range(settings.counts.replicas)
        with devices.running(device):
            weight_slots = {*self.slot_of.values()}
            fixed = {name: self._constant(name) for name in self._names if name not in weight_slots}
            self.values: list[dict[str, Tensor]] = [dict(fixed) for _ in replicas]
            known = () if previous is None else previous.slot_of
            new = {key: value for key, value in weights.items() if key not in known}
            self.write([new] * len(replicas))
            self.new_buffers: list[dict[str, Tensor]] = [{} for _ in replicas]
            self.sums: list[dict[str, Tensor]] = [{} for _ in replicas]
            self.optimizer: dict[Unit, OptimizerState] = {}
            self.owner: dict[str, int] = {}
            self.units = self._units()
            if previous is not None:
                self.take_over(previous)
            self._begin_buffers()
            self.owner = self._owners() | self.owner
            optimizer = settings.optimizer
            group_of = {} if optimizer is None else optimizer.group_of
            for unit in self.units:
                if unit not in self.optimizer and unit.key in group_of and self.is_kept_here(unit.key):
                    assert optimizer is not None
                    self.optimizer[unit] = init_state(optimizer, self.weight(unit))
        devices.settle(device)

    def _constant(self, name: str) -> Tensor:
        slot = self._slots[name]
        if slot.role == "constant":
            return begins_well(self.plan.partition.signature.constants[slot.key].to(self.device))
        return torch.ones(slot.shape, dtype=slot.dtype, device=self.device)

    def _units(self) -> list[Unit]:
        """Return all units, in the order of ipus, then slots, then replicas."""
        trained = set(self.trained)
        return [
            Unit(slot.key, replica, ipu)
            for ipu, names in self.plan.state.items()
            for slot in map(self._slots.__getitem__, names)
            if slot.role == "parameter" and slot.key in trained
            for replica in range(self.settings.counts.replicas)
            if self.settings.members(slot.key, replica)[0] == replica
        ]

    def _owners(self) -> dict[str, int]:
        """Return the owner of each sharded parameter; per ipu, all processes own about as many elements."""
        counts, least = self.settings.counts, self.settings.shard_optimizer
        optimizer = self.settings.optimizer
        if least is None or optimizer is None or counts.instances == 1:
            return {}
        found: dict[str, int] = {}
        loads: dict[int, list[int]] = {}
        for unit in self.units:
            size = self.weight(unit).numel()
            if (
                unit.key in optimizer.group_of
                and unit.key not in self.settings.replica_groups
                and size >= least
            ):
                load = loads.setdefault(unit.ipu, [0] * counts.instances)
                found[unit.key] = load.index(min(load))
                load[found[unit.key]] += size
        return found

    def take_over(self, other: State) -> None:
        """Share the weights, buffers, optimizer state and random state of another plan; nothing is copied.

        Replicas that the other plan does not have keep their tensors, or share those of its last replica.
        """
        for replica, values in enumerate(self.values):
            theirs = other.values[min(replica, len(other.values) - 1)]
            for key, name in other.slot_of.items():
                if replica < len(other.values) or self.slot_of[key] not in values:
                    values[self.slot_of[key]] = theirs[name]
        units = {(unit.key, unit.replica): unit for unit in self.units}
        states = {
            (unit.key, unit.replica): state
            for optimizer in (self.optimizer, other.optimizer)
            for unit, state in optimizer.items()
        }
        self.optimizer = {units.get(place, Unit(*place, -1)): state for place, state in states.items()}
        self.owner = self.owner | other.owner
        self.still, self.lost, self.host_is_stale = other.still, other.lost, other.host_is_stale
        self.random_state, self.loss_factor = other.random_state, other.loss_factor
        self._held = other._held if self.settings.part.before else None

    # ---- a step --------------------------------------------------------------------------------------------

    def weight(self, unit: Unit) -> Tensor:
        return self.values[unit.replica][self.slot_of[unit.key]]

    def is_kept_here(self, key: str) -> bool:
        """Return whether this process has the optimizer state of a parameter."""
        return self.owner.get(key, self.settings.counts.instance) == self.settings.counts.instance

    def begin_step(self) -> None:
        """Start a step; if another plan has begun it, with that plan's gradient sums and new buffers."""
        self._begin_buffers()
        if self._held is None:
            return
        self.new_buffers[0].update((self.slot_of[key], value) for key, value in self._held.buffers.items())
        for key, value in self._held.sums.items():
            if key in self.sums[0]:  # in a bucket
                self.sums[0][key].copy_(value)
            else:
                self.sums[0][key] = value
        self._held = None

    def _begin_buffers(self) -> None:
        for values, new in zip(self.values, self.new_buffers, strict=True):
            new.clear()
            new.update((name, values[name]) for name in self._changed)

    def hold_step(self) -> None:
        """Store the gradient sums and new buffers, of replica 0, for the plan that ends the step."""
        buffers = {self._slots[name].key: value for name, value in self.new_buffers[0].items()}
        self._held = _OpenStep(dict(self.sums[0]), buffers)

    def end_step(self) -> None:
        """Finish the step: its new buffers become the values, and the count of updates grows by 1."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            values.update(new)
        seed, step = self.random_state
        self.random_state = seed, step + 1
        self.host_is_stale = self.host_is_stale or self.settings.training

    def set_loss_scale(self, scale: float) -> None:
        name = next((slot.name for slot in self._slots.values() if slot.role == "loss_scale"), None)
        if name in self.values[0] and scale != self._loss_scale:
            value = torch.full_like(self.values[0][name], scale)
            for values in self.values:
                values[name] = value
            self._loss_scale = scale

    # ---- the host's side -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the stored error, if the weights are lost."""
        if self.lost is not None:
            raise self.lost

    def write(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy `weights[replica]` to each replica's parameters and buffers, all or none; others stay."""
        after: list[dict[str, Tensor]] = []
        held = {*self._names}
        with torch.no_grad(), devices.running(self.device):
            for replica, before in enumerate(self.values):
                values, given = dict(before), weights[replica]
                for key, name in self.slot_of.items():
                    if key not in given or name not in held:
                        continue
                    first = self.settings.members(key, replica)[0]
                    if first != replica and self._slots[name].role == "parameter":
                        values[name] = after[first][name]
                        continue
                    slot = self._slots[name]
                    new = torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
                    values[name] = new.copy_(self._row(key, given[key], replica))
                after.append(values)
        devices.settle(self.device)
        if self.slot_of.keys() <= weights[0].keys():
            self.host_is_stale = False
        self.values = after  # one assignment: an interrupt changes all weights or none

    def read(self) -> dict[str, Tensor]:
        """Return replica 0's parameters and buffers by canonical name; with replica groups, one row per
        group.

        On the CPU they are not copies: copy what you keep, and hold `still` meanwhile if another thread
        may run a call. Raises Error if the weights are lost."""
        self.check()
        return {
            slot.key: self._for_host(slot.key, [self.values[row][name] for row in self._rows(slot.key)])
            for name in self._names
            if (slot := self._slots[name]).role in ("parameter", "buffer")
        }

    def read_buffers(self) -> list[dict[str, Tensor]]:
        """Return copies of each replica's buffers, by canonical name."""
        buffers = [slot for name in self._names if (slot := self._slots[name]).role == "buffer"]
        return [
            {slot.key: self._fetch(values[slot.name]).clone() for slot in buffers} for values in self.values
        ]

    def read_optimizer(self) -> dict[str, OptimizerState]:
        """Return copies of the optimizer state by parameter; with replica groups, one row per group.

        If processes shard the state, only this process's shard. Raises Error if the weights are lost."""
        found: dict[str, OptimizerState] = {}
        with self.still:
            self.check()
            states = {(unit.key, unit.replica): state for unit, state in self.optimizer.items()}
            for key in dict.fromkeys(unit.key for unit in (*self.units, *self.optimizer)):
                places = [(key, self.settings.members(key, row)[0]) for row in self._rows(key)]
                rows = [states[place] for place in places if place in states]
                if rows:
                    found[key] = {
                        name: self._for_host(key, [row[name] for row in rows]).clone() for name in rows[0]
                    }
        return found

    def _for_host(self, key: str, values: Sequence[Tensor]) -> Tensor:
        """Return the first value on the CPU; of a parameter with replica groups, all values stacked."""
        fetched = [self._fetch(value) for value in values]
        return torch.stack(fetched) if self._is_grouped(key) else fetched[0]

    def _fetch(self, value: Tensor) -> Tensor:
        with devices.running(self.device):
            return value.cpu()

    def write_optimizer(
        self, states: Mapping[str, Mapping[str, Tensor]], loss_factor: float | None = None
    ) -> None:
        """Copy optimizer state into every replica, all or none; states that are not given are unchanged."""
        with devices.running(self.device):
            written = {
                unit: {**state, **self._written_state(unit, state, states.get(unit.key, {}))}
                for unit, state in self.optimizer.items()
            }
        devices.settle(self.device)
        self.optimizer = written
        if loss_factor is not None:
            self.loss_factor = loss_factor

    def _written_state(
        self, unit: Unit, state: OptimizerState, given: Mapping[str, Tensor]
    ) -> OptimizerState:
        found = {}
        for name, value in given.items():
            like = state.get(name)
            home = (like if like is not None else self.weight(unit)).device
            dtype = value.dtype if like is None else like.dtype
            new = torch.empty_like(self._row(unit.key, value, unit.replica), dtype=dtype, device=home)
            found[name] = new.copy_(self._row(unit.key, value, unit.replica).detach())
        return found

    def _is_grouped(self, key: str) -> bool:
        return key in self.settings.replica_groups

    def _rows(self, key: str) -> tuple[int, ...]:
        """Return the replicas whose values of a parameter the host receives."""
        return self.settings.replica_groups[key].rows if self._is_grouped(key) else (0,)

    def _row(self, key: str, value: Tensor, replica: int) -> Tensor:
        """Return a replica's row of a host value; the whole value if the parameter has no replica groups."""
        if not self._is_grouped(key):
            return value
        return value[self.settings.replica_groups[key].row_for(replica, len(value))]

    # ---- what a profile shows --------------------------------------------------------------------------------

    def memory(self, replica: int, ipu: int) -> Memory:
        """Return the bytes that an ipu of a replica holds from step to step, as if it had its own memory."""
        optimizer = self.settings.optimizer
        parameters = others = gradients = states = 0
        for name in self.plan.held(ipu):
            size = self.values[replica][name].nbytes
            if self._slots[name].role == "parameter":
                parameters += size
            else:
                others += size
        for unit in self.units:
            if unit.ipu == ipu and replica in self.settings.members(unit.key, unit.replica):
                weight = self.weight(unit)
                assert optimizer is not None
                gradients += weight.numel() * optimizer.type_for(weight.dtype).itemsize
                states += sum(value.nbytes for value in self.optimizer.get(unit, {}).values())
        return Memory(replica, ipu, parameters, others, gradients, states)
