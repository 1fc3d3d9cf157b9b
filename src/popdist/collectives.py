"""Collectives of instances outside the model: sums of metrics, equal first weights, results of all.

Inside `execute_on_instances` only its instances take part. Each has to call the same, with the same shapes; one that
does not, or is gone, is an error in all of them within seconds.
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
from popengine.run.instances import this_process
from popengine.run.instances.instance_sums import Instances, even_cuts
from popengine.run.instances.meeting import Meeting
from popengine.run.instances.tree_sums import Node

T = TypeVar("T")

_TAG = 4  # of messages; those of models begin at meeting.FIRST_FREE
_chosen: Sequence[int] | None = None  # inside execute_on_instances


def all_reduce(value: Tensor | float, op: str = "sum") -> Any:
    """Return the sum, mean, smallest or largest of all instances' values, element by element.

    Sums are made in an order that depends on the number of instances only, so they are the same bits everywhere.

    Args:
        value: a tensor, which is left as it is, or a number; of the same shape and dtype in all instances
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
    here = _meeting()
    if here is not None:
        if op in ("min", "max"):
            rows = all_gather(tensor.unsqueeze(0))
            tensor = rows.amin(0) if op == "min" else rows.amax(0)
        else:
            flat = tensor.reshape(1) if not tensor.dim() else tensor
            _meet(
                here,
                f"popdist.collectives.all_reduce({op})",
                {"value": tensor},
                lambda: Instances(here, _TAG, 1).sum([Node(0, here.place, [flat])]),
            )
            tensor = flat.reshape(tensor.shape)
            if op == "mean":
                tensor = tensor / here.size
    return tensor if isinstance(value, Tensor) else tensor.item()


def broadcast(values: Any, root: int = 0) -> Any:
    """Give all instances the tensors of one, in place: a tensor, or a mapping such as `model.state_dict()`.

    Args:
        root: the instance whose values all get
    Returns: `values`
    """
    here = _meeting()
    if here is None:
        return values
    if root not in here.names:
        raise ValueError(f"broadcast: instance {root} is not one of {here.names}")
    tensors = {"value": values} if isinstance(values, Tensor) else dict(values)
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}

    def work() -> None:
        for dtype in dict.fromkeys(value.dtype for value in tensors.values()):
            mine = [value for value in tensors.values() if value.dtype == dtype]
            flat = torch.cat([value.detach().reshape(-1).cpu() for value in mine])
            _spread(here, flat, here.names.index(root))
            for value, part in zip(mine, flat.split([value.numel() for value in mine]), strict=True):
                value.detach().copy_(part.view(value.shape))

    with torch.no_grad():
        _meet(here, f"popdist.collectives.broadcast(root={root})", tensors, work)
    return values


def _spread(here: Meeting, flat: Tensor, root: int) -> None:
    """Send a share to each instance from the root, and then each share to all, which spares the root most messages."""
    cuts = even_cuts(flat.numel(), here.size)
    shares = [flat[start:stop] for start, stop in pairwise(cuts)]
    if here.place == root:
        begun = [here.send(shares[other], other, _TAG) for other in here.others if shares[other].numel()]
    elif shares[here.place].numel():
        begun = [here.receive(shares[here.place], root, _TAG)]
    else:
        begun = []
    for work, other in begun:
        here.wait(work, other, "popdist.collectives.broadcast")
    Instances(here, _TAG, 1).gather(flat, cuts)


def all_gather(value: Tensor) -> Tensor:
    """Return the rows of all instances, in their order; each may have another number of rows.

    Args:
        value: [rows, ...], with the same shape beyond the rows and the same dtype in all instances
    """
    if not value.dim():
        raise ValueError("all_gather: the value has no rows; fix: value.unsqueeze(0)")
    here = _meeting()
    if here is None:
        return value.detach().clone()

    def work() -> Tensor:
        everybody = Instances(here, _TAG, 1)
        rows = torch.zeros(here.size, dtype=torch.int64)
        rows[here.place] = len(value)
        everybody.gather(rows, list(range(here.size + 1)))
        width = math.prod(value.shape[1:])
        cuts = [0, *(rows.cumsum(0) * width).tolist()]
        flat = torch.empty(cuts[-1], dtype=value.dtype)
        flat[cuts[here.place] : cuts[here.place + 1]] = value.detach().reshape(-1).cpu()
        everybody.gather(flat, cuts)
        return flat.view(-1, *value.shape[1:]).to(value.device)

    return _meet(
        here, "popdist.collectives.all_gather", {"a row": value.new_empty(1, *value.shape[1:])}, work
    )


def barrier(what: str = "popdist.collectives.barrier()") -> None:
    """Wait until all instances are here."""
    here = _meeting()
    if here is not None:
        here.agree(what)


def _meet(here: Meeting, what: str, tensors: Mapping[str, Tensor], work: Callable[[], T]) -> T:
    shapes = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in tensors.items()}
    return here.meet(what, {"shape": shapes}, work)


def _meeting() -> Meeting | None:
    """Return the meeting of the instances that take part; None: this one alone."""
    size = read().instances
    if size == 1:
        return None
    everybody = this_process.of(size)
    if _chosen is None or len(_chosen) == size:
        return everybody
    return everybody.among(_chosen) if len(_chosen) > 1 else None


@contextmanager
def among(chosen: Sequence[int]) -> Iterator[None]:
    """Let only these instances take part inside the `with` statement."""
    global _chosen
    before, _chosen = _chosen, chosen
    try:
        yield
    finally:
        _chosen = before
