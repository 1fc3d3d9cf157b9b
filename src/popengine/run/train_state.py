"""What training changes and calls continue with: one `TrainState` for all plans and engines of an executor.

Parameters, buffers and optimizer state are the user's own tensors; a `TrainState` finds them by canonical name.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import Error
from ..torch_private import can_assign_data
from . import devices
from .call import Commit
from .elsewhere import is_elsewhere, swap_memory

OptimizerState = dict[str, Tensor]


class TrainState:
    """What training changes and calls continue with. All plans and engines of an executor use one `TrainState`.

    Args: find_weights: returns the model's present parameters and buffers, by canonical name
    """

    def __init__(self, find_weights: Callable[[], Mapping[str, Tensor]], seed: int = 0) -> None:
        self.find_weights = find_weights
        # `optimizer.state[parameter]` has the optimizer state, and `parameters` returns the optimizer's parameters by
        # canonical name. Without an optimizer these are the weights.
        self.optimizer: Any = SimpleNamespace(state={})
        self.parameters = find_weights
        # If processes shard the optimizer state: the process that has a parameter's state, by canonical name.
        self.owner: dict[str, int] = {}
        self.shard_name = ""  # under which peers read this process's shard; "": it is not published
        # Of a replica that spans several processes: the weights that only others of them hold, by canonical name. Here
        # they have no memory (device "meta"), so that no old value can be read.
        self.elsewhere: frozenset[str] = frozenset()
        # (seed, number of weight updates so far): one value, so that an interrupt changes both or none.
        self.random_state: tuple[int, int] = seed, 0
        self.loss_factor = torch.ones(())  # of automatic loss scaling: multiplies the user's loss scale
        self.updates = 0  # finished weight updates since the executor set this to 0
        self.engines = 0  # that are not closed
        # By replica, buffers that forward changes. Those of replica 0 are copies of the model's own after the
        # latest step: the model's differ if the user has written them, and then all replicas take these.
        self.buffers: list[dict[str, Tensor]] = []
        # Of a step that a plan has begun and another one will end: gradient sums and new buffers of replica 0.
        self.held: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self.commit = Commit()
        # Of trained parameters, when they were equal in all processes.
        self._confirmed: dict[str, VersionStamp] = {}

    def optimizer_states(self) -> dict[str, OptimizerState]:
        """Return the optimizer state of this process by canonical name: the tensors that updates change."""
        state = self.optimizer.state
        return {key: state[value] for key, value in self.parameters().items() if state.get(value)}

    def run_own_step(self, gradients: Mapping[str, Tensor]) -> None:
        """Run the optimizer's own `step()` on gradients by canonical name; attributes `grad` stay the program's."""
        parameters, optimizer = self.parameters(), self.optimizer
        kept = [parameter.grad for parameter in parameters.values()]
        try:
            for name, parameter in parameters.items():
                parameter.grad = gradients.get(name)
            with torch.enable_grad():  # as in a plain loop
                # Some programs keep a number under this name.
                optimizer.step() if callable(optimizer.step) else type(optimizer).step(optimizer)
        finally:
            for parameter, gradient in zip(parameters.values(), kept, strict=True):
                parameter.grad = gradient

    def export(self, weights: bool = True) -> dict[str, Any]:
        """Return the state that this process has: "random" and "loss_factor", "optimizer" by canonical name, and with
        `weights` "weights" (parameters) and "buffers" for each replica. The tensors are those that calls change."""
        found = {
            "random": self.random_state,
            "loss_factor": float(self.loss_factor),
            "optimizer": self.optimizer_states(),
        }
        if not weights:
            return found
        present = {key: value for key, value in self.find_weights().items() if key not in self.elsewhere}
        parameters = {key: value.detach() for key, value in present.items() if isinstance(value, Parameter)}
        buffers = {key: value.detach() for key, value in present.items() if key not in parameters}
        own = self.buffers or [{}]
        if self.buffers:
            self.own_buffers(buffers, own[0].keys() & buffers.keys(), len(own))
        replicas = [{key: each.get(key, value) for key, value in buffers.items()} for each in own]
        return {**found, "weights": parameters, "buffers": replicas}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the state by copies of the entries of an `export()`, of any number of processes together; leave out
        what other processes hold. Raises Error for state of parameters that the optimizer does not hold."""
        parameters, weights = self.parameters(), self.find_weights()
        if unknown := sorted(state.get("optimizer", {}).keys() - parameters.keys()):
            raise Error(
                f"there is optimizer state of {', '.join(unknown)}, which the optimizer does not hold\n"
                "  fix: build the optimizer with the parameter groups that it had when the state was saved"
            )
        here = {key: weight for key, weight in weights.items() if not is_elsewhere(weight)}
        buffers = [{key: each[key] for key in each.keys() & here.keys()} for each in state.get("buffers", ())]
        for key, value in ChainMap(state.get("weights", {}), *buffers[:1]).items():
            if key in here and here[key].is_meta:  # of a model whose weights have no memory yet
                swap_memory(key, here[key], value.clone())
            elif key in here:
                write(here[key], value)
        if "optimizer" in state:
            self.optimizer.state.clear()
            names = {"velocity": "momentum_buffer"}  # as earlier versions wrote the momentum of SGD and LARS
            for key, found in state["optimizer"].items():
                if not is_elsewhere(parameters[key]):
                    copied = {names.get(name, name): copy.deepcopy(value) for name, value in found.items()}
                    self.optimizer.state[parameters[key]] = copied
        self.random_state = state.get("random", self.random_state)
        self.loss_factor.fill_(state.get("loss_factor", self.loss_factor))
        if buffers:
            self.buffers = [{key: value.clone() for key, value in each.items()} for each in buffers]

    def release_elsewhere(self) -> None:
        """Free the weights that only other processes hold, and their optimizer state. Raises Error if autograd uses
        such a weight."""
        parameters = self.parameters() if self.elsewhere else {}
        for key, value in self.find_weights().items() if self.elsewhere else ():
            if key in self.elsewhere and not is_elsewhere(value):
                swap_memory(key, value, value.detach().to("meta"), elsewhere=True)
                self.optimizer.state.pop(parameters.get(key), None)

    def fill_elsewhere(self, weights: Mapping[str, Tensor]) -> None:
        """Let weights that only other processes hold be these tensors, where shape and dtype are equal."""
        for key, value in self.find_weights().items() if self.elsewhere else ():
            other = weights.get(key) if key in self.elsewhere and value.is_meta else None
            if other is not None and (value.shape, value.dtype) == (other.shape, other.dtype):
                swap_memory(key, value, other)

    def move_to_host(self) -> bool:
        """Move weights, buffers and optimizer state from accelerators to the host's memory, unless they are lost;
        return whether any was there."""
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        return self.commit.state != "lost" and move_to_host(self.find_weights(), [*states, *self.buffers])

    def marks_of_optimizer(self) -> list[tuple[int, int]]:
        """Return (id, version) of each value in the optimizer's state: a write, or another value, changes them."""
        states = self.optimizer.state.values()
        values = [value for state in states if isinstance(state, dict) for value in state.values()]
        return [(id(v), v._version if isinstance(v, Tensor) and not v.is_inference() else 0) for v in values]

    def confirm(self, parameters: Mapping[str, Tensor]) -> None:
        """Record that these parameters are equal in all processes: after a comparison, or an update in all."""
        self._confirmed |= {key: version_stamp(value) for key, value in parameters.items()}

    def unconfirmed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of these parameters that were written or replaced since `confirm`, by name."""
        return {
            key: value.detach()
            for key, value in parameters.items()
            if key not in self._confirmed or not self._confirmed[key].fits(value)
        }

    def own_buffers(
        self, weights: Mapping[str, Tensor], keys: Iterable[str], replicas: int
    ) -> list[dict[str, Tensor]]:
        """Return `buffers`, with these keys for each replica. A buffer that has no value of a replica's own, or
        that the user has written, gets the model's value (in `weights`) in all replicas."""
        self.buffers.extend({} for _ in range(replicas - len(self.buffers)))
        for key in keys:
            value = weights[key].detach()
            for own in self.buffers:
                has_kept = key in own and own[key].shape == value.shape
                own[key] = own[key].to(value) if has_kept else value.clone()
            is_same = (_bits_of(self.buffers[0][key]) == _bits_of(value)).all()
            # Without a wait of the host for an accelerator.
            for own in self.buffers if devices.has_queue(value.device) or not is_same else ():
                own[key].copy_(torch.where(is_same, own[key], value))
        return self.buffers


class VersionStamp(NamedTuple):
    """What a write to a tensor changes. `alias` keeps its memory: no other tensor can get the same address."""

    value: Tensor
    alias: Tensor
    version: int

    def fits(self, value: Tensor) -> bool:
        """Return whether a tensor is this one, and neither its memory nor its version counter has changed."""
        version, address = version_stamp(value).version, self.alias.data_ptr()
        return self.value is value and (address, self.version) == (value.data_ptr(), version)


def version_stamp(value: Tensor) -> VersionStamp:
    return VersionStamp(value, value.detach(), 0 if value.is_inference() else value._version)


def move_to_host(weights: Mapping[str, Tensor], groups: Iterable[dict[str, Any]] = ()) -> bool:
    """Move weights, and the tensors in these dictionaries, from accelerators to the host's memory; return whether any
    was there. Weights stay the same objects. Waits once for each accelerator."""
    on_device = [(key, value) for key, value in weights.items() if devices.has_queue(value.device)]
    copies = [(key, value, devices.download(value.detach())) for key, value in on_device]
    found = {value.device for _, value in on_device}
    for group in groups:
        for name, value in group.items():
            if isinstance(value, Tensor) and devices.has_queue(value.device):
                group[name] = devices.download(value)
                found.add(value.device)
    for device in found:
        devices.synchronize(device)
    for key, value, copied in copies:
        move_to(key, value, copied)
    return bool(found)


def move_to(key: str, value: Tensor, memory: Tensor) -> None:
    """Put a weight of the user's into another memory, which has its values. The tensor stays the same object."""
    if can_assign_data(value, memory):
        value.data = memory
        return
    swap_memory(key, value, memory)  # assigning `data` refuses another kind of device, such as meta


def write(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of the user's, in place."""
    # Tensors that were made in inference mode can be written only there.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.detach().copy_(value)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; unlike `torch.equal` with NaNs."""
    return torch.equal(_bits_of(one), _bits_of(other))


def _bits_of(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
