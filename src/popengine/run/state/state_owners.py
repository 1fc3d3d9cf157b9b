"""Sharing out the optimizer's state: each parameter has one replica that keeps its state and updates it.

The others, in this instance and all others, keep no state of it; they receive its new value. Whole parameters, given in
their order to whoever has the fewest elements so far, so the shares differ by at most the largest parameter.

Over instances this costs no traffic: a sum goes to its owner alone, and the new weight comes back in its place.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from popengine.settings import Settings
from popengine.update.loss_scaling import Count

from ..instances.all_reduce import AllReduce
from ..instances.ordered_sums import Give, Waits, share_over_instances


class Owner(NamedTuple):
    """Who keeps a parameter's state: a replica of an instance."""

    instance: int
    replica: int


def owners(elements: Mapping[str, int], settings: Settings, replica: int) -> dict[str, Owner]:
    """The owner of each parameter that `replica` shares with others; without the option, of none.

    A parameter with groups of replicas has other values in other instances, and so an owner in each of them.

    Args:
        elements: how many each trained parameter of an ipu has, in the same order on every replica
    """
    if settings.shard_optimizer is None:
        return {}
    found: dict[str, Owner] = {}
    loads: dict[tuple[Owner, ...], dict[Owner, int]] = {}
    here, everywhere = [settings.counts.instance], range(settings.counts.instances)
    for key, size in elements.items():
        instances = here if key in settings.replica_groups else everywhere
        members = tuple(Owner(i, member) for i in instances for member in settings.members(key, replica))
        if size >= settings.shard_optimizer and len(members) > 1:
            load = loads.setdefault(members, dict.fromkeys(members, 0))
            found[key] = min(load, key=load.__getitem__)
            load[found[key]] += size
    return found


def owning_instance(owner: Mapping[str, Owner], settings: Settings, key: str) -> int | None:
    """The instance that alone needs the sum of a parameter's gradients; None: all do."""
    return owner[key].instance if key in owner and key not in settings.replica_groups else None


def pass_on(
    weights: Mapping[str, Tensor],
    owner: Mapping[str, Owner],
    members: Sequence[int],
    ipu: int,
    me: Owner,
    give: Give,
) -> Waits:
    """Give the other replicas of this instance the weights that this one has updated, and take theirs.

    References, not copies: their owner writes to them again only after everybody has given its next gradients.
    """
    others = [other for other in members if other != me.replica]
    if mine := [weight for key, weight in weights.items() if owner[key] == me]:
        for other in others:
            give(("updated", ipu, me.replica, other), mine)
    for other in others:
        theirs = [weight for key, weight in weights.items() if owner[key] == Owner(me.instance, other)]
        if theirs:
            torch._foreach_copy_(theirs, (yield "updated", ipu, other, me.replica))


class OverInstances:
    """What one ipu of a replica exchanges with other instances, because they share out the state of its parameters.

    Args:
        owner: of each parameter
        to:    the other instances; None: there are none
    """

    def __init__(
        self, owner: Mapping[str, Owner], settings: Settings, ipu: int, replica: int, to: AllReduce | None
    ) -> None:
        self._to, self._ipu, self._replica = to, ipu, replica
        self._place, self._members = settings.counts.instance, range(settings.counts.replicas)
        found = {key: owning_instance(owner, settings, key) for key in owner}
        self._owner = {key: one for key, one in found.items() if one is not None and to is not None}

    def is_here(self, key: str) -> bool:
        """Whether this instance receives it."""
        return self._owner.get(key, self._place) == self._place

    def counts(self, key: str) -> bool:
        """Whether it is this instance that counts these gradients for all of them."""
        return self._owner.get(key, 0) == self._place if self._owner else True

    def norms(
        self, mine: Mapping[str, Tensor], sums: Mapping[str, Tensor], give: Give
    ) -> Generator[Any, Any, dict[str, Tensor]]:
        """The norms of all gradients from those that are here."""
        everything = dict(mine)
        for key in self._owner:
            if key not in mine:
                wide = torch.promote_types(sums[key].dtype, torch.float32)
                everything[key] = torch.zeros((), dtype=wide, device=sums[key].device)
        yield from self._share(
            [everything[key] for key in self._owner], [*self._owner.values()], "norms", give
        )
        return everything

    def total(self, mine: Count, give: Give) -> Generator[Any, Any, Count]:
        """What all instances have counted."""
        if self._to is None or not self._owner:
            return mine
        rows = [torch.zeros(3, dtype=torch.int64) for _ in range(self._to.size)]
        rows[self._place] += torch.tensor([mine.elements, mine.large, mine.finite])
        yield from self._share(rows, range(self._to.size), "counts", give)
        counted = (row.tolist() for row in rows)
        return sum((Count(elements, large, bool(finite)) for elements, large, finite in counted), Count())

    def weights(self, weights: Mapping[str, Tensor], give: Give) -> Waits:
        """Let all weights be as their owners have updated them."""
        yield from self._share(
            [weights[key] for key in self._owner], [*self._owner.values()], "weights", give
        )

    def _share(self, values: list[Tensor], owners: Sequence[int], what: str, give: Give) -> Waits:
        if self._to is not None and values:
            name = what, self._ipu
            yield from share_over_instances(
                values, owners, self._replica, self._members, name, give, self._to
            )
