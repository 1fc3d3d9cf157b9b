"""Sharing out the optimizer's state: each parameter has one replica that keeps its state and updates it.

The others keep no state of it; they receive its new value. Whole parameters, given in their order to whoever has
the fewest elements so far, so the shares differ by at most the largest parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from popengine.settings import Settings

from ..instances.collectives import Give, Waits


def owners(elements: Mapping[str, int], settings: Settings, replica: int) -> dict[str, int]:
    """The owner of each parameter that `replica` shares with others; without the option, of none.

    Args:
        elements: how many each trained parameter of an ipu has, in the same order on every replica
    """
    if settings.shard_optimizer is None:
        return {}
    found: dict[str, int] = {}
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    for key, size in elements.items():
        members = settings.members(key, replica)
        if size >= settings.shard_optimizer and len(members) > 1:
            load = loads.setdefault(members, dict.fromkeys(members, 0))
            found[key] = min(load, key=load.__getitem__)
            load[found[key]] += size
    return found


def pass_on(
    weights: Mapping[str, Tensor],
    owner: Mapping[str, int],
    members: Sequence[int],
    ipu: int,
    replica: int,
    give: Give,
) -> Waits:
    """Give the others the weights that this replica has updated, and take theirs.

    References, not copies: their owner writes to them again only after everybody has given its next gradients.
    """
    others = [other for other in members if other != replica]
    if mine := [weight for key, weight in weights.items() if owner[key] == replica]:
        for other in others:
            give(("updated", ipu, replica, other), mine)
    for other in others:
        if theirs := [weight for key, weight in weights.items() if owner[key] == other]:
            torch._foreach_copy_(theirs, (yield "updated", ipu, other, replica))
