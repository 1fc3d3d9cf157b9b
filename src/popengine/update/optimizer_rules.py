"""The rules of weight updates, one value for each kind of optimizer: all that others have to know of it.

A new kind of optimizer is a formula, a rule here, and a class in `poptorch.optim` (listed in `freeze_optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from popengine.settings import Optimizer
from popengine.update import formulas, fused_kernels
from popengine.update.formulas import Formula, Rates
from popengine.update.fused_kernels import Kernel


@dataclass(frozen=True)
class RuleState:
    """A tensor that a rule keeps of each parameter.

    Args:
        file:  its prefix in the `state_dict()` of a poptorch optimizer
        dtype: the optimizer's attribute that names its dtype; "": it is float32
        torch: its name in the state of torch's optimizer of this kind, where that is another; "": torch has none
        when:  the field of `settings.Optimizer` that has to be true; or "momentum": once there is momentum
    """

    name: str
    file: str
    dtype: str = ""
    torch: str | None = None
    when: str = ""

    @property
    def torch_name(self) -> str:
        return self.name if self.torch is None else self.torch


@dataclass(frozen=True)
class Layers:
    """What comes before the formula of a rule that scales each parameter's step by norms.

    Args:
        steps: puts in the place of the gradients what is measured beside the weights
        trust: from the norms of weights and steps, one a parameter, to the ratios: the states "trust" of the formula
        least: dimensions that a parameter has to have; others have no ratio
    """

    steps: Formula
    trust: Callable[[Rates, Tensor, Tensor], Tensor]
    least: int = 0


@dataclass(frozen=True)
class Rule:
    """How one kind of optimizer updates weights.

    Args:
        rates:  keys of a parameter group that may change from call to call
        flags:  keys of a parameter group that are compiled in
        fused:  torch's one kernel for all of it, where there is one
        layers: the norms it needs
    """

    formula: Formula
    rates: tuple[str, ...]
    states: tuple[RuleState, ...]
    flags: tuple[str, ...] = ()
    fused: Kernel | None = None
    layers: Layers | None = None

    def kept(self, optimizer: Optimizer) -> Iterator[RuleState]:
        """The states that a parameter has from the beginning."""
        for state in self.states:
            if state.when == "momentum":
                if state.name in optimizer.state_types:
                    yield state
            elif not state.when or getattr(optimizer, state.when):
                yield state


_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_MOMENTS = (
    RuleState("exp_avg", "Accl1", _FIRST),
    RuleState("exp_avg_sq", "Accl2", _SECOND),
    RuleState("step", "Step"),
)
_ADAM_RATES = ("lr", "betas", "eps", "weight_decay")

RULES: dict[str, Rule] = {
    "sgd": Rule(
        formulas.sgd,
        rates=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        states=(
            RuleState("velocity", "Accl1", "velocity_accum_type", torch="momentum_buffer", when="momentum"),
            RuleState("step", "Step", torch="", when="torch_dampening"),
        ),
        fused=fused_kernels.sgd,
    ),
    "adam": Rule(formulas.adam, _ADAM_RATES, _MOMENTS, ("amsgrad",), fused_kernels.adam),
    "adamw": Rule(formulas.adamw, _ADAM_RATES, _MOMENTS, ("amsgrad",), fused_kernels.adamw),
    "rmsprop": Rule(
        formulas.rmsprop,
        rates=("lr", "momentum", "weight_decay", "alpha", "eps"),
        states=(
            RuleState("square_avg", "Accl1", _SECOND),
            RuleState("momentum_buffer", "Accl2", _FIRST, when="momentum"),
            RuleState("grad_avg", "Accl3", _FIRST, when="centered"),
        ),
        flags=("centered",),
    ),
    "lamb": Rule(
        formulas.lamb,
        rates=(*_ADAM_RATES, "max_weight_norm"),
        states=_MOMENTS,
        layers=Layers(formulas.lamb_steps, formulas.lamb_trust),
    ),
    "lars": Rule(
        formulas.lars,
        rates=("lr", "momentum", "weight_decay", "eta", "eps"),
        states=(RuleState("velocity", "Accl1", "velocity_accum_type"),),
        layers=Layers(formulas.signed, formulas.lars_trust, least=2),  # biases and norms have none
    ),
}


def rule_of(optimizer: Optimizer) -> Rule:
    return RULES[optimizer.kind]
