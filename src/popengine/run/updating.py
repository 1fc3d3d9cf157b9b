"""The end of a step on one ipu: gradient sums become gradients, and those a weight update.

Sum over replicas and instances, divide by the loss scale and the number of micro-batches, clip, update. All of
it in a fixed order, so that every layout and every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import ir
from ..settings import Hyper, Settings
from ..update.chunks import Part, Task, chunks
from ..update.clipping import clamp_, clipping_factor, norms, scale_
from ..update.group_update import phases
from ..update.loss_scaling import Count, all_finite, count, next_factor
from ..update.one_chunk import Prepare
from .instances.all_reduce import AllReduce
from .instances.buckets import Bucket
from .instances.exchange import Exchange
from .instances.ordered_sums import (
    AT_THE_END,
    Give,
    Waits,
    average,
    exchange,
    reduce_over_replicas,
    total_norm,
)
from .instances.process_group import FIRST_TAG, ProcessGroup
from .state.random_draws import generator
from .state.state_owners import OverInstances, Owner, pass_on
from .state.store import Store

Share = Callable[[Sequence[Task], Any], None]


WORTH_SHARING = 4  # tasks of an update; of fewer, cores mostly wait for each other


class Updater:
    """Updates the weights that live on one ipu of one replica.

    Args:
        group: this instance and its peers; None for one alone
    """

    def __init__(
        self,
        ipu: int,
        replica: int,
        plan: ir.Plan,
        settings: Settings,
        store: Store,
        group: ProcessGroup | None,
    ) -> None:
        self.ipu, self.replica, self.settings, self.store = ipu, replica, settings, store
        self._group = group
        self._instances: dict[tuple[int, ...], AllReduce] = {}
        self.exchange = Exchange(self._sum_up)
        self._me = Owner(settings.counts.instance, replica)
        others = self._others(tuple(range(settings.counts.replicas)))
        self._shared = OverInstances(store.owner, settings, ipu, replica, others)
        self.place = {slot.key: place for place, slot in enumerate(plan.partition.signature.slots)}
        self.ipus = [
            i for i, program in plan.programs.items() if any(isinstance(x, ir.Update) for x in program)
        ]

    def update(
        self,
        keys: Sequence[str],
        hyper: Hyper,
        key: int,
        give: Give,
        share: Share | None = None,
        commit: Callable[[], None] | None = None,
    ) -> Generator[Any, Any, bool]:
        """One weight update of these parameters; `key` is that of the step's random numbers.

        Args:
            share:  hands tasks to all cores, and a name to the channel of which they are done; without it they are
                done here
            commit: where the update writes to what is kept: to be called before, when nothing else is left to do
        Returns: whether their gradients are finite, as far as it is of interest
        """
        scale = hyper.loss_scaling * self.store.loss_factor
        by_bucket = self.exchange.is_under_way and commit is None and not self._looks_at_gradients(scale)
        if not by_bucket:
            yield from self._reduce(keys, give)
        prepare, is_finite = yield from self._gradients(keys, scale, give, share)
        updates: Iterable[Iterator[list[Task]]] = ()
        if prepare is not None:
            self._renew(keys)
            portions = self._arriving() if by_bucket else [keys]
            updates = (each for some in portions for each in self._updates(some, hyper, key, prepare))
        if commit is not None:
            updates = [chain([next(each)], each) for each in updates]  # now there is their memory
            yield from self._commit(commit, give)
        for phase in chain.from_iterable(updates):
            yield from self._do(phase, share)
        if prepare is not None:
            yield from self._pass_on(give)
        return is_finite

    def _gradients(
        self, keys: Sequence[str], scale: float, give: Give, share: Share | None
    ) -> Generator[Any, Any, tuple[list[Prepare] | None, bool]]:
        """Let the sums over all replicas be gradients, as far as all of them have to be looked at.

        Returns: what is left to be done to each (None: the update is left out), and whether they are finite
        """
        optimizer, store = self.settings.optimizer, self.store
        assert optimizer is not None
        here = [name for name in keys if self._shared.is_here(name)]
        sums = [store.sums[name] for name in here]
        prepare: list[Prepare] = [partial(average, divisor=self._divisor(scale))]
        if self._looks_at_gradients(scale):
            yield from self._each(sums, prepare.pop(), share)
        if self.settings.automatic_loss_scaling and not (yield from self._adapt_scale(here, scale, give)):
            return None, True  # the update is left out, so nothing is lost
        is_finite = not self._may_overflow(scale) or all_finite(sums)
        if optimizer.max_grad_norm != float("inf"):
            mine = dict(zip(here, (yield from self._norms(sums, share)), strict=True))
            mine = yield from self._shared.norms(mine, store.sums, give)
            everything = yield from exchange(mine, "norms", self.ipu, self.replica, self.ipus, give)
            if keys:
                total = total_norm(everything, self.place)
                prepare.append(partial(scale_, factor=clipping_factor(total, optimizer.max_grad_norm)))
        if optimizer.max_grad_value != float("inf"):
            prepare.append(partial(clamp_, max_value=optimizer.max_grad_value))
        return prepare, is_finite

    def _updates(
        self, keys: Sequence[str], hyper: Hyper, key: int, prepare: Sequence[Prepare]
    ) -> list[Iterator[list[Task]]]:
        """What there is to do for each group of parameters, phase by phase."""
        optimizer, store = self.settings.optimizer, self.store
        assert optimizer is not None
        mine = [name for name in keys if store.owner.get(name, self._me) == self._me]
        found: list[Iterator[list[Task]]] = []
        for group, rates in enumerate(hyper.groups):
            names = [name for name in mine if optimizer.group_of.get(name) == group]
            if names:
                found.append(self._phases(names, rates, key, prepare))
        return found

    def _renew(self, keys: Sequence[str]) -> None:
        """Make ready what the update of these parameters writes to."""
        assert self.settings.optimizer is not None
        self.store.renew([name for name in keys if name in self.settings.optimizer.group_of])

    def _arriving(self) -> Iterator[list[str]]:
        """The parameters of each bucket as soon as its sum is there. They are updated while others are on their way."""
        for number in self.exchange.arriving():
            yield [gradient.key for gradient in self.store.buckets[number].gradients]

    def _commit(self, commit: Callable[[], None], give: Give) -> Waits:
        """Wait until all ipus of all replicas are here, and nothing else is left to do; then one commits for all."""
        everybody = [(ipu, replica) for ipu in self.ipus for replica in range(self.settings.counts.replicas)]
        yield AT_THE_END
        if (self.ipu, self.replica) == everybody[0]:
            commit()
            for other in everybody[1:]:
                give(("committed", other), None)
        else:
            yield "committed", (self.ipu, self.replica)

    def _pass_on(self, give: Give) -> Waits:
        """Where the state is shared out: what each has updated goes to the others."""
        store = self.store
        for members, names in self._by_members(store.owner).items():
            weights = {name: store.state[store.slot[name]] for name in names}
            yield from pass_on(weights, store.owner, members, self.ipu, self._me, give)
        weights = {name: store.state[store.slot[name]] for name in store.owner}
        yield from self._shared.weights(weights, give)

    def _looks_at_gradients(self, scale: float) -> bool:
        """Whether gradients are looked at before the update, and so have to be divided before it."""
        assert self.settings.optimizer is not None
        return (
            self.settings.automatic_loss_scaling
            or self._may_overflow(scale)
            or self.settings.optimizer.max_grad_norm != float("inf")
        )

    def _divisor(self, scale: float) -> float:
        if self.settings.reduction == "mean":
            return scale * self.settings.counts.accumulation * self.settings.counts.global_replicas
        return scale

    def _each(self, sums: Sequence[Tensor], change: Prepare, share: Share | None) -> Waits:
        """Change gradients in place, element by element."""
        parts = [Part(value, value, {}) for value in sums]
        some = [
            partial(change, [span.view.gradient for span in chunk])
            for turns in chunks(parts)
            for chunk in turns
        ]
        yield from self._do(some, share)

    def _norms(self, sums: Sequence[Tensor], share: Share | None) -> Generator[Any, Any, list[Tensor]]:
        """The norm of each gradient. Where operations have several threads these add up, as in plain PyTorch."""
        if torch.get_num_threads() > 1:
            return norms(sums)
        found: list[Any] = [None] * len(sums)

        def measure(place: int) -> None:
            (found[place],) = norms([sums[place]])

        yield from self._do([partial(measure, place) for place in range(len(sums))], share)
        return found

    def _do(self, some: Sequence[Task], share: Share | None) -> Waits:
        """Do tasks in any order."""
        if share is None or len(some) < WORTH_SHARING:
            for task in some:
                task()
        else:
            name = "shared", self.ipu, self.replica
            share(some, name)
            yield name

    def _may_overflow(self, scale: float) -> bool:
        """Whether a loss scale may make gradients overflow that nobody looks at."""
        return scale != 1 and not self.settings.automatic_loss_scaling

    def _phases(
        self, names: Sequence[str], rates: Mapping[str, Any], key: int, prepare: Sequence[Prepare]
    ) -> Iterator[list[Task]]:
        """The update of some parameters of one group."""
        store, optimizer = self.store, self.settings.optimizer
        assert optimizer is not None
        weights = [store.state[store.slot[name]] for name in names]
        generators = self._generators(names, weights, key) or [None] * len(names)
        parts = [
            Part(weight, store.sums[name], store.states[name], store.old.get(name, {}), generator)
            for name, weight, generator in zip(names, weights, generators, strict=True)
        ]
        return phases(optimizer, rates, parts, prepare)

    def _sum_up(self, number: int) -> None:
        """Sum a bucket up over instances that have one replica each."""
        bucket = self.store.buckets[number]
        others = self._others(bucket.members)
        assert others is not None
        self._scale_down([bucket.flat])
        if bucket.cuts is None:
            others.all_reduce([bucket.flat])
        else:
            others.reduce_scatter([bucket.flat], bucket.cuts)

    def _reduce(self, keys: Sequence[str], give: Give) -> Waits:
        if self.exchange.is_under_way:
            self.exchange.finish()
            return
        buckets: dict[tuple[int, ...], list[Bucket]] = {}
        for bucket in self.store.buckets:
            buckets.setdefault(bucket.members, []).append(bucket)
        for members, names in self._by_members(keys).items():
            mine = buckets.get(members, [])
            sums = [bucket.flat for bucket in mine] or [self.store.sums[key] for key in names]
            self._scale_down(sums)
            name, others = ("sums", self.ipu, members), self._others(members)
            yield from reduce_over_replicas(
                sums, self.replica, members, name, give, others, [bucket.cuts for bucket in mine]
            )

    def _scale_down(self, sums: list[Tensor]) -> None:
        if self.settings.reduction == "running":  # then the sum over replicas is no larger than they are
            average(sums, self.settings.counts.global_replicas)

    def _others(self, members: tuple[int, ...]) -> AllReduce | None:
        """The way to the same replicas of other instances."""
        if self._group is None:
            return None
        if members not in self._instances:
            tag = FIRST_TAG + 2 * (self.ipu * self.settings.counts.replicas + members[0])
            self._instances[members] = AllReduce(self._group, tag, len(members))
        return self._instances[members]

    def _by_members(self, keys: Iterable[str]) -> dict[tuple[int, ...], list[str]]:
        """Parameters by the replicas that have the same value of them."""
        found: dict[tuple[int, ...], list[str]] = {}
        for key in keys:
            found.setdefault(self.settings.members(key, self.replica), []).append(key)
        return found

    def _adapt_scale(self, names: Sequence[str], scale: float, give: Give) -> Generator[Any, Any, bool]:
        """Choose the next loss scale by the gradients as they were while scaled; whether to update at all."""
        found = count([self.store.sums[name] for name in names if self._shared.counts(name)], scale)
        mine = {self.ipu: (yield from self._shared.total(found, give))}
        everybody = yield from exchange(mine, "counts", self.ipu, self.replica, self.ipus, give)
        seen = sum(everybody.values(), Count())
        self.store.loss_factor = next_factor(self.store.loss_factor, seen)
        return seen.finite

    def _generators(
        self, names: Sequence[str], weights: Sequence[Tensor], key: int
    ) -> list[torch.Generator] | None:
        """For stochastic rounding: numbers that depend on the step and the parameter, not on who updates it."""
        if not self.settings.stochastic_rounding or all(weight.dtype == torch.float32 for weight in weights):
            return None
        return [
            generator(weight.device, key, self.place[name])
            for name, weight in zip(names, weights, strict=True)
        ]
