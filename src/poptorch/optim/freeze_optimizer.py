"""Make the engine's snapshot of an optimizer, and check what `setOptimizer` changes after compilation.

Rates may change. A change of an attribute that is compiled in raises Error; an unknown attribute logs a
warning. The table `popengine.update.optimizer_rules.RULES` has the rates, states and flags of each kind.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from popengine import settings
from popengine.errors import Error
from popengine.torch_private import step_hooks
from popengine.update.optimizer_rules import OWN_STEP, RULES, Rule
from poptorch.logs import listed
from poptorch.optim.optimizer_base import Optimizer, as_float, rates_of

_TORCH_KINDS: dict[type, str] = {
    rule.torch_class: kind for kind, rule in RULES.items() if rule.torch_class is not None
}
# Rates of torch's optimizers that may not change from 0 after compilation: the state that they need is missing.
_NEED_STATE = ("momentum", "dampening")


class UnknownParameterError(Error, KeyError):
    """The error for an optimizer with parameters that are not in the model."""


def freeze_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> tuple[settings.Optimizer, settings.Hyper]:
    """Return an optimizer's compiled-in values and rates. `names`: id(parameter) -> name, of the whole model; "" for
    parameters of the optimizer that the program has replaced in the model."""
    kind = optimizer_kind(optimizer)
    hyper, rule = rates_of(kind, optimizer), RULES[kind]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(
            "Only non-amsgrad Adam/AdamW optimizers are supported.\n  fix: leave out amsgrad=True"
        )
    flags = _flag_values(optimizer, rule)
    momenta = [group.get("momentum", 0) for group in optimizer.param_groups]
    has_momentum = any(momenta) or not _is_constant_rate(optimizer, "momentum", momenta)
    frozen = settings.Optimizer(
        kind=kind,
        group_of=_group_indices(optimizer, names),
        state_types={
            state.name: getattr(optimizer, state.dtype, torch.float32)
            for state in rule.states
            if state.dtype and (has_momentum if state.when == "momentum" else flags.get(state.when, True))
        },
        accumulator_type=getattr(optimizer, "accum_type", torch.float32),
        max_grad_norm=_clipping_bound(optimizer, "max_grad_norm"),
        max_grad_value=_clipping_bound(optimizer, "max_grad_value"),
        flags=flags,
    )
    return frozen, hyper


def supported_optimizers() -> str:
    """Return the names of all optimizers that executors can run, as text for messages."""
    ours = [f"poptorch.optim.{kind.__name__}" for kind in Optimizer._classes]
    return ", ".join([*ours, *(f"torch.optim.{kind.__name__}" for kind in _TORCH_KINDS)])


def optimizer_kind(optimizer: Any) -> str:
    """Return the key in `RULES` of an optimizer's rule. Raises AssertionError if its type is unsupported."""
    # The nearest class, as torch derives AdamW from Adam.
    known = (base for base in type(optimizer).__mro__ if base in _TORCH_KINDS or base in Optimizer._classes)
    base: Any = next(known, None)
    kind = _TORCH_KINDS.get(base) or getattr(base, "_kind", None)
    if isinstance(optimizer, torch.optim.Optimizer) and (kind is None or not _updates_as(base, optimizer)):
        _check_own_step(optimizer)
        return OWN_STEP
    if kind is None:
        raise AssertionError(
            f"Unsupported optimizer type. Types supported: {supported_optimizers()}, and others that are derived from"
            f" torch.optim.Optimizer; this one is {type(optimizer).__module__}.{type(optimizer).__qualname__}\n"
            "  fix: an optimizer of the model's parameters, such as torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    return "adamw" if kind == "adam" and _is_true_in_all_groups(optimizer, "decoupled_weight_decay") else kind


def _updates_as(base: Any, optimizer: Any) -> bool:
    """Return whether an optimizer's `step()` is that of its class `base`: a scheduler may have wrapped it."""
    step = _step_of(optimizer)
    is_same = getattr(step, "__func__", step) is inspect.unwrap(base.step)
    return is_same and getattr(type(optimizer), "_init_group", None) is getattr(base, "_init_group", None)


def _step_of(optimizer: Any) -> Any:
    """Return the method `step()` of an optimizer, without a scheduler's wrapper. A number that a program keeps as
    `optimizer.step` is an unexpected attribute."""
    return inspect.unwrap(optimizer.step if callable(optimizer.step) else type(optimizer).step)


def _check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise AssertionError if an optimizer's `step()` needs more than one gradient, or a sparse one, and Error if it
    lacks what executors read."""
    if lacking := [name for name in ("param_groups", "state") if not hasattr(optimizer, name)]:
        raise Error(
            f"{type(optimizer).__qualname__} has no {' and no '.join(lacking)}\n"
            "  why: its __init__ doesn't call that of torch.optim.Optimizer\n"
            "  fix: super().__init__(params, defaults); or in a wrapper of another optimizer, self.param_groups ="
            " other.param_groups and self.state = other.state"
        )
    needs_closure = any(
        argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        for argument in inspect.signature(_step_of(optimizer)).parameters.values()
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


def name_in_messages(optimizer: torch.optim.Optimizer, frozen: settings.Optimizer) -> str:
    """Return the optimizer's name in messages: "SGD1" (combined accumulators), "SGD2", "ADAMW_NO_BIAS" ..."""
    if frozen.kind == "sgd":
        return "SGD1" if frozen.flags["use_combined_accum"] else "SGD2"
    rule = RULES[frozen.kind]
    if frozen.kind == OWN_STEP:
        return type(optimizer).__name__
    return frozen.kind.upper() + "".join(rule.flags[name].label for name in rule.nondefault_flags(frozen))


def _flag_values(optimizer: Any, rule: Rule) -> dict[str, bool]:
    values = {}
    for name, flag in rule.flags.items():
        if flag.read is not None:
            values[name] = flag.read(optimizer)
        elif flag.of_group:
            values[name] = _is_true_in_all_groups(optimizer, name)
        else:
            values[name] = bool(getattr(optimizer, name, flag.default))
    return values


def _is_true_in_all_groups(optimizer: Any, name: str) -> bool:
    """Return whether a key is true in all parameter groups. Raises AssertionError if the groups differ."""
    values = {bool(group.get(name)) for group in optimizer.param_groups}
    if len(values) > 1:
        raise AssertionError(
            f"{name} must be equal in all parameter groups of {type(optimizer).__name__}, but some have True,"
            f" some False\n  fix: pass {name} to the constructor, and leave it out of the groups"
        )
    return values == {True}


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


def _group_indices(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, int]:
    group_of, unknown = {}, []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name:
                group_of[name] = group_index
            elif name is None:
                unknown.append(f"group {group_index}, parameter {index}, shape {list(parameter.shape)}")
    if unknown:
        raise UnknownParameterError(
            f"the optimizer holds tensors that aren't parameters of the model:\n  {listed(unknown)}\n"
            "  why: they belong to another model, or to layers that the model had before\n"
            "  fix: build the optimizer from the parameters() of the model that is wrapped, after any change of its"
            " layers; in place of a function wrap an nn.Module that has the layers as attributes"
        )
    return group_of


# After compilation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """An optimizer as an executor takes it over: `frozen` is compiled in, `hyper` are the rates of calls. `rates` are
    each group's by name, of which `constants` may not change after compilation."""

    label: str  # name in messages
    frozen: settings.Optimizer
    hyper: settings.Hyper
    rates: Mapping[str, list[float]]
    constants: frozenset[str]


def take_snapshot(
    optimizer: torch.optim.Optimizer, names: dict[int, str], automatic_loss_scaling: bool = False
) -> Snapshot:
    """Return the snapshot of an optimizer; `names` as in `freeze_optimizer`. Raises errors of that function, and Error
    for hooks of `step()`."""
    frozen, hyper = freeze_optimizer(optimizer, names)
    if frozen.kind != OWN_STEP:
        refuse_step_hooks(optimizer)
    rates = {"loss_scaling": [hyper.loss_scaling]}
    for group, given in zip(hyper.groups, optimizer.param_groups, strict=True):
        for name, value in group.items():
            rates.setdefault("betas" if name.startswith("beta") else name, []).append(value)
        if "velocity_scaling" in given:
            rates.setdefault("velocity_scaling", []).append(given["velocity_scaling"])
    # "fused" chooses the kernel.
    may_change = {"fused", "loss_scaling"} if automatic_loss_scaling else {"fused"}
    constants = {name for name, values in rates.items() if _is_constant_rate(optimizer, name, values)}
    label = name_in_messages(optimizer, frozen)
    return Snapshot(label, frozen, hyper, rates, frozenset(constants - may_change))


def check_changes(before: Snapshot, now: Snapshot, with_rates: bool) -> None:
    """Raise Error if a value that is compiled in, or `with_rates` a constant rate, is not that of `before`."""
    if now.label != before.label:
        raise Error(
            f"the optimizer's type can't change once the model is compiled: it was {before.label}, this one is "
            f"{now.label}.\n  fix: call destroy() on the executor first, so that its next call compiles the model again"
        )
    was = before.frozen.accumulator_type
    if now.frozen.accumulator_type == torch.float16 != was and now.label != "SGD1":
        raise ValueError(
            "accum_type=torch.float16 needs options.Training.setMeanAccumulationAndReplicationReductionStrategy("
            f"poptorch.MeanReductionStrategy.Running), but the model is already compiled with {was}.\n"
            "  fix: set this optimizer before the first call, or call destroy() on the model first"
        )
    values, changes = _compared_values(now.frozen), []
    for what, value in _compared_values(before.frozen).items():
        if values.get(what, value) != value:
            changes.append(f"  {what}: it was {value}, now it is {values[what]}\n")
    for name, rates in before.rates.items() if with_rates else ():
        found = now.rates.get(name, []) if name in before.constants else []
        if any(one != other for one, other in zip(rates, found, strict=False)):  # groups may be added
            changes.append(f"  modified constant attribute {name!r}: it was {rates}, now it is {found}\n")
    if changes:
        raise Error(
            f"the {now.label} optimizer changes what is compiled in:\n{''.join(changes)}"
            "  fix: call destroy() on the model first; an attribute may change if it is given to the constructor"
            " of a poptorch optimizer, or marked by optimizer.variable_attrs.markAsVariable(name), before the"
            " model is compiled"
        )


def unexpected_names(
    optimizer: torch.optim.Optimizer, known: dict[str, set[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield (description, names) of attributes, defaults and keys of groups that are not `known` and that no class
    declares; add them. All of a description that is not known are accepted."""
    # Keys of SGD and LAMB, a bound that any optimizer may have, and a key of torch's load_state_dict.
    expected = {"velocity_scaling", "max_weight_norm", "max_grad_value", "differentiable"}
    # A scheduler replaces the method `step`, to count its calls.
    is_expected = {"step": callable(optimizer.step)}
    attributes = {name for name in vars(optimizer) if not (name[0] == "_" or is_expected.get(name))}
    of_groups = {f"group {i} attribute": group for i, group in enumerate(optimizer.param_groups)}
    defaults = getattr(optimizer, "defaults", ())
    found = {"optimizer attribute": attributes, "default group variable": defaults, **of_groups}
    for description, names in found.items():
        names = set(map(str, names))
        new = names - known.setdefault(description, names)
        expected.update(*map(inspect.get_annotations, type(optimizer).__mro__) if new else ())
        if unexpected := sorted(new - expected):
            known[description] |= new
            yield description, unexpected


def refuse_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise Error if the optimizer has hooks of `step()`, which executors never call; allow torch's own."""
    for hook in chain.from_iterable(hooks.values() for hooks in step_hooks(optimizer)):
        if not str(getattr(hook, "__module__", "")).startswith(
            ("torch.", "poptorch.")
        ):  # a profiler, compare
            raise Error(
                f"the optimizer's step hook {getattr(hook, '__qualname__', hook)} would never be called\n"
                "  why: the executor updates the weights inside of its calls, and not by the optimizer's step()\n"
                "  fix: remove the hook with its handle; call the function after the executor's call, with one device"
                " iteration a call for one update each"
            )


def _is_constant_rate(optimizer: torch.optim.Optimizer, name: str, values: list[float]) -> bool:
    """Return whether later optimizers must have the same `values` (one per parameter group) of a rate."""
    marks = getattr(optimizer, "variable_attrs", None)
    if marks is not None:
        return name not in marks or marks.isConstant(name)
    return name in _NEED_STATE and not any(values)


def _compared_values(frozen: settings.Optimizer) -> dict[str, Any]:
    """Return the values that are compiled in, except parameter groups, by their names in errors."""
    return {
        "the type of gradient sums (accum_type)": frozen.accumulator_type,
        "the clipping (max_grad_norm)": frozen.max_grad_norm,
        "the clipping (max_grad_value)": frozen.max_grad_value,
        **{f"the attribute {name!r}": is_on for name, is_on in frozen.flags.items()},
        **{f"the dtype of the state {name!r}": dtype for name, dtype in frozen.state_types.items()},
    }
