"""The mixin of poptorch's optimizers: attributes that torch's lack, and poptorch's format of the state."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from popengine.errors import did_you_mean
from popengine.update.optimizer_rules import RULES
from poptorch.logs import logger
from poptorch.optim.optimizer_state import (
    check_torch_state,
    from_ipu_state,
    names_in,
    rates_of,
    to_ipu_param,
    to_ipu_state,
)

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
        """Make `setOptimizer` refuse changes of the attribute, from the next compilation on."""
        self._variable.discard(self._checked_name(name))

    def markAsVariable(self, name: str) -> None:
        """Allow `setOptimizer` to change the attribute, from the next compilation on."""
        self._variable.add(self._checked_name(name))

    def _checked_name(self, name: str) -> str:
        """Return `name`. Raises AssertionError if no attribute of this name can be marked."""
        known = ", ".join(sorted(self._allowed))
        meant = did_you_mean(name, self._allowed)
        assert name in self._allowed, f"Unknown attribute {name}, allowed values: {known}{meant}"
        return name


class Optimizer:
    """Mixin of poptorch's optimizers: each inherits from this class and from a torch optimizer.

    The rates are torch's `param_groups`, so learning rate schedulers work; an executor reads them at
    `setOptimizer` only. The state (momenta, step counts) is torch's `state`, which executors update.
    """

    _kind: str  # key of the class's rule in `RULES`
    _defaults: dict[str, Any] | None = None  # default rates of a rule that torch has no optimizer for
    _needs_lr = False  # whether "lr" is mandatory, as an argument or in every parameter group
    _more_rates: tuple[str, ...] = ()  # rates in `variable_attrs` that the rule doesn't read

    # Canonical names of the parameters in the order of the groups: those of the executor that has compiled them,
    # before that those in a loaded "ipu_param".
    _names: tuple[str, ...] = ()
    # Whether the rates were changed by a loaded state since the executor last read them.
    _has_loaded_rates = False
    # The factor of automatic loss scaling, which calls change; None: there is none.
    _loss_factor: Tensor | None = None

    state: Any  # torch's: {parameter: {name of a state: tensor}}
    loss_scaling: float = 1.0
    max_grad_norm: float = math.inf
    accum_type: torch.dtype = torch.float32
    variable_attrs: VariableAttributes

    _classes: ClassVar[list[type]] = []  # the classes of this package, not the user's subclasses

    def __init_subclass__(cls) -> None:
        if "_kind" in vars(cls):
            Optimizer._classes.append(cls)

    def _init_from_arguments(self, arguments: dict[str, Any]) -> None:
        """Initialise torch's class with the arguments that it accepts, and set the other declared attributes.
        `arguments` are the `locals()` of the constructor; None means omitted. The given rates become
        variable."""
        given = {name: value for name, value in arguments.items() if value is not None}
        for name, dtype in given.items():
            assert not name.endswith("accum_type") or dtype in (torch.float32, torch.float16), (
                "Accumulation types must be either torch.float32 or torch.float16, "
                f"but {name}={dtype!r} was given to poptorch.optim.{type(self).__name__}"
            )
        if self._needs_lr and "lr" not in given:
            groups = given["params"] = list(given["params"])
            for index, group in enumerate(groups):
                if not isinstance(group, dict) or "lr" not in group:
                    raise ValueError(
                        f"parameter group {index if isinstance(group, dict) else 0} didn't specify a value of "
                        "required optimization parameter lr\n"
                        f"  fix: poptorch.optim.{type(self).__name__}(params, lr=...), or an 'lr' in every group"
                    )
        if self._defaults is not None:
            given["defaults"] = {name: given.get(name, value) for name, value in self._defaults.items()}
        accepted = inspect.signature(super().__init__).parameters
        super().__init__(**{name: value for name, value in given.items() if name in accepted})
        for name, value in given.items():
            if name not in accepted and not name.startswith("_") and hasattr(type(self), name):
                setattr(self, name, value)
        allowed = (*RULES[self._kind].group_keys, *self._more_rates, "loss_scaling")
        self.variable_attrs = VariableAttributes((name for name in allowed if name in given), allowed)

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, with the state as "ipu_state" too, and the rates as "ipu_param".

        Both are None before compilation, unless they were loaded. Their tensors are those that updates change.
        Raises Error if the state was sharded over instances and the executor has ended.
        """
        whole = super().state_dict()  # type: ignore[misc]
        ipu_state = ipu_param = None
        if self._names:
            states = {name: whole["state"].get(index, {}) for index, name in enumerate(self._names)}
            ipu_state = to_ipu_state(self._kind, states)
            if self._loss_factor is not None:
                ipu_state[LOSS_FACTOR] = self._loss_factor
            sizes = [len(group["params"]) for group in self.param_groups]  # type: ignore[attr-defined]
            indices = (index for index, size in enumerate(sizes) for _ in range(size))
            group_of = dict(zip(self._names, indices, strict=False))  # a group may have been added
            ipu_param = to_ipu_param(group_of, rates_of(self._kind, self))
        return {"ipu_state": ipu_state, "ipu_param": ipu_param, **whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`: rates and state.

        "ipu_state" and "ipu_param" may be None: then the dictionary is that of a torch optimizer with the same rule.
        A state in "ipu_state" replaces the one in torch's part. States that both lack stay, and a warning names
        them. Raises RuntimeError, and loads nothing, if the dictionary is empty or lacks "ipu_state" or "ipu_param",
        or for states of another rule, of other shapes, or with values that no update yields.
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
                "  fix: load what `optimizer.state_dict()` of a poptorch optimizer returned; if a torch optimizer with"
                " the same rule wrote it, load {'ipu_state': None, 'ipu_param': None, **dictionary}"
            )
        torch_part = dict(state_dict)
        ipu_state, ipu_param = torch_part.pop("ipu_state"), torch_part.pop("ipu_param") or {}
        names = self._names or names_in(ipu_param)
        if ipu_state is not None:
            torch_part["state"] = self._joined_states(names, torch_part["state"], ipu_state)
        check_torch_state(self._kind, self, torch_part)
        super().load_state_dict(torch_part)  # type: ignore[misc]
        self._names = names
        if ipu_state is None:
            return
        for index, parameter in enumerate(self._parameters()):
            if state := torch_part["state"].get(index):  # torch casts states to the dtype of their parameter
                self.state[parameter] = {name: value.detach().clone() for name, value in state.items()}
        if (factor := ipu_state.get(LOSS_FACTOR)) is not None:
            kept = torch.ones(()) if self._loss_factor is None else self._loss_factor
            self._loss_factor = kept.copy_(factor.detach())
        if (scaling := ipu_param.get("lossScaling_FLOAT")) is not None:
            self.loss_scaling = float(scaling)
            self._has_loaded_rates = True

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]  # type: ignore[attr-defined]

    def _joined_states(
        self, names: Sequence[str], states: Mapping[int, Any], ipu_state: Mapping[str, Tensor]
    ) -> dict[int, dict[str, Tensor]]:
        """Return the state of each parameter, by index: from "ipu_state", else from `states`, else the present one.
        Log a warning of present states that "ipu_state" lacks."""
        present = {name: self.state.get(p, {}) for name, p in zip(names, self._parameters(), strict=False)}
        if missing := sorted(to_ipu_state(self._kind, present).keys() - ipu_state.keys()):
            logger.warning("the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing))
        loaded = from_ipu_state(self._kind, ipu_state)
        joined = {
            index: {**present[name], **states.get(index, {}), **loaded.get(name, {})}
            for index, name in enumerate(present)
        }
        return {**states, **joined}

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be copied: without hooks and a scheduler's `step`."""
        return {
            **super().__getstate__(),  # type: ignore[misc]
            **{n: v for n, v in vars(self).items() if n != "step" and not n.startswith("_optimizer_")},
        }
