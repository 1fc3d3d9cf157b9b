"""A random place for each ipu: engines in one process, whose messages come late and reordered, and lost messages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from popengine.compile.tasks import make_plan
from popengine.ir import Plan
from popengine.places import unordered_reads
from popengine.run.train_state import TrainState
from popengine.settings import Place

from .layouts import Layout, Load
from .models import Steps
from .runs import Run, batches, executor

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "popengine", "popengine/run")]
from places_in_memory import SeveralEngines


def trained_at(steps: Steps, layout: Layout, load: Load, places: list[int]) -> Run:
    """The training of a model in a layout, with ipu i at place `places[i]`."""
    trainer: Any = executor(steps, layout, load)
    calls = batches(load)
    trainer.compile(*calls[0])
    compiled, hyper, seed = trainer._executable, trainer._optimizer_link.hyper, trainer.rng_state[0]
    trainer.destroy()
    settings = replace(compiled.settings, places=tuple(Place(places[i]) for i in range(max(layout.ipus) + 1)))
    plan = make_plan(compiled.plan.partition, settings)
    if lost := undetected(plan):
        raise AssertionError(f"no check finds a table without {', '.join(lost)}")
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    several = SeveralEngines(plan, settings, TrainState(weights.copy, seed), held=sum(places), seed=seed)
    try:
        losses = []
        for batch in calls:
            results = several.run([value.contiguous() for value in batch], hyper)
            losses.append(results.outputs()[0].reshape(-1).clone())
        return Run(losses, {name: value.clone() for name, value in several.find_weights().items()})
    finally:
        several.close()


def undetected(plan: Plan) -> list[str]:
    """The messages with values without which the checks of a table find nothing."""
    return [
        str(row) for row, task in enumerate(plan.tasks) if _has_values(plan, row) and not _is_found(plan, row)
    ]


def _has_values(plan: Plan, row: int) -> bool:
    task = plan.tasks[row]
    return task.kind == "receive" and bool(task.instructions[0].names)


def _is_found(plan: Plan, message: int) -> bool:
    """Whether the checks find that no row waits for a receive."""
    tasks = [
        replace(task, after=tuple(edge for edge in task.after if edge.row != message or row == message))
        for row, task in enumerate(plan.tasks)
    ]
    return bool(unordered_reads(replace(plan, tasks=tuple(tasks))))
