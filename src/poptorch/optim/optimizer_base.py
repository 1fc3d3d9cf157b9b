"""What poptorch's optimizers add to torch's: attributes of their own, and state that lives on devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from popengine.update.optimizer_rules import RULES
from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.torch_link import refuse_other_rules

# (ipu_state, ipu_param): tensors by the names that `poptorch.optim.state_names` gives them.
DeviceState = tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]

ACCUMULATION_TYPES = (torch.float32, torch.float16)
MAX_WEIGHT_NORM = 65500.0  # of LAMB


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were given: None says that torch's default is wanted."""
    return {name: value for name, value in arguments.items() if value is not None}


class Optimizer:
    """Mixed into a torch optimizer: holds what an executor reads, and gives access to what it keeps.

    The rates are torch's `param_groups`, so learning rate schedulers work. An executor reads them at
    `setOptimizer` only, and keeps the state (momenta, step counts) on its devices.
    """

    _kind: str  # of each class: the key of its rule

    # Set by an executor while this optimizer is its own; reads the state back from the devices.
    _state_reader: Callable[[], DeviceState] | None = None
    # Loaded by the user, to be uploaded by the executor, which then resets it to None.
    _pending_state: DeviceState | None = None
    # The same, where torch's part of the dictionary has the state and there is no devices' part.
    _pending_torch_state: dict[Tensor, Any] | None = None
    # Whether it came after the last `setOptimizer`: then its rates are newer than those of the executor.
    _has_pending_rates: bool = False
    # The last state of an executor that has let go of this optimizer.
    _kept_state: DeviceState | None = None

    loss_scaling: float
    max_grad_norm: float
    variable_attrs: VariableAttributes

    @property
    def _attributes(self) -> tuple[str, ...]:
        """What `variable_attrs` knows, beside the loss scaling."""
        return (*RULES[self._kind].rates, *RULES[self._kind].flags)

    def _extend(
        self,
        explicit: dict[str, Any],
        loss_scaling: float | None,
        max_grad_norm: float | None = None,
        **types: torch.dtype | None,
    ) -> None:
        """Add the attributes that torch's class hasn't got.

        Args: explicit: the arguments the user gave, which may change after compilation
              types: accumulator and state dtypes, by the name of their attribute; None is float32
        """
        for name, dtype in types.items():
            dtype = torch.float32 if dtype is None else dtype
            if dtype not in ACCUMULATION_TYPES:
                raise AssertionError(
                    "Accumulation types must be either torch.float32 or torch.float16, "
                    f"but {name}={dtype!r} was given to poptorch.optim.{type(self).__name__}"
                )
            setattr(self, name, dtype)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        variable = {*explicit, *given(loss_scaling=loss_scaling)}
        allowed = (*self._attributes, "loss_scaling")
        self.variable_attrs = VariableAttributes((name for name in allowed if name in variable), allowed)

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
            RuntimeError: the dictionary is empty, lacks "ipu_state" or "ipu_param", or torch's part is the state of
                another rule; nothing is taken over then
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
        refuse_other_rules(self._kind, self, rest)
        super().load_state_dict(rest)  # type: ignore[misc]
        ipu_state, ipu_param = state_dict["ipu_state"], state_dict["ipu_param"]
        self._pending_state = None if ipu_state is None else (dict(ipu_state), dict(ipu_param or {}))
        self._has_pending_rates = bool(ipu_param)
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

    def _release(self, lost: Callable[[], NoReturn] | None = None) -> None:
        """Keep the devices' last state and let go of them; the executor calls this before it forgets us.

        Args: lost: the state can't be kept, and this is to be called by who asks for it
        """
        if self._state_reader is not None:
            self._kept_state = self._state_reader() if lost is None else None
            self._state_reader = lost

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the link to an executor, torch's hooks and the `step` that schedulers replace."""
        attributes = {
            name: value
            for name, value in vars(self).items()
            if name not in ("step", "_state_reader") and not name.startswith("_optimizer_")
        }
        if self._state_reader is not None:
            attributes["_kept_state"] = self._state_reader()
        return {**super().__getstate__(), **attributes}  # type: ignore[misc]
