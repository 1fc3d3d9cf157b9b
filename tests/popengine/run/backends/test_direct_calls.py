"""Cheaper calls dispatch to the very overload that the graph names, and so compute the same bits."""

from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from popengine.run.backends.eager import DIRECT

torch.manual_seed(0)
X, Y = torch.randn(3, 4), torch.randn(3, 4)
A, V = torch.randn(4, 4), torch.randn(4)
B = torch.randn(2, 4, 4)
IMAGE, KERNEL, MASK = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 3, 3), torch.rand(3, 4) > 0.5
VERSATILE = {
    "add.Tensor": [(X, Y), (X, 2.5), (X, 1), (X, torch.tensor(2.0)), (X.long(), 1.5), (X, Y, {"alpha": 2})],
    "sub.Tensor": [(X, Y), (X, 2.5), (X, Y, {"alpha": 0.5})],
    "sum.dim_IntList": [
        (X, [0]),
        (X, [0, 1], True),
        (X, None),
        (X, [], False),
        (X, [1], {"dtype": torch.double}),
    ],
    "clone.default": [(X,), (X.t(), {"memory_format": torch.contiguous_format})],
    "cat.default": [([X, Y],), ([X, Y], 1), ([X, Y], -1)],
    "select.int": [(X, 0, 1), (X, -1, -2)],
    "native_batch_norm.default": [(IMAGE, V, V, V, V.abs(), flag, 0.1, 1e-5) for flag in (True, False)]
    + [(IMAGE, None, None, None, None, True, 0.1, 1e-5)],
    "convolution.default": [
        (IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (IMAGE, KERNEL, torch.randn(2), [2, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ],
    "embedding.default": [
        (A, torch.tensor([0, 3])),
        (A, torch.tensor([0, 3]), 1),
        (A, torch.tensor([3]), -1, True),
    ],
    "max_pool2d_with_indices.default": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True)],
    "avg_pool2d.default": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1], False, False)],
    "expand.default": [(V, [3, 4]), (V, [3, -1]), (torch.tensor(1.0), [2, 2])],
    "permute.default": [(B, [2, 0, 1]), (B, [-1, 0, 1])],
    "view.default": [(X, [12]), (X, [2, -1]), (torch.randn(1), [])],
    "addmm.default": [(V, X, A), (torch.randn(3, 4), X, A, {"beta": 0.5, "alpha": 2})],
    "gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "native_layer_norm.default": [(X, [4], V, V, 1e-5), (X, [4], None, None, 1e-5)],
    "native_group_norm.default": [(IMAGE, V, V, 2, 4, 36, 2, 1e-5), (IMAGE, None, None, 2, 4, 36, 2, 1e-5)],
    "amax.default": [(X,), (X, [1], True)],
    "squeeze.dim": [(X.unsqueeze(1), 1)],
    "unsqueeze.default": [(X, -1)],
    "transpose.int": [(B, 1, 2)],
    "_softmax.default": [(X, -1, False)],
    "_log_softmax.default": [(X, 1, False)],
    "where.self": [(MASK, X, Y), (MASK, torch.tensor(1.0), X)],
    "bmm.default": [(B, B)],
    "mm.default": [(X, A)],
    "t.default": [(X,), (V,)],
    "bitwise_and.Tensor": [(MASK, ~MASK)],
    "bitwise_not.default": [(MASK,)],
    "logical_and.default": [(MASK, X)],
}
NUMBERS = {"Scalar": [(X, 0), (X, 0.5), (X.long(), 1)], "Tensor_Scalar": [(X, 2), (X, 2.0), (X.abs(), 0.5)]}
TENSORS = [(X, Y), (X, torch.tensor(0.5)), (X, 2.0), (X, 2)]
COMPARISONS = ("eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor")


def calls_of(name):
    """Ways in which graphs call an operation."""
    if name in VERSATILE:
        return VERSATILE[name]
    if name in COMPARISONS:
        return TENSORS[:2]
    overload = name.partition(".")[2]
    return NUMBERS.get(overload) or (TENSORS if overload == "Tensor" else [(X,)])


class Dispatched(TorchDispatchMode):
    """The overloads that are called, with their arguments as text."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), str(args), str(kwargs)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_call_dispatches_what_the_overload_dispatches(name):
    _, packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    for call in calls_of(f"{packet}.{overload}"):
        named = call[-1] if isinstance(call[-1], dict) else {}
        given = call[:-1] if named else call
        again = deepcopy(given)  # some change an argument
        with torch.inference_mode():
            with Dispatched() as seen:
                results = DIRECT[name](*given, **named)
            with Dispatched() as expected:
                wanted = operation(*again, **named)
            assert seen.calls == expected.calls
            for result, value in zip(leaves(results), leaves(wanted), strict=True):
                assert result.dtype == value.dtype
                assert result.stride() == value.stride()
                assert torch.equal(result, value) or bool(value.isnan().any())


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)
