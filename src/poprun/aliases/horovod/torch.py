"""`import horovod.torch as hvd`: rank, size and collectives of popdist under Horovod's names."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

import popdist
from popdist import collectives

Average, Sum, Min, Max = "mean", "sum", "min", "max"
is_initialized = popdist.isBackendInitialized
rank = popdist.getInstanceIndex
size = popdist.getNumInstances
local_rank = popdist.getLocalInstanceIndex


def init(*args: Any, **kwargs: Any) -> None:
    """Connect to the other instances by `popdist.init()`; all arguments are ignored."""
    popdist.init()


def shutdown() -> None:
    """Do nothing, since popdist disconnects at the end of the process."""


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None
) -> Tensor:
    """Return a tensor reduced over all instances by `op`: by default the mean (`average=False`: sum)."""
    if op is None:
        op = Sum if average is False else Average
    return collectives.all_reduce(tensor, op)


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None
) -> list[Tensor]:
    """Return the `allreduce` of each tensor."""
    return [allreduce(tensor, average, name, op) for tensor in tensors]


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return the rows of the tensors of all instances, concatenated in the order of the instances."""
    return collectives.all_gather(tensor)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return a copy of the tensor of instance `root_rank`."""
    return collectives.broadcast(tensor.detach().clone(), root_rank)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace a tensor's elements by those of its `allreduce`, and return it."""
    return tensor.copy_(allreduce(tensor, *args, **kwargs))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Replace a tensor's elements by those of the tensor of instance `root_rank`, and return it."""
    return collectives.broadcast(tensor, root_rank)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Copy the tensors of a `state_dict()` or `named_parameters()` from one instance to all, in place."""
    collectives.broadcast(dict(params), root_rank)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of instance `root_rank`, which is sent by pickle, in all instances."""
    pickled = pickle.dumps(obj) if rank() == root_rank else b""
    return pickle.loads(collectives.all_gather_bytes(pickled))


def barrier() -> None:
    """Wait until all instances have called this."""
    collectives.barrier("horovod.torch.barrier()")


def DistributedOptimizer(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise a NotImplementedError that says what to write instead."""
    raise NotImplementedError(
        "horovod.torch.DistributedOptimizer and broadcast_optimizer_state are not there: under poprun the executor sums"
        " the gradients of all instances\n"
        "  fix: give the optimizer itself to poptorch.trainingModel"
    )


broadcast_optimizer_state = DistributedOptimizer
