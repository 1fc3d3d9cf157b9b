"""Register operations as `torch.ops.poptorch.*`, of three kinds.

A mark is an identity that stays in the captured graph under its name. A computed operation is opaque: the
graph doesn't hold the operations that it calls. A shorthand is transparent: the graph holds only these.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

LIBRARY = torch.library.Library("poptorch", "DEF")


def register_mark(
    schema: str,
    run: Callable[..., None] = lambda first, *settings: None,
    gradient: Callable[..., Tensor] = lambda gradient, *settings: gradient,
) -> None:
    """Register a mark: an operation whose result is its first argument.

    Args:
        schema:   "name(Tensor input, <settings>) -> Tensor"
        run:      called with the arguments each time a compiled graph runs the operation
        gradient: called with (gradient, *settings), returns the gradient of the input
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)

    operation = getattr(torch.ops.poptorch, name).default

    def identity(first: Tensor, *settings: Any) -> Tensor:
        run(first, *settings)
        return first

    def differentiable(first: Tensor, *settings: Any) -> Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:  # no capture
            return first
        return _MarkFunction.apply(operation, gradient, first, *settings)

    LIBRARY.impl(name, identity, "CompositeExplicitAutograd")
    LIBRARY.impl(name, differentiable, "Autograd")
    torch.library.register_fake(f"poptorch::{name}", _fake_like, lib=LIBRARY)


def _fake_like(first: Tensor, *settings: Any) -> Tensor:
    """Return a new fake tensor like `first`, not a view: a view with its own backward can't be written to."""
    return torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device=first.device)


class _MarkFunction(torch.autograd.Function):
    """The autograd function of a mark: the identity in forward, the registered gradient in backward."""

    @staticmethod
    def forward(ctx: Any, operation: Any, gradient: Any, first: Tensor, *settings: Any) -> Tensor:
        ctx.gradient, ctx.settings = gradient, settings
        with torch._C._AutoDispatchBelowAutograd():
            return operation(first, *settings)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return the result of the registered gradient function; the other inputs have no gradient."""
        return (None, None, ctx.gradient(*grad_outputs, *ctx.settings), *[None] * len(ctx.settings))


def register_computed(name: str, function: Callable[..., Any], pretend: Callable[..., Any]) -> None:
    """Register `function` as a computed operation, without a gradient; its annotations give the schema.

    `pretend` is the implementation for fake tensors.
    """
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poptorch::{name}", pretend, lib=LIBRARY)


def check_tensors(rule: str, *values: Any, error: type[Exception] = Error) -> None:
    """Raise `error` unless all values are tensors; the message is `rule` and the types of other values."""
    wrong = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
    if wrong:
        raise error(f"{rule}; found {', '.join(wrong)}")


def listed(outputs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Return dtypes and shapes as text; "nothing" if there are none."""
    return ", ".join(f"{dtype} {shape}" for shape, dtype in outputs) or "nothing"


def register_shorthand(schema: str, function: Callable[..., Any]) -> None:
    """Register a shorthand: a call becomes the operations that `function` calls."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
