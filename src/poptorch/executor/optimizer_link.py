"""The executor's side of an optimizer: takes its rates at `setOptimizer`, keeps its state on the devices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error

from ..enums import MeanReductionStrategy
from ..optim import Optimizer as PoptorchOptimizer
from ..optim.freeze_optimizer import freeze_optimizer
from ..optim.state_names import loaded_rates, rate_entries, state_entries, states_of
from ..optim.torch_link import Link, torch_state
from ..reporting.logs import logger
from . import marked_model
from .state import ExecutorState

_LOSS_FACTOR = "lossScaleUpdateFactor"  # in the "ipu_state": automatic loss scaling's own state


class OptimizerOwner(ExecutorState):
    """The part of a training executor that talks to optimizers."""

    def setOptimizer(self, optimizer: Any) -> None:
        """Use this optimizer's rates, as they are now, from the next call on.

        Raises:
            Error: something changed that is compiled in, or the model is for inference
        """
        if not self._training:
            raise Error(
                "setOptimizer needs a model that trains, and this one is for inference\n"
                "  fix: wrap the model with poptorch.trainingModel(model, options, optimizer)"
            )
        names = self._parameter_names()
        frozen, self._hyper = self._guard.accept(optimizer, names, self.isCompiled())
        vars(optimizer).pop("_has_pending_rates", None)  # those of the optimizer are newer now
        if not self.isCompiled():
            self._optimizer_settings = frozen
            self._pick_reduction_strategy(optimizer)
            with torch._C.DisableTorchFunctionSubclass():
                trained = [name for name, parameter in self._named_parameters() if parameter.requires_grad]
            lost = [name for name in trained if name not in frozen.group_of]
            if lost:
                logger.warning("parameters in no group of the optimizer are not updated: %s", ", ".join(lost))
        optimizer._opt_called = True  # our calls are its steps: schedulers would warn that there were none
        if optimizer is self._optimizer:
            return
        self._release_optimizer()
        self._optimizer = optimizer
        self._link_optimizer(take=not self.isCompiled())  # else the state on the devices is the newer one

    def _pick_reduction_strategy(self, optimizer: Any) -> None:
        """Sums of gradients that are kept in float16 are divided as they grow, lest they overflow."""
        narrow = self._optimizer_settings.accumulator_type == torch.float16
        if narrow and not getattr(optimizer, "use_combined_accum", False):
            self._options._unfreeze()
            self._options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                MeanReductionStrategy.Running
            )
            self._options._freeze()

    def _link_optimizer(self, take: bool = True) -> None:
        """An optimizer reads its state from the devices of the executor it belongs to; `take` its own to begin with."""
        if isinstance(self._optimizer, PoptorchOptimizer):
            if self._executable is not None:
                link = weakref.ref(self)
                self._optimizer._state_reader = lambda: ((it := link()) and it._read_state()) or (None, None)
        elif self._training and self._link is None:
            self._link = Link(self._optimizer, self._parameter_names(), self, take)

    def _release_optimizer(self) -> None:
        """Leave the optimizer with the state that the devices have."""
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._release()
        if self._link is not None:
            self._link.release()
            self._link = None

    def _named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        # The class's own names: a wrapper may leave out its prefix. And those of a marked model would copy weights.
        return marked_model.plain_class(self._user_model).named_parameters(self._user_model)

    def _parameter_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._named_parameters()}

    def _device_states(self) -> dict[str, dict[str, Tensor]]:
        """The engine's state of each parameter, also while it is detached."""
        return self._engine.read_optimizer() if self._engine is not None else self._kept_state or {}

    def _load_states(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Upload these before the next call."""
        self._loaded_states.update(states)

    def _torch_states(self) -> dict[str, dict[str, Tensor]]:
        """The state of each parameter as torch's optimizers have it; none before the first update."""
        kind = self._optimizer_settings.kind
        _, steps = self._engine.random_state if self._engine is not None else self._kept_rng or (0, 0)
        states = {name: dict(state) for name, state in self._device_states().items()} if steps else {}
        for name, state in self._loaded_states.items():
            states.setdefault(name, {}).update(state)
        return {name: torch_state(kind, state, steps) for name, state in states.items()}

    def _read_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        assert self._hyper is not None
        if self._engine is None and self._kept_state is None:
            return None
        frozen = self._optimizer_settings
        entries = state_entries(frozen.kind, self._device_states())
        if self._executable is not None and self._executable.settings.automatic_loss_scaling:
            entries[_LOSS_FACTOR] = torch.tensor(self._loss_factor())
        return entries, rate_entries(frozen, self._hyper)

    def _loss_factor(self) -> float:
        return self._engine.loss_factor if self._engine is not None else self._kept_factor

    def _loss_scale(self) -> float:
        """What the devices multiply the loss with at the moment."""
        return self._hyper.loss_scaling * self._loss_factor() if self._hyper is not None else 1.0

    def _upload_pending_state(self) -> None:
        """Take over what the user loaded into the optimizer."""
        optimizer = self._optimizer
        if self._loaded_states:
            assert self._engine is not None
            self._engine.write_optimizer(self._loaded_states)
            self._loaded_states = {}
        if isinstance(optimizer, PoptorchOptimizer) and optimizer._pending_state is not None:
            assert self._engine is not None
            kind, entries = self._optimizer_settings.kind, optimizer._pending_state[0] or {}
            loaded = states_of(kind, entries)
            missing = sorted(set(state_entries(kind, self._engine.read_optimizer())) - set(entries))
            if missing:
                logger.warning(
                    "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing)
                )
            factor = entries.get(_LOSS_FACTOR)
            self._engine.write_optimizer(loaded, None if factor is None else float(factor))
            if optimizer._has_pending_rates:
                kept: Any = optimizer
                _, hyper = freeze_optimizer(kept, self._parameter_names())
                self._hyper = loaded_rates(self._optimizer_settings, hyper, optimizer._pending_state[1] or {})
            optimizer._pending_state = None
