"""The tensors that tasks share: weights, buffers, gradient sums and optimizer state, each held once.

Parameters, buffers and optimizer state are the user's own tensors, which updates change in place (`TrainState`). A
`State` binds the slots of one plan to them; replicas and ipus with the same value read the same tensor. Its attributes:

    values[replica]      parameters, buffers, constants and the loss scale, by slot name
    new_buffers[replica] new values of the buffers that forward changes, by slot name; `end_step` copies them
                         into `values`
    sums[replica]        gradient sums of the running step, by parameter
    optimizer[unit]      optimizer state of a parameter, for each group of replicas that share the parameter
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Error, UnrecoverableError
from ..ir import Plan, Slot
from ..profile import KeptBytes
from ..settings import Hyper, Optimizer, Settings
from ..torch_private import DisableTorchFunctionSubclass, is_aligned
from ..update.group_update import fitting_state
from ..update.optimizer_rules import OWN_STEP, RULES
from . import devices
from .devices import with_aligned_start

OptimizerState = dict[str, Tensor]
WEIGHTS = ("parameter", "buffer")  # roles of the slots that are tensors of the model


class Unit(NamedTuple):
    """A parameter, for a group of local replicas that share the parameter's tensor."""

    key: str  # canonical name
    replica: int  # the first replica of the group


class TrainState:
    """What training changes and calls continue with. All plans and engines of an executor use one `TrainState`.

    Args: find_weights: returns the model's present parameters and buffers, by canonical name
    """

    def __init__(self, find_weights: Callable[[], Mapping[str, Tensor]], seed: int = 0) -> None:
        self.find_weights = find_weights
        # `optimizer.state[parameter]` has the optimizer state.
        self.optimizer: Any = SimpleNamespace(state={})
        self._parameters: Mapping[str, Tensor] | None = None  # keys of `optimizer.state`; None: the weights
        # If processes shard the optimizer state: the process that has a parameter's state, by canonical name.
        self.owner: dict[str, int] = {}
        self.shard_name = ""  # under which peers read this process's shard; "": it is not published
        # (seed, number of weight updates so far): one value, so that an interrupt changes both or none.
        self.random_state: tuple[int, int] = seed, 0
        # The `step` of an optimizer without a rule, on gradients by canonical name of the parameter.
        self.own_step: Callable[[Mapping[str, Tensor]], None]
        self.loss_factor = torch.ones(())  # of automatic loss scaling: multiplies the user's loss scale
        self.calls = 0  # complete calls
        self.engines = 0  # that are not closed
        # By replica, buffers that forward changes. Those of replica 0 are copies of the model's own after the
        # latest step: the model's differ if the user has written them, and then all replicas take these.
        self.buffers: list[dict[str, Tensor]] = []
        # Of a step that a plan has begun and another one will end: gradient sums and new buffers of replica 0.
        self.held: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        # Held while updates write to the weights, and by threads that read them.
        self.lock = threading.Lock()
        self.lost: Error | None = None  # why the weights can't be used any more
        # Of trained parameters when they were equal in all processes: the tensor, its address and its version counter.
        self._confirmed: dict[str, tuple[Tensor, int, int]] = {}

    def use_optimizer(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        """Keep optimizer state in `optimizer.state` from now on; `parameters`: the optimizer's, by canonical name."""
        self.optimizer, self._parameters = optimizer, parameters

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the optimizer's parameters by canonical name; without an optimizer the model's weights."""
        return self.find_weights() if self._parameters is None else self._parameters

    def optimizer_states(self) -> dict[str, OptimizerState]:
        """Return the optimizer state of this process by canonical name: the tensors that updates change."""
        state = self.optimizer.state
        return {key: state[value] for key, value in self.parameters().items() if state.get(value)}

    def marks_of_optimizer(self) -> list[tuple[int, int]]:
        """Return (id, version) of each value in the optimizer's state: a write, or another value, changes them."""
        states = self.optimizer.state.values()
        values = [value for state in states if isinstance(state, dict) for value in state.values()]
        return [(id(v), v._version if isinstance(v, Tensor) and not v.is_inference() else 0) for v in values]

    def set_state(self, key: str, state: OptimizerState) -> None:
        """Set or, with {}, remove the optimizer state of a parameter."""
        if state:
            self.optimizer.state[self.parameters()[key]] = state
        else:
            self.optimizer.state.pop(self.parameters()[key], None)

    def check_not_lost(self) -> None:
        """Raise the error `lost` if the weights are lost."""
        if self.lost is not None:
            raise self.lost

    def confirm(self, parameters: Mapping[str, Tensor]) -> None:
        """Record that these parameters are equal in all processes: after a comparison, or an update in all."""
        self._confirmed |= {key: _mark(value) for key, value in parameters.items()}

    def unconfirmed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of these parameters that were written or replaced since `confirm`, by name."""
        found = {}
        for key, value in parameters.items():
            known = self._confirmed.get(key)
            if known is None or known[0] is not value or known[1:] != _mark(value)[1:]:
                found[key] = value.detach()
        return found

    def own_buffers(
        self, weights: Mapping[str, Tensor], keys: Iterable[str], replicas: int
    ) -> list[dict[str, Tensor]]:
        """Return `buffers`, with these keys for each replica. A buffer that has no value of a replica's own, or
        that the user has written, gets the model's value (in `weights`) in all replicas."""
        self.buffers.extend({} for _ in range(replicas - len(self.buffers)))
        for key in keys:
            value = weights[key].detach()
            is_written = key not in self.buffers[0] or not has_same_bits(self.buffers[0][key], value)
            for own in self.buffers:
                if is_written or key not in own:
                    own[key] = value.clone()
        return self.buffers

    def write_buffers(self, replicas: list[dict[str, Tensor]]) -> None:
        """Copy buffers, by canonical name for each replica, to the model (replica 0's) and to the replicas."""
        weights = self.find_weights()
        for key, value in replicas[0].items():
            write(weights[key], value)
        self.buffers = [{key: value.clone() for key, value in each.items()} for each in replicas]


def _mark(value: Tensor) -> tuple[Tensor, int, int]:
    return value, value.data_ptr(), 0 if value.is_inference() else value._version


def write(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of the user's, in place."""
    # Tensors that were made in inference mode can be written only there.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.detach().copy_(value)


class State:
    """The tensors of a loaded plan. `bind` has to be called before each call of the engine."""

    def __init__(self, plan: Plan, settings: Settings, shared: TrainState, device: torch.device) -> None:
        self.plan, self.settings, self.shared, self.device = plan, settings, shared, device
        self._loss_scale = 1.0
        signature = plan.partition.signature
        self.slot_of = {slot.key: slot.name for slot in signature.parameters_and_buffers}
        names = {name for names in plan.state.values() for name in names}
        self._slots = {slot.name: slot for slot in signature.slots if slot.name in names}
        self._weights = [slot for slot in self._slots.values() if slot.role in WEIGHTS]
        self._changed = [name for name in self._slots if name in signature.changed_buffers]
        self.trained = signature.trained
        replicas, trained = range(settings.counts.replicas), set(self.trained)
        # The model's tensors, with address, shape, strides and dtype; and these tensors without autograd, or copies of
        # them on an accelerator.
        self._bound: dict[str, tuple[Tensor, Any, Any, Any, Any]] = {}
        self._plain: dict[str, Tensor] = {}
        self._strides: dict[str, tuple[int, ...]] = {}  # of the model's tensors in the first `bind`
        # Values with replica groups, each with the index of the row that is copied to each row.
        self._repeated: dict[str, tuple[list[Tensor], list[int]]] = {}
        self.new_buffers: list[dict[str, Tensor]] = [{} for _ in replicas]
        self.sums: list[dict[str, Tensor]] = [{} for _ in replicas]
        self.optimizer: dict[Unit, OptimizerState] = {}
        self._bound_states: dict[Unit, tuple[Tensor, ...]] = {}  # those that `optimizer` was made from
        with devices.as_current_device(device):
            fixed = {}  # constants, and the loss scale, which is 1 at first
            for slot in (slot for slot in self._slots.values() if slot.role not in WEIGHTS):
                if slot.role == "constant":
                    fixed[slot.name] = with_aligned_start(signature.constants[slot.key].to(device))
                else:
                    fixed[slot.name] = torch.ones(slot.shape, dtype=slot.dtype, device=device)
            self.values: list[dict[str, Tensor]] = [dict(fixed) for _ in replicas]
        # The ipu that updates each trained parameter, by canonical name; `units` are in the same order.
        held = [(self._slots[name], ipu) for ipu, names in plan.state.items() for name in names]
        self.ipu_of = {s.key: ipu for s, ipu in held if s.role == "parameter" and s.key in trained}
        units = (Unit(key, replica) for key in self.ipu_of for replica in replicas)
        self.units = [unit for unit in units if settings.sharing_replicas(*unit)[0] == unit.replica]
        shared.owner = self._owners() | shared.owner
        self.bind(None)

    def _owners(self) -> dict[str, int]:
        """Return the owner process of each sharded parameter, by canonical name. Processes own about the same number of
        elements of each ipu. Small parameters, and those with replica groups, are not sharded."""
        counts, optimizer = self.settings.counts, self.settings.optimizer
        least = self.settings.shard_optimizer
        if least is None or optimizer is None or optimizer.kind == OWN_STEP or counts.instances == 1:
            return {}
        found: dict[str, int] = {}
        loads: dict[int, list[int]] = {}  # by ipu, the elements that each process owns
        for unit in self.units:
            size = prod(self._slots[self.slot_of[unit.key]].shape)
            is_grouped = unit.key in self.settings.replica_groups
            if unit.key in optimizer.group_of and not is_grouped and size >= least:
                load = loads.setdefault(self.ipu_of[unit.key], [0] * counts.instances)
                found[unit.key] = load.index(min(load))
                load[found[unit.key]] += size
        return found

    # ---- the user's tensors --------------------------------------------------------------------------------

    def bind(self, hyper: Hyper | None) -> None:
        """Set `values` and `optimizer` to the present tensors of model and optimizer (on an accelerator to copies), and
        add missing optimizer state. Raises Error if weights are lost, or have another shape or dtype."""
        self.shared.check_not_lost()
        with torch.no_grad(), DisableTorchFunctionSubclass(), devices.as_current_device(self.device):
            present = self.shared.find_weights()
            if lost := [slot.key for slot in self._weights if slot.key not in present]:
                raise Error(
                    f"the model has lost {', '.join(lost)} since it was compiled\n"
                    "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                    " became the same object as another one\n"
                    "  fix: put it back, or change the model before it is wrapped"
                )
            for slot in self._weights:
                value = present[slot.key]
                now = value, value.data_ptr(), value.shape, value.stride(), value.dtype
                known = self._bound.get(slot.key)
                is_known = known is not None and known[0] is value and known[1:] == now[1:]
                if not is_known or self.device != devices.CPU:
                    self._bind_weight(slot, value)
            if len(self.values) > 1:  # replicas 1, 2, ... have buffers of their own
                keys = (self._slots[name].key for name in self._changed)
                own = self.shared.own_buffers(present, keys, len(self.values))
                for values, buffers in list(zip(self.values, own, strict=False))[1:]:
                    values.update((n, buffers[self._slots[n].key].to(self.device)) for n in self._changed)
            if self.settings.optimizer is not None:
                parameters = self.shared.parameters()
                for unit in (u for u in self.units if u.key in self.settings.optimizer.group_of):
                    self._bind_optimizer(unit, parameters[unit.key], self.settings.optimizer, hyper)
        self._repeat_rows()

    def bound_parameters(self) -> dict[str, Tensor]:
        """Return the user's trained parameters that the latest `bind` has found, by canonical name."""
        return {key: self._bound[key][0] for key in self.trained}

    def _bind_weight(self, slot: Slot, value: Tensor) -> None:
        """Set `values` of all replicas to a tensor of the model, which is moved if its layout has changed."""
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
            value.data = value.detach()[list(groups.of)]  # `all_rows`, and the model has one per group
        is_overlapping = any(
            step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)
        )
        dense = torch.empty(value.shape, device="meta").stride() if is_overlapping else value.stride()
        strides = self._strides.setdefault(slot.key, dense)
        # A view of larger memory stays there, since the user's other tensors may share this memory.
        is_unaligned = not is_aligned(value) and not value.storage_offset()
        if (value.stride() != strides or is_unaligned) and not value.is_inference():
            moved = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
            value.data = moved.copy_(value)
        self._bound[slot.key] = value, value.data_ptr(), value.shape, value.stride(), value.dtype
        plain = value.detach() if self.device == devices.CPU else value.detach().to(self.device, copy=True)
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
            self._repeated[slot.key] = [plain], groups.repeated_rows

    def _repeat_rows(self) -> None:
        """Copy each row of a value with replica groups to the rows that repeat it."""
        for values, sources in self._repeated.values():
            for value in values:
                value.copy_(value[sources])

    def _bind_optimizer(
        self, unit: Unit, parameter: Tensor, optimizer: Optimizer, hyper: Hyper | None
    ) -> None:
        """Set `optimizer[unit]` to the shared optimizer state of the user's `parameter`. Missing states are added;
        those with another dtype or layout are replaced by copies. Remove a state that another process owns."""
        if not self.is_updated_here(unit.key):
            self.shared.optimizer.state.pop(parameter, None)
            return
        rates = {} if hyper is None else hyper.groups[optimizer.group_of[unit.key]]
        kept = list(RULES[optimizer.kind].states_of(optimizer, rates))
        states = self.shared.optimizer.state.get(parameter, {})
        present = [states.get(each.name) for each in kept]
        known = self._bound_states.get(unit)
        if known is not None and [*map(id, present)] == [*map(id, known)]:
            return
        groups, weight = self.settings.replica_groups.get(unit.key), self.weight(unit)
        fitting = OptimizerState()
        for each, value in zip(kept, present, strict=True):
            if groups is None:
                fitting[each.name] = fitting_state(optimizer, each, weight, value)
            elif value is None:
                first = fitting_state(optimizer, each, weight)
                fitting[each.name] = torch.stack([first] * len(groups.rows))
            else:
                rows = value if len(value) == len(groups.rows) else value[list(groups.of)]
                fitting[each.name] = rows.to(fitting_state(optimizer, each, weight).dtype)
            if value is None and states.get(each.one_with) is not None:
                fitting[each.name].fill_(1)
        if states or fitting:
            self.shared.optimizer.state[parameter] = {**states, **fitting}
        self._bound_states[unit] = tuple(fitting.values())
        if groups is not None:
            if groups.repeated_rows:
                self._repeated[f"state of {unit.key}"] = [*fitting.values()], groups.repeated_rows
            index = groups.rows.index(unit.replica)
            fitting = {name: value[index] for name, value in fitting.items()}
        self.optimizer[unit] = fitting

    # ---- a step --------------------------------------------------------------------------------------------

    def weight(self, unit: Unit) -> Tensor:
        """Return the tensor of a parameter, which updates change in place."""
        return self.values[unit.replica][self.slot_of[unit.key]]

    def is_updated_here(self, key: str) -> bool:
        """Return whether this process updates a parameter: False if a peer owns the optimizer state."""
        return self.shared.owner.get(key, self.settings.counts.instance) == self.settings.counts.instance

    def begin_step(self) -> None:
        """Set the new buffers to the current ones; take those, and the sums, of a plan that has begun the step."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            new.clear()
            new.update((name, values[name]) for name in self._changed)
        held, self.shared.held = self.shared.held, None
        if held is None or not self.settings.part.before:
            return
        sums, buffers = held
        self.new_buffers[0].update((self.slot_of[key], value) for key, value in buffers.items())
        for key, value in sums.items():
            if key in self.sums[0]:  # in a bucket
                self.sums[0][key].copy_(value)
            else:
                self.sums[0][key] = value

    def hold_sums_and_buffers(self) -> None:
        """Hold the gradient sums and new buffers of replica 0 for the plan that ends the step."""
        buffers = {self._slots[name].key: value for name, value in self.new_buffers[0].items()}
        self.shared.held = dict(self.sums[0]), buffers

    def end_step(self) -> None:
        """Copy the new buffers into `values`, and add 1 to the step count in `random_state`."""
        for values, new in zip(self.values, self.new_buffers, strict=True):
            for name, value in new.items():
                if value is not values[name]:
                    write(values[name], value)
        self._repeat_rows()
        if self.device == devices.CPU:
            self.share_buffers()
        seed, step = self.shared.random_state
        self.shared.random_state = seed, step + 1

    def share_buffers(self) -> None:
        """Copy the buffers of all replicas to `shared`."""
        if len(self.values) > 1:
            for values, own in zip(self.values, self.shared.buffers, strict=False):
                for name in self._changed:
                    own[self._slots[name].key].copy_(values[name])

    def set_loss_scale(self, scale: float) -> None:
        """Set the value by which pieces multiply the loss; do nothing if the plan has no loss scale."""
        name = next((slot.name for slot in self._slots.values() if slot.role == "loss_scale"), None)
        if name is not None and scale != self._loss_scale:
            value = torch.full_like(self.values[0][name], scale)
            for values in self.values:
                values[name] = value
            self._loss_scale = scale

    def end_call(self) -> None:
        """Copy weights and buffers from an accelerator to the model; on the CPU they are the model's own."""
        if self.device != devices.CPU:
            try:
                devices.synchronize(self.device)
            except UnrecoverableError as error:
                self.shared.lost = error
                raise
            for slot in self._weights:
                write(self._bound[slot.key][0], self._plain[slot.key])
            self.share_buffers()

    # ---- what a profile shows --------------------------------------------------------------------------------

    def memory(self, replica: int, ipu: int) -> KeptBytes:
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
        return KeptBytes(replica, ipu, weights, sum(sizes.values()) - weights, gradients, states)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; unlike `torch.equal` with NaNs."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
