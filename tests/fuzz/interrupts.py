"""Ctrl-C at a random line of a call: the state is that after whole weight updates, and training goes on from there."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import poptorch

from .layouts import Layout, Load
from .models import Steps
from .runs import Run, batches, differing, executor, state_of

_OURS = (str(Path(poptorch.__file__).parent), str(Path(poptorch.__file__).parents[1] / "popengine"))


class _Interrupt:
    """Counts the lines of ours that the calling thread runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None) -> None:
        self.lines, self._at, self.where = 0, at, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            return self if frame.f_code.co_filename.startswith(_OURS) else None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _traced(trainer: Any, batch: Any, interrupt: _Interrupt) -> Any:
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        return trainer(*batch).reshape(-1)
    finally:
        sys.settrace(before)


def problem(steps: Steps, layout: Layout, load: Load, unbroken: Run, at: float) -> str | None:
    """What is wrong after an interrupt of the second call; None if nothing is.

    Args:
        unbroken: the same training without it
        at:       where, from 0 (the call's first line) to 1 (its last one)
    """
    calls = batches(load)
    counted, twin = _Interrupt(None), executor(steps, layout, load)
    twin(*calls[0])
    _traced(twin, calls[1], counted)
    twin.destroy()
    interrupt, trainer = _Interrupt(1 + int(at * (counted.lines - 1))), executor(steps, layout, load)
    trainer(*calls[0])
    state_of(trainer)
    before = trainer.rng_state[1]
    try:
        _traced(trainer, calls[1], interrupt)
    except KeyboardInterrupt:
        pass
    else:
        return None  # fewer lines than were counted
    done = trainer.rng_state[1] - before
    # The same updates, one a call.
    single = replace(load, iterations=1)
    twin = executor(steps, layout, single)
    updates = [*_updates(calls[0], load), *_updates(calls[1], load)[:done]]
    for update in updates:
        twin(*update)
    wrong = differing(state_of(trainer), state_of(twin))
    if wrong:
        return f"an interrupt at {interrupt.where} does not leave the state after {done} updates: {wrong}"
    for batch in calls[2:]:
        trainer(*batch)
        for update in _updates(batch, load):
            twin(*update)
    wrong = differing(state_of(trainer), state_of(twin))
    if done == load.iterations:
        wrong += differing(state_of(trainer), unbroken.state)
    trainer.destroy()
    twin.destroy()
    if wrong:
        return f"after an interrupt at {interrupt.where} ({done} updates done) training goes on differently: {wrong}"
    return None


def _updates(batch: Any, load: Load) -> list[tuple[Any, ...]]:
    """The rows of each weight update of a call."""
    rows = load.rows_of_a_call // load.iterations
    return [
        tuple(value[start : start + rows].clone() for value in batch)
        for start in range(0, load.rows_of_a_call, rows)
    ]


def random_place(numbers: random.Random) -> float:
    return numbers.random()
