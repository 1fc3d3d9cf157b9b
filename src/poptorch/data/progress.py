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
from poptorch.data.loader_warnings import warn_about_nothing
from poptorch.data.randomness import random_state, set_random_state
from poptorch.enums import DataLoaderMode

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
        position = {"epoch": self.epoch, "position": self.position}
        return {**position, **_layout(loader), "begun": self.begun, "now": _generators(loader)}

    def epoch_of(self, loader: Any, batches_of: Callable[[], Iterator[Any]], parts: int) -> Iterator[Any]:
        """Begin an epoch, or the rest of the one that was wanted.

        Args:
            parts: what the sampler yields for a batch
        """
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            self.epoch += self.begun is not None  # the one that a `break` has ended
            self.position, self.begun = 0, _generators(loader)
            return self._counted(loader, batches_of())
        self.epoch, self.position = wanted["epoch"], wanted["position"]
        begun = wanted["begun"] or wanted["now"]
        now = None if wanted["begun"] is None else wanted["now"]["random"]
        loader._iterator = None  # workers that last from epoch to epoch have begun another one
        _put_back(loader, begun)
        self.begun = begun
        if isinstance(loader.dataset, IterableDataset):
            return self._counted(loader, _behind(batches_of(), Skip(self.position, now, ahead=0)))
        again = None if begun["fresh"] else partial(_put_back, loader, begun)
        self.skip = Skip(self.position * parts, now, ahead=1, again=again)
        return self._counted(loader, batches_of())

    def _counted(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.position += 1
            yield batch
            del batch
        if self.epoch == 0 == self.position and loader.mode == DataLoaderMode.Sync:  # others raise
            warn_about_nothing(loader._rows(), loader.combinedBatchSize)
        self.epoch, self.position, self.begun = self.epoch + 1, 0, None


@dataclass(frozen=True)
class Skip:
    """The beginning of an epoch that was handed out already."""

    count: int
    random: State | None  # to be put back behind it ...
    ahead: int  # ... after this many of the rest were drawn
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
    """Return the state with its position in this loader's batches.

    Raises:
        DataError: it is no loader's state, or rows would be lost or read twice
    """
    if not isinstance(state, Mapping) or set(state) != {"epoch", "position", *_LAYOUT, "begun", "now"}:
        raise DataError(
            "this is not the state of a poptorch.DataLoader\n  fix: load what its state_dict() has returned"
        )
    here = _layout(loader)
    if len(state["now"]["own"]) != len(_own(loader)):
        raise DataError(
            "the loader's state is that of another kind of shuffling\n"
            "  why: where rows belong to replicas the options' seed shuffles them, elsewhere torch's numbers do\n"
            "  fix: the first loader's options (popdist.poptorch.Options or poptorch.Options), shuffle and generator"
        )
    position = state["position"]
    if position and any(state[name] != here[name] for name in _LAYOUT):
        rows = position * (state["rows"] or 0)
        if state["shares"] != 1 or here["shares"] != 1 or not rows or rows % (here["rows"] or rows + 1):
            raise DataError(
                f"the loader's state is of the middle of epoch {state['epoch']}, from {_words(state)}, and here are "
                f"{_words(here)}: rows would be read twice, and others never\n"
                f"  why: a process with a share of its own counts the batches of that share\n"
                f"  fix: go on as before until the epoch has ended, or load a state from between two epochs; with "
                f"popdist.poptorch.Options rows belong to replicas, and any number of processes goes on"
            )
        position = rows // here["rows"]
    return {**state, **here, "position": position}


_LAYOUT = ("shares", "rows")


def _layout(loader: Any) -> State:
    """Return how many processes have a share and a position of their own, and the rows of a call of all of them."""
    return {"shares": loader._shares, "rows": loader._rows_of_a_call()}


def _words(layout: Mapping[str, Any]) -> str:
    shares = (
        f"{layout['shares']} processes with a share each" if layout["shares"] > 1 else "one order for all"
    )
    return f"{shares} in calls of {layout['rows']} rows"


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
