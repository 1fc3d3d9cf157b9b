"""The mixin of poptorch's optimizers: attributes that torch's lack, and PopTorch's names of rates and states.

`state_dict()` of poptorch's optimizers has two dictionaries of tensors. Each class defines the keys' prefixes:

ipu_state   Accl1___<parameter>   first state: velocity, first moment, or RMSprop's square average
            Accl2___<parameter>   second moment, or RMSprop's momentum buffer
            Accl3___<parameter>   mean of the gradients (centered RMSprop)
            Step___<parameter>    number of updates
ipu_param   <rate>___specific___<parameter>   a rate of the parameter's group
            lossScaling_FLOAT                 the loss scaling of the optimizer

The rest of the dictionary is torch's, with the same states and rates, so a checkpoint can be loaded in plain PyTorch. A
dictionary of a torch optimizer can be loaded as {"ipu_state": None, "ipu_param": None, **dictionary}.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from popengine.errors import without_internal_frames
from popengine.settings import Hyper
from poptorch.checks import checked
from poptorch.logs import logger

_SMALL = 1 << 20  # elements of a group whose update costs mostly the start of operations
MAX_WEIGHT_NORM = 65500.0  # the default of LAMB
_SPECIFIC = "___specific___"  # between the name of a rate and its parameter's
# Keys of groups that are rates of no constructor in PopTorch's sense: speed, and the sign of gradients.
_SPEED = ("foreach", "maximize", "capturable", "differentiable", "fused", "velocity_scaling")
_SWITCHES = ("nesterov", "amsgrad", "centered")  # not in "ipu_param"
LOSS_FACTOR = "lossScaleUpdateFactor"  # key of "ipu_state": the factor of automatic loss scaling


class VariableAttributes:
    """Marks of an optimizer's attributes: constant, or variable, which may change after compilation.

    Unless it is marked, an attribute is variable if it was an argument of the constructor, else constant.

    >>> optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer.variable_attrs.markAsVariable("momentum")
    """

    def __init__(self, variable: Iterable[str], allowed: Iterable[str]) -> None:
        self._allowed = tuple(allowed)
        self._variable = set(map(self._checked_name, variable))

    def __iter__(self):
        """Iterate over the names that can be marked."""
        return iter(self._allowed)

    def isConstant(self, name: str) -> bool:
        """Return whether a change of the attribute after compilation is an error."""
        return self._checked_name(name) not in self._variable

    def markAsConstant(self, name: str) -> None:
        """Make `setOptimizer` refuse changes of a hyperparameter, such as "lr", from the next compilation on.
        Raises AssertionError for an unknown name."""
        self._variable.discard(self._checked_name(name))

    def markAsVariable(self, name: str) -> None:
        """Allow `setOptimizer` to change a hyperparameter; otherwise as `markAsConstant`."""
        self._variable.add(self._checked_name(name))

    def _checked_name(self, name: str) -> str:
        """Return `name`. Raises AssertionError if no attribute of this name can be marked."""
        return checked("variable_attrs", name, tuple(sorted(self._allowed)))


class StateKind(NamedTuple):
    """The description of a state tensor that an optimizer has for each parameter."""

    file: str  # prefix of the tensor's name in the "ipu_state"; "": it is not there
    dtype: str = ""  # attribute of the optimizer that holds the tensor's dtype; "": one number, a count
    when: str = ""  # key of the group; the tensor exists if the rate is not 0
    is_square: bool = False  # an update takes the root of its values


class Optimizer:
    """Mixin of poptorch's optimizers: each inherits from this class and from a torch optimizer.

    The hyperparameters are torch's `param_groups`, so learning rate schedulers work; an executor reads them
    at `setOptimizer` only. The state (momenta, step counts) is torch's `state`, which executors update.
    """

    _states: ClassVar[dict[str, StateKind]] = {}  # by name, as torch's; the first one is always there
    _rates: ClassVar[tuple[str, ...]] = ()  # keys that each group must have
    # Names of the constructor's arguments after `params`, in PopTorch's order; those after "*" by keyword only.
    _arguments = ""
    _defaults: dict[str, Any] | None = None  # default rates of a rule that torch has no optimizer for
    _needs_lr = False  # whether "lr" is mandatory, as an argument or in every parameter group
    _more_rates: tuple[str, ...] = ()  # rates in `variable_attrs` that `step()` doesn't read

    # Canonical names of parameters, in the groups' order: the executor's, before that those in a loaded "ipu_param".
    _names: tuple[str, ...] = ()
    _loads = 0  # number of loaded states that had rates
    _loss_factor: Tensor | None = None  # of automatic loss scaling, which calls change
    _per_replica: frozenset[int] = frozenset()  # ids of parameters with a row for each group of replicas

    state: Any  # torch's: {parameter: {name of a state: tensor}}
    loss_scaling: float = 1.0
    max_grad_norm: float = math.inf
    accum_type: torch.dtype = torch.float32
    variable_attrs: VariableAttributes

    # The classes of this package by themselves and by torch's class of the same name, without the user's subclasses.
    _classes: ClassVar[dict[type, type["Optimizer"]]] = {}

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("each optimizer has a constructor of its own")

    def __init_subclass__(cls) -> None:
        if "_arguments" in vars(cls):
            Optimizer._classes |= dict.fromkeys([cls, getattr(torch.optim, cls.__name__, cls)], cls)
            cls.__init__ = _constructor(cls._arguments)
            ordered = cls._arguments.partition("*")[0].split()
            cls._rates = tuple(n for n in ordered if n not in _SPEED and not hasattr(cls, n))

    def _init_from_arguments(self, arguments: dict[str, Any]) -> None:
        """Initialise torch's class, and set the other declared attributes. None: omitted. Given rates are variable."""
        left_out = ("capturable", "differentiable")  # of updates inside of graphs, which executors don't make
        given = {
            name: value for name, value in arguments.items() if value is not None and name not in left_out
        }
        if isinstance(given.get("params"), torch.nn.Module):
            raise TypeError("an optimizer takes parameters, and not the model\n  fix: model.parameters()")
        for name, dtype in given.items():
            if name.endswith("accum_type"):
                words = f"Accumulation types must be either torch.float32 or torch.float16: {name}"
                checked(words, dtype, (torch.float32, torch.float16), fix=f"{name}=torch.float16")
        if self._needs_lr and "lr" not in given:
            groups = given["params"] = list(given["params"])
            lacking = [
                n for n, group in enumerate(groups) if not isinstance(group, dict) or "lr" not in group
            ]
            if lacking:
                raise ValueError(
                    f"parameter group {lacking[0]} didn't specify a value of required optimization parameter lr\n"
                    f"  fix: poptorch.optim.{type(self).__name__}(params, lr=...), or an 'lr' in every group"
                )
        if self._defaults is not None:
            given["defaults"] = {name: given.get(name, value) for name, value in self._defaults.items()}
        accepted = inspect.signature(super().__init__).parameters
        super().__init__(**{name: value for name, value in given.items() if name in accepted})
        for name, value in given.items():
            if name not in accepted and not name.startswith("_") and hasattr(type(self), name):
                setattr(self, name, value)
        allowed = (*self._rates, *self._more_rates, "loss_scaling")
        self.variable_attrs = VariableAttributes((name for name in allowed if name in given), allowed)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Called by torch's `step()` for each group."""
        self._complete_states(group)
        return super()._init_group(group, *lists)  # type: ignore[misc]

    def _complete_states(self, group: dict[str, Any]) -> None:
        """Add the states that are missing: of the first update, of a loaded file, of a momentum that was 0 so far."""
        names = [name for name, state in self._states.items() if not state.when or group[state.when]]
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            state = self.state[parameter]
            for name in names:
                if name not in state:
                    state[name] = self._first_state(name, parameter, group)

    def _first_state(self, name: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a state before the first update: zeros."""
        if self._states[name].dtype:
            return torch.zeros_like(parameter, memory_format=torch.preserve_format)
        is_there = group.get("fused") or group.get("capturable")
        return torch.zeros((), dtype=torch.float32, device=parameter.device if is_there else "cpu")

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, with the state as "ipu_state" too, and the hyperparameters as "ipu_param".

        Both are None before compilation, unless they were loaded. Their tensors are copies; those in torch's part are
        the ones that updates change.
        Raises Error if the state was sharded over instances and the executor has ended.
        """
        whole = super().state_dict()  # type: ignore[misc]
        ipu_state = ipu_param = None
        if self._names:
            ipu_state = {
                f"{self._states[kind].file}___{name}": value.clone()
                for index, name in enumerate(self._names)
                for kind, value in whole["state"].get(index, {}).items()
                if kind in self._states and self._states[kind].file
            }
            if self._loss_factor is not None:
                ipu_state[LOSS_FACTOR] = self._loss_factor.clone()
            sizes = [len(group["params"]) for group in self.param_groups]  # type: ignore[attr-defined]
            indices = (index for index, size in enumerate(sizes) for _ in range(size))
            group_of = dict(zip(self._names, indices, strict=False))  # a group may have been added
            ipu_param = to_ipu_param(type(self), group_of, rates_of(self))
        return {"ipu_state": ipu_state, "ipu_param": ipu_param, **whole}

    @without_internal_frames
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`: hyperparameters and state.

        "ipu_state" and "ipu_param" may be None: then the dictionary is that of torch's optimizer of this name.
        A state in "ipu_state" replaces the one in torch's part. States that both lack stay, and a warning names
        them. Raises RuntimeError, and loads nothing, if the dictionary is empty or lacks "ipu_state" or "ipu_param",
        or for states of another optimizer, of other shapes, or with values that no update yields.
        """
        if not state_dict:
            raise RuntimeError(
                "Cannot load the optimizer state dictionary because it is empty.\n"
                "  fix: load what `optimizer.state_dict()` of a poptorch optimizer returned"
            )
        if not {"ipu_state", "ipu_param"} <= set(state_dict):
            raise RuntimeError(
                "Only IPU optimizer states can be loaded into a poptorch optimizer: this dictionary lacks "
                "'ipu_state' or 'ipu_param', so another optimizer wrote it.\n"
                f"  found: {', '.join(map(repr, state_dict))}\n"
                "  fix: load what `optimizer.state_dict()` of a poptorch optimizer returned; if a torch optimizer of"
                " this name wrote it, load {'ipu_state': None, 'ipu_param': None, **dictionary}"
            )
        torch_part = dict(state_dict)
        ipu_state, ipu_param = torch_part.pop("ipu_state"), torch_part.pop("ipu_param") or {}
        names_in_order = dict.fromkeys(key.partition(_SPECIFIC)[2] for key in ipu_param)
        names = self._names or tuple(filter(None, names_in_order))
        if ipu_state is not None:
            torch_part["state"] = self._joined_states(names, torch_part["state"], ipu_state)
        check_torch_state(self, torch_part)
        super().load_state_dict(torch_part)  # type: ignore[misc]
        self._names = names
        if ipu_state is None:
            return
        for index, parameter in enumerate(parameters_of(self)):
            if state := torch_part["state"].get(index):  # torch casts states to the dtype of their parameter
                self.state[parameter] = {name: value.detach().clone() for name, value in state.items()}
        if (factor := ipu_state.get(LOSS_FACTOR)) is not None:
            kept = torch.ones(()) if self._loss_factor is None else self._loss_factor
            self._loss_factor = kept.copy_(factor.detach())
        if (scaling := ipu_param.get("lossScaling_FLOAT")) is not None:
            self.loss_scaling = float(scaling)
            self._loads += 1

    def _joined_states(
        self, names: Sequence[str], states: Mapping[int, Any], ipu_state: Mapping[str, Tensor]
    ) -> dict[int, dict[str, Tensor]]:
        """Return each parameter's state, by index: from "ipu_state", else from `states`, else the present
        one. Log a warning of present states that "ipu_state" lacks."""
        joined, missing = dict(states), list[str]()
        for index, (name, parameter) in enumerate(zip(names, parameters_of(self), strict=False)):
            present = self.state.get(parameter, {})
            joined[index] = {**present, **states.get(index, {})}
            for kind, file in ((kind, state.file) for kind, state in self._states.items() if state.file):
                if (key := f"{file}___{name}") in ipu_state:
                    joined[index][kind] = ipu_state[key]
                elif kind in present:
                    missing.append(key)
        if missing:
            logger.warning(
                "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(sorted(missing))
            )
        return joined

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be copied: without hooks and a scheduler's `step`."""
        return {
            **super().__getstate__(),  # type: ignore[misc]
            **{n: v for n, v in vars(self).items() if n != "step" and not n.startswith("_optimizer_")},
        }


def _constructor(arguments: str) -> Callable[..., None]:
    """Return the method `__init__` of an optimizer with these arguments, all of which may be None."""
    ordered, _, named = arguments.partition("*")
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kinds[0]) for name in ("self", "params")]
    for names, kind in zip((ordered, named), kinds, strict=True):
        parameters += [inspect.Parameter(name, kind, default=None) for name in names.split()]
    signature = inspect.Signature(parameters)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        self._init_from_arguments({name: given[name] for name in given if name != "self"})

    __init__.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return without_internal_frames(__init__)


# rates ------------------------------------------------------------------------------------------------


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def class_of(optimizer: Any) -> type[Optimizer] | None:
    """Return the class of this package that describes an optimizer: its own, or the one of the same name as its class
    of torch; None for others, of whose rates and states nothing is known."""
    bases = type(optimizer).__mro__  # the nearest first: torch derives AdamW from Adam
    return next((Optimizer._classes[base] for base in bases if base in Optimizer._classes), None)


def rates_of(optimizer: Any) -> Hyper:
    """Return the rates of an optimizer's groups, and its loss scaling. Raises AssertionError for invalid
    ones."""
    scaling = as_float(getattr(optimizer, "loss_scaling", 1.0), "loss_scaling", "the optimizer")
    if not 0 < scaling < math.inf:
        raise AssertionError(
            f"loss_scaling has to be a positive, finite number, and is {scaling:g}\n"
            "  why: the loss is multiplied by it, and gradients are divided by it before the update\n"
            "  fix: loss_scaling=1.0, or a power of two for half precision"
        )
    groups = (_group_rates(optimizer, group, index) for index, group in enumerate(optimizer.param_groups))
    return Hyper(groups=tuple(groups), loss_scaling=scaling)


def _group_rates(optimizer: Any, group: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the rates of parameter group `index`: numbers, switches and words. Raises errors as `rates_of`."""
    cls, where = class_of(optimizer), f"parameter group {index}"
    for key in cls._rates if cls is not None else ():
        if key not in group:
            raise AssertionError(
                f"Mandatory attribute {key} not found in {where} of {type(optimizer).__name__}; "
                f"fix: optimizer.param_groups[{index}][{key!r}] = ..."
            )
        value = group[key]
        if key == "betas" and not (isinstance(value, tuple) and len(value) == 2):
            raise AssertionError(f"Expected a tuple of 2 numbers for betas in {where}, but found {value!r}")
        if not (key == "max_weight_norm" and value is None):  # the default
            for number in value if key == "betas" else (value,):
                as_float(number, key, where)
    rates = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params" and _is_rate(value)
    }
    if cls is not None and _may_use_lists(group):
        rates["foreach"] = True
    return rates


def _may_use_lists(group: dict[str, Any]) -> bool:
    """Return whether torch's loop over lists of parameters is faster, for the same bits: to start an operation takes
    longer than its work. (By itself torch chooses it for accelerators only; it copies a state of all parameters.)"""
    is_free = (
        group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable")
    )
    values = group["params"]
    return (
        is_free
        and not isinstance(group["lr"], Tensor)
        and sum(value.numel() for value in values) <= _SMALL
        and all(value.is_cpu and type(value) in (Tensor, Parameter) for value in values)
    )


def _is_rate(value: Any) -> bool:
    """Return whether a value of a group is a number, a switch or a word, or a pair of numbers."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple):
        return all(map(_is_rate, value))
    return value is None or isinstance(value, (bool, int, float, str))


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
    first, *rest = ["learning", "rate"] if rate == "lr" else rate.split("_")
    return first + "".join(map(str.capitalize, rest))


def to_ipu_param(cls: type[Optimizer], group_of: Mapping[str, int], hyper: Hyper) -> dict[str, Tensor]:
    """Return the "ipu_param" of an optimizer: the loss scaling, and for each parameter its group's rates. SGD
    without momentum has two derived values instead, with dampening d, weight decay λ and loss scaling s:
    scaledLearningRate0 = lr·(1 − d) / s and weightDecayScaleFactor0 = 1 − lr·(1 − d)·λ."""
    entries = {"lossScaling_FLOAT": torch.tensor(float(hyper.loss_scaling))}
    for parameter, index in group_of.items():
        rates = numbers_of(cls, hyper.groups[index])
        values = {_ipu_param_name(name): rate for name, rate in rates.items() if name not in _SWITCHES}
        if "dampening" in rates and rates["momentum"] == 0:
            step = rates["lr"] * (1 - rates["dampening"])
            factor = 1 - step * rates["weight_decay"]
            values = {"scaledLearningRate0": step / hyper.loss_scaling, "weightDecayScaleFactor0": factor}
        for name, value in values.items():
            entries[f"{name}{_SPECIFIC}{parameter}"] = torch.tensor(value)
    return entries


def numbers_of(cls: type[Optimizer] | None, rates: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of a group as numbers, with "betas" as "beta1" and "beta2": those that a class names, else all
    numbers."""
    numbers: dict[str, float] = {}
    for name in rates if cls is None else cls._rates:
        value = rates[name]
        if name == "betas":
            numbers |= {f"beta{n}": float(beta) for n, beta in enumerate(value, 1)}
        elif isinstance(value, (int, float, Tensor)) or name == "max_weight_norm":
            numbers[name] = MAX_WEIGHT_NORM if value is None else float(value)
    return numbers


# poptorch's format ------------------------------------------------------------------------------------


def check_torch_state(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError if torch's part of a `state_dict()` has states of another kind of optimizer, of
    other shapes than the parameters, or with values that no update yields. States of unknown kinds pass."""
    cls = class_of(optimizer)
    if cls is None:
        return
    first, names = next(iter(cls._states)), {"step", *cls._states}
    for index, parameter in enumerate(parameters_of(optimizer)):
        state = state_dict["state"].get(index, {})
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        if tensors and not {first} <= set(tensors) <= names:
            raise RuntimeError(
                f"the state to be loaded into {type(optimizer).__name__} is of another kind of optimizer: of parameter"
                f" {index} it has {', '.join(sorted(tensors))}, and {type(optimizer).__name__} keeps"
                f" {', '.join(sorted(names))}\n"
                "  fix: use the optimizer that wrote it, or go on with a new one"
            )
        for name, value in tensors.items():
            state_kind = cls._states.get(name, StateKind(""))
            if why := _fault_of_state(state_kind, value.detach(), parameter.shape):
                shown = value.tolist() if value.numel() == 1 else f"a tensor of the shape {list(value.shape)}"
                raise RuntimeError(
                    f"the state to be loaded can't be right: {name} of parameter {index} is {shown}\n"
                    f"  why: {why}\n"
                    f"  fix: load what state_dict() of an optimizer of this kind ({cls.__name__}) returned for this"
                    " model"
                )


def _fault_of_state(kind: StateKind, value: Tensor, shape: torch.Size) -> str:
    """Return why a state of a parameter with this shape can't be right; "" if it can."""
    if not kind.dtype:
        is_count = value.isfinite() & (value >= 0) & (value == value.floor())
        return "" if is_count.all() else "a count of updates is a whole number, 0 or more"
    if kind.is_square and bool((value < 0).any()):
        return "a mean of squares is nowhere negative"
    return "" if value.shape == shape else f"the parameter has the shape {list(shape)}"
