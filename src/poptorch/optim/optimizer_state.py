"""Rates of optimizers, the names that PopTorch gives to rates and states, and checks of states.

`state_dict()` of poptorch's optimizers has two dictionaries of tensors. `RULES` defines the keys' prefixes:

ipu_state   Accl1___<parameter>   first state of the rule: velocity, first moment, or RMSprop's square average
            Accl2___<parameter>   second moment, or RMSprop's momentum buffer
            Accl3___<parameter>   mean of the gradients (centered RMSprop)
            Step___<parameter>    number of updates
ipu_param   <rate>___specific___<parameter>   a rate of the parameter's group
            lossScaling_FLOAT                 the loss scaling of the optimizer

The rest of the dictionary is torch's, with the same states and rates, so a checkpoint can be loaded in plain PyTorch,
and the other way round.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from popengine.settings import Hyper
from popengine.update.optimizer_rules import OWN_STEP, RULES

State = dict[str, Tensor]

_SQUARES = ("exp_avg_sq", "square_avg")  # states of which an update takes the root
MAX_WEIGHT_NORM = 65500.0  # the default of LAMB
_SPECIFIC = "___specific___"  # between the name of a rate and its parameter's
_SWITCHES = ("nesterov", "maximize", "fused")  # not in "ipu_param"


# rates ------------------------------------------------------------------------------------------------


def rates_of(kind: str, optimizer: Any) -> Hyper:
    """Return the rates of an optimizer's parameter groups as floats, and its loss scaling. Raises
    AssertionError if a key of the rule `kind` is missing in a group, or a value is invalid."""
    scaling = as_float(getattr(optimizer, "loss_scaling", 1.0), "loss_scaling", "the optimizer")
    assert 0 < scaling < math.inf, (
        f"loss_scaling has to be a positive, finite number, and is {scaling:g}\n"
        "  why: the loss is multiplied by it, and gradients are divided by it before the update\n"
        "  fix: loss_scaling=1.0, or a power of two for half precision"
    )
    groups = (_group_rates(kind, group, index) for index, group in enumerate(optimizer.param_groups))
    return Hyper(groups=tuple(groups), loss_scaling=scaling)


def _group_rates(kind: str, group: dict[str, Any], index: int) -> dict[str, float]:
    """Return the rates of parameter group `index`, with "betas" split. Raises errors as `rates_of`."""
    rule, where, rates = RULES[kind], f"parameter group {index}", {}
    for key in rule.group_keys:
        assert key in group, (
            f"Mandatory attribute {key} not found in {where} of the {kind} optimizer; "
            f"fix: optimizer.param_groups[{index}][{key!r}] = ..."
        )
    for name in (*rule.rates, "maximize"):
        value = group.get(name, False)
        if name == "betas":
            assert isinstance(value, tuple) and len(value) == 2, (
                f"Expected a pair of numbers, a tuple, for betas in {where}, but found {value!r}"
            )
            rates["beta1"], rates["beta2"] = (as_float(beta, name, where) for beta in value)
        else:
            is_default = name == "max_weight_norm" and value is None
            rates[name] = MAX_WEIGHT_NORM if is_default else as_float(value, name, where)
    if rule.fused is not None and group.get("fused"):
        rates["fused"] = 1.0
    return rates


def as_float(value: Any, name: str, where: str) -> float:
    """Return a number or a one-element tensor as a float. Raises AssertionError for NaN and other types."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if isinstance(value, (str, bytes, Tensor)) or math.isnan(value):
            raise TypeError
        return float(value)
    except TypeError:
        raise AssertionError(f"Expected a number for {name} in {where}, but found {value!r}") from None


def _ipu_param_name(rate: str) -> str:
    """Return the name of a rate in "ipu_param": "weightDecay" for "weight_decay", "learningRate" for "lr"."""
    first, *others = ["learning", "rate"] if rate == "lr" else rate.split("_")
    return first + "".join(map(str.capitalize, others))


def to_ipu_param(group_of: Mapping[str, int], hyper: Hyper) -> dict[str, Tensor]:
    """Return the "ipu_param" of an optimizer: the loss scaling, and for each parameter its group's rates. SGD
    without momentum has two derived values instead, with dampening d, weight decay λ and loss scaling s:
    scaledLearningRate0 = lr·(1 − d) / s and weightDecayScaleFactor0 = 1 − lr·(1 − d)·λ."""
    entries = {"lossScaling_FLOAT": torch.tensor(float(hyper.loss_scaling))}
    for parameter, index in group_of.items():
        rates = hyper.groups[index]
        values = {_ipu_param_name(name): rate for name, rate in rates.items() if name not in _SWITCHES}
        if "dampening" in rates and rates["momentum"] == 0:
            step = rates["lr"] * (1 - rates["dampening"])
            factor = 1 - step * rates["weight_decay"]
            values = {"scaledLearningRate0": step / hyper.loss_scaling, "weightDecayScaleFactor0": factor}
        for name, value in values.items():
            entries[f"{name}{_SPECIFIC}{parameter}"] = torch.tensor(value)
    return entries


# poptorch's format ------------------------------------------------------------------------------------


def names_in(ipu_param: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the parameters in an "ipu_param", in their order."""
    keys = (key.partition(_SPECIFIC)[2] for key in ipu_param)
    return tuple(dict.fromkeys(filter(None, keys)))


def to_ipu_state(kind: str, states: Mapping[str, State]) -> dict[str, Tensor]:
    """Convert states, by canonical parameter name, to an "ipu_state" with the same tensors."""
    prefixes = {state.name: state.file for state in RULES[kind].states if state.file}
    return {
        f"{prefixes[name]}___{parameter}": value
        for parameter, state in states.items()
        for name, value in state.items()
        if name in prefixes
    }


def from_ipu_state(kind: str, ipu_state: Mapping[str, Tensor]) -> dict[str, State]:
    """Convert an "ipu_state" to states by canonical parameter name, without entries that the rule lacks."""
    names = {state.file: state.name for state in RULES[kind].states if state.file}
    states: dict[str, State] = {}
    for key, value in ipu_state.items():
        prefix, _, parameter = key.partition("___")
        if parameter and prefix in names:
            states.setdefault(parameter, {})[names[prefix]] = value
    return states


# checks -----------------------------------------------------------------------------------------------


def check_torch_state(kind: str, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError if torch's part of a `state_dict()` has states of another kind of optimizer, of
    other shapes than the parameters, or with values that no update yields. Any state fits an own `step()`."""
    if kind == OWN_STEP:
        return
    rule_states = RULES[kind].states
    always = {each.name for each in rule_states if each.dtype and not each.when}
    known = {"step", *(each.name for each in rule_states)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = state_dict["state"].get(index, {})
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        if tensors and not always <= set(tensors) <= known:
            raise RuntimeError(
                f"the state to be loaded into {type(optimizer).__name__} is of another kind of optimizer: of parameter"
                f" {index} it has {', '.join(sorted(tensors))}, and {type(optimizer).__name__} keeps"
                f" {', '.join(sorted(known))}\n"
                "  fix: use the optimizer that wrote it, or go on with a new one"
            )
        for name, value in tensors.items():
            if why := _fault_of_state(name, value.detach(), parameter.shape):
                shown = value.tolist() if value.numel() == 1 else f"a tensor of the shape {list(value.shape)}"
                raise RuntimeError(
                    f"the state to be loaded can't be right: {name} of parameter {index} is {shown}\n"
                    f"  why: {why}\n"
                    f"  fix: load what state_dict() of an optimizer of this kind ({kind}) returned for this model"
                )


def _fault_of_state(name: str, value: Tensor, shape: torch.Size) -> str:
    """Return why a state of a parameter with this shape can't be right; "" if it can."""
    if name == "step":
        is_count = value.isfinite() & (value >= 0) & (value == value.floor())
        return "" if is_count.all() else "a count of updates is a whole number, 0 or more"
    if name in _SQUARES and bool((value < 0).any()):
        return "a mean of squares is nowhere negative"
    return "" if value.shape == shape else f"the parameter has the shape {list(shape)}"
