"""The table of optimizers: how each kind updates weights, and what executors and checkpoints read of it.

To add a kind of optimizer, write a formula, a rule in `RULES`, and a class in `poptorch/optim/optimizers.py`
(or name a torch optimizer as the rule's `torch_class`). Checks, snapshots, checkpoints and messages follow
from the rule.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..settings import Optimizer
from . import formulas
from .formulas import Formula, Rates


@dataclass(frozen=True)
class RuleState:
    """The description of a state tensor that an optimizer has for each parameter."""

    name: str  # key in `optimizer.state[parameter]`; torch's, if torch has this optimizer
    file: str  # prefix of the tensor's name in the "ipu_state" of a poptorch optimizer; "": it is not there
    dtype: str = ""  # attribute of the optimizer that holds the tensor's dtype; "" for float32
    when: str = ""  # flag for which the tensor exists; "momentum": it exists once the momentum is not 0
    ones_when: str = ""  # flag for which the tensor starts with ones; otherwise it starts with zeros
    is_gradient_first: bool = False  # it starts as the first gradient; the rule has a state "step"
    one_with: str = ""  # a state of torch: if it is there and this state is not, this state starts with 1


@dataclass(frozen=True)
class Flag:
    """A property of an optimizer that is on or off, and is fixed at compilation."""

    default: bool = False  # value of optimizers that don't have the property
    of_group: bool = False  # a key of all parameter groups; False: an attribute of the optimizer
    label: str = ""  # suffix of the optimizer's type in messages, if the value is not the default
    read: Callable[[Any], bool] | None = None  # returns the value, if it is neither a key nor an attribute


@dataclass(frozen=True)
class TrustRatios:
    """The functions by which a rule (LAMB, LARS) computes trust ratios, before its formula runs."""

    steps: Formula  # overwrites the gradients with the steps whose norms are compared with the weights' norms
    trust: Callable[[Rates, Tensor, Tensor], Tensor]  # returns ratios, from the norms of weights and of steps
    min_dims: int = 0  # parameters with fewer dimensions have no trust ratio


@dataclass(frozen=True)
class Rule:
    """The update rule of one kind of optimizer."""

    formula: Formula
    rates: tuple[str, ...]  # keys of a parameter group that may change from call to call
    states: tuple[RuleState, ...]  # of each parameter
    flags: Mapping[str, Flag] = field(default_factory=dict)  # by name
    fused: Formula | None = None  # the formula as one kernel of torch, if there is one
    trust_ratios: TrustRatios | None = None
    torch_class: type[torch.optim.Optimizer] | None = None  # which updates by this rule
    betas: int = 2  # how many the rate "betas" has; formulas get "beta1", "beta2", ...

    @property
    def group_keys(self) -> tuple[str, ...]:
        """The keys that every parameter group must have."""
        return (*self.rates, *(name for name, flag in self.flags.items() if flag.of_group))

    @cached_property
    def watched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The attributes of an optimizer, and the keys of its groups, that executors compare before each call."""
        flags = (name for name, flag in self.flags.items() if not flag.of_group)
        types = (state.dtype for state in self.states if state.dtype)
        bounds = "step", "loss_scaling", "accum_type", "max_grad_norm", "max_grad_value", "dampens_first_step"
        return (*bounds, *flags, *types), (*self.group_keys, "maximize", "fused", "decoupled_weight_decay")

    def states_of(self, optimizer: Optimizer, rates: Rates = MappingProxyType({})) -> Iterator[RuleState]:
        """Yield the descriptions of the state tensors that a parameter has: those of momentum unless the momentum is
        constantly 0 and not in `rates`, the rates of the next update; those of flags if the flags are on."""
        for state in self.states:
            if state.when == "momentum":
                if state.name in optimizer.state_types or rates.get("momentum"):
                    yield state
            elif not state.when or optimizer.flags.get(state.when):
                yield state

    def nondefault_flags(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the rule's flags that don't have their default value in `optimizer`."""
        return [n for n, flag in self.flags.items() if optimizer.flags.get(n, flag.default) != flag.default]


def _has_torch_dampening(optimizer: Any) -> bool:
    """Return whether an optimizer has a dampening that leaves the first update undampened, as torch.optim.SGD has."""
    dampened = any(group["dampening"] for group in optimizer.param_groups)
    return dampened and not getattr(optimizer, "dampens_first_step", False)


_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_MOMENTS = (
    RuleState("exp_avg", "Accl1", _FIRST),
    RuleState("exp_avg_sq", "Accl2", _SECOND),
    RuleState("step", "Step"),
)
_ADAM_RATES = ("lr", "betas", "eps", "weight_decay")
_BIAS = {"bias_correction": Flag(default=True, label="_NO_BIAS")}
_ADAM_FLAGS = {"amsgrad": Flag(of_group=True), **_BIAS}
_ADAM: dict[str, Any] = {"rates": _ADAM_RATES, "states": _MOMENTS, "flags": _ADAM_FLAGS}

# The kind of all optimizers without a formula here: their own `step()` updates the weights.
OWN_STEP = "own_step"


RULES: dict[str, Rule] = {
    OWN_STEP: Rule(lambda step: None, rates=(), states=()),  # `Updates._run_own_step` runs it
    "sgd": Rule(
        formulas.sgd,
        rates=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        states=(
            RuleState("momentum_buffer", "Accl1", "velocity_accum_type", when="momentum"),
            RuleState("step", "Step", when="torch_dampening", one_with="momentum_buffer"),
        ),
        flags={"torch_dampening": Flag(read=_has_torch_dampening), "use_combined_accum": Flag()},
        fused=formulas.fused_sgd,
        torch_class=torch.optim.SGD,
    ),
    "adam": Rule(formulas.adam, **_ADAM, fused=formulas.fused_adam, torch_class=torch.optim.Adam),
    "adamw": Rule(formulas.adamw, **_ADAM, fused=formulas.fused_adamw, torch_class=torch.optim.AdamW),
    "rmsprop": Rule(
        formulas.rmsprop,
        rates=("lr", "momentum", "weight_decay", "alpha", "eps"),
        states=(
            RuleState("square_avg", "Accl1", _SECOND, ones_when="use_tf_variant"),
            RuleState("momentum_buffer", "Accl2", _FIRST, when="momentum"),
            RuleState("grad_avg", "Accl3", _FIRST, when="centered"),
            RuleState("step", ""),
        ),
        flags={"centered": Flag(of_group=True, label="_CENTERED"), "use_tf_variant": Flag()},
        torch_class=torch.optim.RMSprop,
    ),
    "lamb": Rule(
        formulas.lamb,
        rates=(*_ADAM_RATES, "max_weight_norm"),
        states=_MOMENTS,
        flags=_BIAS,
        trust_ratios=TrustRatios(formulas.compute_lamb_steps, formulas.lamb_trust_ratios),
    ),
    "lars": Rule(
        formulas.lars,
        rates=("lr", "momentum", "weight_decay", "eta", "eps"),
        states=(RuleState("momentum_buffer", "Accl1", "velocity_accum_type"),),
        # No ratios for biases and norm layers.
        trust_ratios=TrustRatios(lambda step: None, formulas.lars_trust_ratios, min_dims=2),
    ),
}
