"""Sums over replicas, instances and ipus, in a fixed order, so that every run gives the same bits.

What waits for others is a generator: it yields the name of a channel and is sent what came there. So a thread
of its own may wait, and a thread that drives many workers goes on with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnrecoverableError

K = TypeVar("K")
V = TypeVar("V")


Give = Callable[[Any, Any], None]  # put a value into the channel of this name
Waits = Generator[Any, Any, None]


def reduce_over_replicas(
    sums: list[Tensor],
    replica: int,
    members: Sequence[int],
    name: Any,
    give: Give,
    instances: Any = None,
) -> Waits:
    """Replace each member's gradient sums by the total, added up in order by the first: 0 + 1 + 2 ...

    Args:
        instances: a process group whose processes go on with the sum, in order of their ranks, so that it is
            the one that a single process with all their replicas makes
    """
    first, *others = members
    if replica == first:
        if instances is not None:
            _begin_with_earlier_instances(sums, instances)
        for other in others:
            torch._foreach_add_(sums, (yield name, other))
        if instances is not None:
            _take_from_last_instance(sums, instances)
        # A copy: this replica writes to its sums again at once.
        total = [value.clone() for value in sums] if others else []
        for other in others:
            give((name, "total", other), total)
    else:
        give((name, replica), sums)
        torch._foreach_copy_(sums, (yield name, "total", replica))


@contextmanager
def _together() -> Iterator[None]:
    """What torch.distributed raises here means that another process failed, or is gone."""
    try:
        yield
    except RuntimeError as error:
        raise UnrecoverableError(
            f"another instance has left the training: {error}\n"
            "  why: all instances add up their gradients, and have to make the same number of calls\n"
            "  fix: see what the other instance says, and start all of them again"
        ) from error


@_together()
def _begin_with_earlier_instances(sums: list[Tensor], group: Any) -> None:
    if rank := dist.get_rank(group):
        for values in _by_dtype(sums):
            packed = torch.empty(sum(value.numel() for value in values), dtype=values[0].dtype)
            dist.recv(packed, rank - 1, group)
            torch._foreach_add_(values, _unpacked(packed, values))


@_together()
def _take_from_last_instance(sums: list[Tensor], group: Any) -> None:
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    for values in _by_dtype(sums):
        packed = torch.cat([value.flatten() for value in values]).cpu()
        if rank < last:
            dist.send(packed, rank + 1, group)
        dist.broadcast(packed, last, group)
        if rank < last:
            torch._foreach_copy_(values, _unpacked(packed, values))


def _by_dtype(sums: list[Tensor]) -> list[list[Tensor]]:
    """What can travel as one tensor."""
    dtypes = dict.fromkeys(value.dtype for value in sums)
    return [[value for value in sums if value.dtype == dtype] for dtype in dtypes]


def _unpacked(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = packed.to(like[0].device).split([value.numel() for value in like])
    return [part.view_as(value) for part, value in zip(parts, like, strict=True)]


def average(sums: list[Tensor], divisor: float) -> None:
    """Divide the sums in place; by 1 is no division."""
    if divisor != 1 and sums:
        torch._foreach_div_(sums, divisor)


def exchange(
    mine: Mapping[K, V], what: str, ipu: int, replica: int, ipus: Sequence[int], give: Give
) -> Generator[Any, Any, dict[K, V]]:
    """Everything that the ipus of one replica have to say, joined."""
    for other in ipus:
        if other != ipu:
            give((what, ipu, other, replica), mine)
    everything = dict(mine)
    for other in ipus:
        if other != ipu:
            everything |= yield what, other, ipu, replica
    return everything


def total_norm(norms: Mapping[str, Tensor], place: Mapping[str, int]) -> Tensor:
    """The norm of all gradients from the norm of each, as torch.nn.utils.get_total_norm: the norm of the norms,
    stacked in the order of the model's parameters, whichever ipus they are on."""
    ordered = [norms[key] for key in sorted(norms, key=place.__getitem__)]
    return torch.linalg.vector_norm(torch.stack([norm.to(ordered[0].device) for norm in ordered]))
