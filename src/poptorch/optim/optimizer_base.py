"""The mixin of poptorch's optimizers: attributes that torch's lack, and the state on an executor's devices."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from popengine.update.optimizer_rules import RULES
from poptorch.optim.optimizer_state import check_states, check_torch_state, from_ipu_state, load_rates

# (ipu_state, ipu_param): tensors by the names that `optimizer_state.py` lists.
DeviceState = tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]


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
        assert name in self._allowed, f"Unknown attribute {name}, allowed values: {known}"
        return name


class Optimizer:
    """Mixin of poptorch's optimizers: each inherits from this class and from a torch optimizer.

    The rates are torch's `param_groups`, so learning rate schedulers work; an executor reads them at
    `setOptimizer` only. The state (momenta, step counts) is on the executor's devices.
    """

    _kind: str  # key of the class's rule in `RULES`
    _defaults: dict[str, Any] | None = None  # default rates of a rule that torch has no optimizer for
    _needs_lr = False  # whether "lr" is mandatory, as an argument or in every parameter group
    _more_rates: tuple[str, ...] = ()  # rates in `variable_attrs` that the rule doesn't read

    # Reads the state back from the devices. Set by the executor that the optimizer belongs to.
    _state_reader: Callable[[], DeviceState] | None = None
    # Raises RuntimeError for states with other shapes than the parameters. Set by the executor, too.
    _state_check: Callable[[Mapping[str, Tensor]], None] | None = None
    # State that the user has loaded and the executor has not uploaded yet.
    _pending_state: DeviceState | None = None
    # Whether `state` was loaded, from a dictionary whose "ipu_state" is None, and not uploaded yet.
    _has_torch_state = False
    # Whether the rates were changed by a loaded state since the executor last read them.
    _has_loaded_rates = False
    # State read from the last executor before it released the optimizer, and its names of the parameters.
    _kept_state: DeviceState | None = None
    _kept_names: Mapping[int, str] = MappingProxyType({})  # id(parameter) -> canonical name

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
        """Return torch's dictionary, with the devices' state as "ipu_state" and the rates as "ipu_param".

        Both are None before compilation, unless they were loaded, and while a loaded state in torch's format
        waits for its upload. Raises Error if the state was sharded over instances and the executor has ended.
        """
        state = None
        if not self._has_torch_state:
            state = self._pending_state or (self._state_reader() if self._state_reader else self._kept_state)
        ipu_state, ipu_param = state or (None, None)
        return {"ipu_state": ipu_state, "ipu_param": ipu_param, **super().state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`: the rates at once, the state at the next call of an executor.

        If "ipu_state" is None, the executor uploads torch's part: the momenta of updates on the host, or of a
        torch optimizer with the same rule. Raises RuntimeError, and loads nothing, if the dictionary is empty
        or lacks "ipu_state" or "ipu_param", or for states of another rule, of other shapes, or with values
        that no update yields.
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
        check_states(self._kind, from_ipu_state(self._kind, ipu_state or {}))
        if self._state_check is not None:
            self._state_check(ipu_state or {})
        super().load_state_dict(torch_part)  # type: ignore[misc]
        self._pending_state = None if ipu_state is None else (dict(ipu_state), dict(ipu_param or {}))
        if ipu_param:
            load_rates(self._kind, self, ipu_param)
            self._has_loaded_rates = True
        self._has_torch_state = ipu_state is None and bool(self.state)  # type: ignore[attr-defined]

    def _unlink_executor(self, names: Mapping[int, str], lost: Callable[[], NoReturn] | None = None) -> None:
        """If an executor is linked, copy the devices' state into `_kept_state`, and remove the link.

        Args:
            names: id(parameter) -> canonical name
            lost:  None, or a function that raises the error of later reads: then no state is copied
        """
        if self._state_reader is not None:
            self._kept_state = self._state_reader() if lost is None else None
            self._kept_names = names
            self._state_reader, self._state_check = lost, None

    def _reload_kept_state(self, names: Mapping[int, str]) -> None:
        """Move `_kept_state` to `_pending_state`; discard the kept state if another one was loaded since.

        Args: names: id(parameter) -> canonical name in the executor that will upload the state
        """
        kept, self._kept_state = self._kept_state, None
        if kept is None or kept[0] is None or self._pending_state or self._has_torch_state:
            return
        new_names = {name: names[key] for key, name in self._kept_names.items() if key in names}
        state = {}
        for key, value in kept[0].items():
            prefix, separator, name = key.partition("___")
            state[f"{prefix}{separator}{new_names.get(name, name)}"] = value
        self._pending_state = state, kept[1]

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be copied: without links to the executor, hooks, and a scheduler's `step`,
        and with the devices' state, which is read now."""
        attributes = {
            name: value
            for name, value in vars(self).items()
            if name not in ("step", "_state_reader", "_state_check", "_kept_names")
            and not name.startswith("_optimizer_")
        }
        if self._state_reader is not None:
            attributes["_kept_state"] = self._state_reader()
        return {**super().__getstate__(), **attributes}  # type: ignore[misc]
