"""Collectives of instances outside the model: all-reduce of metrics, broadcast of weights, all-gather of results.

Inside `execute_on_instances` only its instances take part. All have to make the same call with the same shapes. If an
instance does not, or is gone, all raise an error within seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from popengine.environment import read
from popengine.run.instances.all_reduce import AllReduce, by_dtype, copy_from_flat, even_cuts, flattened
from popengine.run.instances.process_group import ProcessGroup, group_of

T = TypeVar("T")

_TAG = 4  # of messages; those of models begin at process_group.FIRST_TAG
_chosen: Sequence[int] | None = None  # instances of execute_on_instances


def all_reduce(value: Tensor | float, op: str = "sum") -> Any:
    """Return the sum, mean, minimum or maximum of all instances' values, element by element.

    The order of a sum depends on the number of instances only, so all instances get the same bits.

    Args:
        value: a tensor (not changed) or a number, of the same shape and dtype in all instances
        op:    "sum", "mean", "min" or "max"
    Returns: a new tensor; a float for a number
    """
    if op not in ("sum", "mean", "min", "max"):
        raise ValueError(f"all_reduce: op is {op!r}, and must be sum, mean, min or max")
    tensor = (
        value.detach().clone()
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=torch.float64)
    )
    group = _group()
    if group is not None:
        if op in ("min", "max"):
            rows = all_gather(tensor.unsqueeze(0))
            tensor = rows.amin(0) if op == "min" else rows.amax(0)
        else:
            flat = tensor.cpu().reshape(-1)
            _after_barrier(
                group,
                f"popdist.collectives.all_reduce({op})",
                {"value": tensor},
                lambda: AllReduce(group, _TAG, 1).all_reduce([flat]),
            )
            tensor = flat.reshape(tensor.shape).to(tensor.device)
            if op == "mean":
                tensor = tensor / group.size
    return tensor if isinstance(value, Tensor) else tensor.item()


def broadcast(values: Any, root: int = 0) -> Any:
    """Copy the tensors of one instance to all, in place.

    Args:
        values: a tensor, or a mapping such as `model.state_dict()`
        root:   the instance that sends its values
    Returns: `values`
    """
    group = _group()
    if group is None:
        return values
    if root not in group.ranks:
        raise ValueError(f"broadcast: instance {root} is not one of {group.ranks}")
    tensors = {"value": values} if isinstance(values, Tensor) else dict(values)
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}

    def work() -> None:
        detached = [value.detach() for value in tensors.values()]
        for chosen in by_dtype(detached):
            mine = [detached[index] for index in chosen]
            flat = flattened([value.cpu() for value in mine])
            _broadcast(group, flat, group.ranks.index(root))
            copy_from_flat(flat, mine)

    with torch.no_grad():
        _after_barrier(group, f"popdist.collectives.broadcast(root={root})", tensors, work)
    return values


def _broadcast(group: ProcessGroup, flat: Tensor, root: int) -> None:
    """Broadcast as scatter and all-gather, so that the root sends each element once."""
    cuts = even_cuts(flat.numel(), group.size)
    shares = [flat[start:stop] for start, stop in pairwise(cuts)]
    if group.rank == root:
        begun = [group.send(shares[peer], peer, _TAG) for peer in group.peers if shares[peer].numel()]
    elif shares[group.rank].numel():
        begun = [group.receive(shares[group.rank], root, _TAG)]
    else:
        begun = []
    for work, peer in begun:
        group.wait(work, peer, "popdist.collectives.broadcast")
    AllReduce(group, _TAG, 1).all_gather(flat, cuts)


def all_gather(value: Tensor) -> Tensor:
    """Return the rows of all instances, concatenated by instance; the numbers of rows may differ.

    Args:
        value: [rows, ...], with the same shape beyond the rows and the same dtype in all instances
    """
    if not value.dim():
        raise ValueError("all_gather: the value has no rows; fix: value.unsqueeze(0)")
    group = _group()
    if group is None:
        return value.detach().clone()

    def work() -> Tensor:
        over_instances = AllReduce(group, _TAG, 1)
        rows = torch.zeros(group.size, dtype=torch.int64)
        rows[group.rank] = len(value)
        over_instances.all_gather(rows, list(range(group.size + 1)))
        width = math.prod(value.shape[1:])
        cuts = [0, *(rows.cumsum(0) * width).tolist()]
        flat = torch.empty(cuts[-1], dtype=value.dtype)
        flat[cuts[group.rank] : cuts[group.rank + 1]] = value.detach().reshape(-1).cpu()
        over_instances.all_gather(flat, cuts)
        return flat.view(-1, *value.shape[1:]).to(value.device)

    row = value.new_empty(1, *value.shape[1:])
    return _after_barrier(group, "popdist.collectives.all_gather", {"a row": row}, work)


def all_gather_bytes(value: bytes) -> bytes:
    """Return the bytes of all instances, concatenated in the order of the instances."""
    # torch.frombuffer takes no empty buffer.
    tensor = (
        torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    )
    return all_gather(tensor).numpy().tobytes()


def barrier(what: str = "popdist.collectives.barrier()") -> None:
    """Wait until all instances have called this."""
    group = _group()
    if group is not None:
        group.barrier(what)


def _after_barrier(group: ProcessGroup, what: str, tensors: Mapping[str, Tensor], work: Callable[[], T]) -> T:
    shapes = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in tensors.items()}
    return group.after_barrier(what, {"shape": shapes}, work)


def _group() -> ProcessGroup | None:
    """Return the process group of the instances that take part; None, if this is the only instance."""
    size = read().instances
    if size == 1:
        return None
    group = group_of(size)
    if _chosen is None or len(_chosen) == size:
        return group
    return group.subgroup(_chosen) if len(_chosen) > 1 else None


@contextmanager
def among(chosen: Sequence[int]) -> Iterator[None]:
    """Restrict collectives inside the `with` statement to these instances."""
    global _chosen
    before, _chosen = _chosen, chosen
    try:
        yield
    finally:
        _chosen = before
