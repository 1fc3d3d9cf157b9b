"""The state of a loader within its epochs, from which another process goes on with the same rows.

The rows of an epoch depend on random numbers that are drawn when it begins. So a state has the states of the
generators at the beginning of the epoch ("begun") and at present ("now"). To resume, the epoch begins with
the first; the rows that were yielded are skipped without being loaded; then the second is set.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from popengine.errors import DataError

RandomState = dict[str, Any]
LoaderState = dict[str, Any]


def random_state() -> RandomState:
    """Return the states of the global random generators, in types for `torch.load(weights_only=True)`."""
    numpys: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numpys["state"]["key"].astype("int64"))
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": key}},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global generators of torch, numpy and Python to a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    numpys = state["numpy"]
    numpy.random.set_state(
        {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].numpy().astype("uint32")}}
    )
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


class Progress:
    """The position of a loader: the number of ended epochs, and of batches yielded in the current epoch."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0
        self.begun: LoaderState | None = None  # generators when this epoch began; None between two epochs
        self.loaded_state: LoaderState | None = None  # from which the next epoch continues
        self.iterate: Callable[[Iterable[Any]], Iterator[Any]] = iter  # of `Resumable`, at its next `iter()`

    def state(self, loader: Any) -> LoaderState:
        """Return the state of a loader; if a state was loaded, that state until the next epoch begins."""
        if self.loaded_state is not None:
            return self.loaded_state
        position = {"epoch": self.epoch, "position": self.position}
        return {**position, **_layout(loader), "begun": self.begun, "now": _generator_states(loader)}

    def begin_epoch(self, loader: Any) -> Iterator[Any]:
        """Begin the loader's next epoch, and return an iterator over its batches. If a state was loaded,
        clear it, restore its random generators, and continue its epoch after the batches already yielded."""
        loaded_state, self.loaded_state = self.loaded_state, None
        if loaded_state is None:
            self.epoch += self.begun is not None  # a `break` has ended the one before
            self.position, self.begun = 0, _generator_states(loader)
            return self._count_batches(loader, loader._begin_epoch())
        self.epoch, self.position = loaded_state["epoch"], loaded_state["position"]
        self.begun = begun = loaded_state["begun"] or loaded_state["now"]
        now = None if loaded_state["begun"] is None else loaded_state["now"]["random"]
        loader._iterator = None  # persistent workers may have begun another epoch
        _set_generators(loader, begun)
        if isinstance(loader.dataset, IterableDataset):
            return self._count_batches(
                loader, _after_skip(loader._begin_epoch(), self.position, now, ahead=0)
            )
        begin = None if begun["fresh"] else partial(_set_generators, loader, begun)
        parts, head = loader._elements_before(self.position)
        self.iterate = partial(_after_skip, count=parts, random=now, ahead=1, begin=begin)
        return self._count_batches(loader, loader._begin_epoch(head))

    def _count_batches(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.position += 1
            yield batch
            del batch
        if self.epoch == 0 == self.position:
            loader._warn_of_no_batch()
        self.epoch, self.position, self.begun = self.epoch + 1, 0, None


class Resumable:
    """A wrapper of a sampler; the first iteration after a state was loaded skips elements already yielded."""

    def __init__(self, sampler: Any, progress: Progress) -> None:
        self.sampler, self.progress = sampler, progress

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator: torch calls this twice in the first epoch of workers, and the first call must draw nothing.
        iterate, self.progress.iterate = self.progress.iterate, iter
        yield from iterate(self.sampler)


def _after_skip(
    parts: Iterable[Any],
    count: int,
    random: RandomState | None,
    ahead: int,
    begin: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yield the elements after the first `count`. (A generator: new workers of torch draw a seed before.)

    Args:
        random: state for the global generators, set after the skipped elements and `ahead` more; or None
        begin:  called first, sets the generators to their state at the beginning of the epoch; or None
    """
    if begin is not None:
        begin()
    rest = iter(parts)
    for _ in islice(rest, count):
        pass
    first = list(islice(rest, ahead))
    if random is not None:
        set_random_state(random)
    yield from first
    yield from rest


def checked(state: Mapping[str, Any], loader: Any) -> LoaderState:
    """Return a checked copy of a loader's state, with the position counted in batches of this loader.

    Raises:
        DataError: the value is not a loader's state, it has other random generators than this loader, or rows
            would be lost or read twice
    """
    here = _layout(loader)
    if not isinstance(state, Mapping) or set(state) != {"epoch", "position", "begun", "now", *here}:
        raise DataError(
            "this is not the state of a poptorch.DataLoader\n  fix: load what its state_dict() has returned"
        )
    if len(state["now"]["own"]) != len(_own_generators(loader)):
        raise DataError(
            "the loader's state is that of another kind of shuffling\n"
            "  why: where rows belong to replicas the options' seed shuffles them, elsewhere torch's numbers do\n"
            "  fix: the first loader's options (popdist.poptorch.Options or poptorch.Options), shuffle and generator"
        )
    position = state["position"]
    if position and any(state[name] != here[name] for name in here):
        rows = position * (state["rows"] or 0)
        if state["shares"] != 1 or here["shares"] != 1 or not rows or rows % (here["rows"] or rows + 1):
            raise DataError(
                f"the loader's state is of the middle of epoch {state['epoch']}, from {_describe_layout(state)}, "
                f"and here are {_describe_layout(here)}: rows would be read twice, and others never\n"
                f"  why: a process with a share of its own counts the batches of that share\n"
                f"  fix: go on as before until the epoch has ended, or load a state from between two epochs; with "
                f"popdist.poptorch.Options rows belong to replicas, and any number of processes goes on"
            )
        position = rows // here["rows"]
    return {**state, **here, "position": position}


def _layout(loader: Any) -> dict[str, Any]:
    """Return the number of processes with shares of their own (1: no shares), and the rows of a call."""
    return {"shares": loader._share_count, "rows": loader._rows_of_a_call()}


def _describe_layout(layout: Mapping[str, Any]) -> str:
    shares = (
        f"{layout['shares']} processes with a share each" if layout["shares"] > 1 else "one order for all"
    )
    return f"{shares} in calls of {layout['rows']} rows"


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    generators = [getattr(part, "generator", None) for part in (loader, *samplers)]
    return list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())


def _generator_states(loader: Any) -> LoaderState:
    """Return the states of the random generators on which a loader's rows depend."""
    return {
        "random": random_state(),
        "own": [generator.get_state() for generator in _own_generators(loader)],
        "behind": getattr(loader.sampler, "is_shifted", False),
        "fresh": loader._iterator is None,  # new workers draw a seed when an epoch begins
    }


def _set_generators(loader: Any, state: LoaderState) -> None:
    """Set the generators on which a loader's rows depend to a result of `_generator_states`."""
    set_random_state(state["random"])
    for generator, value in zip(_own_generators(loader), state["own"], strict=False):
        generator.set_state(value)
    if hasattr(loader.sampler, "is_shifted"):
        loader.sampler.is_shifted = state["behind"]
