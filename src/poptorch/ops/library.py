"""How an operation becomes one of `torch.ops.poptorch.*`, and so a node of its own in a captured graph.

Three kinds: a mark is the identity and stays in the graph under its name; a computed operation stays there
too, and is opaque; a shorthand is traced through, so that the graph holds what it calls.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("poptorch", "DEF")


def mark(
    schema: str,
    run: Callable[..., None] = lambda first, *settings: None,
    gradient: Callable[..., Tensor] = lambda gradient, *settings: gradient,
) -> None:
    """Register an operation whose result is its first argument.

    Args:
        schema:   "name(Tensor input, <settings>) -> Tensor"
        run:      called with the arguments each time the operation computes
        gradient: from (gradient, *settings) to the gradient of the input
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)

    operation = getattr(torch.ops.poptorch, name).default

    def identity(first: Tensor, *settings: Any) -> Tensor:
        run(first, *settings)
        return first

    def differentiable(first: Tensor, *settings: Any) -> Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:  # nobody records: on the host it is no operation at all
            return first
        return _MarkFunction.apply(operation, gradient, first, *settings)

    LIBRARY.impl(name, identity, "CompositeExplicitAutograd")
    LIBRARY.impl(name, differentiable, "Autograd")
    torch.library.register_fake(f"poptorch::{name}", _fresh, lib=LIBRARY)


def _fresh(first: Tensor, *settings: Any) -> Tensor:
    """Not a view, which could not be changed in place while it has a gradient of its own."""
    return torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device=first.device)


class _MarkFunction(torch.autograd.Function):
    """A mark in forward; in backward, what its definition says."""

    @staticmethod
    def forward(ctx: Any, operation: Any, gradient: Any, first: Tensor, *settings: Any) -> Tensor:
        ctx.gradient, ctx.settings = gradient, settings
        with torch._C._AutoDispatchBelowAutograd():
            return operation(first, *settings)

    @staticmethod
    def backward(ctx: Any, passed: Tensor) -> Any:
        return (None, None, ctx.gradient(passed, *ctx.settings), *[None] * len(ctx.settings))


def computed(schema: str, function: Callable[..., Any], pretend: Callable[..., Any]) -> None:
    """Register an operation without a gradient; `pretend` returns empty tensors of its result's shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poptorch::{name}", pretend, lib=LIBRARY)


def listed(outputs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Shapes and types of tensors, in words."""
    return ", ".join(f"{dtype} {shape}" for shape, dtype in outputs) or "nothing"


def shorthand(schema: str, function: Callable[..., Any]) -> None:
    """Register an operation that is what `function` does."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
