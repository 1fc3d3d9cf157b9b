"""What is done to the gradients of a step before the optimizer's `step()`: a list of functions, in their order.

To add one, write a function of a `StepGradients` and its line in `gradient_work`. Each runs once per step, when all
gradients are summed. The number of threads must not change its bits: `StepGradients.threads` is for sums over elements.

Random numbers: a draw of a piece has the key (seed, step, micro-batch, replica) and its number in the model; stochastic
rounding has the key (seed, step) and the number of the parameter's slot. Another draw has to use the key (seed, step)
and numbers from `len(slots)` on.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..settings import Settings
from .devices import CPU
from .state import Unit

# Automatic loss scaling keeps half precision gradients large, but within their range: the loss scale doubles if
# at most `_MAX_LARGE_SHARE` of the gradients' elements are large, and otherwise halves.
# An element is large above this value, before the division by the loss scale.
_LARGE_ELEMENT = 0.125 * torch.finfo(torch.float16).max
_MAX_LARGE_SHARE = 1e-7


@dataclass(eq=False)
class StepGradients:
    """The gradients of a step that this process updates, each on its device and summed over replicas; and what
    functions of the list return."""

    gradients: Mapping[Unit, Tensor]  # a complex one as real numbers, with a last dimension of 2
    norm_types: Mapping[Unit, torch.dtype]  # of all processes' gradients, in the parameters' order
    loss_scale: float
    threads: int  # per operation, in sums over elements: their number changes the bits
    # If each process has some of the gradients: a sum over processes, in place; and whether a gradient counts in it
    # here, which it does in one process.
    sum_over_processes: Callable[[Tensor], Tensor]
    counts_here: Callable[[Unit], bool]
    # Results:
    loss_factor: float = 1.0  # multiplies the loss scale of the next step
    is_applied: bool = True  # whether the weights are updated
    has_overflowed: bool = False

    @property
    def values(self) -> list[Tensor]:
        """The gradients, without their units."""
        return [*self.gradients.values()]

    @property
    def device(self) -> torch.device:
        """The device on which figures of all gradients are computed."""
        return next((value.device for value in self.gradients.values()), CPU)

    @property
    def counted(self) -> dict[Unit, Tensor]:
        """The gradients that count in sums over processes."""
        return {unit: value for unit, value in self.gradients.items() if self.counts_here(unit)}


GradientFunction = Callable[[StepGradients], None]


def gradient_work(settings: Settings) -> list[GradientFunction]:
    """Return the functions that prepare the gradients of a step, in their order."""
    part, counts, count = settings.step_part, settings.counts, 1
    if settings.reduction == "mean":
        count = (part.before + part.weight * counts.accumulation) * counts.global_replicas
    work: list[GradientFunction] = [partial(average, count)]
    work.append(choose_loss_scale if settings.automatic_loss_scaling else find_overflow)
    if settings.optimizer is not None and settings.optimizer.max_grad_norm < math.inf:
        work.append(partial(clip_by_norm, settings.optimizer.max_grad_norm))
    if settings.optimizer is not None and settings.optimizer.max_grad_value < math.inf:
        work.append(partial(clip_by_value, settings.optimizer.max_grad_value))
    return work


def average(count: float, step: StepGradients) -> None:
    """Divide the gradients by the loss scale, and for means by the number of micro-batches of all replicas."""
    divide_(step.values, step.loss_scale * count)


def divide_(sums: Iterable[Tensor], divisor: float) -> None:
    """Divide the sums in place; a divisor of 1 leaves them unchanged."""
    for values in by_device(sums) if divisor != 1 else ():
        torch._foreach_div_(values, divisor)


def by_device(values: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return lists of the values, one for each device, as torch's functions of lists take them."""
    groups: dict[torch.device, list[Tensor]] = {}
    for value in values:
        groups.setdefault(value.device, []).append(value)
    return groups.values()


def choose_loss_scale(step: StepGradients) -> None:
    """Double or halve the loss scale of the next step. If a gradient is not finite, the step updates no weight."""
    values, counts = [*step.counted.values()], []
    for value in values:
        is_large = value.abs() > _LARGE_ELEMENT / step.loss_scale
        counts.append(torch.stack([is_large.sum(), value.isfinite().sum()]).to(step.device))
    # The host waits once for an accelerator.
    large, finite = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    total = sum(value.numel() for value in values)
    seen = step.sum_over_processes(torch.tensor([total, large, total - finite]))
    elements, large, not_finite = seen.tolist()
    step.is_applied = not not_finite
    step.loss_factor = 2.0 if not not_finite and large <= _MAX_LARGE_SHARE * elements else 0.5


def find_overflow(step: StepGradients) -> None:
    """Set whether the loss scale made gradients overflow, for a warning. (Not on an accelerator: the host would
    wait.)"""
    values = (
        [value for value in step.values if value.is_cpu and value.numel()] if step.loss_scale != 1 else []
    )
    step.has_overflowed = not all(math.isfinite(bound) for value in values for bound in value.aminmax())


def clip_by_norm(bound: float, step: StepGradients) -> None:
    """Clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does."""
    groups: dict[tuple[torch.dtype, torch.device], dict[Unit, Tensor]] = {}
    for unit, value in step.counted.items():
        groups.setdefault((step.norm_types[unit], value.device), {})[unit] = value
    norms: dict[Unit, Tensor] = {}
    with IntraOpThreads(step.threads):
        for (dtype, _), members in groups.items():
            values = torch._foreach_norm([*members.values()], 2, dtype=dtype)
            norms.update((unit, norm.to(step.device)) for unit, norm in zip(members, values, strict=True))
        # Gradients that a peer counts are 0 here. (A norm of norms of parts would have other bits.)
        dtypes = {*step.norm_types.values()}
        zeros = {dtype: torch.zeros((), dtype=dtype, device=step.device) for dtype in dtypes}
        stacked = torch.stack([norms.get(unit, zeros[dtype]) for unit, dtype in step.norm_types.items()])
        total = torch.linalg.vector_norm(step.sum_over_processes(stacked))
    # torch's own epsilon. A factor of 1 changes no bits, so the host need not wait for the norm.
    factor = torch.clamp(bound / (total + 1e-6), max=1.0)
    for values in by_device(step.values):
        torch._foreach_mul_(values, factor.to(values[0].device))


def clip_by_value(bound: float, step: StepGradients) -> None:
    """Clip each element of the gradients."""
    for values in by_device(step.values):
        torch._foreach_clamp_min_(values, -bound)
        torch._foreach_clamp_max_(values, bound)


class IntraOpThreads:
    """A context that sets the number of threads per operation of the calling thread."""

    def __init__(self, count: int) -> None:
        self._count, self._before = count, count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)
