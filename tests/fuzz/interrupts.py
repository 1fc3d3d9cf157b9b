"""Ctrl-C at a random line of a call: the state is as before the call or as after it, and training goes on."""

from __future__ import annotations

import random
import sys
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
    before = state_of(twin)
    _traced(twin, calls[1], counted)
    after = state_of(twin)
    twin.destroy()
    interrupt, trainer = _Interrupt(1 + int(at * (counted.lines - 1))), executor(steps, layout, load)
    trainer(*calls[0])
    state_of(trainer)
    try:
        _traced(trainer, calls[1], interrupt)
    except KeyboardInterrupt:
        pass
    else:
        return None  # fewer lines than were counted
    found = state_of(trainer)
    is_before, is_after = not differing(found, before), not differing(found, after)
    if not (is_before or is_after):
        return (
            f"an interrupt at {interrupt.where} leaves neither before nor after: {differing(found, before)}"
        )
    if is_before and not is_after:
        trainer(*calls[1])
    for batch in calls[2:]:
        trainer(*batch)
    wrong = differing(state_of(trainer), unbroken.state)
    trainer.destroy()
    if wrong:
        place = "before" if is_before else "after"
        return f"after an interrupt at {interrupt.where} (state as {place}) training goes on differently: {wrong}"
    return None


def random_place(numbers: random.Random) -> float:
    return numbers.random()
