"""`import horovod.torch as hvd`: rank, size and collectives of popdist under Horovod's names."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import popdist
from popdist import collectives

Average, Sum, Min, Max = "mean", "sum", "min", "max"


def init(*args: Any, **kwargs: Any) -> None:
    """Meet the other instances, as `popdist.init()`."""
    popdist.init()


def shutdown() -> None:
    """Do nothing: popdist needs no end."""


def is_initialized() -> bool:
    return popdist.isBackendInitialized()


def rank() -> int:
    return popdist.getInstanceIndex()


def size() -> int:
    return popdist.getNumInstances()


def local_rank() -> int:
    return popdist.getLocalInstanceIndex()


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None
) -> Tensor:
    """Return the mean over all instances, or what `op` says."""
    if op is None:
        op = Sum if average is False else Average
    return collectives.all_reduce(tensor, op)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None
) -> Tensor:
    """As `allreduce`, in place."""
    return tensor.copy_(allreduce(tensor, average, name, op))


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None
) -> list[Tensor]:
    return [allreduce(tensor, average, name, op) for tensor in tensors]


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return the rows of all instances, in their order."""
    return collectives.all_gather(tensor)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    return collectives.broadcast(tensor.detach().clone(), root_rank)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    return collectives.broadcast(tensor, root_rank)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Give all instances the tensors of one, in place: a `state_dict()` or `named_parameters()`."""
    collectives.broadcast(dict(params), root_rank)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return one instance's object in all instances. It is unpickled, as in Horovod."""
    pickled = bytearray(pickle.dumps(obj)) if rank() == root_rank else bytearray()
    gathered = collectives.all_gather(
        torch.frombuffer(pickled, dtype=torch.uint8) if pickled else torch.empty(0, dtype=torch.uint8)
    )
    return pickle.loads(bytes(gathered.numpy()))


def barrier() -> None:
    collectives.barrier("horovod.torch.barrier()")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"horovod.torch.{name} is not there: under poprun the executor sums the gradients of all instances\n"
        "  fix: give the optimizer itself to poptorch.trainingModel"
    )


def DistributedOptimizer(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse("DistributedOptimizer")


def broadcast_optimizer_state(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse("broadcast_optimizer_state")
