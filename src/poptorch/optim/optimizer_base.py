"""The mixin of poptorch's optimizers: attributes that torch's lack, and poptorch's format of the state."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from popengine.errors import did_you_mean
from popengine.update.optimizer_rules import RULES
from poptorch.logs import logger
from poptorch.optim.optimizer_state import (
    check_states,
    check_torch_state,
    from_ipu_state,
    load_rates,
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

    # Canonical names of the parameters in the order of the groups. Set by an executor that has compiled them.
    _names: tuple[str, ...] = ()
    # ("ipu_state", "ipu_param") that were loaded before the names were known.
    _pending_state: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
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

        Args: arguments: `locals()` of the constructor. None means omitted; the other rates become variable.
        Raises:
            AssertionError: an accumulation type is not float16 or float32
            ValueError: a mandatory "lr" is missing
        """
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
        ipu_state, ipu_param = self._pending_state or (None, None)
        if self._pending_state is None and self._names:
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

        If "ipu_state" is None, torch's part is loaded: the momenta of updates on the host, or of a torch
        optimizer with the same rule. States that "ipu_state" lacks stay, and a warning names them. Raises
        RuntimeError, and loads nothing, if the dictionary is empty or lacks "ipu_state" or "ipu_param", or
        for states of another rule, of other shapes, or with values that no update yields.
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
        ipu_state, ipu_param = torch_part.pop("ipu_state"), torch_part.pop("ipu_param")
        check_torch_state(self._kind, self, torch_part)
        self._check_ipu_state(ipu_state or {})
        before = self.state
        super().load_state_dict(torch_part)  # type: ignore[misc]
        self._pending_state = None if ipu_state is None else (dict(ipu_state), dict(ipu_param or {}))
        if self._pending_state is not None and self._names:
            self.state = before
            self._take_pending_state()
        if ipu_param:
            load_rates(self._kind, self, ipu_param)
            self._has_loaded_rates = True

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]  # type: ignore[attr-defined]

    def _check_ipu_state(self, entries: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if a state in an "ipu_state" has invalid values or another shape."""
        shapes = {n: tuple(p.shape) for n, p in zip(self._names, self._parameters(), strict=False)}
        check_states(self._kind, from_ipu_state(self._kind, entries), shapes)

    def _set_names(self, names: Iterable[str]) -> None:
        """Set the canonical names of the parameters, and move a state that was loaded before into `state`.

        Raises: RuntimeError, if the loaded state does not fit the parameters
        """
        self._names = tuple(names)
        if self._pending_state is not None:
            self._check_ipu_state(self._pending_state[0])
            self._take_pending_state()

    def _take_pending_state(self) -> None:
        """Copy the pending state into `state`. States that it lacks stay; a warning names them."""
        assert self._pending_state is not None
        entries, self._pending_state = self._pending_state[0], None
        loaded = from_ipu_state(self._kind, entries)
        parameters = dict(zip(self._names, self._parameters(), strict=False))
        present = {name: self.state.get(parameter, {}) for name, parameter in parameters.items()}
        if missing := sorted(set(to_ipu_state(self._kind, present)) - set(entries)):
            logger.warning("the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing))
        for name in loaded.keys() & parameters.keys():
            copies = {key: value.detach().clone() for key, value in loaded[name].items()}
            self.state[parameters[name]] = {**present[name], **copies}
        if LOSS_FACTOR in entries:
            loaded_factor = entries[LOSS_FACTOR].detach().clone()
            self._loss_factor = (
                loaded_factor if self._loss_factor is None else self._loss_factor.copy_(loaded_factor)
            )

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be copied: without hooks and a scheduler's `step`."""
        return {
            **super().__getstate__(),  # type: ignore[misc]
            **{n: v for n, v in vars(self).items() if n != "step" and not n.startswith("_optimizer_")},
        }
