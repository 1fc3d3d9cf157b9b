"""What a training will need on this machine, from one micro-batch in plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .logs import say
from .sampling import Layout

LONG = 0.5  # seconds: where one row takes as long, it stands for all rows


@dataclass(frozen=True)
class Cost:
    """Of one micro-batch, forward and backward: seconds, and bytes kept in between."""

    seconds: float
    kept: int


def measured(model: nn.Module, rows: tuple[Tensor, ...]) -> Cost:
    """Run the model on one micro-batch, or on one row of it where that takes long. Leaves no trace.

    On one thread, as micro-batches run here: others run beside it.

    Args: model: returns its loss first
    """
    with torch.random.fork_rng(), _one_thread():
        one, count = tuple(field[:1] for field in rows), len(rows[0])
        cost = _timed(model, one)
        if cost.seconds < 10 * LONG:
            cost = _timed(model, one)  # the first time is slower
        if cost.seconds > LONG:
            return Cost(cost.seconds * count, cost.kept * count)
        return _timed(model, rows)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _timed(model: nn.Module, rows: tuple[Tensor, ...]) -> Cost:
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.data_ptr()] = value.nbytes
        return value

    started = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model(*rows)[0].backward()
    seconds = time.perf_counter() - started
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    model.zero_grad(set_to_none=True)
    return Cost(seconds, sum(size for pointer, size in kept.items() if pointer not in weights))


def announce(
    model: nn.Module, cost: Cost, layout: Layout, stages: int, state_bytes: int, gradient_bytes: int
) -> None:
    """Say how many samples a call reads, and about how much memory and time it takes on this machine.

    Args:
        stages: so many micro-batches are under way at once, at most
        state_bytes, gradient_bytes: of the optimizer's state and of a gradient, for each weight
    """
    weights = list({id(p): p for p in model.parameters()}.values())
    count = sum(p.numel() for p in weights)
    size = sum(p.nbytes for p in weights)
    under_way = min(max(stages, torch.get_num_threads()), layout.accumulation * layout.local)
    # Updates go on in a spare set of weights and state, so that a call that fails leaves them as they were.
    memory = 2 * (size + count * state_bytes) + count * gradient_bytes * layout.local + cost.kept * under_way
    micro_batches = layout.iterations * layout.accumulation * layout.local
    at_once = min(torch.get_num_threads(), layout.accumulation * layout.local)
    say(
        f"A step reads {layout.call:,} samples: {layout.iterations} weight updates of {layout.global_batch:,}"
    )
    say(
        f"This instance: {count / 1e6:.1f} M weights, about {memory / 2**30:.1f} GiB of memory, and about "
        f"{duration(cost.seconds * micro_batches / at_once)} a step ({cost.seconds:.2g} s a micro-batch on one core)"
    )


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} seconds"
