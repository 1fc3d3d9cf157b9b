"""The runs of a call: a complete combined batch is one run of one plan.

With `Options.allowNewShapes` a batch may be incomplete (ragged), and needs several runs of different plans.
Examples of training with two micro-batches per step, where `####` is a micro-batch of four rows:

    #### #### | #### #### | ####     two steps, and a step of one micro-batch
    #### #### | #### ##              a step, and a step of two plans: the second one ends it, with weight 2/4
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from popengine.settings import Counts, Settings, StepPart

from ..data.loader import loaded_batches
from ..enums import OutputMode
from ..options import Options
from .arguments import BoundCall, CompiledInputs, tensors_for_engine

_WHOLE_STEP = StepPart()


@dataclass(frozen=True)
class Run:
    """One run of a plan, with the call's arguments cut to its rows, and the `part` of an update that it
    computes.

    `iteration` is the number of device iterations before it, for the last, incomplete step of a ragged batch
    with OutputMode.EveryN. Parameters in `frozen` require no gradients. `tied`: the names of one parameter, the
    canonical one first.
    """

    call: BoundCall
    counts: Counts
    part: StepPart = _WHOLE_STEP
    iteration: int | None = None
    is_ragged: bool = False
    frozen: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    # The key of this run's plan. Runs with equal keys share a plan.
    key = property(attrgetter("call.kind", "counts", "part", "iteration", "frozen", "tied"))

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of the run's plan, from those of a complete combined batch."""
        settings = replace(settings, counts=self.counts, step_part=self.part)
        if not self.is_ragged:
            return settings
        # A short step does not fill a pipeline.
        settings = replace(settings, strategy=replace(settings.strategy, or_sharded=True))
        if settings.outputs == "every_n" and self.iteration is not None:
            is_kept = (self.iteration + 1) % settings.return_period == 0
            period = 1 if is_kept else self.counts.iterations + 1  # a run of fewer iterations keeps none
            settings = replace(settings, return_period=period)
        return settings


def split_into_runs(whole: Run, options: Options, training: bool, like: CompiledInputs | None) -> list[Run]:
    """Return the runs of a call: several for an incomplete batch, in which all inputs have the same number of
    rows, else only `whole`. `like`: inputs of the first plan, for the rows of a micro-batch without a
    DataLoader; None: then the call is complete."""
    call, counts = whole.call, whole.counts
    row_counts = {tensor.shape[0] for tensor in call.tensors if tensor.dim()}
    rows = row_counts.pop() if len(row_counts) == 1 else 0
    size = _micro_batch_rows(call, rows, like) if rows else None
    if not size or rows >= size * counts.product:
        return [whole]
    count, rest = divmod(rows, size)
    steps, left = divmod(count, counts.accumulation * counts.groups)
    iteration = steps if options.output_mode == OutputMode.EveryN else None
    parts: list[tuple[int, Counts, StepPart, int | None]] = []  # rows, and the fields of a run
    if steps:
        parts.append(((count - left) * size, replace(counts, iterations=steps), _WHOLE_STEP, None))
    if left and not rest and left % counts.groups == 0:
        part_counts = replace(counts, iterations=1, accumulation=left // counts.groups)
        parts.append((left * size, part_counts, _WHOLE_STEP, iteration))
        left = 0
    # Too few micro-batches for all replicas: the first replica computes the rest of the step.
    alone = replace(counts, iterations=1, accumulation=1, replicas=1, groups=1)
    if left:
        part_counts = replace(alone, accumulation=left) if training else replace(alone, iterations=left)
        parts.append((left * size, part_counts, StepPart(ends_step=not (training and rest)), iteration))
    if rest:
        part = StepPart(before=left, weight=rest / size) if training and left else _WHOLE_STEP
        parts.append((rest, alone, part, iteration))
    runs, start = [], 0
    for taken, own_counts, part, iteration in parts:
        inputs = (tensor[start : start + taken] if tensor.dim() else tensor for tensor in call.tensors)
        fields = {"counts": own_counts, "part": part, "iteration": iteration, "is_ragged": True}
        runs.append(replace(whole, call=call.with_tensors(inputs), **fields))
        start += taken
    return runs


def _micro_batch_rows(call: BoundCall, rows: int, like: CompiledInputs | None) -> int | None:
    """Return the rows of a micro-batch: as the DataLoader says, else the common number of those of `like`."""
    for tensor in call.tensors:
        batch = loaded_batches.get(tensor)
        if batch is not None and (size := batch.micro_batch_rows(rows)) is not None:
            return size
    if like is None:
        return None
    sizes = {shape[0] // like.counts.product for _, shape in like.kind.tensors if shape}
    return sizes.pop() if len(sizes) == 1 else None


def _first_micro_batch(tensor: Tensor, counts: Counts) -> Tensor:
    """Return the rows of a combined batch's first micro-batch; a 0-d tensor unchanged."""
    return tensor[: len(tensor) // counts.product] if tensor.dim() else tensor


def synthetic_inputs(tensors: Sequence[Tensor], mode: int, counts: Counts) -> list[Tensor]:
    """Return combined batches that repeat one synthetic micro-batch, by `popart.SyntheticDataMode`."""
    made = []
    for tensor in tensors:
        value = torch.zeros_like(_first_micro_batch(tensor, counts))
        if value.is_floating_point() and mode > 1:
            value.normal_() if mode == 2 else value.uniform_()
        made.append(value.expand(counts.product, *value.shape).reshape(tensor.shape))
    return made


def first_micro_batches(call: BoundCall, counts: Counts, has_float64: bool) -> list[Tensor]:
    """Return the rows of a call's first micro-batch, as `tensors_for_engine` converts them."""
    return [_first_micro_batch(tensor, counts) for tensor in tensors_for_engine(call, has_float64)]
