"""Make the engine's snapshot of an optimizer, and check what `setOptimizer` changes after compilation.

Rates may change. A change of an attribute that is compiled in raises Error; an unknown attribute logs a
warning. The classes of `poptorch.optim` describe the rates and states of each kind of optimizer.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from popengine import settings
from popengine.errors import Error, did_you_mean
from poptorch.logs import listed
from poptorch.optim.optimizer_base import Optimizer, as_float, class_of, numbers_of, rates_of


class UnknownParameterError(Error, KeyError):
    """The error for an optimizer with parameters that are not in the model."""


def supported_optimizers() -> str:
    """Return the names of all optimizers that the original runs, as text for messages."""
    names = (f"{cls.__module__.partition('.')[0]}.optim.{cls.__name__}" for cls in Optimizer._classes)
    return ", ".join(sorted(names))


def _check_step(optimizer: Any) -> None:
    """Raise AssertionError if an object is no optimizer, or its `step()` needs more than one gradient, or a sparse one,
    and Error if it lacks what executors read."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        fix = "make an object: torch.optim.SGD(model.parameters(), lr=0.1)"
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            given, fix = "a class", fix.replace("torch.optim.SGD", optimizer.__name__)
        elif isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
            fix = "trainer.setOptimizer(optimizer), after scheduler.step()"
        elif isinstance(optimizer, float):
            fix = f"optimizer.param_groups[0]['lr'] = {optimizer}; trainer.setOptimizer(optimizer)"
        raise AssertionError(
            f"Unsupported optimizer type. Types supported: {supported_optimizers()}, and others that are derived from"
            f" torch.optim.Optimizer; this one is {given}\n"
            f"  fix: {fix}"
        )
    if lacking := [name for name in ("param_groups", "state") if not hasattr(optimizer, name)]:
        raise Error(
            f"{type(optimizer).__qualname__} has no {' and no '.join(lacking)}\n"
            "  why: its __init__ doesn't call that of torch.optim.Optimizer\n"
            "  fix: super().__init__(params, defaults); or in a wrapper of another optimizer, self.param_groups ="
            " other.param_groups and self.state = other.state"
        )
    # Without a scheduler's wrapper. A number that a program keeps as `optimizer.step` is an unexpected attribute.
    step = inspect.unwrap(optimizer.step if callable(optimizer.step) else type(optimizer).step)
    needs_closure = any(
        argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        for argument in inspect.signature(step).parameters.values()
        if argument.name != "self"
    )
    if needs_closure:
        raise AssertionError(
            f"Unsupported optimizer type. The step(closure) of {type(optimizer).__qualname__} calls the forward again\n"
            "  why: an update runs after the gradients of all micro-batches are summed, once\n"
            "  fix: an optimizer that steps on one gradient, such as torch.optim.Adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise AssertionError(
            "Unsupported optimizer type. torch.optim.SparseAdam steps on sparse gradients, and gradients are dense"
            " here\n"
            "  fix: torch.optim.Adam"
        )


def name_in_messages(optimizer: Any) -> str:
    """Return the optimizer's name in messages: "SGD1" (combined accumulators), "SGD2", "ADAMW_NO_BIAS" ..."""
    cls = class_of(optimizer)
    if cls is None:
        return type(optimizer).__name__
    if cls.__name__ == "SGD":
        return "SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"
    name = cls.__name__.upper() + "_NO_BIAS" * (not getattr(optimizer, "bias_correction", True))
    return name + "_CENTERED" * any(group.get("centered") for group in optimizer.param_groups)


def _clipping_bound(optimizer: torch.optim.Optimizer, name: str) -> float:
    """Return the clipping bound `name`, by default infinity. Raises AssertionError if it is negative."""
    bound = as_float(getattr(optimizer, name, math.inf), name, "the optimizer")
    if not bound >= 0:
        raise AssertionError(
            f"{name} has to be 0 or more, and is {bound:g}\n"
            "  why: gradients would change their sign\n"
            f"  fix: a positive {name}; or leave it out for no clipping"
        )
    return bound


def _check_parameters(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Raise UnknownParameterError if the optimizer holds parameters that are not in `names`."""
    unknown = [
        f"group {group_index}, parameter {index}, shape {list(parameter.shape)}"
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]
    if unknown:
        raise UnknownParameterError(
            f"the optimizer holds tensors that aren't parameters of the model:\n  {listed(unknown)}\n"
            "  why: they belong to another model, or to layers that the model had before\n"
            "  fix: build the optimizer from the parameters() of the model that is wrapped, after any change of its"
            " layers; in place of a function wrap an nn.Module that has the layers as attributes"
        )


# After compilation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """An optimizer as an executor takes it over: `frozen` is compiled in, `hyper` are the rates of calls, of which
    `constants` may not change after compilation."""

    frozen: settings.Optimizer
    hyper: settings.Hyper
    constants: frozenset[str]
    cls: type[Optimizer] | None  # the class that describes the optimizer

    def rates(self) -> dict[str, list[Any]]:
        """Return each rate's values in the groups, by name: those that have a name in `variable_attrs`, or all."""
        values_of: dict[str, list[Any]] = {"loss_scaling": [self.hyper.loss_scaling]}
        for group in self.hyper.groups:
            values = numbers_of(self.cls, group)
            if "velocity_scaling" in group:
                values["velocity_scaling"] = group["velocity_scaling"]
            for name, value in values.items():
                values_of.setdefault("betas" if name.startswith("beta") else name, []).append(value)
        return values_of


def take_snapshot(
    optimizer: torch.optim.Optimizer, names: dict[int, str], automatic_loss_scaling: bool = False
) -> Snapshot:
    """Return the snapshot of an optimizer. `names`: id(parameter) -> name, of the whole model; "" for parameters of the
    optimizer that the program has replaced in the model."""
    _check_step(optimizer)
    hyper, groups, cls = rates_of(optimizer), optimizer.param_groups, class_of(optimizer)
    if cls is not None and any(group.get("amsgrad") for group in groups):
        raise ValueError(
            "Only non-amsgrad Adam/AdamW optimizers are supported.\n  fix: leave out amsgrad=True"
        )
    if len({bool(group.get("centered")) for group in groups}) > 1:
        raise AssertionError(
            f"centered must be equal in all parameter groups of {type(optimizer).__name__}, but some have True,"
            " some False\n  fix: pass centered to the constructor, and leave it out of the groups"
        )
    _check_parameters(optimizer, names)
    states = {} if cls is None else {name: state for name, state in cls._states.items() if state.dtype}
    types = {name: getattr(optimizer, state.dtype, torch.float32) for name, state in states.items()}
    frozen = settings.Optimizer(
        kind=name_in_messages(optimizer),
        state_types=types,
        accumulator_type=getattr(optimizer, "accum_type", torch.float32),
        max_grad_norm=_clipping_bound(optimizer, "max_grad_norm"),
        max_grad_value=_clipping_bound(optimizer, "max_grad_value"),
    )
    snapshot = Snapshot(frozen, hyper, frozenset(), cls)
    constants = {
        name
        for name, values in snapshot.rates().items()
        if _is_constant_rate(optimizer, name, values)
        and not (name == "loss_scaling" and automatic_loss_scaling)
    }
    return replace(snapshot, constants=frozenset(constants))


def check_changes(before: Snapshot, now: Snapshot, with_rates: bool) -> None:
    """Raise Error if a value that is compiled in, or `with_rates` a constant rate, is not that of `before`."""
    label = now.frozen.kind
    if label != before.frozen.kind:
        raise Error(
            f"the optimizer's type can't change once the model is compiled: it was {before.frozen.kind}, this one is"
            f" {label}.\n  fix: call destroy() on the executor first, so that its next call compiles the model again"
        )
    was = before.frozen.accumulator_type
    if now.frozen.accumulator_type == torch.float16 != was and label != "SGD1":
        raise ValueError(
            "accum_type=torch.float16 needs options.Training.setMeanAccumulationAndReplicationReductionStrategy("
            f"poptorch.MeanReductionStrategy.Running), but the model is already compiled with {was}.\n"
            "  fix: set this optimizer before the first call, or call destroy() on the model first"
        )
    values, changes = _compared_values(now.frozen), []
    for what, value in _compared_values(before.frozen).items():
        if values.get(what, value) != value:
            changes.append(f"  {what}: it was {value}, now it is {values[what]}\n")
    present_rates = now.rates()
    for name, rates in before.rates().items() if with_rates else ():
        present = present_rates.get(name, []) if name in before.constants else []
        if any(old != new for old, new in zip(rates, present, strict=False)):  # groups may be added
            changes.append(f"  modified constant attribute {name!r}: it was {rates}, now it is {present}\n")
    if changes:
        raise Error(
            f"the {label} optimizer changes what is compiled in:\n{''.join(changes)}"
            "  fix: call destroy() on the model first; an attribute may change if it is given to the constructor"
            " of a poptorch optimizer, or marked by optimizer.variable_attrs.markAsVariable(name), before the"
            " model is compiled"
        )


def unexpected_names(
    optimizer: torch.optim.Optimizer, accepted: dict[str, set[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield (description, names) of attributes, defaults and keys of groups that are not `accepted` and that no class
    declares; add them. Of a new description all are accepted, except misspelt names of rates."""
    # Keys of SGD and LAMB, a bound that any optimizer may have, and keys of torch's load_state_dict and schedulers.
    expected = {"velocity_scaling", "max_weight_norm", "max_grad_value", "differentiable", "initial_lr"}
    rates = {"max_grad_norm", "max_grad_value", "loss_scaling"}  # a name like one of these is a misspelling
    # A scheduler replaces the method `step`, to count its calls.
    is_expected = {"step": callable(optimizer.step)}
    attributes = {name for name in vars(optimizer) if not (name[0] == "_" or is_expected.get(name))}
    of_groups = {f"group {i} attribute": group for i, group in enumerate(optimizer.param_groups)}
    defaults = getattr(optimizer, "defaults", ())
    names_of = {"optimizer attribute": attributes, "default group variable": defaults, **of_groups}
    for description, names in names_of.items():
        names = set(map(str, names))
        if description not in accepted:
            accepted[description] = {x for x in names if x in rates or not did_you_mean(x, rates, 0.85)}
        new = names - accepted[description]
        expected.update(*map(inspect.get_annotations, type(optimizer).__mro__) if new else ())
        if unexpected := sorted(new - expected):
            accepted[description] |= new
            yield description, unexpected


def _is_constant_rate(optimizer: torch.optim.Optimizer, name: str, values: list[float]) -> bool:
    """Return whether later optimizers must have the same `values` (one per parameter group) of a rate."""
    marks = getattr(optimizer, "variable_attrs", None)
    if marks is not None:
        return name not in marks or marks.isConstant(name)
    # torch's RMSprop adds the state of a momentum in its first step only.
    return name == "momentum" and not any(values) and isinstance(optimizer, torch.optim.RMSprop)


def _compared_values(frozen: settings.Optimizer) -> dict[str, Any]:
    """Return the values that are compiled in, except parameter groups, by their names in errors."""
    return {
        "the type of gradient sums (accum_type)": frozen.accumulator_type,
        "the clipping (max_grad_norm)": frozen.max_grad_norm,
        "the clipping (max_grad_value)": frozen.max_grad_value,
        **{f"the dtype of the state {name!r}": dtype for name, dtype in frozen.state_types.items()},
    }
