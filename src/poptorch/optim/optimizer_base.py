"""What poptorch's optimizers add to torch's: attributes of their own, and state that lives on devices."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from popengine.update.optimizer_rules import RULES
from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.state_names import check_states, renamed, states_of
from poptorch.optim.torch_link import refuse_other_rules

# ("ipu_param"; the parameter groups when it was loaded, without parameters; the loss scaling then).
LoadedRates = tuple[Mapping[str, Tensor], list[dict[str, Any]], float]

# (ipu_state, ipu_param): tensors by the names that `poptorch.optim.state_names` gives them.
DeviceState = tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]

ACCUMULATION_TYPES = (torch.float32, torch.float16)
MAX_WEIGHT_NORM = 65500.0  # of LAMB


class Optimizer:
    """Mixed into a torch optimizer: holds what an executor reads, and gives access to what it keeps.

    The rates are torch's `param_groups`, so learning rate schedulers work. An executor reads them at
    `setOptimizer` only, and keeps the state (momenta, step counts) on its devices.
    """

    _kind: str  # of each class: the key of its rule
    _defaults: dict[str, Any] | None = None  # of a rule that torch hasn't got: the rates that nobody gives

    # Set by an executor while this optimizer is its own; reads the state back from the devices.
    _state_reader: Callable[[], DeviceState] | None = None
    # Loaded by the user, to be uploaded by the executor, which then resets it to None.
    _pending_state: DeviceState | None = None
    # The same, where torch's part of the dictionary has the state and there is no devices' part.
    _pending_torch_state: dict[Tensor, Any] | None = None
    # Its rates, beside those that the groups had then: for the rates that the user does not change afterwards.
    _loaded_rates: LoadedRates | None = None
    # Set by an executor, with the reader. Raises RuntimeError for states that do not fit its parameters.
    _state_check: Callable[[Mapping[str, Tensor]], None] | None = None
    # The last state of an executor that has let go of this optimizer, and the names that it had for the parameters.
    _kept_state: DeviceState | None = None
    _kept_names: Mapping[int, str] = MappingProxyType({})  # id(parameter) -> canonical name

    loss_scaling: float = 1.0
    max_grad_norm: float = math.inf
    accum_type: torch.dtype = torch.float32
    variable_attrs: VariableAttributes

    @property
    def _attributes(self) -> tuple[str, ...]:
        """What `variable_attrs` knows, beside the loss scaling."""
        return (*RULES[self._kind].rates, *RULES[self._kind].flags)

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Initialise torch's class with the arguments that it takes, and set the attributes that it hasn't got.

        Args: arguments: `locals()` of the constructor; None: not given. Those of rates make these variable: they may
                  change after compilation
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        for name, dtype in given.items():
            if name.endswith("accum_type") and dtype not in ACCUMULATION_TYPES:
                raise AssertionError(
                    "Accumulation types must be either torch.float32 or torch.float16, "
                    f"but {name}={dtype!r} was given to poptorch.optim.{type(self).__name__}"
                )
        taken = inspect.signature(super().__init__).parameters if self._defaults is None else self._defaults
        theirs = {name: value for name, value in given.items() if name in taken}
        if self._defaults is None:
            super().__init__(**theirs)
        else:
            super().__init__(given["params"], self._defaults | theirs)  # type: ignore[call-arg]
        for name in given.keys() - theirs.keys():
            if not name.startswith("_") and hasattr(type(self), name):
                setattr(self, name, given[name])
        allowed = (*self._attributes, "loss_scaling")
        self.variable_attrs = VariableAttributes((name for name in allowed if name in given), allowed)

    def _with_rates(self, params: ParamsT) -> ParamsT:
        """Parameter groups, each with a learning rate. Raises ValueError, where one has none."""
        groups: Any = list(params)
        for index, group in enumerate(groups):
            if not isinstance(group, dict) or "lr" not in group:
                raise ValueError(
                    f"parameter group {index if isinstance(group, dict) else 0} didn't specify a value of "
                    "required optimization parameter lr\n"
                    f"  fix: poptorch.optim.{type(self).__name__}(params, lr=...), or an 'lr' in every group"
                )
        return groups

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's dictionary, with the devices' part as "ipu_state" and "ipu_param": None before compilation.

        The rates are in torch's part, so that schedulers find them after `load_state_dict`.
        """
        ipu_state, ipu_param = self._device_state()
        return {"ipu_state": ipu_state, "ipu_param": ipu_param, **super().state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`: the rates now, the devices' part when an executor next runs.

        Without a devices' part ("ipu_state" is None) the executor takes torch's, which has the momenta of updates on
        the host, or those of a torch optimizer with the same rule.

        Raises:
            RuntimeError: the dictionary is empty, lacks "ipu_state" or "ipu_param", torch's part is the state of
                another rule, or a state can't be right; nothing is taken over then
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
        rest = {name: value for name, value in state_dict.items() if name not in ("ipu_state", "ipu_param")}
        ipu_state, ipu_param = state_dict["ipu_state"], state_dict["ipu_param"]
        refuse_other_rules(self._kind, self, rest)
        check_states(self._kind, states_of(self._kind, ipu_state or {}))
        if self._state_check is not None:
            self._state_check(ipu_state or {})
        super().load_state_dict(rest)  # type: ignore[misc]
        self._pending_state = None if ipu_state is None else (dict(ipu_state), dict(ipu_param or {}))
        own: Any = self
        groups = [{name: group[name] for name in group if name != "params"} for group in own.param_groups]
        self._loaded_rates = (dict(ipu_param), groups, self.loss_scaling) if ipu_param else None
        loaded: dict[Tensor, Any] = self.state  # type: ignore[attr-defined]
        self._pending_torch_state = dict(loaded) if ipu_state is None and loaded else None

    def _device_state(self) -> DeviceState:
        if self._pending_state is not None:
            return self._pending_state
        if self._pending_torch_state is not None:
            return None, None
        if self._state_reader is not None:
            return self._state_reader()
        return self._kept_state or (None, None)

    def _release(self, names: Mapping[int, str], lost: Callable[[], NoReturn] | None = None) -> None:
        """Keep the devices' last state and let go of them; the executor calls this before it forgets us.

        Args: names: id(parameter) -> its canonical name
              lost: the state can't be kept, and this is to be called by who asks for it
        """
        if self._state_reader is not None:
            self._kept_state = self._state_reader() if lost is None else None
            self._kept_names = names
            self._state_reader, self._state_check = lost, None

    def _resume(self, names: Mapping[int, str]) -> None:
        """Let the next executor upload the state that the last one left, unless another state was loaded since.

        Args: names: id(parameter) -> its canonical name in the next executor
        """
        kept, self._kept_state = self._kept_state, None
        if kept is not None and kept[0] is not None and self._pending_torch_state is None:
            news = {name: names[key] for key, name in self._kept_names.items() if key in names}
            self._pending_state = self._pending_state or (renamed(kept[0], news), renamed(kept[1], news))

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the link to an executor, torch's hooks and the `step` that schedulers replace."""
        attributes = {
            name: value
            for name, value in vars(self).items()
            if name not in ("step", "_state_reader", "_state_check", "_kept_names")
            and not name.startswith("_optimizer_")
        }
        if self._state_reader is not None:
            attributes["_kept_state"] = self._state_reader()
        return {**super().__getstate__(), **attributes}  # type: ignore[misc]
