"""Random numbers that depend on what is drawn, and not on who draws it.

Each draw has a generator of its own, seeded from (seed, step, micro-batch, replica, place in the model). So
every layout of stages draws the same numbers, and recomputing a draw gives the same again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

aten = torch.ops.aten
MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 64-bit number out of several, by splitmix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


# Factories whose generator is another overload, and look-alikes, which have none.
_WITH_GENERATOR: dict[Any, Any] = {
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
}
_LIKE: dict[Any, Callable[..., Any]] = {
    aten.rand_like.default: lambda like, g: like.uniform_(generator=g),
    aten.randn_like.default: lambda like, g: like.normal_(generator=g),
    aten.randint_like.default: lambda like, high, g: like.random_(0, high, generator=g),
    aten.randint_like.low_dtype: lambda like, low, high, g: like.random_(low, high, generator=g),
}


class Source(Protocol):
    """Whoever hands out generators."""

    def generator(self, device: torch.device, key: int, place: int) -> torch.Generator:
        """One that draws the numbers of `key` and `place`."""
        ...

    def refuse(self, operation: Any) -> None:
        """Told of each operation that can't draw from a generator of its own."""
        ...


# Set where generators have to be known beforehand: in a call that is captured as a graph.
_source: ContextVar[Source | None] = ContextVar("source of generators", default=None)


@contextmanager
def drawing_from(source: Source) -> Iterator[None]:
    """All draws inside take their generators from here."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def generator(device: torch.device, key: int, place: int) -> torch.Generator:
    """The generator of one draw."""
    source = _source.get()
    if source is not None:
        return source.generator(device, key, place)
    return torch.Generator(device).manual_seed(mix(key, place))


_default = threading.Lock()  # held while torch's own generator is seeded for one operation


def draw(func: Any, key: int, place: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random operation with the numbers that belong to `key` and `place`."""
    device = torch.device(
        next(
            (value.device for value in args if isinstance(value, torch.Tensor)), kwargs.get("device") or "cpu"
        )
    )
    numbers = generator(device, key, place)
    fill = _LIKE.get(func)
    if fill is not None:
        return fill(torch.empty_like(args[0], **kwargs), *args[1:], numbers)
    if func is aten.native_dropout.default:
        value, chance, train = args
        if train is False or chance == 0:
            return value.clone(), torch.ones_like(value, dtype=torch.bool)
        kept = torch.empty_like(value).bernoulli_(1 - chance, generator=numbers)
        return value * kept / (1 - chance), kept.bool()
    func = _WITH_GENERATOR.get(func, func)
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, generator=numbers, **kwargs)
    if (source := _source.get()) is not None:
        source.refuse(func)
    return _from_default(numbers, func, *args, **kwargs)


def drawing_on(there: torch.device) -> Callable[..., Any]:
    """`draw`, where all that is drawn is to be on this device."""

    def draw_there(func: Any, key: int, place: int, *args: Any, **kwargs: Any) -> Any:
        return draw(func, key, place, *args, **kwargs_on(there, func, kwargs))

    return draw_there


def kwargs_on(there: torch.device, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation that makes tensors, so that it makes them on this device."""
    if there.type != "cpu" and any(argument.name == "device" for argument in func._schema.arguments):
        return {**kwargs, "device": there}
    return kwargs


def _from_default(numbers: torch.Generator, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Fused kernels and custom operations draw from torch's own generator, and take no other."""
    device = numbers.device
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        default = torch.cuda.default_generators[index]
    else:
        default = torch.default_generator
    with _default:
        before = default.get_state()
        default.set_state(numbers.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            default.set_state(before)
