"""The link of a torch optimizer to the executor it belongs to: its state, in torch's own format.

The state lives on the devices, and `optimizer.state` is empty while they have it. Whoever asks for `state_dict()` gets
it from there; what `load_state_dict()` brings is uploaded before the next call. So a checkpoint goes from here to
plain PyTorch, and back. (poptorch's optimizers have a format of their own: `state_names.py`.)
"""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from popengine import settings
from popengine.update.optimizer_rules import RULES, rule_of
from poptorch.optim.state_names import State, check_states


def torch_state(kind: str, state: Mapping[str, Tensor], steps: int) -> State:
    """One parameter's state after so many updates, as torch's optimizer of this kind has it."""
    names = {each.name: each.torch_name for each in RULES[kind].states}
    found = {names[name]: value for name, value in state.items() if names[name]}
    if names.get("step", "step"):  # torch's rule counts updates, also where ours need not
        found.setdefault("step", torch.tensor(float(steps)))
    return found


def engine_state(optimizer: settings.Optimizer, state: Mapping[str, Any]) -> State:
    """Undo `torch_state`; what this rule doesn't keep is left out."""
    names = {each.torch_name: each.name for each in rule_of(optimizer).states if each.torch_name}
    found = {names[n]: value for n, value in state.items() if n in names and isinstance(value, Tensor)}
    if optimizer.torch_dampening and found:
        found["step"] = torch.ones(())  # there was a first update
    return found


def refuse_other_rules(kind: str, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Look at torch's part of a dictionary before it is loaded into an optimizer of this kind.

    Raises:
        RuntimeError: it has the state of another kind of optimizer, of parameters of other shapes, or one that can't be
            right
    """
    states = RULES[kind].states
    always = {state.torch_name for state in states if state.dtype and not state.when}
    sometimes = {"step", *(state.torch_name for state in states)} - always - {""}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in state_dict.get("state", {}).items():
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        if tensors and not always <= set(tensors) <= always | sometimes:
            raise RuntimeError(
                f"the state to be loaded into {type(optimizer).__name__} is of another kind of optimizer: of parameter"
                f" {index} it has {', '.join(sorted(tensors))}, and {type(optimizer).__name__} keeps"
                f" {', '.join(sorted(always | sometimes))}\n"
                "  fix: use the optimizer that wrote it, or go on with a new one"
            )
        with torch._C.DisableTorchFunctionSubclass():  # reading a marked parameter copies weights
            shape = parameters[index].shape if index < len(parameters) else None
        if any(value.dim() and value.shape != shape for value in tensors.values()):
            found = next(tuple(value.shape) for value in tensors.values() if value.dim())
            raise RuntimeError(
                f"the state to be loaded into {type(optimizer).__name__} is of another model: parameter {index} had"
                f" shape {found}, and has {None if shape is None else tuple(shape)}\n"
                "  fix: give the optimizer the parameters that it had, in the same order"
            )
        names = {each.torch_name: each.name for each in states if each.torch_name}
        check_states(
            kind, {f"parameter {index}": {names.get(str(n), str(n)): value for n, value in tensors.items()}}
        )


_LOST = "_pando_lost_state"  # an optimizer's attribute: the hook that says so
_PICKLED = (
    "__getstate__"  # of an optimizer itself: what copies and pickles take; looked up there before its class
)


class OptimizerHolder(Protocol):
    """The part of an executor that a link calls."""

    frozen: settings.Optimizer

    def torch_states(self) -> dict[str, State]: ...
    def load_states(self, states: Mapping[Tensor, Any], names: dict[int, str]) -> None: ...


class Link:
    """Hooks of one optimizer; they do nothing once its executor is gone.

    Args:
        names: id(parameter) -> canonical name
        take:  hand over the state that the optimizer has
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], owner: OptimizerHolder, take: bool
    ) -> None:
        self._optimizer, self._names, self._owner = optimizer, names, weakref.ref(owner)
        if (lost := vars(optimizer).pop(_LOST, None)) is not None:
            lost.remove()
        vars(optimizer)[_PICKLED] = self._pickled
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._fill()),
            optimizer.register_state_dict_post_hook(lambda *_: self._empty()),
            optimizer.register_load_state_dict_pre_hook(
                functools.partial(refuse_other_rules, owner.frozen.kind)
            ),
            optimizer.register_load_state_dict_post_hook(lambda _: self._take()),
        ]
        if take:
            self._take()

    def _take(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.load_states(self._optimizer.state, self._names)
        self._empty()

    def _fill(self) -> None:
        owner = self._owner()
        states = owner.torch_states() if owner is not None else {}
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            state = states.get(self._names.get(id(parameter), ""))
            if state:
                self._optimizer.state[parameter] = state

    def _empty(self) -> None:
        if self._owner() is not None:
            self._optimizer.state.clear()

    def _pickled(self) -> dict[str, Any]:
        """Return the attributes of a copy or pickle of the optimizer, with the state that the devices have."""
        self._fill()
        found = dict(type(self._optimizer).__getstate__(self._optimizer))
        found["state"] = copy.copy(found["state"])
        self._empty()
        return found

    def release(self, lost: Callable[[], NoReturn] | None = None) -> None:
        """Leave the optimizer with its state, as an ordinary one; or without: then `lost` is for whoever asks."""
        if lost is None:
            self._fill()
            vars(self._optimizer).pop(_PICKLED, None)
        else:
            vars(self._optimizer)[_LOST] = self._optimizer.register_state_dict_pre_hook(lambda _: lost())
            vars(self._optimizer)[_PICKLED] = lost
        for handle in self._handles:
            handle.remove()
