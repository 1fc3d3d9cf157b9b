"""How an operation becomes one of `torch.ops.poptorch.*`, and so a node of its own in a captured graph.

Three kinds: a mark is the identity and stays in the graph under its name; a computed operation stays there
too, and is opaque; a shorthand is traced through, so that the graph holds what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("poptorch", "DEF")


def _nothing(first: Tensor, *settings: Any) -> None:
    """What a mark does when it runs, beyond handing its input on."""


def mark(
    schema: str,
    run: Callable[..., None] = _nothing,
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

    def identity(first: Tensor, *settings: Any) -> Tensor:
        run(first, *settings)
        return first

    def keep_settings(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[1:]

    def backward(ctx: Any, passed: Tensor) -> Any:
        result = gradient(passed, *ctx.settings)
        return (result, *[None] * len(ctx.settings)) if ctx.settings else result

    LIBRARY.impl(name, identity, "CompositeExplicitAutograd")
    qualified = f"poptorch::{name}"
    torch.library.register_fake(qualified, lambda first, *_: first.view_as(first), lib=LIBRARY)
    torch.library.register_autograd(qualified, backward, setup_context=keep_settings, lib=LIBRARY)


def computed(schema: str, function: Callable[..., Any], pretend: Callable[..., Any]) -> None:
    """Register an operation without a gradient; `pretend` returns empty tensors of its result's shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poptorch::{name}", pretend, lib=LIBRARY)


def shorthand(schema: str, function: Callable[..., Any]) -> None:
    """Register an operation that is what `function` does."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
