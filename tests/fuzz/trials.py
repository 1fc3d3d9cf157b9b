"""A trial: one random model in all kinds of layouts. A failure is made smaller, and becomes a program."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import interrupts
from .layouts import UNSPLIT, Layout, Load, random_layout, random_load
from .models import Steps, random_steps
from .places import trained_at
from .runs import differences, plain, trained, unsplit


def against_plain(steps: Steps, layout: Layout, load: Load) -> str | None:
    """What differs from plain PyTorch; None if nothing does."""
    return _text(differences(trained(steps, layout, load), plain(steps, load)))


def against_unsplit(steps: Steps, layout: Layout, load: Load) -> str | None:
    """What differs from the same model in one piece; None if nothing does."""
    return _text(differences(trained(steps, layout, load), unsplit(steps, load)))


def at_places(steps: Steps, layout: Layout, load: Load, *places: int) -> str | None:
    """What differs if ipu i is at place `places[i]`, which the messages of other places reach late; None if nothing."""
    return _text(differences(trained_at(steps, layout, load, list(places)), unsplit(steps, load)))


def interrupted(steps: Steps, layout: Layout, load: Load, at: float) -> str | None:
    """What is wrong after an interrupt at a place of the second call, from 0 to 1; None if nothing is."""
    return interrupts.problem(steps, layout, load, unsplit(steps, load), at)


def _text(found: list[str]) -> str | None:
    return "; ".join(found) or None


def trial(seed: str) -> str | None:
    """A report of the first thing that is wrong with the random model of this seed; None if nothing is."""
    numbers = random.Random(seed)
    steps, load = random_steps(numbers), random_load(numbers)
    checks: list[tuple[str, Layout, tuple[Any, ...]]] = []
    # A view made before forward is made anew within it: with two other uses, the gradients of its weight are then added
    # up in another order than plain PyTorch's, and the last bit may differ. All layouts still agree.
    reordered = any(step.kind.startswith("tied") and steps[step.other].kind == "view" for step in steps)
    if load.replicas == 1 and not reordered and not any(step.kind == "dropout" for step in steps):
        checks.append(("against_plain", UNSPLIT, ()))
    for mode in ("pipelined", "sharded"):
        checks.append(("against_unsplit", random_layout(numbers, mode, len(steps), load), ()))
    layout = random_layout(numbers, numbers.choice(["pipelined", "sharded"]), len(steps), load)
    checks.append(("interrupted", layout, (interrupts.random_place(numbers),)))
    layout = random_layout(numbers, numbers.choice(["pipelined", "sharded"]), len(steps), load)
    if len(set(layout.ipus)) > 1:
        places = [numbers.randrange(4) for _ in range(max(layout.ipus) + 1)]
        places[-1] = (places[0] + 1) % 4  # at least two
        checks.append(("at_places", layout, tuple(places)))
    for name, layout, more in checks:
        wrong = _run(name, steps, layout, load, more)
        if wrong is not None:
            smaller, layout, load = _smaller(name, steps, layout, load, more)
            wrong = _run(name, smaller, layout, load, more) or wrong
            return f"{wrong}\n\n{_program(name, smaller, layout, load, more)}"
    return None


def _run(name: str, steps: Steps, layout: Layout, load: Load, more: tuple[Any, ...]) -> str | None:
    check: Callable[..., str | None] = globals()[name]
    try:
        return check(steps, layout, load, *more)
    except Exception:
        return traceback.format_exc()


def _smaller(
    name: str, steps: Steps, layout: Layout, load: Load, more: tuple[Any, ...]
) -> tuple[Steps, Layout, Load]:
    """Leave out steps, iterations and replicas, as long as something is wrong."""
    for position in reversed(range(1, len(steps))):
        if any(step.other == position for step in steps):
            continue
        fewer = tuple(
            replace(step, other=step.other - (step.other > position))
            for i, step in enumerate(steps)
            if i != position
        )
        cuts = [cut - (cut > position) for cut in layout.cuts]
        fits = len(set(cuts)) == len(cuts) and cuts[-1] < len(fewer)
        if fits and _run(name, fewer, replace(layout, cuts=cuts), load, more):
            steps, layout = fewer, replace(layout, cuts=cuts)
    for simpler in (replace(load, iterations=1), replace(load, replicas=1), replace(load, optimizer="sgd")):
        merged = replace(
            load, iterations=min(load.iterations, simpler.iterations), optimizer=simpler.optimizer
        )
        merged = replace(merged, replicas=min(load.replicas, simpler.replicas))
        if merged != load and _run(name, steps, layout, merged, more):
            load = merged
    return steps, layout, load


def _program(name: str, steps: Steps, layout: Layout, load: Load, more: tuple[Any, ...]) -> str:
    arguments = ", ".join(["steps", repr(layout), repr(load), *map(repr, more)])
    return (
        "from tests.fuzz.layouts import Layout, Load\n"
        "from tests.fuzz.models import Step\n"
        f"from tests.fuzz.trials import {name}\n\n"
        f"steps = {steps!r}\n"
        f"print({name}({arguments}))\n"
    )
