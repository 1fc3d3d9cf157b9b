"""An executor as a loop that `compare` can check."""

import copy
from typing import Any

import torch
from torch import nn

from ..enums import OutputMode
from ..executor.wrapping import trainingModel
from ..nested_values import arguments_of, tensors_of
from ..options import Options
from .loop import Updated
from .plain import rows_in, take


class ExecutorUpdate:
    """A function that makes an update by an executor, with the rows of this instance.

    Args:
        loss_index: of the loss in the outputs of forward
        updates:    the number of calls; the last one destroys the executor
    """

    title = ""

    def __init__(self, options: Options, loss_index: int, updates: int) -> None:
        self._options = options.clone().deviceIterations(1).createOrSet(check_recording="always")
        self._loss_index, self._calls_left = loss_index, updates
        self._executor: Any = None

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Updated:
        """Make an update. The gradients, left in `.grad`, are the momenta of SGD after an update of a copy."""
        counts = self._options._counts()
        rows = torch.arange(rows_in(batch)).chunk(counts.instances)[counts.instance]
        args, kwargs = arguments_of(take(batch, rows))
        twin = copy.deepcopy(model)
        if self._executor is None:
            self._executor = trainingModel(model, self._options.clone().outputMode(OutputMode.All), optimizer)
        losses = tensors_of(self._executor(*args, **kwargs))[self._loss_index].flatten()
        self.title, self._calls_left = self._executor.plan.title, self._calls_left - 1
        if self._calls_left:
            return Updated(losses.tolist())
        self._executor.destroy()
        sgd = torch.optim.SGD(twin.parameters(), lr=0.0, momentum=0.5)
        executor = trainingModel(twin, self._options, sgd)
        executor(*args, **kwargs)
        executor.destroy()
        for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = sgd.state.get(same, {}).get("momentum_buffer")
        return Updated(losses.tolist())
