"""The names of an optimizer's device state in `state_dict()`, and back.

ipu_state   Accl1___<parameter>   SGD, LARS: velocity; Adam, AdamW, LAMB: first moment; RMSprop: square average
            Accl2___<parameter>   Adam, AdamW, LAMB: second moment; RMSprop: momentum buffer
            Accl3___<parameter>   RMSprop: mean of the gradients (centered)
            Step___<parameter>    updates so far
ipu_param   <rate>___specific___<parameter>, a rate of the parameter's group; lossScaling_FLOAT
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from popengine import settings
from popengine.update.optimizer_rules import RULES

State = dict[str, Tensor]

_SQUARES = ("exp_avg_sq", "square_avg")  # states of which an update takes the root
_RATE = "___specific___"  # between the name of a rate and its parameter's
_RATES = {
    **{name: name for name in ("momentum", "dampening", "beta1", "beta2", "eps", "alpha")},
    **{"lr": "learningRate", "weight_decay": "weightDecay", "max_weight_norm": "maxWeightNorm"},
}


def state_entries(kind: str, states: Mapping[str, State]) -> dict[str, Tensor]:
    """The "ipu_state" of the states that each parameter has by its canonical name; nothing is copied."""
    prefixes = {state.name: state.file for state in RULES[kind].states}
    return {
        f"{prefixes[name]}___{parameter}": value
        for parameter, state in states.items()
        for name, value in state.items()
    }


def states_of(kind: str, ipu_state: Mapping[str, Tensor]) -> dict[str, State]:
    """Undo `state_entries`; entries that this kind of optimizer doesn't have are left out."""
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
    """Look at states before they are loaded.

    Args:
        states: of each parameter, by the rule's names
        shapes: of parameters, where they are known
    Raises:
        RuntimeError: no update from such a state can be right
    """
    for parameter, state in states.items():
        for name, value in state.items():
            found = value.detach()
            if name == "step":
                is_count = bool((found.isfinite() & (found >= 0) & (found == found.floor())).all())
                wrong = "" if is_count else "a count of updates is a whole number, 0 or more"
            elif name in _SQUARES and bool((found < 0).any()):
                wrong = "a mean of squares is nowhere negative"
            else:
                shape = shapes.get(parameter, tuple(found.shape))
                wrong = "" if tuple(found.shape) == shape else f"the parameter has the shape {list(shape)}"
            if wrong:
                shown = found.tolist() if found.numel() == 1 else f"a tensor of the shape {list(found.shape)}"
                raise RuntimeError(
                    f"the state to be loaded can't be right: {name} of {parameter} is {shown}\n"
                    f"  why: {wrong}\n"
                    f"  fix: load what state_dict() of an optimizer of this kind ({kind}) returned for this model"
                )


def renamed(entries: Mapping[str, Tensor] | None, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return entries of "ipu_state" or "ipu_param" under other names of the parameters (old -> new)."""
    found = {}
    for key, value in (entries or {}).items():
        before, mark, parameter = key.rpartition(_RATE if _RATE in key else "___")
        found[f"{before}{mark}{names.get(parameter, parameter)}"] = value
    return found


def rate_entries(optimizer: settings.Optimizer, hyper: settings.Hyper) -> dict[str, Tensor]:
    """The "ipu_param" of one snapshot: scalars by parameter.

    SGD without momentum has its rates as the update uses them: scaledLearningRate0 = lr·(1 − d) / scaling
    and weightDecayScaleFactor0 = 1 − lr·(1 − d)·λ.
    """
    scaling = hyper.loss_scaling
    entries = {"lossScaling_FLOAT": torch.tensor(float(scaling))}
    for parameter, index in optimizer.group_of.items():
        rates = hyper.groups[index]
        if "dampening" in rates and rates["momentum"] == 0:
            step = rates["lr"] * (1 - rates["dampening"])
            values = {
                "scaledLearningRate0": step / scaling,
                "weightDecayScaleFactor0": 1 - step * rates["weight_decay"],
            }
        else:
            values = {_RATES[name]: rate for name, rate in rates.items() if name in _RATES}
        for name, value in values.items():
            entries[f"{name}{_RATE}{parameter}"] = torch.tensor(value)
    return entries


def loaded_rates(
    optimizer: settings.Optimizer, hyper: settings.Hyper, ipu_param: Mapping[str, Tensor]
) -> settings.Hyper:
    """Undo `rate_entries`: these rates, and those of `hyper` that are missing in them.

    Where parameters of one group differ, the group has the rates of its last parameter.
    """
    loaded = {key: float(value) for key, value in ipu_param.items()}

    def newer(name: str, old: float, factor: float = 1.0) -> float:
        """Entries are float32: where that is all the difference, the old rate is the exact one."""
        value = loaded.get(name, old / factor) * factor
        return old if math.isclose(value, old, rel_tol=1e-6) else value

    scaling = newer("lossScaling_FLOAT", hyper.loss_scaling)
    groups = [dict(rates) for rates in hyper.groups]
    for parameter, index in optimizer.group_of.items():
        rates, suffix, factor = (
            groups[index],
            f"{_RATE}{parameter}",
            f"weightDecayScaleFactor0{_RATE}{parameter}",
        )
        for name, theirs in _RATES.items():
            if name in rates:
                rates[name] = newer(theirs + suffix, hyper.groups[index][name])
        kept = 1 - rates.get("dampening", 1)
        if f"scaledLearningRate0{suffix}" in loaded and kept:
            rates["lr"] = newer(f"scaledLearningRate0{suffix}", hyper.groups[index]["lr"], scaling / kept)
            step = rates["lr"] * kept
            if step and not math.isclose(
                loaded.get(factor, 1), 1 - step * rates["weight_decay"], abs_tol=1e-6
            ):
                rates["weight_decay"] = (1 - loaded[factor]) / step
    return settings.Hyper(tuple(groups), scaling)
