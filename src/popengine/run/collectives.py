"""Sums over replicas and over ipus, in a fixed order, so that every run gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Meeting(Protocol):
    """The channels in which workers meet."""

    def __getitem__(self, name: Any) -> Any: ...
    def receive(self, name: Any) -> Any: ...


def reduce_over_replicas(
    sums: list[Tensor], replica: int, members: Sequence[int], name: Any, channels: Meeting
) -> None:
    """Replace each member's gradient sums by the total, added up in order by the first: 0 + 1 + 2 ..."""
    first, *others = members
    if not others:
        return
    if replica == first:
        for other in others:
            torch._foreach_add_(sums, channels.receive((name, other)))
        total = [value.clone() for value in sums]  # the sums themselves are written to again at once
        for other in others:
            channels[name, "total", other].put(total)
    else:
        channels[name, replica].put(sums)
        torch._foreach_copy_(sums, channels.receive((name, "total", replica)))


def average(sums: list[Tensor], divisor: float) -> None:
    """Divide the sums in place; by 1 is no division."""
    if divisor != 1:
        torch._foreach_div_(sums, divisor)


def total_norm(
    norms: dict[str, Tensor], ipu: int, replica: int, ipus: Sequence[int], channels: Meeting
) -> Tensor:
    """The global norm of all gradients from the norms of each, as torch.nn.utils.get_total_norm: the norm of
    the norms, stacked in the order of the parameters' names, whichever ipu they are on."""
    for other in ipus:
        if other != ipu:
            channels["norms", ipu, other, replica].put(norms)
    everything = dict(norms)
    for other in ipus:
        if other != ipu:
            everything |= channels.receive(("norms", other, ipu, replica))
    first = next(iter(norms.values()))
    return torch.linalg.vector_norm(
        torch.stack([everything[key].to(first.device) for key in sorted(everything)])
    )
