"""Numbers: the generators of a call's random numbers, known one by one, so that a graph can be given them.

The call that is run as it is makes them. In a graph of it the i-th draw has the i-th of them, and before each run of
the graph each is seeded for the call that is to come: with the numbers that this call would draw without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from popengine.ir import Plan
from popengine.settings import Settings

from ..state.random_draws import MASK, mix
from .one_call import Run


class Numbers:
    """A source of generators (`draws.Source`) for a call and for those that are like it."""

    def __init__(self, run: Run, plan: Plan, settings: Settings) -> None:
        self._plan, self._settings = plan, settings
        self._index = {key & MASK: index for index, key in enumerate(self._keys(run))}
        self._draws: list[tuple[int, int]] = []  # of each: which of the keys, and its place in the model
        self._generators: list[torch.Generator] = []
        self._next: int | None = None  # while a graph is captured: the number of the next draw
        self.refused: Any = None  # an operation that can't draw from a generator of its own

    def _keys(self, run: Run) -> list[int]:
        """All keys that the workers draw with, in one order for all calls."""
        counts = self._settings.counts
        found = []
        for step in range(run.first_step, run.first_step + run.steps):
            found.append(mix(run.seed, step))
            for micro_batch in range(self._plan.schedule.micro_batches):
                for replica in range(counts.replicas):
                    place = counts.instance * counts.replicas + replica
                    found.append(mix(run.seed, step, micro_batch, place))
        return found

    def generator(self, device: torch.device, key: int, place: int) -> torch.Generator:
        draw = self._index[key & MASK], place
        if self._next is None:
            self._draws.append(draw)
            self._generators.append(torch.Generator(device).manual_seed(mix(key, place)))
            return self._generators[-1]
        number, self._next = self._next, self._next + 1
        if self._draws[number : number + 1] != [draw]:
            raise RuntimeError("it draws other random numbers than the call before")
        return self._generators[number]

    def refuse(self, operation: Any) -> None:
        self.refused = operation

    def seeded(self, run: Run) -> Sequence[torch.Generator]:
        """All generators, as they are for this call; from here on they are handed out, and none is made."""
        keys = self._keys(run)
        self._index = {key & MASK: index for index, key in enumerate(keys)}
        for (index, place), generator in zip(self._draws, self._generators, strict=True):
            generator.manual_seed(mix(keys[index], place))
        self._next = 0
        return self._generators
