"""What `setOptimizer` may change: rates; not what is compiled in; what nobody reads, with a warning."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor

from popengine import settings
from popengine.errors import Error
from popengine.update.optimizer_rules import RULES
from poptorch.optim.freeze_optimizer import freeze_optimizer, kind_of, label_of

logger = logging.getLogger("poptorch::python")

# torch's optimizers: variable once they differ from their default; lr always, the others never.
_TORCH_DEFAULTS = {"momentum": 0, "dampening": 0, "weight_decay": 0, "eps": 1e-8, "loss_scaling": 1}

# Attributes of poptorch's optimizers: no news when one takes the place of a torch optimizer.
_KNOWN = {
    *("loss_scaling", "velocity_scaling", "max_grad_norm", "max_grad_value"),
    *("max_weight_norm", "variable_attrs"),
    *("use_combined_accum", "use_tf_variant", "bias_correction", "accum_type", "velocity_accum_type"),
    *("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "differentiable",  # torch adds it to the defaults when a state is loaded
}


@dataclass(frozen=True)
class _Accepted:
    """What later optimizers are held to."""

    label: str
    frozen: settings.Optimizer
    group_count: int
    constants: dict[str, list[Any]]


class OptimizerGuard:
    """The memory of an executor's `setOptimizer` calls: takes each optimizer, returns what to run with.

    Args: relaxed: tell of unexpected attributes in debug messages (`relaxOptimizerAttributesChecks`)
          automatic_loss_scaling: the loss scaling is variable then
    """

    def __init__(self, relaxed: bool = False, automatic_loss_scaling: bool = False) -> None:
        self._tell = logger.debug if relaxed else logger.warning
        self._automatic_loss_scaling = automatic_loss_scaling
        self._accepted: _Accepted | None = None
        self._attributes: dict[str, set[str]] = {}  # the names that are no news, by place
        self._warned: set[str] = set()

    def accept(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], compiled: bool
    ) -> tuple[settings.Optimizer, settings.Hyper]:
        """Check an optimizer and take a snapshot of it; see `freeze_optimizer`.

        Args:   compiled: hold it to the one that was accepted last before the compilation
        Raises: Error, where something changed that is compiled in, or the optimizer has hooks for its steps; nothing is
                accepted then
        """
        frozen, hyper = freeze_optimizer(optimizer, names, self._warn_once)
        check_hooks(optimizer)
        accepted = _Accepted(
            label=label_of(optimizer),
            frozen=frozen,
            group_count=len(hyper.groups),
            constants=_constants(optimizer, self._automatic_loss_scaling),
        )
        if compiled and self._accepted is not None:
            _check_compiled(optimizer, self._accepted, accepted)
        elif self._accepted is None or self._accepted.label != accepted.label:
            self._attributes = _names(optimizer)
        self._tell_unexpected(optimizer, accepted.label)
        if not compiled or self._accepted is None:
            self._accepted = accepted
        return frozen, hyper

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    def _tell_unexpected(self, optimizer: torch.optim.Optimizer, label: str) -> None:
        for place, found in _names(optimizer).items():
            known = self._attributes.setdefault(place, set(found))
            unexpected = sorted(found - known - _KNOWN)
            if unexpected:
                known.update(unexpected)  # told once
                self._tell("Ignoring unexpected %s in %s optimizer: %s", place, label, unexpected)


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises Error, if a step of the optimizer would call hooks: an executor updates without calling `step()`."""
    hooks = {
        **optimizer._optimizer_step_pre_hooks,
        **optimizer._optimizer_step_post_hooks,
        **torch_optimizer._global_optimizer_pre_hooks,
        **torch_optimizer._global_optimizer_post_hooks,
    }
    for hook in hooks.values():
        if not str(getattr(hook, "__module__", "")).startswith(
            "torch."
        ):  # the profiler of torch has one, too
            raise Error(
                f"the optimizer's step hook {getattr(hook, '__qualname__', hook)} would never be called\n"
                "  why: the executor updates the weights inside of its calls, and not by the optimizer's step()\n"
                "  fix: remove the hook with its handle; call the function after the executor's call, with one device"
                " iteration a call for one update each"
            )


def _names(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The names of the user's attributes, by the words that warnings have for their place."""
    attributes = {name for name in vars(optimizer) if not name.startswith("_")}
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        attributes.discard("step")  # a scheduler counts its calls
    groups = {
        f"group {index} attribute": {str(name) for name in group}
        for index, group in enumerate(optimizer.param_groups)
    }
    return {
        "optimizer attribute": attributes,
        "default group variable": {str(name) for name in optimizer.defaults},
        **groups,
    }


def _constants(optimizer: torch.optim.Optimizer, automatic_loss_scaling: bool) -> dict[str, list[Any]]:
    """The values that are compiled in, one a group for a group's attribute."""
    kind = kind_of(optimizer)
    rule = RULES[kind]
    names = (
        *(*rule.rates, *rule.flags),
        *("velocity_scaling", "maximize", "loss_scaling", "use_tf_variant"),
    )
    return {
        name: value
        for name in names
        if (value := _value(optimizer, name))
        and not (name == "loss_scaling" and automatic_loss_scaling)
        and _is_constant(optimizer, kind, name, value)
    }


def _value(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    """An attribute's value in each group, or the optimizer's own; empty where there is none."""
    if name in ("loss_scaling", "use_tf_variant"):
        return [getattr(optimizer, name)] if hasattr(optimizer, name) else []
    return [_plain(group[name]) for group in optimizer.param_groups if name in group]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _is_constant(optimizer: torch.optim.Optimizer, kind: str, name: str, value: list[Any]) -> bool:
    marks = getattr(optimizer, "variable_attrs", None)
    if marks is not None:
        return name not in marks or marks.isConstant(name)
    default = 1e-2 if (name, kind) == ("weight_decay", "adamw") else _TORCH_DEFAULTS.get(name)
    if name == "lr":
        return False
    return default is None or all(each == default for each in value)


def _check_compiled(optimizer: torch.optim.Optimizer, old: _Accepted, new: _Accepted) -> None:
    """Raise unless the compiled program can run with the new optimizer."""
    before, after = old.frozen, new.frozen
    if new.label != old.label:
        raise Error(
            f"the optimizer's type can't change once the model is compiled: it was {old.label}, this one is "
            f"{new.label}.\n  fix: call destroy() on the model first"
        )
    if after.accumulator_type != before.accumulator_type:
        _refuse_accumulator(optimizer, before.accumulator_type, after.accumulator_type)
    changes = [
        f"{what}: it was {was}, now it is {now}"
        for what, was, now in (
            ("the clipping (max_grad_norm)", before.max_grad_norm, after.max_grad_norm),
            ("torch's rule of dampening", before.torch_dampening, after.torch_dampening),
            ("the clipping (max_grad_value)", before.max_grad_value, after.max_grad_value),
            ("the number of parameter groups", old.group_count, new.group_count),
            *(
                (f"the dtype of the state {name!r}", dtype, after.state_types.get(name, dtype))
                for name, dtype in before.state_types.items()
            ),
        )
        if was != now
    ]
    if old.group_count == new.group_count and before.group_of != after.group_of:
        moved = sorted(n for n, _ in before.group_of.items() ^ after.group_of.items())
        changes.append(f"the parameter groups of {', '.join(dict.fromkeys(moved))}")
    if changes:
        raise Error(
            f"the {new.label} optimizer changes what is compiled in:\n"
            + "".join(f"  {change}\n" for change in changes)
            + "  fix: call destroy() on the model first"
        )
    for name, was in old.constants.items():
        now = _value(optimizer, name) or was
        if now != was:
            raise Error(
                f"modified constant attribute {name!r} of the {new.label} optimizer: it was {was}, "
                f"now it is {now}, but the model is compiled with the first.\n"
                f"  fix: give {name} to the constructor of the poptorch optimizer, or call "
                f"optimizer.variable_attrs.markAsVariable({name!r}), before the model is compiled"
            )


def _refuse_accumulator(optimizer: torch.optim.Optimizer, was: torch.dtype, now: torch.dtype) -> None:
    if now == torch.float16 and not getattr(optimizer, "use_combined_accum", False):
        raise ValueError(
            "accum_type=torch.float16 needs "
            "options.Training.setMeanAccumulationAndReplicationReductionStrategy("
            f"poptorch.MeanReductionStrategy.Running), but the model is already "
            f"compiled with {was}.\n  fix: set this optimizer before the first call, "
            "or call destroy() on the model first"
        )
    raise Error(
        f"the optimizer's accum_type can't change once the model is compiled: it was {was}, now "
        f"it is {now}.\n  fix: call destroy() on the model first"
    )
