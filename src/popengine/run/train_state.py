"""What training changes and calls continue with: one `TrainState` for all plans and engines of an executor.

Parameters, buffers and optimizer state are the user's own tensors; a `TrainState` finds them by canonical name.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import Error
from ..torch_private import bits_of, can_assign_data
from . import devices
from .call import Commit
from .elsewhere import Mark, is_elsewhere, mark_of, set_mark, swap_memory
from .instances.consistency import hash_of_sample
from .replica_buffers import ReplicaBuffers

if TYPE_CHECKING:
    from ..settings import Counts
    from .instances.process_group import Entries, ProcessGroup

OptimizerState = dict[str, Tensor]

_CONFIRMED_ATTRIBUTE = "_pando_confirmed"  # of optimizers: `state`, when it was equal in all processes


class TrainState:
    """What training changes and calls continue with. All plans and engines of an executor use one `TrainState`.

    Args:
        find_weights: returns the model's present parameters and buffers, by canonical name
        replicas:     of this process
    """

    def __init__(
        self, find_weights: Callable[[], Mapping[str, Tensor]], seed: int = 0, replicas: int = 1
    ) -> None:
        self.find_weights = find_weights
        # `optimizer.state[parameter]` has the optimizer state, and `parameters` returns the optimizer's parameters by
        # canonical name. Without an optimizer these are the weights.
        self.optimizer: Any = SimpleNamespace(state={})
        self.parameters = find_weights
        # If processes shard the optimizer state: the process that has a parameter's state, by canonical name.
        self.owner: dict[str, int] = {}
        # If processes share out weights or optimizer state: their group, the run's counts (of this process), and the
        # name under which peers read what this process has.
        self.shared: tuple[ProcessGroup, Counts, str] | None = None
        # Of a replica that spans several processes: this process of it, and the process that holds each weight by the
        # plans of this executor, by canonical name.
        self.part = 0
        self._holders: dict[str, int] = {}
        # Weights that may lie in a file, and no update writes: they are copied when their holder is known.
        self._in_file: Collection[str] = ()
        # (seed, number of weight updates so far): one value, so that an interrupt changes both or none.
        self.random_state: tuple[int, int] = seed, 0
        self.loss_factor = torch.ones(())  # of automatic loss scaling: multiplies the user's loss scale
        self.updates = 0  # finished weight updates since the executor set this to 0
        self.engines = 0  # that are not closed
        self.buffers = ReplicaBuffers(replicas)
        # Of a step that a plan has begun and another one will end: gradient sums and new buffers of replica 0.
        self.held: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self.commit = Commit()
        self.graph_pools: dict[torch.device, Any] = {}  # of memory, for the captured steps of all plans
        # Of trained parameters: marks of when they were equal in all processes.
        self._confirmed: dict[str, Mark] = {}

    def optimizer_states(self) -> dict[str, OptimizerState]:
        """Return the optimizer state of this process by canonical name: the tensors that updates change."""
        state, elsewhere = self.optimizer.state, self.elsewhere
        here = {key: value for key, value in self.parameters().items() if key not in elsewhere}
        return {key: state[value] for key, value in here.items() if state.get(value)}

    def entries(self, names: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
        """Return the "weights" and "optimizer" states with these canonical names, if there are such states."""
        weights, states = self.find_weights(), self.optimizer_states()
        return {
            "weights": {key: weights[key].detach() for key in names["weights"]},
            "optimizer": {key: states[key] for key in names["optimizer"] if key in states},
        }

    def export(self) -> dict[str, Any]:
        """Return the state that this process has: "random" and "loss_factor", "optimizer" and "weights" (parameters) by
        canonical name, and "buffers" for each replica. The tensors are those that calls change."""
        elsewhere = self.elsewhere
        present = {key: value for key, value in self.find_weights().items() if key not in elsewhere}
        parameters = {key: value.detach() for key, value in present.items() if isinstance(value, Parameter)}
        buffers = {key: value.detach() for key, value in present.items() if key not in parameters}
        return {
            "random": self.random_state,
            "loss_factor": float(self.loss_factor),
            "optimizer": self.optimizer_states(),
            "weights": parameters,
            "buffers": self.buffers.export(buffers),
        }

    def load(self, state: Mapping[str, Any], copies: bool = True) -> None:
        """Replace the state by the entries of an `export()`, of any number of processes together; leave out what other
        processes hold. Without `copies` the entries, equal in all processes, are used as they are: values that lie in
        a file are then read when they are used. Raises Error for state of parameters that the optimizer does not
        hold."""
        parameters, weights = self.parameters(), self.find_weights()
        if unknown := sorted(state.get("optimizer", {}).keys() - parameters.keys()):
            raise Error(
                f"there is optimizer state of {', '.join(unknown)}, which the optimizer does not hold\n"
                "  fix: build the optimizer with the parameter groups that it had when the state was saved"
            )
        here = {key: weight for key, weight in weights.items() if not is_elsewhere(weight)}
        buffers = [{key: held[key] for key in held.keys() & here.keys()} for held in state.get("buffers", ())]
        taken = set[str]()
        for key, value in ChainMap(state.get("weights", {}), *buffers[:1]).items():
            if key in here and here[key].is_meta:  # of a model whose weights have no memory yet
                swap_memory(key, here[key], value.clone() if copies else value)
                taken.add(key)
            elif key in here:
                write(here[key], value)
            if not copies and key in here and (mark := mark_of(here[key])) is not None:
                mark.confirm(here[key])
        if "optimizer" in state:
            self.optimizer.state.clear()
            for key, saved in state["optimizer"].items():
                if not is_elsewhere(parameters[key]):
                    self.optimizer.state[parameters[key]] = copy.deepcopy(saved) if copies else dict(saved)
            if not copies:
                vars(self.optimizer)[_CONFIRMED_ATTRIBUTE] = self.optimizer.state
                self._in_file = taken - state["optimizer"].keys()
        self.random_state = state.get("random", self.random_state)
        self.loss_factor.fill_(state.get("loss_factor", self.loss_factor))
        if buffers:
            self.buffers.load(buffers)

    def holders(self) -> dict[str, int]:
        """Return the process of the replica that holds each weight, by canonical name; without weights that no plan of
        an executor reads, which each process has."""
        marks = ((key, mark_of(value)) for key, value in self.find_weights().items())
        pairs = ((key, self._holders.get(key) if mark is None else mark.process) for key, mark in marks)
        return {key: process for key, process in pairs if process is not None}

    @property
    def elsewhere(self) -> frozenset[str]:
        """The canonical names of weights that only other processes hold. Here they have no memory (device "meta") while
        executors are attached, so that no old value can be read."""
        return frozenset(key for key, process in self.holders().items() if process != self.part)

    def add_holders(self, holders: Mapping[str, int], process: int) -> None:
        """Add the holders that a plan has chosen, where this process is `process` of the replica."""
        self._holders, self.part = {**self._holders, **holders}, process

    def fill_elsewhere(self, weights: Mapping[str, Tensor]) -> None:
        """Put these tensors in place of weights that only other processes hold."""
        present = self.find_weights()
        for key, value in weights.items():
            swap_memory(key, present[key], value)

    # ---- what other processes have ----------------------------------------------------------------------------

    def gather_optimizer_states(self) -> dict[str, OptimizerState]:
        """Return the optimizer state of all processes by parameter. It waits for the other processes."""
        names = self.parameters()
        states = self.optimizer_states() | self.read_elsewhere(states=names)["optimizer"]
        return {key: states[key] for key in names if key in states}

    def read_elsewhere(self, weights: Iterable[str] = (), states: Iterable[str] = ()) -> Entries:
        """Return weights and optimizer states, by canonical name, of the other processes that hold them: waits for all
        processes, which have to call this, too, or to come to their next barrier."""
        if self.shared is None:
            return {"weights": {}, "optimizer": {}}
        group, counts, name = self.shared
        holders, wanted = self.holders(), dict[int, dict[str, list[str]]]()
        for section, key in (*(("weights", key) for key in weights), *(("optimizer", key) for key in states)):
            instance = self.owner.get(key, counts.instance) if section == "optimizer" else counts.instance
            rank = instance * counts.parts + holders.get(key, counts.part)
            if rank != counts.process:
                wanted.setdefault(rank, {"weights": [], "optimizer": []})[section].append(key)
        return group.read(name, wanted)

    @property
    def has_state_of_calls(self) -> bool:
        """Return whether the optimizer's state is that which calls change: the program has not loaded another one."""
        return vars(self.optimizer).get(_CONFIRMED_ATTRIBUTE) is self.optimizer.state

    # ---- what processes compare ----------------------------------------------------------------------------

    def writes(self) -> dict[str, str]:
        """Return a text of the program's writes to each weight since the latest call, by canonical name; of new weights
        a hash. The texts must be equal in all processes of a replica, also for weights without memory."""
        changes = {}
        for key, value in self.find_weights().items():
            mark = mark_of(value) or Mark(None, value)
            count = mark.writes(value)
            texts = [f"written {count} times" if count else "" if count == 0 else "other memory"]
            texts += [mark.loaded, "" if mark.is_compared else hash_of_sample(value)]
            if any(texts):
                changes[key] = ", ".join(filter(None, texts))
        return changes

    def optimizer_changes(self) -> dict[str, str]:
        """Return a text if the program has loaded an optimizer state or chosen another optimizer since the latest call;
        before the first call also a hash of each state. All have to be equal in all processes."""
        optimizer, parameters = self.optimizer, self.parameters().items()
        if self.has_state_of_calls:
            return {}
        states = (
            [] if self.holders() else [(key, optimizer.state.get(value, {})) for key, value in parameters]
        )
        named = ((f"{key} {name}", value) for key, state in states for name, value in state.items())
        hashes = {name: hash_of_sample(value) for name, value in named if isinstance(value, Tensor)}
        return {**hashes, "all parameters": "loaded, or of another optimizer"}

    def confirm_changes(self) -> None:
        """Note that weights and optimizer state are equal in all processes: after a barrier and after a call. Free the
        weights that only other processes hold, and their state. Raises Error if autograd uses such a weight."""
        optimizer = self.optimizer
        vars(optimizer)[_CONFIRMED_ATTRIBUTE] = optimizer.state
        for key, value in self.find_weights().items() if self._holders else ():
            mark = mark_of(value)
            if mark is None:
                set_mark(value, mark := Mark(None, value))
            mark.process = self._holders.get(key, mark.process)
            if mark.process not in (None, self.part) and not is_elsewhere(value):
                swap_memory(key, value, value.detach().to("meta"), elsewhere=True)
            elif key in self._in_file:
                swap_memory(key, value, value.detach().clone())
            mark.confirm(value)
        self._in_file = ()
        for parameter in self.parameters().values() if self._holders else ():
            if is_elsewhere(parameter):
                optimizer.state.pop(parameter, None)

    def move_to_host(self) -> bool:
        """Move weights, buffers and optimizer state from accelerators to the host's memory, unless they are lost;
        return whether any was there."""
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        return self.commit.state != "lost" and move_to_host(
            self.find_weights(), [*states, *self.buffers.values]
        )

    def confirm(self, parameters: Mapping[str, Tensor]) -> None:
        """Record that these parameters are equal in all processes: after a comparison, or an update in all."""
        self._confirmed |= {key: Mark(None, value) for key, value in parameters.items()}

    def unconfirmed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that were written or replaced since `confirm`, by name."""
        marks = ((key, value, self._confirmed.get(key)) for key, value in parameters.items())
        return {key: value.detach() for key, value, mark in marks if mark is None or mark.writes(value) != 0}

    def count_step(self, is_update: bool) -> None:
        """Count a finished step, so that the next one draws other random numbers."""
        seed, step = self.random_state
        self.random_state = seed, step + 1
        self.updates += is_update


def move_to_host(weights: Mapping[str, Tensor], groups: Iterable[dict[str, Any]] = ()) -> bool:
    """Move weights, and the tensors in these dictionaries, from accelerators to the host's memory; return whether any
    was there. Weights stay the same objects."""
    on_device = [(key, value) for key, value in weights.items() if devices.has_queue(value.device)]
    states = [
        (group, name)
        for group in groups
        for name, value in group.items()
        if isinstance(value, Tensor) and devices.has_queue(value.device)
    ]
    # Before anything moves: the copies below, to memory that is not pinned, wait one by one.
    for device in {value.device for _, value in on_device} | {group[name].device for group, name in states}:
        devices.synchronize(device)
    for group, name in states:
        group[name] = group[name].cpu()
    for key, value in on_device:
        move_to(key, value, value.detach().cpu())
    return bool(on_device or states)


def move_to(key: str, value: Tensor, memory: Tensor) -> None:
    """Put a weight of the user's into another memory, which has its values. The tensor stays the same object."""
    if can_assign_data(value, memory):
        value.data = memory
        return
    swap_memory(key, value, memory)  # assigning `data` refuses another kind of device, such as meta


def write(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of the user's, in place; `TrainState.writes` does not count it."""
    mark = mark_of(target)
    count = mark and mark.writes(target)
    # Tensors that were made in inference mode can be written only there.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.detach().copy_(value)
    if mark is not None and count is not None:
        mark.set_writes(target, count)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; unlike `torch.equal` with NaNs."""
    return torch.equal(bits_of(one), bits_of(other))
