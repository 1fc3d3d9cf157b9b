"""Register operations in `torch.ops.poptorch`, of three kinds; check and describe tensors.

A mark is an identity operation that the captured graph contains under its name. A computed operation is one
node of the graph, whatever torch operations compute it. A shorthand calls a function of this package; the graph
contains the operations that the function calls.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import Capture
from popengine.errors import Error
from popengine.torch_private import BelowAutograd, number_of_dispatch_modes

REDUCTIONS = ("sum", "mean", "none")  # by the number in popart's enum
LIBRARY = torch.library.Library("poptorch", "DEF")


def register_mark(
    schema: str,
    run: Callable[..., None] = lambda first, *settings: None,
    gradient: Callable[..., Tensor] = lambda gradient, *settings: gradient,
) -> None:
    """Register a mark, an operation that returns its first argument.

    `run` is called with the arguments whenever a graph runs it; `gradient(gradient, *settings)` is its backward.
    """
    name = LIBRARY.define(schema)
    operation = getattr(torch.ops.poptorch, name).default

    def run_mark(first: Tensor, *settings: Any) -> Tensor:
        run(first, *settings)
        return first

    def record_mark(first: Tensor, *settings: Any) -> Tensor:
        if number_of_dispatch_modes() == 0:  # no capture
            return first
        return with_gradient(first, lambda x: operation(x, *settings), lambda dy: gradient(dy, *settings))

    def fake_mark(first: Tensor, *settings: Any) -> Tensor:
        # Not a view: its backward would forbid writes into it.
        return torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device=first.device)

    LIBRARY.impl(name, run_mark, "CompositeExplicitAutograd")
    LIBRARY.impl(name, record_mark, "Autograd")
    torch.library.register_fake(f"poptorch::{name}", fake_mark, lib=LIBRARY)


class _GradientRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Any, compute_gradient: Any) -> Any:
        ctx.compute_gradient = compute_gradient
        with BelowAutograd():
            return compute(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.compute_gradient(gradient), None, None


# Called with (x, compute, compute_gradient): `compute(x)`, where `compute_gradient` computes the gradient of `x`.
with_gradient: Any = _GradientRule.apply


def register_computed(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operation that `function`, whose annotations give the schema, or `fake` computes."""
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poptorch::{name}", fake, lib=LIBRARY)


def register_shorthand(schema: str, function: Callable[..., Any]) -> None:
    """Register an operation that calls `function`."""
    LIBRARY.impl(LIBRARY.define(schema), function, "CompositeImplicitAutograd")


def check_tensors(rule: str, *values: Any, error: type[Exception] = Error) -> None:
    """Raise `error` if a value is not a tensor; its message is `rule` and the types of such values."""
    wrong = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
    if wrong:
        raise error(f"{rule}; found {', '.join(wrong)}")


def raise_in_training(capture: Capture, name: str, fix: str) -> None:
    if capture.training:
        raise Error(f"{name} is only supported in inference.\n  why: it has no gradient\n  fix: {fix}")


def shapes_and_dtypes_of(values: Iterable[Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(value.shape), value.dtype) for value in values)


def shapes_text(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in shapes) or "nothing"
