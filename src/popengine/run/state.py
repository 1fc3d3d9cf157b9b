"""The tensors that tasks share: weights, buffers and gradient sums, each held once.

Parameters and buffers are the user's own tensors, which updates change in place (`TrainState`). `DeviceTensors` bind
the slots of one plan to them; replicas and ipus with the same value read the same tensor. Attributes:

    values[replica]      parameters, buffers, constants and the loss scale, by slot name
    new_buffers[replica] new values of the buffers that forward changes, by slot name; `end_step` copies them
                         into `values`
    sums[replica]        gradient sums of the running step, by parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Error
from ..ir import Plan, Slot
from ..operations import RECURRENT_CALLS, flatten_weights, with_strides
from ..places import copies_at
from ..settings import Place, Settings
from ..torch_private import DisableTorchFunctionSubclass, spanned_elements
from . import devices
from .devices import with_aligned_start
from .train_state import TrainState, move_to, write

WEIGHTS = ("parameter", "buffer")  # roles of the slots that are tensors of the model


class Unit(NamedTuple):
    """A parameter, for a group of local replicas that share the parameter's tensor."""

    key: str  # canonical name
    replica: int  # the first replica of the group


class Where(NamedTuple):
    """The rows that a device runs: those of the ipus at a place, for some local replicas."""

    place: Place
    replicas: tuple[int, ...]
    device: torch.device


def device_of_place(plan: Plan, settings: Settings, place: Place, replica: int) -> torch.device:
    """Return the device that a replica's ipus at a place of this process are on."""
    if not settings.devices:
        return devices.device_of(settings.device)
    shift = plan.shifts[replica] if plan.shifts else 0
    return devices.device_named(settings.devices[(place.device + shift) % len(settings.devices)])


def all_devices(plan: Plan, settings: Settings) -> list[Where]:
    """Return what each device of this process runs; first the devices of replica 0."""
    here = {place for place in plan.places.values() if place.process == settings.counts.part}
    shifts = plan.shifts or (0,) * settings.counts.replicas
    groups = {shift: tuple(r for r in range(len(shifts)) if shifts[r] == shift) for shift in shifts}
    return [
        Where(place, replicas, device_of_place(plan, settings, place, replicas[0]))
        for replicas in groups.values()
        for place in sorted(here) or [Place(settings.counts.part)]
    ]


class DeviceTensors:
    """The tensors of a loaded plan on one device. `bind` has to be called before each call of the engine."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        train_state: TrainState,
        where: Where,
        find_constants: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._find_constants = find_constants  # returns the user's plain tensors that forward reads, by key
        self.plan, self.settings, self.train_state = plan, settings, train_state
        self.where, self.device = where, (device := where.device)
        self._loss_scale, self.has_queue = 1.0, devices.has_queue(device)
        signature = plan.partition.signature
        self.slot_of = {slot.key: slot.name for slot in signature.parameters_and_buffers}
        here = plan.slots_at(where.place)
        names = {name for names in here.values() for name in names}
        self._slots = {slot.name: slot for slot in signature.slots if slot.name in names}
        self._constants = {slot.key: slot.name for slot in self._slots.values() if slot.role == "constant"}
        self._weights = [slot for slot in self._slots.values() if slot.role in WEIGHTS]
        self._changed = [name for name in self._slots if name in signature.changed_buffers]
        self.trained = signature.trained
        replicas, trained = range(settings.counts.replicas), set(self.trained)
        # The model's tensors, with shape, strides and dtype; without autograd, or copies with the plan's strides.
        self._bound: dict[str, tuple[Tensor, Any, Any, Any]] = {}
        self._plain: dict[str, Tensor] = {}
        self._memory: dict[str, Tensor] = {}  # of weights of another device: again, so that addresses stay
        self._strides: dict[str, tuple[int, ...]] = {}  # of the model's tensors in the first `bind`
        # Changed buffers of other strides: the user's, ours.
        self._copied: dict[str, tuple[Tensor, Tensor]] = {}
        self._repeated: dict[str, tuple[Tensor, list[int]]] = {}  # replica groups, and rows' sources
        self.new_buffers: list[dict[str, Tensor]] = [{} for _ in replicas]
        self.first_buffers: list[dict[str, Tensor]] = []  # `new_buffers` at the begin of the step
        self.sums: list[dict[str, Tensor]] = [{} for _ in replicas]
        with devices.as_current_device(device):
            fixed = {}  # constants, and the loss scale, which is 1 at first
            for slot in (slot for slot in self._slots.values() if slot.role not in WEIGHTS):
                if slot.role == "constant":
                    fixed[slot.name] = with_aligned_start(signature.constants[slot.key].to(device))
                else:
                    fixed[slot.name] = torch.ones(slot.shape, dtype=slot.dtype, device=device)
            self.values: list[dict[str, Tensor]] = [dict(fixed) for _ in replicas]
        # The ipu that updates each trained parameter, by canonical name; `all_units` are in the same order, and `units`
        # are those of this place.
        key_of = {name: key for key, name in self.slot_of.items()}
        held = [(key_of.get(name), ipu) for ipu, names in plan.slots_of.items() for name in names]
        self.ipu_of = {key: ipu for key, ipu in held if key in trained}
        units = (Unit(key, replica) for key in self.ipu_of for replica in replicas)
        self.all_units = [unit for unit in units if settings.sharing_replicas(*unit)[0] == unit.replica]
        self.units = [unit for unit in self.all_units if self.ipu_of[unit.key] in here]
        train_state.owner = self._choose_owners() | train_state.owner
        if settings.counts.parts > 1:
            train_state.add_holders(plan.holders(), settings.counts.part)
        # Slots whose tensors are on another device: `bind` writes copies. Replica 0's are the user's tensors.
        self._copies = copies_at(plan, where.place)
        self._buffers = {self._slots[n].key: n for n in self._changed if n not in self._copies}
        if 0 not in where.replicas:
            self._copies = {slot.name for slot in self._weights}
        self.bind()

    def _choose_owners(self) -> dict[str, int]:
        """Return the owner process of each sharded parameter, by canonical name. Processes own about the same number of
        elements of each ipu. Small parameters, and those with replica groups, are not sharded."""
        counts, least = self.settings.counts, self.settings.shard_optimizer
        if least is None or not self.settings.training or counts.instances == 1:
            return {}
        held = self.train_state.parameters()
        shapes = {slot.key: slot.shape for slot in self.plan.partition.signature.parameters_and_buffers}
        owners: dict[str, int] = {}
        loads: dict[int, list[int]] = {}  # by ipu, the elements that each process owns
        for unit in self.all_units:
            size = prod(shapes[unit.key])
            is_grouped = unit.key in self.settings.replica_groups
            if unit.key in held and not is_grouped and size >= least:
                load = loads.setdefault(self.ipu_of[unit.key], [0] * counts.instances)
                owners[unit.key] = load.index(min(load))
                load[owners[unit.key]] += size
        return owners

    # ---- the user's tensors --------------------------------------------------------------------------------

    def bind(self) -> None:
        """Set `values` to the present tensors of the model, which move to this device with their optimizer state. Drop
        optimizer state that peers own. Raises Error if weights are lost, or have another shape or dtype."""
        self.train_state.commit.check_not_lost()
        with torch.no_grad(), DisableTorchFunctionSubclass(), devices.as_current_device(self.device):
            present = self.train_state.find_weights()
            if moved := [x for x in self._weights if not self._is_bound(x.key, present.get(x.key))]:
                self._check_present(present, moved)
                self._check_shared_memory(present)
                if self.has_queue:
                    self._allocate_recurrent_layers(moved, present)
                for slot in moved:
                    self._bind_weight(slot, present[slot.key])
            for key, value in self._find_constants().items() if self._constants else ():
                if key in self._constants:
                    plain = value.detach()
                    if self.device != plain.device:
                        plain = self._copy_to_device(f"constant {key}", plain, plain.stride())
                    for values in self.values:
                        values[self._constants[key]] = with_aligned_start(plain)
            self._bind_buffers()
            self._bind_optimizer_state()
        self._repeat_rows()

    def _bind_buffers(self) -> None:
        """Set the changed buffers of replicas 1, 2, ..., which have values of their own."""
        buffers = self.train_state.buffers
        if buffers.replicas > 1 and 0 in self.where.replicas:
            buffers.follow({key: self._plain[key] for key in self._buffers})
        for replica in set(self.where.replicas) - {0}:
            for name in self._changed:
                key = self._slots[name].key
                if key in self._buffers:
                    value = buffers.read(replica, key, self.device)
                else:  # at an earlier place
                    value = buffers.values[replica][key]
                    value = self._copy_to_device(f"{key} of replica {replica}", value, value.stride())
                self.values[replica][name] = value

    def _allocate_recurrent_layers(self, moved: Sequence[Slot], present: Mapping[str, Tensor]) -> None:
        """Allocate one block for the weights of each recurrent layer of which no weight had memory here before."""
        new = (slot for slot in moved if slot.key not in self._memory)
        slot_of = {slot.name: slot for slot in new if present[slot.key].device != self.device}
        lines = (line for piece in self.plan.partition.pieces for line in piece.lines)
        for line in (line for line in lines if line.call in RECURRENT_CALLS):
            numbers = line.arguments[1]
            names = line.operands()[1 + int(numbers[0]) :]
            slots = [slot_of.pop(name) for name in names if name in slot_of]
            memory = [torch.empty(slot.shape, dtype=slot.dtype, device=self.device) for slot in slots]
            if len(slots) == len(names) and flatten_weights(line.call, memory, numbers):
                self._memory |= {slot.key: value for slot, value in zip(slots, memory, strict=True)}

    def _copy_to_device(self, key: str, value: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return a copy of a value on this device: in the memory of an earlier copy, so that it has one address, or in
        new memory with these strides."""
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, value.dtype):
            memory = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=self.device)
            self._memory[key] = memory
        return memory.copy_(value, non_blocking=devices.has_queue(self.device))

    def bound_parameters(self) -> dict[str, Tensor]:
        """Return the user's trained parameters of this place that `bind` has found, by canonical name."""
        return {key: self._bound[key][0] for key in self.trained if key in self._bound}

    def has_bound(self, key: str, parameter: Tensor | None) -> bool:
        """Return whether a parameter is the model's, as `bind` has found it."""
        return self._bound[key][0] is parameter

    def _is_bound(self, key: str, value: Any) -> bool:
        """Return whether `values` are this tensor of the model. Its memory is compared with the present one of the
        bound tensor: `share_memory()` moves both, and the address that they had may be another tensor's now."""
        bound = self._bound.get(key)
        return (
            bound is not None
            and bound[0] is value
            and bound[1:] == (value.shape, value.stride(), value.dtype)
            and self._plain[key].data_ptr() == value.data_ptr()
        )

    def _check_present(self, present: Mapping[str, Tensor], slots: Sequence[Slot]) -> None:
        """Raise Error if the model lacks one of these weights, or its value."""
        if lost := [slot.key for slot in slots if slot.key not in present]:
            raise Error(
                f"the model has lost {', '.join(lost)} since it was compiled\n"
                "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                " became the same object as another one\n"
                "  fix: put it back, or change the model before it is wrapped"
            )
        empty = [slot.key for slot in slots if present[slot.key].is_meta]
        if empty and self.device.type != "meta":
            raise Error(
                f"{', '.join(empty[:5])} of the model are on the meta device, and have no values\n"
                "  fix: poptorch.materialize(model), before it is wrapped, lets the layers' reset_parameters() fill"
                " them; or `model.to_empty(device='cpu')`, then set or load the weights. If ipus of another"
                " instance held them so far: copyWeightsToHost() in all instances"
            )

    def _check_shared_memory(self, present: Mapping[str, Tensor]) -> None:
        """Raise Error if two weights overlap in memory, and calls change one of them."""
        spans = sorted(
            (value.data_ptr(), value.data_ptr() + spanned_elements(value) * value.element_size(), key)
            for key, value in present.items()
            if not value.is_meta
        )
        before: list[tuple[int, int, str]] = []
        for begin, end, key in spans:
            before = [span for span in before if span[1] > begin]
            for *_, earlier in before if end > begin else ():
                if self._is_changed(key) or self._is_changed(earlier):
                    raise Error(
                        f"{earlier} and {key} share their memory, but are two tensors; a compiled model keeps each of"
                        " them, and only one would change\n"
                        "  fix: use the same object twice, as in `self.decoder.weight = self.encoder.weight`, or make"
                        " the other one in forward"
                    )
            before.append((begin, end, key))

    def _is_changed(self, key: str) -> bool:
        """Return whether calls change a weight."""
        return key in self.ipu_of or self.slot_of.get(key) in self._changed

    def _bind_weight(self, slot: Slot, value: Tensor) -> None:
        """Set `values` of all replicas to a tensor of the model, or to a copy if its strides have changed."""
        groups = self.settings.replica_groups.get(slot.key)
        shape = value.shape if groups is None else value.shape[1:]
        if (shape, value.dtype) != (slot.shape, slot.dtype):
            is_cast = shape == slot.shape
            now, before = (value.dtype, slot.dtype) if is_cast else (list(shape), list(slot.shape))
            raise Error(
                f"{slot.role} {slot.key} has the {'type' if is_cast else 'shape'} {now} now, and the model is compiled"
                f" for {before}\n"
                "  why: half(), to(), another layer in its place or an assignment to .data has changed it\n"
                "  fix: change it back, or call destroy() and compile the model again"
            )
        if groups is not None and len(value) != len(groups.rows):
            rows = len(value)  # `all_rows`, and the model has one per group
            value.data = value.detach()[list(groups.of)]
            state = self.train_state.optimizer.state.get(value, {})
            for name, entry in state.items():
                if isinstance(entry, Tensor) and entry.dim() and len(entry) == rows:
                    state[name] = entry[list(groups.of)]
        is_overlapping = any(
            step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)
        )
        dense = torch.empty_like(value, device="meta").stride()  # without gaps, else as they are
        strides = self._strides.setdefault(slot.key, dense)
        if is_overlapping and not value.is_inference():  # torch refuses to write to it
            value.data = with_strides(value.detach(), dense)
        if slot.name not in self._copies and value.device != self.device:
            move_to(slot.key, value, self._copy_to_device(slot.key, value.detach(), strides))
        self._bound[slot.key] = value, value.shape, value.stride(), value.dtype
        plain = value.detach()
        self._copied.pop(slot.key, None)
        if slot.name in self._copies:
            plain = self._copy_to_device(slot.key, plain, strides)
        elif value.stride() != strides:
            plain = self._copy_to_device(f"{slot.key} in the plan's strides", plain, strides)
            if slot.name in self._changed:
                self._copied[slot.key] = value, plain
        self._plain[slot.key] = plain
        for replica, values in enumerate(self.values):
            first = self.settings.sharing_replicas(slot.key, replica)[0]
            if groups is None:
                values[slot.name] = plain
            elif first == replica:
                values[slot.name] = plain[groups.rows.index(replica)]
            else:
                values[slot.name] = self.values[first][slot.name]
        if groups is not None and groups.repeated_rows:
            self._repeated[slot.key] = plain, groups.repeated_rows

    def _repeat_rows(self) -> None:
        """Copy each row of a value with replica groups to the rows that repeat it."""
        for value, sources in self._repeated.values():
            value.copy_(value[sources])

    def _bind_optimizer_state(self) -> None:
        """Move the optimizer state of parameters on an accelerator there; drop the state that peers own."""
        states = self.train_state.optimizer.state
        for key, parameter in self.train_state.parameters().items() if self.train_state.owner else ():
            if not self.is_updated_here(key):
                states.pop(parameter, None)
        for parameter, state in states.items() if self.has_queue else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                # A count, without dimensions, is where torch has it.
                if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                    state[name] = value.to(parameter.device)

    # ---- a step --------------------------------------------------------------------------------------------

    def weight(self, unit: Unit) -> Tensor:
        """Return the tensor of a parameter, which updates change in place."""
        return self.values[unit.replica][self.slot_of[unit.key]]

    def is_updated_here(self, key: str) -> bool:
        """Return whether this process updates a parameter: False if a peer owns the optimizer state."""
        return self.train_state.owner.get(key, self.settings.counts.instance) == self.settings.counts.instance

    def follow_parameters(self) -> None:
        """Copy the parameters that the optimizer has changed into this device's copies: of parameters on another
        device, with other strides, or to which `step()` has given other memory."""
        for key in self.ipu_of.keys() & self._bound.keys():
            parameter, plain = self._bound[key][0], self._plain[key]
            if parameter.data_ptr() != plain.data_ptr():
                plain.copy_(parameter.detach(), non_blocking=self.has_queue)

    def begin_step(self) -> None:
        """Set the new buffers to the current ones; take those, and the sums, of a plan that has begun the step."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            new.clear()
            new.update(zip(self._changed, map(values.__getitem__, self._changed), strict=True))
        held = self.train_state.held
        if held is not None and self.settings.step_part.before:
            self._continue_step(*held)
        self.first_buffers = [dict(new) for new in self.new_buffers]

    def _continue_step(self, sums: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take the gradient sums and new buffers of the plan that has begun the step."""
        local_sums = {key: sums[key] for key in sums.keys() & {unit.key for unit in self.units}}
        for name in self._changed:
            self.new_buffers[0][name] = buffers[self._slots[name].key].to(self.device)
        for key, value in local_sums.items():
            if key in self.sums[0]:  # in a bucket
                self.sums[0][key].copy_(value)
            else:  # another plan may have made the sum on another device
                self.sums[0][key] = value.to(self.device)

    def hold_sums_and_buffers(self) -> None:
        """Hold the gradient sums and new buffers of replica 0 for the plan that ends the step."""
        sums, buffers = self.train_state.held = self.train_state.held or ({}, {})
        if 0 in self.where.replicas:
            sums.update(self.sums[0])
            buffers.update((self._slots[name].key, self.new_buffers[0][name]) for name in self._changed)

    def end_step(self) -> None:
        """Copy the new buffers into `values`."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            for name in self._changed:
                if new[name] is not values[name]:
                    write(values[name], new[name])
        self._repeat_rows()
        for original, copy in self._copied.values():
            write(original, copy)
        for replica in self.where.replicas if self.train_state.buffers.replicas > 1 else ():
            values = self.values[replica]
            self.train_state.buffers.write(replica, {key: values[n] for key, n in self._buffers.items()})

    def set_loss_scale(self, scale: float) -> None:
        """Set the value by which pieces multiply the loss; do nothing if the plan has no loss scale."""
        if scale != self._loss_scale:
            for slot in self._slots.values():
                if slot.role == "loss_scale":
                    self.values[0][slot.name].fill_(scale)  # which all replicas share
            self._loss_scale = scale
