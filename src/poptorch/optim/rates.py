"""Read an optimizer's rates from its parameter groups, and convert them to and from an "ipu_param".

ipu_param   <rate>___specific___<parameter>   a rate of the parameter's group
            lossScaling_FLOAT                 the loss scaling of the optimizer
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from popengine.settings import Hyper
from popengine.update.optimizer_rules import RULES, Rule

logger = logging.getLogger("poptorch::python")

MAX_WEIGHT_NORM = 65500.0  # of LAMB
_SPECIFIC = "___specific___"  # between the name of a rate and its parameter's
_SWITCHES = ("nesterov", "maximize", "fused")  # not in "ipu_param"


def rates_of(kind: str, optimizer: Any) -> Hyper:
    """Return the rates of an optimizer's parameter groups as numbers, and its loss scaling.

    Raises:
        AssertionError: a key of the optimizer's rule is missing in a group, or a value is invalid
    """
    given = getattr(optimizer, "loss_scaling", 1.0)
    scaling = number(given, "loss_scaling", "the optimizer")
    if not 0 < scaling < math.inf:
        raise AssertionError(
            f"loss_scaling has to be a positive, finite number, and is {given!r}\n"
            "  why: the loss is multiplied by it, and gradients are divided by it before the update\n"
            "  fix: loss_scaling=1.0, or a power of two for half precision"
        )
    groups = (_rates(kind, group, index) for index, group in enumerate(optimizer.param_groups))
    return Hyper(groups=tuple(groups), loss_scaling=scaling)


def _rates(kind: str, group: dict[str, Any], index: int) -> dict[str, float]:
    """Return the rates of one parameter group; the pair "betas" as "beta1" and "beta2"."""
    rule, where, rates = RULES[kind], f"parameter group {index}", dict[str, float]()
    for name in rule.group_keys:
        if name not in group:
            raise AssertionError(
                f"Mandatory attribute {name} not found in {where} of the {kind} optimizer; "
                f"fix: optimizer.param_groups[{index}][{name!r}] = ..."
            )
    for name in (*rule.rates, "maximize"):
        value = group.get(name, False)
        if name == "betas":
            if not isinstance(value, tuple) or len(value) != 2:
                raise AssertionError(
                    f"Expected a pair of numbers, a tuple, for betas in {where}, but found {value!r}"
                )
            rates["beta1"], rates["beta2"] = (number(beta, name, where) for beta in value)
        else:
            is_default = name == "max_weight_norm" and value is None
            rates[name] = MAX_WEIGHT_NORM if is_default else number(value, name, where)
    if rule.fused is not None and group.get("fused"):
        rates["fused"] = 1.0
    return rates


def number(value: Any, name: str, where: str) -> float:
    """Return a number, or a tensor with one element, as a float. Raises AssertionError for other values."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if isinstance(value, (str, bytes, Tensor)) or math.isnan(value):
            raise TypeError
        return float(value)
    except TypeError:
        raise AssertionError(f"Expected a number for {name} in {where}, but found {value!r}") from None


def _entry_name(rate: str) -> str:
    """Return the name of a rate in "ipu_param"; weight_decay, for example, is weightDecay there."""
    first, *others = ["learning", "rate"] if rate == "lr" else rate.split("_")
    return first + "".join(map(str.capitalize, others))


def _group_entries(rates: Mapping[str, float], scaling: float) -> dict[str, float]:
    """Return the rates of a group by their names in "ipu_param".

    SGD without momentum has two derived values instead: scaledLearningRate0 = lr·(1 − d) / scaling and
    weightDecayScaleFactor0 = 1 − lr·(1 − d)·λ, with dampening d and weight decay λ.
    """
    if "dampening" in rates and rates["momentum"] == 0:
        step = rates["lr"] * (1 - rates["dampening"])
        factor = 1 - step * rates["weight_decay"]
        return {"scaledLearningRate0": step / scaling, "weightDecayScaleFactor0": factor}
    return {_entry_name(name): rate for name, rate in rates.items() if name not in _SWITCHES}


def hyperparameter_entries(group_of: Mapping[str, int], hyper: Hyper) -> dict[str, Tensor]:
    """Return the "ipu_param" of an optimizer: the loss scaling, and for each parameter its group's rates."""
    entries = {"lossScaling_FLOAT": torch.tensor(float(hyper.loss_scaling))}
    for parameter, index in group_of.items():
        for name, value in _group_entries(hyper.groups[index], hyper.loss_scaling).items():
            entries[f"{name}{_SPECIFIC}{parameter}"] = torch.tensor(value)
    return entries


def load_rates(kind: str, optimizer: Any, ipu_param: Mapping[str, Tensor]) -> None:
    """Write an "ipu_param" into the parameter groups and the loss scaling of an optimizer.

    Parameters are matched by their order, not by name. If the entries of a group's parameters differ, the
    group gets those of its last parameter, and a warning is logged.
    """
    entries: dict[str, dict[str, float]] = {}  # of each parameter; those of "" belong to the optimizer
    for key, value in ipu_param.items():
        rate, _, parameter = key.partition(_SPECIFIC)
        entries.setdefault(parameter, {})[rate] = float(value)
    optimizer.loss_scaling = _newer(entries.pop("", {}).get("lossScaling_FLOAT"), optimizer.loss_scaling)
    indices = [index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    group_of = dict(zip(entries, indices, strict=False))
    for name, index in group_of.items():
        _load_group(RULES[kind], optimizer.param_groups[index], entries[name], optimizer.loss_scaling)
    used = hyperparameter_entries(group_of, rates_of(kind, optimizer))
    unused = [n for n, v in ipu_param.items() if n not in used or not math.isclose(v, used[n], rel_tol=1e-4)]
    if unused:
        logger.warning(
            "the loaded ipu_param has rates that are not used: %s\n"
            "  why: all parameters of a group have the same rates, and these are of another optimizer or group\n"
            "  fix: load a state of the same optimizer, or give the parameters groups of their own",
            ", ".join(unused[:5]),
        )


def _load_group(rule: Rule, group: dict[str, Any], entries: Mapping[str, float], scaling: float) -> None:
    """Write one parameter's rates into its group. `entries` has their names in "ipu_param" as keys."""
    for rate in rule.rates:
        if rate == "betas":
            group[rate] = tuple(_newer(entries.get(f"beta{n}"), old) for n, old in enumerate(group[rate], 1))
        elif rate not in _SWITCHES:
            group[rate] = _newer(entries.get(_entry_name(rate)), group[rate])
    undamped = 1 - group.get("dampening", 1)
    if "scaledLearningRate0" in entries and undamped:
        group["lr"] = _newer(entries["scaledLearningRate0"] * scaling / undamped, group["lr"])
        step, decay = group["lr"] * undamped, group["weight_decay"]
        factor = entries.get("weightDecayScaleFactor0", 1 - step * decay)
        if step and not math.isclose(factor, 1 - step * decay, abs_tol=1e-6):
            group["weight_decay"] = (1 - factor) / step


def _newer(loaded: float | None, old: Any) -> Any:
    """Return the loaded value, or the old value if none was loaded or both are equal in float32."""
    is_equal = loaded is None or (old is not None and math.isclose(loaded, old, rel_tol=1e-6))
    return old if is_equal else loaded
