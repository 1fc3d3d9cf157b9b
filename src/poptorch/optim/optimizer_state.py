"""The state of an optimizer outside of an executor: poptorch's format, torch's format, hooks on optimizers.

`state_dict()` of poptorch's optimizers has two dictionaries of tensors. `RULES` defines the keys' prefixes:

ipu_state   Accl1___<parameter>   first state of the rule: velocity, first moment, or RMSprop's square average
            Accl2___<parameter>   second moment, or RMSprop's momentum buffer
            Accl3___<parameter>   mean of the gradients (centered RMSprop)
            Step___<parameter>    number of updates
ipu_param   the rates, see `rates.py`

torch's optimizers keep torch's own format, so a checkpoint can be loaded in plain PyTorch, and the other way round.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from popengine import settings
from popengine.update.optimizer_rules import RULES, rule_of

State = dict[str, Tensor]

_SQUARES = ("exp_avg_sq", "square_avg")  # states of which an update takes the root


# poptorch's format ------------------------------------------------------------------------------------


def state_entries(kind: str, states: Mapping[str, State]) -> dict[str, Tensor]:
    """Convert states, by canonical parameter name, to an "ipu_state". Tensors are not copied."""
    prefixes = {state.name: state.file for state in RULES[kind].states}
    return {
        f"{prefixes[name]}___{parameter}": value
        for parameter, state in states.items()
        for name, value in state.items()
    }


def states_of(kind: str, ipu_state: Mapping[str, Tensor]) -> dict[str, State]:
    """Return the states in an "ipu_state", by canonical parameter name, without states of other rules."""
    names = {state.file: state.name for state in RULES[kind].states}
    states: dict[str, State] = {}
    for key, value in ipu_state.items():
        prefix, _, parameter = key.partition("___")
        if parameter and prefix in names:
            states.setdefault(parameter, {})[names[prefix]] = value
    return states


def check_states(
    kind: str, states: Mapping[str, State], shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> None:
    """Check states before they are loaded.

    Args:
        states: the states of each parameter, by their names in the rule
        shapes: the shapes of parameters, to compare states with
    Raises:
        RuntimeError: another shape, or a value that no update yields, such as a negative number of updates
    """
    for parameter, state in states.items():
        for name, value in state.items():
            found, shape, why = value.detach(), shapes.get(parameter), ""
            if name == "step":
                if not bool((found.isfinite() & (found >= 0) & (found == found.floor())).all()):
                    why = "a count of updates is a whole number, 0 or more"
            elif name in _SQUARES and bool((found < 0).any()):
                why = "a mean of squares is nowhere negative"
            elif shape is not None and tuple(found.shape) != shape:
                why = f"the parameter has the shape {list(shape)}"
            if why:
                shown = found.tolist() if found.numel() == 1 else f"a tensor of the shape {list(found.shape)}"
                raise RuntimeError(
                    f"the state to be loaded can't be right: {name} of {parameter} is {shown}\n"
                    f"  why: {why}\n"
                    f"  fix: load what state_dict() of an optimizer of this kind ({kind}) returned for this model"
                )


# torch's format ---------------------------------------------------------------------------------------


def torch_state(kind: str, state: Mapping[str, Tensor], steps: int) -> State:
    """Convert one parameter's state, after `steps` updates, to that of torch's optimizer of this kind."""
    names = {each.name: each.torch_name for each in RULES[kind].states}
    result = {names[name]: value for name, value in state.items() if names[name]}
    if names.get("step", "step"):  # torch counts the updates of every rule but SGD
        result.setdefault("step", torch.tensor(float(steps)))
    return result


def engine_state(optimizer: settings.Optimizer, state: Mapping[str, Any]) -> State:
    """Convert torch's state of one parameter to the engine's, without tensors that the rule doesn't have."""
    names = {each.torch_name: each.name for each in rule_of(optimizer).states if each.torch_name}
    result = {names[n]: value for n, value in state.items() if n in names and isinstance(value, Tensor)}
    if optimizer.flags.get("torch_dampening") and result:
        result["step"] = torch.ones(())  # there was a first update
    return result


def refuse_other_rules(kind: str, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Check torch's part of a `state_dict()` before it is loaded into an optimizer of this kind.

    Raises:
        RuntimeError: the state is of another kind of optimizer or model, or has values that no update yields
    """
    rule_states = RULES[kind].states
    names = {each.torch_name: each.name for each in rule_states if each.torch_name}
    always = {each.torch_name for each in rule_states if each.dtype and not each.when}
    known = {"step", *names}
    with torch._C.DisableTorchFunctionSubclass():  # reading a marked parameter copies weights
        shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    states: dict[str, State] = {}
    for index, state in state_dict.get("state", {}).items():
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        if tensors and not always <= set(tensors) <= known:
            raise RuntimeError(
                f"the state to be loaded into {type(optimizer).__name__} is of another kind of optimizer: of parameter"
                f" {index} it has {', '.join(sorted(tensors))}, and {type(optimizer).__name__} keeps"
                f" {', '.join(sorted(known))}\n"
                "  fix: use the optimizer that wrote it, or go on with a new one"
            )
        states[f"parameter {index}"] = {names.get(name, name): value for name, value in tensors.items()}
    check_states(kind, states, {f"parameter {index}": shape for index, shape in enumerate(shapes)})


# torch's optimizers while an executor trains ------------------------------------------------------------

# Attribute of an optimizer whose state is lost: the handle of the hook that raises the error.
_LOST = "_pando_lost_state"
_PICKLED = "__getstate__"  # set on the optimizer itself: copies and pickles use it instead of the class's


class TorchLink:
    """Hooks that connect a torch optimizer with its executor; they do nothing after the executor is gone.

    While they are set, the state is on the devices and `optimizer.state` is empty. `state_dict()` reads the
    state from the devices; a state loaded by `load_state_dict()` is uploaded before the next call.

    Args:
        names: id(parameter) -> canonical name
        owner: the executor's `OptimizerLink`, which reads and writes the state on the devices
        take:  whether the executor loads the state that the optimizer has now
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], owner: Any, take: bool
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
        """Return the attributes for a copy or pickle of the optimizer, including the state on the devices."""
        self._fill()
        result = dict(type(self._optimizer).__getstate__(self._optimizer))
        result["state"] = copy.copy(result["state"])
        self._empty()
        return result

    def release(self, lost: Callable[[], NoReturn] | None = None) -> None:
        """Write the state into the optimizer, and remove the hooks. If the state is lost, `lost` is called
        when the state is read later, to raise an error."""
        if lost is None:
            self._fill()
            vars(self._optimizer).pop(_PICKLED, None)
        else:
            vars(self._optimizer)[_LOST] = self._optimizer.register_state_dict_pre_hook(lambda _: lost())
            vars(self._optimizer)[_PICKLED] = lost
        for handle in self._handles:
            handle.remove()
