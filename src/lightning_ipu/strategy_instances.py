"""Several processes that train together, as Lightning asks about them. Alone, everything gives back what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import popdist
import poptorch


@dataclass(frozen=True)
class Instances:
    """Which process of how many this is."""

    count: int = 1
    index: int = 0
    local_index: int = 0

    @classmethod
    def of(cls, options: poptorch.Options) -> Instances:
        """As the options say; meets the others where popdist was told of them."""
        distributed = options.Distributed
        if distributed.numProcesses == 1:
            return cls()
        if popdist.isPopdistEnvSet():
            popdist.init()
        local = popdist.getLocalInstanceIndex() if popdist.isPopdistEnvSet() else distributed.processId
        return cls(distributed.numProcesses, distributed.processId, local)

    def reduce(self, value: Any, operation: Any = "mean") -> Any:
        """The mean (or sum, min, max) over all processes of a tensor or number."""
        if self.count == 1:
            return value
        word = str(operation or "mean").rsplit(".", 1)[-1].lower()
        operations = {"mean": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM}
        operations |= {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        result = torch.as_tensor(value).clone()
        is_mean = word in ("mean", "avg")
        result = result.float() if is_mean and not result.is_floating_point() else result
        dist.all_reduce(result, operations[word])
        return result / self.count if is_mean else result

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, source)
        return values[0]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[count, *shape]; alone the tensor itself."""
        if self.count == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)


class InstancesPart:
    """The part of a strategy that tells Lightning of the other processes."""

    _instances: Instances

    @property
    def global_rank(self) -> int:
        return self._instances.index

    @property
    def local_rank(self) -> int:
        return self._instances.local_index

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self._instances.count

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._instances.reduce(tensor, reduce_op)

    def barrier(self, name: str | None = None) -> None:
        self._instances.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._instances.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._instances.all_gather(tensor)
