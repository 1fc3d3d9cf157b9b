"""The tensors that tasks share: weights, buffers, gradient sums and optimizer state, each held once.

Local replicas that have the same value of a parameter hold the same tensor, and so do all ipus of a replica:
all are in one memory. Updates write in place. The attributes of `State`:

    values[replica]      parameters, buffers, constants and the loss scale, by slot name
    new_buffers[replica] new values of the buffers that forward changes, by slot name; `end_step` moves them
                         to `values`
    sums[replica]        gradient sums of the running step, by parameter
    optimizer[unit]      optimizer state of a parameter, for each group of replicas that share the parameter
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
from .devices import with_aligned_start

OptimizerState = dict[str, Tensor]
WEIGHTS = ("parameter", "buffer")  # roles of the slots that the host reads and writes


class Unit(NamedTuple):
    """A parameter, for a group of local replicas that share the parameter's tensor."""

    key: str  # canonical name
    replica: int  # the first replica of the group


class State:
    """The tensors of a loaded plan, and methods by which the host reads and writes them.

    Args:
        weights:  parameters and buffers by canonical name; they are copied
        previous: the state of another plan of the model, whose tensors this state shares
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
        self.weights_lock = threading.Lock()
        self.lost: Error | None = None  # why the weights can't be used any more
        # (seed, number of weight updates so far): one value, so that an interrupt changes both or none.
        self.random_state: tuple[int, int] = (0, 0)
        self.host_is_stale = False  # the weights have changed since the host read them
        self.loss_factor = 1.0  # of automatic loss scaling: multiplies the user's loss scale
        self._loss_scale = 1.0
        signature = plan.partition.signature
        self.slot_of = {slot.key: slot.name for slot in signature.parameters_and_buffers}
        # Of a step that another plan has begun: gradient sums and new buffers of replica 0, by canonical name.
        self._held: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        names = {name for names in plan.state.values() for name in names}
        if settings.several_plans:  # other plans may read slots that this plan does not read
            names.update(self.slot_of.values())
        # The slots whose values this state holds, by name.
        self._slots = {slot.name: slot for slot in signature.slots if slot.name in names}
        self._weights = [slot for slot in self._slots.values() if slot.role in WEIGHTS]
        self._changed = [name for name in self._slots if name in signature.changed_buffers]
        self.trained = [r.key for r in signature.results if r.kind == "gradient"]
        replicas, trained = range(settings.counts.replicas), set(self.trained)
        with devices.as_current_device(device):
            fixed = {}  # constants, and the loss scale, which is 1 at first
            for slot in (slot for slot in self._slots.values() if slot.role not in WEIGHTS):
                if slot.role == "constant":
                    fixed[slot.name] = with_aligned_start(signature.constants[slot.key].to(device))
                else:
                    fixed[slot.name] = torch.ones(slot.shape, dtype=slot.dtype, device=device)
            self.values: list[dict[str, Tensor]] = [dict(fixed) for _ in replicas]
            known = () if previous is None else previous.slot_of
            new = {key: value for key, value in weights.items() if key not in known}
            self.write([new] * len(replicas))
            self.new_buffers: list[dict[str, Tensor]] = [{} for _ in replicas]
            self.sums: list[dict[str, Tensor]] = [{} for _ in replicas]
            self.optimizer: dict[Unit, OptimizerState] = {}
            self.owner: dict[str, int] = {}
            # The ipu that updates each trained parameter, by canonical name; `units` are in the same order.
            self.ipu_of = {
                slot.key: ipu
                for ipu, names in plan.state.items()
                for slot in map(self._slots.__getitem__, names)
                if slot.role == "parameter" and slot.key in trained
            }
            self.units = [
                Unit(key, replica)
                for key in self.ipu_of
                for replica in replicas
                if settings.sharing_replicas(key, replica)[0] == replica
            ]
            if previous is not None:
                self.take_over(previous)
            self.owner = self._owners() | self.owner
            if (optimizer := settings.optimizer) is not None:
                for unit in self.units:
                    is_updated_here = unit.key in optimizer.group_of and self.is_updated_here(unit.key)
                    if is_updated_here and unit not in self.optimizer:
                        self.optimizer[unit] = init_state(optimizer, self.weight(unit))
        devices.synchronize(device)

    def _owners(self) -> dict[str, int]:
        """Return the owner process of each sharded parameter, by canonical name. Processes own about the same
        number of elements of each ipu. Small parameters, and those with replica groups, are not sharded."""
        counts, optimizer = self.settings.counts, self.settings.optimizer
        least = self.settings.shard_optimizer
        if least is None or optimizer is None or counts.instances == 1:
            return {}
        found: dict[str, int] = {}
        loads: dict[int, list[int]] = {}  # by ipu, the elements that each process owns
        for unit in self.units:
            size, is_grouped = self.weight(unit).numel(), unit.key in self.settings.replica_groups
            if unit.key in optimizer.group_of and not is_grouped and size >= least:
                load = loads.setdefault(self.ipu_of[unit.key], [0] * counts.instances)
                found[unit.key] = load.index(min(load))
                load[found[unit.key]] += size
        return found

    def take_over(self, other: State) -> None:
        """Share the weights, buffers, optimizer state and random state of another plan's state, without
        copies. A replica that the other plan lacks keeps its tensors; if it has none, it shares those of the
        other plan's last replica."""
        for replica, values in enumerate(self.values):
            theirs = other.values[min(replica, len(other.values) - 1)]
            for key, name in other.slot_of.items():
                if replica < len(other.values) or self.slot_of[key] not in values:
                    values[self.slot_of[key]] = theirs[name]
        self.optimizer, self.owner = self.optimizer | other.optimizer, self.owner | other.owner
        self.weights_lock, self.lost, self.host_is_stale = other.weights_lock, other.lost, other.host_is_stale
        self.random_state, self.loss_factor = other.random_state, other.loss_factor
        self._held = other._held if self.settings.part.before else None

    # ---- a step --------------------------------------------------------------------------------------------

    def weight(self, unit: Unit) -> Tensor:
        """Return the tensor of a parameter, which updates change in place."""
        return self.values[unit.replica][self.slot_of[unit.key]]

    def is_updated_here(self, key: str) -> bool:
        """Return whether this process updates a parameter: False if a peer owns the optimizer state."""
        return self.owner.get(key, self.settings.counts.instance) == self.settings.counts.instance

    def begin_step(self) -> None:
        """Set the new buffers to the current buffers. If another plan has begun the step, take the new buffers
        and gradient sums that it has held."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            new.clear()
            new.update((name, values[name]) for name in self._changed)
        if self._held is None:
            return
        sums, buffers = self._held
        self.new_buffers[0].update((self.slot_of[key], value) for key, value in buffers.items())
        for key, value in sums.items():
            if key in self.sums[0]:  # in a bucket
                self.sums[0][key].copy_(value)
            else:
                self.sums[0][key] = value
        self._held = None

    def hold_sums_and_buffers(self) -> None:
        """Hold the gradient sums and new buffers of replica 0 for the plan that ends the step."""
        buffers = {self._slots[name].key: value for name, value in self.new_buffers[0].items()}
        self._held = dict(self.sums[0]), buffers

    def end_step(self) -> None:
        """Move the new buffers to `values`, and add 1 to the step count in `random_state`."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            values.update(new)
        seed, step = self.random_state
        self.random_state = seed, step + 1
        self.host_is_stale = self.host_is_stale or self.settings.training

    def set_loss_scale(self, scale: float) -> None:
        """Set the value by which pieces multiply the loss; do nothing if the plan has no loss scale."""
        name = next((slot.name for slot in self._slots.values() if slot.role == "loss_scale"), None)
        if name is not None and scale != self._loss_scale:
            value = torch.full_like(self.values[0][name], scale)
            for values in self.values:
                values[name] = value
            self._loss_scale = scale

    # ---- the host's side -----------------------------------------------------------------------------------

    def check_not_lost(self) -> None:
        """Raise the error `lost` if the weights are lost."""
        if self.lost is not None:
            raise self.lost

    def write(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy `weights[replica]`, parameters and buffers by canonical name, to each replica. Other weights
        keep their values; after an error all weights do."""
        after: list[dict[str, Tensor]] = []
        with torch.no_grad(), devices.as_current_device(self.device):
            for replica, given in enumerate(weights):
                values = dict(self.values[replica])
                after.append(values)
                for slot in (slot for slot in self._weights if slot.key in given):
                    first = self.settings.sharing_replicas(slot.key, replica)[0]
                    if slot.role == "parameter" and first != replica:
                        values[slot.name] = after[first][slot.name]
                    else:
                        new = torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
                        values[slot.name] = new.copy_(self._row_of(slot.key, given[slot.key], replica))
        devices.synchronize(self.device)
        if self.slot_of.keys() <= weights[0].keys():
            self.host_is_stale = False
        self.values = after  # one assignment: an interrupt changes all weights or none

    def read(self) -> dict[str, Tensor]:
        """Return replica 0's parameters and buffers by canonical name; of a parameter with replica groups the
        values of the replicas `ReplicaGroups.rows`, stacked. Raises Error if the weights are lost.

        On the CPU these are the tensors that updates change, not copies: hold `weights_lock` while you copy
        them if another thread may run a call.
        """
        self.check_not_lost()
        return {slot.key: self._host_value(slot.key, slot.name, self.values) for slot in self._weights}

    def read_buffers(self) -> list[dict[str, Tensor]]:
        """Return copies of each replica's buffers, by canonical name."""
        buffers = [slot for slot in self._weights if slot.role == "buffer"]
        return [{slot.key: values[slot.name].cpu().clone() for slot in buffers} for values in self.values]

    def read_optimizer(self) -> dict[str, OptimizerState]:
        """Return copies of replica 0's optimizer state by parameter; if processes shard it, of this process's
        shard; with replica groups, stacked as by `read`. Raises Error if the weights are lost."""
        found: dict[str, OptimizerState] = {}
        with self.weights_lock:
            self.check_not_lost()
            for key in dict.fromkeys(unit.key for unit in (*self.units, *self.optimizer)):
                states = [
                    self.optimizer.get(Unit(key, self.settings.sharing_replicas(key, replica)[0]), {})
                    for replica in range(self.settings.counts.replicas)
                ]
                for name in states[0]:
                    found.setdefault(key, {})[name] = self._host_value(key, name, states).clone()
        return found

    def write_optimizer(
        self, states: Mapping[str, Mapping[str, Tensor]], loss_factor: float | None = None
    ) -> None:
        """Copy optimizer state, by parameter, to all replicas (an error changes none), and set the loss
        factor unless None. Only states that are in `states`, and that this process has, are written."""
        written: dict[Unit, OptimizerState] = {}
        with devices.as_current_device(self.device):
            for unit, state in self.optimizer.items():
                written[unit] = dict(state)
                for name, value in states.get(unit.key, {}).items():
                    row, old = self._row_of(unit.key, value, unit.replica).detach(), state.get(name)
                    target = (self.device, row.dtype) if old is None else (old.device, old.dtype)
                    written[unit][name] = row.to(*target, copy=True)
        devices.synchronize(self.device)
        self.optimizer = written
        if loss_factor is not None:
            self.loss_factor = loss_factor

    def _row_of(self, key: str, value: Tensor, replica: int) -> Tensor:
        """Return a replica's row of a value on the host; the whole value without replica groups."""
        groups = self.settings.replica_groups.get(key)
        return value if groups is None else value[groups.row_index_of_replica(replica, len(value))]

    def _host_value(self, key: str, name: str, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return `values[0][name]` on the CPU; of a parameter with replica groups the `values[replica][name]`
        of the replicas `ReplicaGroups.rows`, stacked."""
        groups = self.settings.replica_groups.get(key)
        if groups is None:
            return values[0][name].cpu()
        return torch.stack([values[replica][name].cpu() for replica in groups.rows])

    # ---- what a profile shows --------------------------------------------------------------------------------

    def memory(self, replica: int, ipu: int) -> Memory:
        """Return the bytes that an ipu's weights, gradient sums and states take in a memory of its own."""
        sizes = {name: self.values[replica][name].nbytes for name in self.plan.slots_held_by(ipu)}
        weights = sum(size for name, size in sizes.items() if self._slots[name].role == "parameter")
        gradients = states = 0
        for unit in self.units:
            members = self.settings.sharing_replicas(unit.key, unit.replica)
            if self.settings.optimizer is not None and self.ipu_of[unit.key] == ipu and replica in members:
                weight = self.weight(unit)
                gradients += weight.numel() * self.settings.optimizer.sum_dtype(weight.dtype).itemsize
                states += sum(value.nbytes for value in self.optimizer.get(unit, {}).values())
        return Memory(replica, ipu, weights, sum(sizes.values()) - weights, gradients, states)
