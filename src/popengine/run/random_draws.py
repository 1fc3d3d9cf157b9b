"""Random numbers that depend on the operation in the model and on the micro-batch, not on the ipu or thread.

Each draw has a generator of its own, seeded from (seed, step, micro-batch, replica, number of the draw in the
model). So every layout of stages draws the same numbers, and recomputation draws the same numbers again. On an
accelerator the generator of a draw is seeded for a step's first micro-batch and continues with the next ones: before a
replay of a captured step, torch fills seed and offset of each generator.
"""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten
MASK = (1 << 64) - 1


def hash_integers(*numbers: int) -> int:
    """Return a 64-bit hash of several integers, by splitmix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of a random operation that has a generator as an argument, if it is another one."""
    words = func._overloadname.split("_")
    words.insert(1, "generator")  # rand.generator; randint.low_generator for randint.low
    return getattr(func.overloadpacket, "_".join(words).removeprefix("default_"), func)


def has_generator(func: Any) -> bool:
    """Return whether `draw` runs a random operation with a generator of its own."""
    arguments = _with_generator(func)._schema.arguments
    return func is aten.native_dropout.default or any(argument.name == "generator" for argument in arguments)


def new_generator(device: torch.device) -> torch.Generator:
    """Return a new generator of a device."""
    return torch.Generator(device)


_default_generator_lock = threading.Lock()  # held while torch's own generator is seeded for one operation


def draw(
    func: Any,
    key: int | Iterator[torch.Generator],
    number: int,
    *args: Any,
    on: torch.device | None = None,
    **kwargs: Any,
) -> Any:
    """Run a random operation with a generator of its own, and return its result. `key` is the hash of (seed, step,
    micro-batch, replica), `number` the index of the draw in the model; tensors are made `on` this device. On an
    accelerator, `key` yields the generators of a piece's draws."""
    if on is not None and any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = on
    of_arguments = (value.device for value in args if isinstance(value, torch.Tensor))
    device = torch.device(next(of_arguments, kwargs.get("device") or "cpu"))
    generator = (
        new_generator(device).manual_seed(hash_integers(key, number)) if isinstance(key, int) else next(key)
    )
    if func is aten.native_dropout.default:
        value, chance, train = args
        if train is False or chance == 0:
            return value.clone(), torch.ones_like(value, dtype=torch.bool)
        if device.type != "cpu" and chance < 1:  # one kernel
            made, kept = aten._fused_dropout(value, 1 - chance, generator=generator)
            return made, kept.view(torch.bool)
        kept = torch.empty_like(value).bernoulli_(1 - chance, generator=generator)
        return value * kept / (1 - chance), kept.bool()
    func = _with_generator(func)
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, generator=generator, **kwargs)
    # Of an operation without this argument, such as a fused kernel: torch's own generator gets the state.
    module = torch.random if device.type == "cpu" else torch.get_device_module(device)
    with _default_generator_lock:
        before = module.get_rng_state()
        module.set_rng_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(module.get_rng_state())
            module.set_rng_state(before)
