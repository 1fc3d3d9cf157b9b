"""All that a training executor has to remember, as one value that `popdist.Checkpoint` writes and restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from popengine.errors import Error

from .executable_file import FileOwner

TrainingState = dict[str, Any]
_PLAIN = (int, float, bool, str, tuple, list, type(None))


class TrainingStateOwner(FileOwner):
    """The part of an executor that is put into the state of another one, compiled or not."""

    def _training_state(self) -> TrainingState:
        """Copies of weights, each replica's buffers, optimizer state and rates, loss scale and random state.

        "weights" and "optimizer" are equal in all instances but for parameters that belong to groups of replicas.
        """
        names = dict(self._model.named_buffers())
        with torch._C.DisableTorchFunctionSubclass():
            if self._engine is not None:
                values, buffers = self._engine.read(), self._engine.read_buffers()
            else:
                values = self._host_weights()
                buffers = [{name: values[name].detach().clone() for name in names}]
        return {
            "weights": {name: v.detach().clone() for name, v in values.items() if name not in names},
            "buffers": buffers,
            "optimizer": self._device_states(),
            "rates": [_plain(group) for group in self._optimizer.param_groups],
            "loss_scaling": getattr(self._optimizer, "loss_scaling", None),
            "loss_factor": self._loss_factor(),
            "random": list(self.rng_state) if self._executable is not None else [self._seed(), 0],
        }

    def _set_training_state(self, state: TrainingState) -> None:
        """Go on from a state of the same model: now, where it is attached, else once it is."""
        self._check_fits(state)
        attached = self._engine is not None
        if attached:
            self.detachFromDevice()
        self._put_on_host({**state["buffers"][0], **state["weights"]})
        self._kept_buffers = state["buffers"]
        self._kept_state, self._kept_factor = state["optimizer"], state["loss_factor"]
        self._kept_rng = state["random"][0], state["random"][1]
        for group, rates in zip(self._optimizer.param_groups, state["rates"], strict=True):
            group.update(rates)
        if state["loss_scaling"] is not None:
            self._optimizer.loss_scaling = state["loss_scaling"]
        self.setOptimizer(self._optimizer)
        if attached:
            self.attachToDevice()

    def _check_fits(self, state: TrainingState) -> None:
        """Raises Error, unless a state is of this model and an optimizer with as many groups."""
        with torch._C.DisableTorchFunctionSubclass():
            mine = {name: list(value.shape) for name, value in self._host_weights().items()}
        theirs = {
            name: list(value.shape) for name, value in {**state["buffers"][0], **state["weights"]}.items()
        }
        groups = [name for name in self.per_replica_params if name in mine]
        mine, theirs = ({n: s for n, s in one.items() if n not in groups} for one in (mine, theirs))
        other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if other:
            shown = [
                f"{name} is {theirs.get(name, 'missing')} there, {mine.get(name, 'missing')} here"
                for name in other
            ]
            raise Error(f"the checkpoint is of another model: {'; '.join(shown[:5])}")
        if len(state["rates"]) != len(self._optimizer.param_groups):
            raise Error(
                f"the checkpoint's optimizer has {len(state['rates'])} groups, this one"
                f" {len(self._optimizer.param_groups)}"
            )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params" and isinstance(value, _PLAIN)}
