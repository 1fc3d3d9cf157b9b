"""Where a loader is in its epochs, so that another process goes on from there with the same rows.

Which rows an epoch has depends on random numbers that were drawn when it began. So a state holds the generators as
they were then, and as they are now: the epoch is begun again with the first, what was handed out is skipped without
being loaded, and the second are put in place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from popengine.errors import DataError
from poptorch.data.randomness import random_state, set_random_state

State = dict[str, Any]


class Progress:
    """The epochs that a loader has ended, and the batches of the present one that it has handed out."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0
        self.begun: State | None = None  # generators when the present epoch began; None: between two
        self.wanted: State | None = None  # the state that the next epoch begins with
        self.skip: Skip | None = None  # for `Resumable`, once

    def state(self, loader: Any) -> State:
        if self.wanted is not None:
            return self.wanted
        position = {"epoch": self.epoch, "position": self.position, "shares": loader._shares}
        return {**position, "begun": self.begun, "now": _generators(loader)}

    def epoch_of(self, loader: Any, batches_of: Callable[[], Iterator[Any]], parts: int) -> Iterator[Any]:
        """Begin an epoch, or the rest of the one that was wanted.

        Args:
            parts: what the sampler yields for a batch
        """
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            self.epoch += self.begun is not None  # the one that a `break` has ended
            self.position, self.begun = 0, _generators(loader)
            return self._counted(batches_of())
        self.epoch, self.position = wanted["epoch"], wanted["position"]
        begun = wanted["begun"] or wanted["now"]
        now = None if wanted["begun"] is None else wanted["now"]["random"]
        loader._iterator = None  # workers that last from epoch to epoch have begun another one
        _put_back(loader, begun)
        self.begun = begun
        if isinstance(loader.dataset, IterableDataset):
            return self._counted(_behind(batches_of(), Skip(self.position, now, ahead=0)))
        again = None if begun["fresh"] else partial(_put_back, loader, begun)
        self.skip = Skip(self.position * parts, now, ahead=1, again=again)
        return self._counted(batches_of())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.position += 1
            yield batch
            del batch
        self.epoch, self.position, self.begun = self.epoch + 1, 0, None


@dataclass(frozen=True)
class Skip:
    """The beginning of an epoch that was handed out already."""

    count: int
    random: State | None  # to be put back behind it ...
    ahead: int  # ... when so many of the rest were drawn
    again: Callable[[], None] | None = None  # puts generators back before it


class Resumable:
    """A sampler that can leave out its beginning."""

    def __init__(self, sampler: Any, progress: Progress) -> None:
        self.sampler, self.progress = sampler, progress

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator: torch calls this twice for the first epoch of its workers, and uses the second.
        skip, self.progress.skip = self.progress.skip, None
        if skip is None:
            yield from self.sampler
            return
        if skip.again is not None:
            skip.again()
        yield from _behind(iter(self.sampler), skip)


def _behind(parts: Iterator[Any], skip: Skip) -> Iterator[Any]:
    """The parts behind the beginning. Nothing happens before the first is asked for: new workers draw a seed before."""
    for _ in range(skip.count):
        next(parts, None)
    first = list(islice(parts, skip.ahead))
    if skip.random is not None:
        set_random_state(skip.random)
    yield from first
    yield from parts


def checked(state: Mapping[str, Any], loader: Any) -> State:
    """Return a state that `loader` can continue from. Raises: DataError"""
    if not isinstance(state, Mapping) or set(state) != {"epoch", "position", "shares", "begun", "now"}:
        raise DataError(
            "this is not the state of a poptorch.DataLoader\n  fix: load what its state_dict() has returned"
        )
    if state["position"] and state["shares"] != loader._shares:
        raise DataError(
            f"the loader's state is of the middle of epoch {state['epoch']} in {state['shares']} processes, and "
            f"here are {loader._shares}: rows would be read twice, and others never\n"
            f"  why: each process reads a share of its own, and the position counts batches of that share\n"
            f"  fix: {state['shares']} processes until the epoch has ended, or a state from between two epochs"
        )
    return dict(state)


def _own(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, each once."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(part, "generator", None) for part in (loader, *samplers)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _generators(loader: Any) -> State:
    return {
        "random": random_state(),
        "own": [generator.get_state() for generator in _own(loader)],
        "behind": getattr(loader.sampler, "behind", False),
        "fresh": loader._iterator is None,  # new workers draw a seed when an epoch begins
    }


def _put_back(loader: Any, state: State) -> None:
    set_random_state(state["random"])
    for generator, value in zip(_own(loader), state["own"], strict=False):
        generator.set_state(value)
    if hasattr(loader.sampler, "behind"):
        loader.sampler.behind = state["behind"]
