"""One run of an optimizer's own `step()`: on the gradients of a step, with the rates of the call, in float32.

Parameters in half precision are float32 while `step()` runs, and so are their states; new weights are rounded once, at
the end. So torch's optimizers are the reference for all bits but those of half precision.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError
from ..settings import Hyper
from ..torch_private import STEP_HOOKS, STEP_HOOKS_OF_ALL
from .elsewhere import version_of
from .train_state import has_same_bits

logger = logging.getLogger("poptorch::python")
_warned = weakref.WeakSet[Any]()  # optimizers of which `warn_of_a_step` has warned
_HALF = (torch.float16, torch.bfloat16)
# Optimizers that only read gradients, except with Nesterov's momentum.
_READERS = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD)


def run_optimizer_step(
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    hyper: Hyper,
    state_types: Mapping[str, torch.dtype],
    seeds: Mapping[str, int],
) -> None:
    """Run `optimizer.step()` once. Attributes `grad` stay the program's.

    Args:
        parameters: the optimizer's, by canonical name
        gradients: of the parameters that are updated, by name; all other parameters have none in `step()`
        state_types: of states that are kept in half precision, by the state's name
        seeds: of the stochastic rounding of weights in half precision, by name; without: to the nearest
    Raises: RunError, if `step()` failed and has written nothing; its own error, if it may have
    """
    updated = {name: parameters[name] for name in gradients}
    groups, kept_grads = optimizer.param_groups, [parameter.grad for parameter in parameters.values()]
    kept_rates = [dict(group) for group in groups]
    is_narrow = bool(state_types) or any(value.dtype in _HALF for value in updated.values())
    step = library_step_of(optimizer)
    may_write = step is None or not isinstance(optimizer, _READERS) or any(g.get("nesterov") for g in groups)
    unfused = list[Any]()
    # Outside of inference mode, as in a plain loop: else new states and weights could not be written there.
    with torch.inference_mode(False), torch.set_grad_enabled(step is None):
        try:
            for group, rates in zip(groups, hyper.groups, strict=True):
                group.update(rates)
            with _InFloat32(optimizer, updated, state_types, seeds) if is_narrow else nullcontext():
                for name, parameter in parameters.items():
                    gradient = gradients.get(name)
                    if gradient is not None and gradient.dtype != parameter.dtype:
                        gradient = gradient.to(parameter.dtype)
                    if gradient is not None and gradient.stride() != parameter.stride():
                        # As autograd leaves it: fused steps read parameter and gradient in the order of their memory.
                        gradient = torch.empty_like(parameter).copy_(gradient)
                    if gradient is not None and may_write:
                        gradient = _as_normal_tensor(gradient)
                    parameter.grad = gradient
                unfused = [
                    group for group in groups if group.get("fused") and not _is_in_order(optimizer, group)
                ]
                for group in unfused:
                    group["fused"] = False
                if step is not None:
                    step(optimizer)
                else:
                    _run_users_step(optimizer, updated)
        finally:
            for parameter, gradient in zip(parameters.values(), kept_grads, strict=True):
                parameter.grad = gradient
            for group in unfused:
                group["fused"] = True
            _restore_rates(groups, kept_rates, hyper)


def _is_in_order(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a group lie without gaps, and their gradients and states in the same order: as
    torch's fused kernels read them, without a check. A parameter that is a view of the user's memory may not."""
    for parameter in group["params"]:
        states = (state for state in optimizer.state.get(parameter, {}).values() if isinstance(state, Tensor))
        values = [parameter, parameter.grad, *(state for state in states if state.shape == parameter.shape)]
        if parameter.grad is None or all(value.is_contiguous() for value in values):
            continue
        dense = torch.empty_like(parameter, device="meta").stride()
        if any(value.stride() != dense for value in values):
            return False
    return True


def _restore_rates(groups: Any, before: Sequence[Mapping[str, Any]], hyper: Hyper) -> None:
    """Set the groups' rates back to the program's, after a step with the rates of a call. A rate that `step()` has
    changed keeps its new value, also in `hyper`."""
    for group, kept, rates in zip(groups, before, hyper.groups, strict=True):
        for name, rate in rates.items():
            if group.get(name) is not rate and name in group:
                rates[name] = group[name]
            elif name in kept and kept[name] is not rate:
                group[name] = kept[name]


@cache
def _library_step_of(cls: type) -> Callable[[Any], Any] | None:
    """Return the `step` of a class, without torch's wrappers for profilers and hooks, if only code of torch and
    poptorch runs in it; else None."""
    step: Any = inspect.unwrap(cls.step)  # pyright: ignore[reportAttributeAccessIssue]
    functions = (step, getattr(cls, "_init_group", step))
    modules = [str(getattr(function, "__module__", None)).partition(".")[0] for function in functions]
    return step if {*modules} <= {"torch", "poptorch"} else None


def library_step_of(optimizer: Any) -> Callable[[Any], Any] | None:
    """Return the function that runs an optimizer's step, to be called without gradients, if only code of torch and
    poptorch runs in it. None: the user's code runs."""
    step, instance_step = _library_step_of(type(optimizer)), vars(optimizer).get("step")
    if callable(instance_step) and inspect.unwrap(instance_step) is not step:  # a scheduler only wraps it
        return None
    shelves = (*(getattr(optimizer, name, None) for name in STEP_HOOKS), *STEP_HOOKS_OF_ALL)
    is_hooked = any(hook is not warn_of_a_step for hooks in shelves if hooks for hook in hooks.values())
    return None if is_hooked else step


def warn_of_a_step(optimizer: Any, *_: Any) -> None:
    """A hook of an executor's optimizer: warn, once, of a `step()` of the program's, which finds no gradients."""
    if optimizer not in _warned and all(p.grad is None for g in optimizer.param_groups for p in g["params"]):
        _warned.add(optimizer)
        logger.warning(
            "%s.step() did nothing: each call of the executor has updated the weights\n  fix: leave step() out;"
            " clip_grad_norm_ does nothing either: set optimizer.max_grad_norm",
            type(optimizer).__name__,
        )


def _run_users_step(optimizer: Any, updated: Mapping[str, Tensor]) -> None:
    """Run a step with code of the user's. If it fails before it has written, raise RunError: nothing is lost."""
    # A write to `parameter.data` leaves no other trace than the bits.
    weights = [parameter.detach() for parameter in updated.values()]
    before, marks = [weight.clone() for weight in weights], _state_versions(optimizer)
    try:
        # Some programs keep a number under this name.
        optimizer.step() if callable(optimizer.step) else type(optimizer).step(optimizer)
    except Exception as error:
        if not all(map(has_same_bits, before, weights)) or marks != _state_versions(optimizer):
            raise
        raise RunError(
            f"the optimizer's step() failed: {type(error).__name__}: {error}\n"
            "  the weights are those after the last finished update; the executor can be called again"
        ) from error


def _state_versions(optimizer: Any) -> list[tuple[int, int]]:
    """Return (id, version) of each value in the optimizer's state: a write, or another value, changes them."""
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    values = [value for state in states for value in state.values()]
    return [(id(value), version_of(value) if isinstance(value, Tensor) else 0) for value in values]


def _as_normal_tensor(value: Tensor) -> Tensor:
    """Return a tensor with the memory of `value` that code outside of inference mode can write to."""
    if not value.is_inference():
        return value
    layout = value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(*layout)


class _InFloat32:
    """A context in which parameters in half precision, and their states, are float32. At its end the parameters are
    rounded, and states that have types; if the body fails, the parameters have their values from before."""

    def __init__(
        self,
        optimizer: Any,
        updated: Mapping[str, Tensor],
        types: Mapping[str, torch.dtype],
        seeds: Mapping[str, int],
    ) -> None:
        self._optimizer, self._updated, self._types, self._seeds = optimizer, updated, types, seeds
        self._memories = {name: value.detach() for name, value in updated.items() if value.dtype in _HALF}

    def _states(self) -> list[dict[str, Any]]:
        """Return the optimizer states, by name, of each parameter in half precision; with `types` of all parameters."""
        changed = self._updated if self._types else self._memories
        return [self._optimizer.state.get(self._updated[name], {}) for name in changed]

    def __enter__(self) -> None:
        for name, memory in self._memories.items():
            self._updated[name].data = memory.float()
        for state in self._states():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in _HALF:
                    state[name] = value.float()

    def __exit__(self, error: Any, *_: object) -> None:
        for name, memory in self._memories.items():
            if error is None:
                round_into(memory, self._updated[name].detach(), self._seeds.get(name))
            self._updated[name].data = memory
        for state in self._states() if error is None else ():
            for name in self._types.keys() & state.keys():
                if state[name].dtype == torch.float32:
                    state[name] = state[name].to(self._types[name])


def round_into(target: Tensor, source: Tensor, seed: int | None) -> Tensor:
    """Copy `source` into `target`, and return it. With a seed, round half types stochastically: add noise, floor."""
    if seed is None or target.dtype not in _HALF:
        return target.copy_(source)
    generator = torch.Generator(source.device).manual_seed(seed)
    narrow, wide = torch.finfo(target.dtype), torch.finfo(torch.float32)
    source = source.float()
    # The power of two at or below |source|: a float32 with its mantissa cleared.
    power = (source.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    # The distance of neighbouring numbers in the target's dtype; constant below its smallest normal number.
    spacing = power.clamp(min=narrow.smallest_normal) * narrow.eps
    # Noise has exactly the bits that rounding drops, so that adding it is exact.
    dropped, like = int(narrow.eps / wide.eps), {"dtype": torch.float32, "device": source.device}
    noise = torch.randint(dropped, source.shape, generator=generator, **like).div_(dropped)
    rounded = torch.floor(source / spacing + noise) * spacing
    return target.copy_(torch.where(torch.isfinite(source), rounded, source))
