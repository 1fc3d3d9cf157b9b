"""The executor's side of an optimizer: takes its rates at `setOptimizer`, keeps its state on the devices."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from . import wrapping
from .enums import MeanReductionStrategy
from .logs import logger
from .optim import Optimizer as PoptorchOptimizer
from .optim.state import rate_entries, state_entries, states_of
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
        # The class's own names: a wrapper may leave out its prefix. And those of a marked model would copy weights.
        parameters = list(wrapping.plain_class(self._user_model).named_parameters(self._user_model))
        names = {id(parameter): name for name, parameter in parameters}
        frozen, self._hyper = self._guard.accept(optimizer, names, self.isCompiled())
        if not self.isCompiled():
            self._optimizer_settings = frozen
            self._pick_reduction_strategy(optimizer)
            with torch._C.DisableTorchFunctionSubclass():
                lost = [name for name, p in parameters if p.requires_grad and name not in frozen.group_of]
            if lost:
                logger.warning("parameters in no group of the optimizer are not updated: %s", ", ".join(lost))
        if optimizer is self._optimizer:
            return
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._release()
        self._optimizer = optimizer
        self._link_optimizer()

    def _pick_reduction_strategy(self, optimizer: Any) -> None:
        """Sums of gradients that are kept in float16 are divided as they grow, lest they overflow."""
        narrow = self._optimizer_settings.accumulator_type == torch.float16
        if narrow and not getattr(optimizer, "use_combined_accum", False):
            self._options._unfreeze()
            self._options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                MeanReductionStrategy.Running
            )
            self._options._freeze()

    def _link_optimizer(self) -> None:
        """A poptorch optimizer reads its state from the devices of the executor it belongs to."""
        if isinstance(self._optimizer, PoptorchOptimizer) and self._engine is not None:
            link = weakref.ref(self)
            self._optimizer._state_reader = lambda: ((own := link()) and own._read_state()) or (None, None)

    def _read_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        assert self._hyper is not None
        states = self._engine.read_optimizer() if self._engine is not None else self._kept_state or {}
        frozen = self._optimizer_settings
        entries = state_entries(frozen.kind, states)
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
        if isinstance(optimizer, PoptorchOptimizer) and optimizer._pending_state is not None:
            assert self._engine is not None
            loaded = states_of(self._optimizer_settings.kind, optimizer._pending_state[0] or {})
            missing = sorted(set(self._engine.read_optimizer()) - set(loaded))
            if missing:
                logger.warning(
                    "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing)
                )
            self._engine.write_optimizer(loaded)
            factor = (optimizer._pending_state[0] or {}).get(_LOSS_FACTOR)
            if factor is not None:
                self._engine.loss_factor = float(factor)
            optimizer._pending_state = None
