"""Optimizer -> settings: the rule and its rates as the engine knows them, read once and checked."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from popengine import settings
from popengine.errors import Error
from popengine.update.optimizer_rules import RULES, Rule
from poptorch.optim.optimizer_base import MAX_WEIGHT_NORM, Optimizer

logger = logging.getLogger("poptorch::python")

# AdamW first: torch derives it from Adam.
_TORCH_KINDS = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.RMSprop: "rmsprop",
}
_OURS = ("SGD", "Adam", "AdamW", "RMSprop", "LAMB", "LARS")  # in words


class UnknownParameterError(Error, KeyError):
    """The optimizer holds parameters that aren't the model's."""


def freeze_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    warn: Callable[[str], None] = logger.warning,
) -> tuple[settings.Optimizer, settings.Hyper]:
    """Check an optimizer and take a snapshot of it.

    Args:   names: id(parameter) -> canonical name, for every parameter of the model
            warn: told that a subclass's own Python code won't run
    Raises: AssertionError for an unsupported type or a bad attribute, ValueError for amsgrad,
            UnknownParameterError for parameters that aren't the model's
    """
    kind = kind_of(optimizer)
    rule = RULES[kind]
    if type(optimizer) not in _TORCH_KINDS and "_kind" not in vars(type(optimizer)):
        warn(
            "Poptorch does not run Python optimizer code directly: optimizers subclassed from classes in "
            "poptorch.optim or torch.optim are unlikely to behave as intended; "
            f"the engine runs the update, not the Python of {type(optimizer).__name__}"
        )
    _check_presence(optimizer, rule, kind)
    hyper = rates_of(kind, optimizer.param_groups, getattr(optimizer, "loss_scaling", 1.0))
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported. Fix: leave out amsgrad=True")
    frozen = settings.Optimizer(
        kind=kind,
        group_of=_group_of(optimizer, names),
        state_types=_state_types(optimizer, rule),
        accumulator_type=getattr(optimizer, "accum_type", torch.float32),
        max_grad_norm=_limit(optimizer, "max_grad_norm"),
        max_grad_value=_limit(optimizer, "max_grad_value"),
        centered=_is_centered(optimizer, rule),
        tf_variant=kind == "rmsprop" and bool(getattr(optimizer, "use_tf_variant", False)),
        bias_correction=bool(getattr(optimizer, "bias_correction", True)),
        # torch's own SGD does not dampen the first step; poptorch's does.
        torch_dampening=kind == "sgd"
        and not isinstance(optimizer, Optimizer)
        and any(group["dampening"] for group in optimizer.param_groups),
    )
    return frozen, hyper


def rates_of(kind: str, groups: Sequence[dict[str, Any]], loss_scaling: Any) -> settings.Hyper:
    """Return the rates of parameter groups as numbers. Raises AssertionError, where one is no number in its range."""
    scaling = _number(loss_scaling, "loss_scaling", "the optimizer")
    if not 0 < scaling < math.inf:
        raise AssertionError(
            f"loss_scaling has to be a positive, finite number, and is {loss_scaling!r}\n"
            "  why: the loss is multiplied by it, and gradients are divided by it before the update\n"
            "  fix: loss_scaling=1.0, or a power of two for half precision"
        )
    rates = tuple(_rates(RULES[kind], group, index) for index, group in enumerate(groups))
    return settings.Hyper(groups=rates, loss_scaling=scaling)


def kind_of(optimizer: Any) -> str:
    """The rule an optimizer stands for, whichever library it's from: a key of `RULES`."""
    kinds = (kind for of_torch, kind in _TORCH_KINDS.items() if isinstance(optimizer, of_torch))
    own: Any = optimizer
    kind: str | None = own._kind if isinstance(optimizer, Optimizer) else next(kinds, None)
    if kind == "adam":
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in own.param_groups}
        if len(decoupled) > 1:
            raise AssertionError("decoupled_weight_decay must be equal in all parameter groups of Adam")
        return "adamw" if decoupled == {True} else "adam"
    if kind is not None:
        return kind
    of_torch = sorted(kind.__name__ for kind in _TORCH_KINDS)
    supported = ", ".join(
        [*(f"poptorch.optim.{name}" for name in _OURS), *(f"torch.optim.{name}" for name in of_torch)]
    )
    raise AssertionError(
        f"Unsupported optimizer type. Types supported: {supported}; "
        f"this one is {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    )


def label_of(optimizer: torch.optim.Optimizer) -> str:
    """The rule's name in warnings and errors: what of it is compiled in."""
    kind = kind_of(optimizer)
    if kind == "sgd":
        return "SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"
    if _is_centered(optimizer, RULES[kind]):
        return f"{kind.upper()}_CENTERED"
    if not getattr(optimizer, "bias_correction", True):
        return f"{kind.upper()}_NO_BIAS"
    return kind.upper()


def _check_presence(optimizer: torch.optim.Optimizer, rule: Rule, kind: str) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for name in (*rule.rates, *rule.flags):
            if name not in group:
                raise AssertionError(
                    f"Mandatory attribute {name} not found in parameter group {index} of "
                    f"the {kind} optimizer; fix: optimizer.param_groups[{index}][{name!r}] = ..."
                )


def _rates(rule: Rule, group: dict[str, Any], index: int) -> dict[str, float]:
    where = f"parameter group {index}"
    rates = {}
    for name in (*rule.rates, "maximize"):
        if name == "betas":
            rates["beta1"], rates["beta2"] = _betas(group["betas"], where)
        elif name == "max_weight_norm" and group[name] is None:
            rates[name] = MAX_WEIGHT_NORM
        else:
            rates[name] = _number(group.get(name, False), name, where)
    if rule.fused is not None and group.get("fused"):
        rates["fused"] = 1.0
    return rates


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if isinstance(value, (str, bytes, Tensor)) or math.isnan(value):
            raise TypeError
        return float(value)
    except TypeError:
        raise AssertionError(f"Expected a number for {name} in {where}, but found {value!r}") from None


def _limit(optimizer: torch.optim.Optimizer, name: str) -> float:
    """A bound on gradients, which any optimizer may have as an attribute."""
    limit = _number(getattr(optimizer, name, math.inf), name, "the optimizer")
    if limit < 0:
        raise AssertionError(
            f"{name} has to be 0 or more, and is {limit:g}\n"
            "  why: gradients would change their sign\n"
            f"  fix: a positive {name}; or leave it out for no clipping"
        )
    return limit


def _betas(betas: Any, where: str) -> tuple[float, float]:
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise AssertionError(
            f"Expected a pair of numbers, a tuple, for betas in {where}, but found {betas!r}"
        )
    return _number(betas[0], "betas[0]", where), _number(betas[1], "betas[1]", where)


def _is_centered(optimizer: torch.optim.Optimizer, rule: Rule) -> bool:
    if "centered" not in rule.flags:
        return False
    values = {bool(group["centered"]) for group in optimizer.param_groups}
    if len(values) > 1:
        raise AssertionError(
            "centered must be equal in all parameter groups of RMSprop, but some have True, some False"
        )
    return values == {True}


def _state_types(optimizer: torch.optim.Optimizer, rule: Rule) -> dict[str, torch.dtype]:
    """The dtype of each state the rule keeps; a momentum that is and stays zero keeps none."""
    there = {"": True, "centered": _is_centered(optimizer, rule)}
    if "momentum" in rule.rates:
        there["momentum"] = _has_momentum(optimizer)
    return {
        state.name: getattr(optimizer, state.dtype, torch.float32)
        for state in rule.states
        if state.dtype and there[state.when]
    }


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is momentum, or can be one day."""
    marks = getattr(optimizer, "variable_attrs", None)
    may_change = marks is not None and not marks.isConstant("momentum")
    return may_change or any(group["momentum"] for group in optimizer.param_groups)


def _group_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, int]:
    members = [
        (parameter, index, place)
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    # Nothing of a parameter but its identity is read: any other look at one that trains copies all weights to the host.
    unknown = [
        f"group {index}, parameter {place}, shape {list(parameter.shape)}"
        for parameter, index, place in members
        if id(parameter) not in names
    ]
    if unknown:
        shown = [*unknown[:8], f"... and {len(unknown) - 8} more"] if len(unknown) > 8 else unknown
        raise UnknownParameterError(
            "the optimizer holds parameters that aren't parameters of the model:\n"
            + "".join(f"  {each}\n" for each in shown)
            + "  fix: build the optimizer from the parameters() of the model that is wrapped, after any "
            "change of its layers"
        )
    return {names[id(parameter)]: index for parameter, index, _ in members}
