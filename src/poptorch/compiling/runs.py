"""The runs of plans that make up one call.

A combined batch of whole micro-batches is one run. With `Options.allowNewShapes` a batch may end early (it is ragged):
of training rows with two micro-batches a step, `####` is a micro-batch of four rows:

    #### #### | #### #### | ####     two steps, and a step of one micro-batch
    #### #### | #### ##              a step, and a step of two plans: the second one ends it, with weight 2/4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from popengine.errors import BatchError
from popengine.settings import Counts, Settings, StepPart

from ..data.loader import micro_batch_of
from .arguments import BoundCall, CompiledInputs

_WHOLE_STEP = StepPart()


@dataclass(frozen=True)
class Run:
    """One run of a plan: its rows of the call's inputs, and what the plan computes.

    Args:
        iteration: of the step at the end of a ragged call, for OutputMode.EveryN: the device iterations before it
    """

    call: BoundCall
    counts: Counts
    part: StepPart = _WHOLE_STEP
    iteration: int | None = None
    is_ragged: bool = False

    @property
    def key(self) -> Any:
        """What plans are known by."""
        return self.call.kind, self.counts, self.part, self.iteration

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of the run's plan from those of a call of whole micro-batches."""
        settings = replace(settings, counts=self.counts, part=self.part, several_plans=True)
        if not self.is_ragged:
            return settings
        # A short step does not fill a pipeline.
        settings = replace(settings, strategy=replace(settings.strategy, or_sharded=True))
        if settings.outputs == "every_n" and self.iteration is not None:
            is_kept = (self.iteration + 1) % settings.return_period == 0
            period = 1 if is_kept else self.counts.iterations + 1  # a run of fewer iterations keeps none
            settings = replace(settings, return_period=period)
        return settings


def runs_of(
    call: BoundCall, counts: Counts, like: CompiledInputs | None, *, training: bool, every_n: bool
) -> list[Run]:
    """Return the runs of a call.

    Args:
        like: the inputs of the model's first plan, which has the size of a micro-batch where no DataLoader has made
            the batch
        every_n: whether outputs depend on the iteration
    Raises:
        BatchError: the inputs end after different numbers of micro-batches
    """
    batched = [(t.shape[0], path) for t, path in zip(call.tensors, call.paths, strict=True) if t.dim()]
    sizes = _micro_batch_rows(call, counts, like)
    whole = [size * counts.product for size in sizes]
    if not sizes or all(rows >= full for (rows, _), full in zip(batched, whole, strict=True)):
        return [Run(call, counts)]
    parts = {(rows // size, rows % size, size) for (rows, _), size in zip(batched, sizes, strict=True)}
    if len({(count, bool(rest)) for count, rest, _ in parts}) > 1 or (
        len(parts) > 1 and any(rest for _, rest, _ in parts)
    ):
        listed = ", ".join(f"{path} has {rows}" for rows, path in batched)
        raise BatchError(
            f"the inputs of an incomplete batch end after different numbers of micro-batches: {listed} rows\n"
            f"  why: micro-batches have {', '.join(map(str, sizes))} rows\n"
            "  fix: pass tensors with the same number of rows"
        )
    count, rest, size = parts.pop()
    found, start = [], 0
    for micro_batches, rows, fields in _split(counts, count, rest, size, training):
        tensors = []
        for tensor, of_one in zip(call.tensors, _by_tensor(call, sizes), strict=True):
            first = start * of_one
            tensors.append(tensor[first : first + (micro_batches * of_one or rows)] if of_one else tensor)
        fields["iteration"] = fields.get("iteration") if every_n else None
        found.append(Run(call.with_tensors(tensors), is_ragged=True, **fields))
        start += micro_batches
    return found


def _micro_batch_rows(call: BoundCall, counts: Counts, like: CompiledInputs | None) -> list[int]:
    """Return the rows of a micro-batch in each input that has rows; an empty list where they are not known."""
    batched = [path for tensor, path in zip(call.tensors, call.paths, strict=True) if tensor.dim()]
    loaded = next((found for tensor in call.tensors if (found := micro_batch_of(tensor))), None)
    if loaded is not None and len({tensor.shape[0] for tensor in call.tensors if tensor.dim()}) == 1:
        return [loaded] * len(batched)
    if like is None:
        return []
    known = {
        path: shape[0] // like.counts.product
        for path, (_, shape) in zip(like.paths, like.kind.tensors, strict=True)
        if shape
    }
    common = set(known.values()).pop() if len(set(known.values())) == 1 else 0
    sizes = [known.get(path, common) for path in batched]
    return sizes if all(sizes) else []


def _by_tensor(call: BoundCall, sizes: list[int]) -> list[int]:
    """Return the rows of a micro-batch in each input; 0 for one without rows."""
    rest = iter(sizes)
    return [next(rest) if tensor.dim() else 0 for tensor in call.tensors]


def _split(
    counts: Counts, count: int, rest: int, size: int, training: bool
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield micro-batches, rows and fields of each run of a ragged call.

    Args:
        count: of micro-batches of `size` rows, which `rest` rows follow
    """
    steps, left = divmod(count, counts.accumulation * counts.groups)
    if steps:
        yield count - left, 0, {"counts": replace(counts, iterations=steps)}
    alone = replace(counts, iterations=1, accumulation=1, replicas=1, groups=1)
    if left and not rest and left % counts.groups == 0:
        each = replace(counts, iterations=1, accumulation=left // counts.groups)
        yield left, 0, {"counts": each, "iteration": steps}
        return
    # Replicas would not all have a micro-batch: the first one computes the whole step.
    if left:
        each = replace(alone, accumulation=left) if training else replace(alone, iterations=left)
        part = StepPart(ends_step=not (training and rest))
        yield left, 0, {"counts": each, "part": part, "iteration": steps}
    if rest:
        part = StepPart(before=left, weight=rest / size) if training and left else StepPart()
        yield 0, rest, {"counts": alone, "part": part, "iteration": steps}
