"""The state of a loader, from which another process continues in the middle of an epoch with the same rows.

The rows of an epoch depend on random numbers that are drawn when the epoch begins. So a state has the states
of the generators at the beginning of the epoch ("begun"; None between two epochs) and at present ("now"). To
resume, the generators are set to "begun" and the epoch begins; the rows that were yielded are skipped without
being loaded; then the generators are set to "now".
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
    """Return the states of torch's, numpy's and Python's global generators, for `torch.load(weights_only=True)`."""
    numpys: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numpys["state"]["key"].astype("int64"))
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": key}},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    numpys = state["numpy"]
    numpy.random.set_state(
        {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].numpy().astype("uint32")}}
    )
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def state_after_break(state: LoaderState) -> LoaderState:
    """Return the state that a `break` leaves: between the current and the next epoch."""
    if state["begun"] is None:
        return state
    return {**state, "epoch": state["epoch"] + 1, "position": 0, "begun": None}


class Progress:
    """The position of a loader (ended epochs, batches yielded in this epoch), and a loaded state."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0
        self.begun: LoaderState | None = None  # generators when this epoch began; None between two epochs
        self.loaded_state: LoaderState | None = None  # from which the next epoch continues
        # The function by which ResumableSampler iterates over its sampler the next time.
        self.iterate: Callable[[Iterable[Any]], Iterator[Any]] = iter

    def state(self, loader: Any) -> LoaderState:
        """Return the loader's state; after `load_state_dict`, until the next `iter()`, the loaded state."""
        if self.loaded_state is not None:
            return self.loaded_state
        position = {"epoch": self.epoch, "position": self.position}
        return {**position, **_layout_of(loader), "begun": self.begun, "now": _generator_states(loader)}

    def next_state(self, loader: Any) -> LoaderState:
        """Return the state from which the next `iter()` starts: the loaded state, or that of a new epoch."""
        return self.loaded_state or state_after_break(self.state(loader))

    def begin_epoch(self, loader: Any) -> Iterator[Any]:
        """Begin the loader's next epoch, or continue the loaded state's; return an iterator over its batches."""
        state, is_loaded = self.next_state(loader), self.loaded_state is not None
        self.loaded_state = None
        self.epoch, self.position = state["epoch"], state["position"]
        self.begun = begun = state["begun"] or state["now"]
        if not is_loaded:
            return self._yield_and_count(loader, loader._begin_epoch())
        now = None if state["begun"] is None else state["now"]["random"]
        if now is not None or begun["fresh"]:
            loader._iterator = None  # persistent workers may have begun another epoch
        _restore_generators(loader, begun)
        if isinstance(loader.dataset, IterableDataset):
            batches = _skip_elements(loader._begin_epoch(), self.position, now, ahead=0)
        else:
            begin = None if begun["fresh"] else partial(_restore_generators, loader, begun)
            count = self.position * loader._elements_per_batch
            self.iterate = partial(_skip_elements, count=count, random=now, ahead=1, begin=begin)
            batches = loader._begin_epoch()
        return self._yield_and_count(loader, batches)

    def _yield_and_count(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield and count the batches; at the end count the epoch, and warn if the first one was empty."""
        for batch in batches:
            self.position += 1
            yield batch
            del batch
        if self.epoch == 0 == self.position:
            loader._warn_of_no_batch()
        self.epoch, self.position, self.begun = self.epoch + 1, 0, None


class ResumableSampler:
    """A sampler of another sampler's elements (with `rows`: cut into lists of so many row indices), which skips
    elements in the first epoch after a state was loaded."""

    def __init__(self, sampler: Any, progress: Progress, rows: int | None) -> None:
        self.sampler, self.progress, self.rows = sampler, progress, rows

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator: torch calls this twice in the first epoch of workers, and the first call must draw nothing.
        iterate, self.progress.iterate = self.progress.iterate, iter
        yield from iterate(self.sampler if self.rows is None else self._cut_elements(self.rows))

    def _cut_elements(self, rows: int) -> Iterator[list[int]]:
        for indices in self.sampler:
            yield from (indices[start : start + rows] for start in range(0, len(indices), rows))


def _skip_elements(
    parts: Iterable[Any],
    count: int,
    random: RandomState | None,
    ahead: int,
    begin: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yield `parts` without the first `count`, read after `begin()`. When `ahead` more elements are read, set the
    global generators to `random`. A generator, since new workers of torch draw a seed before the first `next()`.
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


def state_for_loader(state: Mapping[str, Any], loader: Any) -> LoaderState:
    """Return a state, perhaps of a loader in another layout, with the position in this loader's batches.

    Raises: DataError, if it is no state of such a loader, or rows would be lost or read twice
    """
    here = _layout_of(loader)
    if not isinstance(state, Mapping) or set(state) != {"epoch", "position", "begun", "now", *here}:
        raise DataError(
            "this is not the state of a poptorch.DataLoader\n  fix: load what its state_dict() has returned"
        )
    if len(state["now"]["own"]) != len(_loader_generators(loader)):
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
                f"the loader's state is of the middle of epoch {state['epoch']}, from {_layout_text(state)}, "
                f"and here are {_layout_text(here)}: rows would be read twice, and others never\n"
                f"  why: a process with a share of its own counts the batches of that share\n"
                f"  fix: go on as before until the epoch has ended, or load a state from between two epochs; with "
                f"popdist.poptorch.Options rows belong to replicas, and any number of processes continues"
            )
        position = rows // here["rows"]
    return {**state, **here, "position": position}


def _layout_of(loader: Any) -> dict[str, Any]:
    """Return the number of processes that count the batches of a share each, and the rows of a call that are
    counted together (None: not known)."""
    shares, size = loader._share_count, loader._combined_batch_size
    processes = 1 if shares > 1 else loader.options.Distributed._dataset_share[1]
    return {"shares": shares, "rows": size and size * processes}


def _layout_text(layout: Mapping[str, Any]) -> str:
    count, rows = layout["shares"], layout["rows"]
    shares = f"{count} processes with a share each" if count > 1 else "one order for all"
    return f"{shares} in calls of {rows} rows"


def _loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the torch.Generators of a loader and of its samplers, each generator once."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    generators = [getattr(part, "generator", None) for part in (loader, *samplers)]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def _generator_states(loader: Any) -> LoaderState:
    return {
        "random": random_state(),
        "own": [generator.get_state() for generator in _loader_generators(loader)],
        "behind": getattr(loader.sampler, "is_shifted", False),
        "fresh": loader._iterator is None,  # the next epoch starts new workers, for which torch draws a seed
    }


def _restore_generators(loader: Any, state: LoaderState) -> None:
    set_random_state(state["random"])
    for generator, value in zip(_loader_generators(loader), state["own"], strict=False):
        generator.set_state(value)
    if hasattr(loader.sampler, "is_shifted"):
        loader.sampler.is_shifted = state["behind"]
