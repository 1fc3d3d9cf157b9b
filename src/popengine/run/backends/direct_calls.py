"""Cheaper calls: torch's operations by the functions that Python programs call, and not as overloads.

`torch.ops.aten.view.default` reaches the same kernel as `Tensor.view`, but its arguments are matched against the schema
one by one: a training step of a small transformer layer takes 1.06 (width 64) to 1.2 times (width 16) as much CPU time
with overloads. Only operations are listed whose function chooses the same overload for every argument that a graph can
hold; `test_direct_calls.py` looks at what is dispatched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FUNCTIONS = """
    _log_softmax.default _softmax.default abs.default add.Tensor addmm.default amax.default
    bitwise_and.Tensor bitwise_not.default bmm.default cat.default clone.default convolution.default
    detach.default div.Tensor embedding.default eq.Scalar eq.Tensor erf.default exp.default ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor le.Scalar le.Tensor log.default logical_and.default logical_not.default lt.Scalar
    lt.Tensor mm.default mul.Tensor native_batch_norm.default native_group_norm.default
    native_layer_norm.default ne.Scalar ne.Tensor neg.default pow.Tensor_Scalar reciprocal.default relu.default
    rsqrt.default select.int sigmoid.default sqrt.default squeeze.dim sub.Tensor sum.dim_IntList t.default
    tanh.default transpose.int unsqueeze.default where.self
"""
_METHODS = "expand.default permute.default view.default"
_LAYERS = "avg_pool2d.default gelu.default max_pool2d_with_indices.default silu.default"


def _by_name() -> dict[str, Callable[..., Any]]:
    homes: tuple[tuple[str, Any], ...] = (
        (_FUNCTIONS, torch._C._VariableFunctions),  # pyright: ignore[reportAttributeAccessIssue]
        (_METHODS, torch.Tensor),
        (_LAYERS, torch._C._nn),  # pyright: ignore[reportAttributeAccessIssue]
    )
    return {
        f"aten.{name}": getattr(home, name.partition(".")[0])
        for names, home in homes
        for name in names.split()
    }


DIRECT = _by_name()


def operation_of(name: str) -> Any:
    """`torch.ops.aten.add.Tensor` for "aten.add.Tensor"."""
    namespace, packet, overload = name.rsplit("::", 1)[-1].split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def direct(operation: Any) -> Callable[..., Any]:
    """The cheapest function that does what this overload does."""
    function = DIRECT.get(str(operation))
    return operation._op if function is None else function
