"""Collectives of instances outside the model: to reduce metrics, broadcast weights, gather results.

If a replica spans several instances, all of them have the same results: `all_reduce` and `all_gather` use those of the
first one of each replica.

All instances make the same call with the same shapes; inside `execute_on_instances` only its instances do. If
one of them makes another call, or has ended, the others raise an error within seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from popengine.environment import read_launch
from popengine.run.instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import ProcessGroup, group_of_size
from popengine.torch_private import bits_of

__all__ = ["all_gather", "all_gather_bytes", "all_reduce", "barrier", "broadcast", "restrict_to_instances"]

T = TypeVar("T")
_ALL_GATHER = "popdist.collectives.all_gather"

_chosen: Sequence[int] | None = None  # indices of the instances that take part; None: all


def all_reduce(value: Tensor | float, op: str = "sum") -> Any:
    """Return the sum, mean, minimum or maximum of the values of all instances, element by element.

    >>> mean_loss = popdist.collectives.all_reduce(loss.item(), "mean")

    The order of a sum depends on the number of instances only, so all instances get the same bits.

    Args:
        value: a tensor (not changed) or a number, of the same shape and dtype in all instances
        op:    "sum", "mean", "min" or "max"
    Returns: a new tensor on the value's device (the mean of integers is float32); a float for a number
    Raises: ValueError, for another `op`
    """
    if op not in ("sum", "mean", "min", "max"):
        raise ValueError(f"all_reduce: op is {op!r}, and must be sum, mean, min or max")
    tensor = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).detach()
    rows = _gather_rows(tensor.unsqueeze(0), f"popdist.collectives.all_reduce({op})", {"value": tensor})
    if op in ("min", "max"):
        tensor = rows.amin(0) if op == "min" else rows.amax(0)
    else:
        (tensor,) = tree_sum(leaf_nodes([row] for row in rows))
    if op == "mean":
        tensor = tensor / len(rows)
    return tensor if isinstance(value, Tensor) else tensor.item()


def broadcast(values: Any, root: int = 0) -> Any:
    """Overwrite the tensors of all instances by those of one instance, in place.

    Args:
        values: a tensor, or a mapping such as `model.state_dict()`; values that are no tensors stay unchanged
        root:   index of the instance that sends its tensors; a ValueError is raised if it does not take part
    Returns: `values`
    """
    group = _current_group()
    if group is None:
        return values
    if root not in group.ranks:
        raise ValueError(f"broadcast: instance {root} is not one of {group.ranks}")
    named = {"value": values} if isinstance(values, Tensor) else dict(values)
    tensors = {name: value.detach() for name, value in named.items() if isinstance(value, Tensor)}

    def work() -> None:
        memories = [bits_of(value.cpu()) for value in tensors.values() if value.numel()]
        owners = [group.ranks.index(root)] * len(memories)
        AllReduce(group, Tag.COLLECTIVE).broadcast_by_owners(memories, owners)
        for value, memory in zip(filter(Tensor.numel, tensors.values()), memories, strict=True):
            value.copy_(memory.view(value.dtype).view(value.shape))

    _after_barrier(group, f"popdist.collectives.broadcast(root={root})", tensors, work)
    return values


def all_gather(value: Tensor) -> Tensor:
    """Return the rows of all instances, in the order of the instances; the numbers of rows may differ.

    Args: value: [rows, ...], with the same dtype and shape of a row in all instances
    Raises: ValueError, for a scalar tensor
    """
    if not value.dim():
        raise ValueError("all_gather: the value has no rows; fix: value.unsqueeze(0)")
    return _gather_rows(value, _ALL_GATHER, {"a row": value.new_empty(1, *value.shape[1:])})


def all_gather_bytes(value: bytes) -> bytes:
    """Return the bytes of all instances, concatenated in the order of the instances; lengths may differ."""
    return b"".join(_gather(value, _ALL_GATHER, {}))


def _gather_rows(value: Tensor, what: str, like: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of the first instance of each replica. Errors name the call by `what`. `like`: see `_gather`"""
    parts, group = _gather(bits_of(value.cpu()).numpy().tobytes(), what, like), _current_group()
    rows = b"".join(parts if group is None else [parts[index] for index in _firsts_of_replicas(group)])
    flat = torch.frombuffer(bytearray(rows + b"\0"), dtype=torch.uint8)[:-1]  # a buffer must not be empty
    return flat.view(value.dtype).view(-1, *value.shape[1:]).to(value.device)


def _gather(value: bytes, what: str, like: Mapping[str, Tensor]) -> list[bytes]:
    """Return the bytes of all instances. Raises Error if shapes or dtypes of the tensors `like` differ."""
    group = _current_group()
    if group is None:
        return [value]
    return _after_barrier(group, what, like, lambda: group.all_gather_bytes(value, Tag.COLLECTIVE, what))


def _firsts_of_replicas(group: ProcessGroup) -> list[int]:
    """Return the index, in a group, of the first instance of each replica."""
    replicas = [rank // read_launch().instances_per_replica for rank in group.ranks]
    return [index for index, replica in enumerate(replicas) if replica not in replicas[:index]]


def barrier(what: str = "popdist.collectives.barrier()") -> None:
    """Wait, as `popdist.synchronize`, until all instances have called this. Errors name the call by `what`."""
    group = _current_group()
    if group is not None:
        group.barrier(what)


def _after_barrier(group: ProcessGroup, what: str, tensors: Mapping[str, Tensor], work: Callable[[], T]) -> T:
    """Wait for all instances, check that `tensors` have equal shapes and dtypes in all of them, and return
    `work()`. Raises: Error, if they differ"""
    shapes = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in tensors.items()}
    return group.barrier(what, {"shape": shapes}, work)


def _current_group() -> ProcessGroup | None:
    """Return the process group of the instances that take part in collectives; None for this instance alone."""
    size = read_launch().instances
    if size == 1:
        return None
    group = group_of_size(size)
    if _chosen is None or len(_chosen) == size:
        return group
    return group.subgroup(_chosen) if len(_chosen) > 1 else None


@contextmanager
def restrict_to_instances(chosen: Sequence[int]) -> Iterator[None]:
    """Restrict collectives inside the `with` to the instances `chosen`: sorted indices, with this one's."""
    global _chosen
    before, _chosen = _chosen, chosen
    try:
        yield
    finally:
        _chosen = before
