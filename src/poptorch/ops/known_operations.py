"""Implementations in torch of custom operations that public programs load from compiled libraries.

The graph contains the torch operations that an implementation calls: autograd differentiates them, the engine
draws their random numbers, and executables contain them. `custom_op` prefers an implementation that the user
has registered under the same name (`registerCustomOp`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.operations import gather_over_replicas

from ..logs import logger
from .ctc import ctc_loss_and_gradient
from .grouped_norm import sum_as_tree
from .library import shapes_of, shapes_text

_IGNORED_ATTRIBUTES = ("root_path", "debug_str")  # the path of code for IPUs, and a name
_warned_names: set[str] = set()  # of operations of which a warning was logged


def copy_tensor(x: Tensor) -> Tensor:
    """Return a copy of the tensor."""
    return x.clone()


def remap(x: Tensor, **layout: Any) -> Tensor:
    """Return the same values; on IPUs their layout in memory changes.

    Args: layout: grain sizes, clones and the like, of no effect here
    """
    return torch.ops.poptorch.nop(x)


def moving_average(average: Tensor, value: Tensor, factor: Tensor | float) -> Tensor:
    """Return factor · average + (1 - factor) · value, in the dtype of `average`. No input is changed."""
    return (factor * average + (1 - factor) * value).to(average.dtype)


class _AutogradProxy(torch.autograd.Function):
    """The autograd function of `autograd_proxy`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, proxy: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient


def autograd_proxy(value: Tensor, proxy: Tensor) -> Tensor:
    """Return a copy of `value`; its gradient becomes the gradient of `proxy`, and `value` gets none."""
    return _AutogradProxy.apply(value, proxy)  # type: ignore[return-value]


def l1_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the L1 distance of each row of `first`, [m, k], from each row of `second`, [n, k]: [m, n]."""
    return (first.unsqueeze(1) - second.unsqueeze(0)).abs().sum(-1)


def l2_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the L2 distance of each row of `first`, [m, k], from each row of `second`, [n, k]: [m, n].

    The gradient of the distance of equal rows is zero.
    """
    return torch.linalg.vector_norm(first.unsqueeze(1) - second.unsqueeze(0), dim=-1)


def round_to_float_format(x: Tensor, exponent_bits: int, mantissa_bits: int, rounding: str) -> Tensor:
    """Return the values rounded to a smaller float format and clamped to its range; their dtype stays.

    With e exponent and m mantissa bits the largest value is 2^(2^(e-1)-1) · (2 - 2^-m), the smallest normal
    value 2^(1-2^(e-1)); there are subnormals, and no infinity. `rounding` is "nearest" (ties to even) or
    "stochastic" (expected error zero).
    """
    bias = 2 ** (exponent_bits - 1)
    largest = 2.0 ** (bias - 1) * (2 - 2.0**-mantissa_bits)
    values = x.float().clamp(-largest, largest)
    exponent = torch.frexp(values).exponent.sub(1).clamp(min=1 - bias) - mantissa_bits  # of the last bit
    steps = torch.ldexp(values, -exponent)
    steps = (steps + torch.rand_like(steps)).floor() if rounding == "stochastic" else steps.round()
    return torch.ldexp(steps, exponent).to(x.dtype)


class _QuantisedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fwd: bool, bwd: str, *how: Any) -> Tensor:
        ctx.bwd, ctx.how = bwd, how
        return round_to_float_format(x, *how) if fwd else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = {"ste": lambda: gradient, "quantise": lambda: round_to_float_format(gradient, *ctx.how)}
        return (made.get(ctx.bwd, lambda: None)(), *[None] * 5)


def simulated_quant(
    x: Tensor,
    exponent_bits: int,
    mantissa_bits: int,
    rounding: str = "stochastic",
    fwd: bool = True,
    bwd: str | int = "ste",
) -> Tensor:
    """Return a copy, rounded by `round_to_float_format` if `fwd`.

    Args: bwd: the gradient passes unchanged ("ste" or 0), rounded ("quantise" or 1), or not at all ("stop")
    Raises: Error, for another value of `rounding`, `fwd` or `bwd`
    """
    known = {
        "rounding": ("nearest", "stochastic"),
        "fwd": (True, False),
        "bwd": ("ste", "quantise", "stop", 0, 1),
    }
    for name, value in (("rounding", rounding), ("fwd", fwd), ("bwd", bwd)):
        if value not in known[name]:
            raise Error(
                f"SimulatedQuant has {name} {value!r}\n  fix: one of {', '.join(map(repr, known[name]))}"
            )
    kind = bwd if isinstance(bwd, str) else ("ste", "quantise")[bwd]
    return _QuantisedFunction.apply(x, fwd, kind, exponent_bits, mantissa_bits, rounding)  # type: ignore[return-value]


class _AllReduceFunction(torch.autograd.Function):
    """A sum over a group of replicas in forward, or else (`backwards`) of the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, backwards: bool) -> Tensor:
        ctx.size, ctx.sums_gradients = size, backwards
        return x.clone() if backwards else sum_as_tree(gather_over_replicas(x, size))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.sums_gradients:
            gradient = sum_as_tree(gather_over_replicas(gradient, ctx.size))
        return gradient, None, None


class _ExchangeFunction(torch.autograd.Function):
    """Row j of the result is this replica's row of replica j's value; the backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_over_replicas(x, len(x), exchange=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_over_replicas(gradient.contiguous(), len(gradient), exchange=True)


def replicated_all_reduce(x: Tensor, op: str = "sum", backwards: bool = False, **grouping: Any) -> Tensor:
    """Return the sum of `x` over groups of neighbouring replicas, whose gradient is passed unchanged; if
    `backwards`, return `x`, whose gradient becomes the sum over the group."""
    replicas, stride, size = grouping.get("__collectiveReplicaGrouping", (0, 1, 0))
    if op.lower() not in ("sum", "add") or len(grouping) != 1 or stride != 1 or size < 1 or replicas % size:
        raise Error(
            f"ReplicatedAllReduceTP has op {op!r} and {grouping}\n"
            '  fix: op="sum", __collectiveReplicaGrouping=[replicas, stride 1, size of a group], such as [4, 1, 2]'
        )
    return _AllReduceFunction.apply(x, size, backwards)  # type: ignore[return-value]


def all_gather(x: Tensor, examples: Sequence[Tensor]) -> Tensor:
    """Return the values of n neighbouring replicas, [n, *x.shape]; an example output of that shape gives n."""
    return all_to_all(x.expand(examples[0].numel() // x.numel(), *x.shape))


def all_to_all(x: Tensor) -> Tensor:
    """Return row i of the values of n neighbouring replicas on the i-th of them; `x` is [n, ...]."""
    return _ExchangeFunction.apply(x)  # type: ignore[return-value]


KNOWN: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "CopyTensor": copy_tensor,
    "RemapCE": remap,
    **dict.fromkeys(("Ctc", "CtcLoss", "CTCLoss"), ctc_loss_and_gradient),
    "ExpMovAvg": moving_average,
    "AutogradProxy": autograd_proxy,
    "L1Distance": l1_distance,
    "L2Distance": l2_distance,
    "SimulatedQuant": simulated_quant,
    "ReplicatedAllReduceTP": replicated_all_reduce,
    "AllGather": all_gather,
    "AllToAll": all_to_all,
}


def compute_known_operation(
    name: str, inputs: Sequence[Tensor], attributes: dict[str, Any], examples: Sequence[Tensor]
) -> list[Tensor]:
    """Return the outputs of the operation `KNOWN[name]`. The first call for a name logs a warning.

    Args:
        examples: the outputs are converted to the shapes and dtypes of these tensors; more outputs are left out
    Raises:
        Error: inputs or attributes don't fit the operation, or the output has another size than the example
    """
    function = KNOWN[name]
    signature = inspect.signature(function)
    given = {key: value for key, value in attributes.items() if key not in _IGNORED_ATTRIBUTES}
    if "examples" in signature.parameters:
        given["examples"] = examples
    try:
        signature.bind(*inputs, **given)
    except TypeError as error:
        raise Error(
            f"the custom operation {name} is called with {len(inputs)} inputs and the attributes {sorted(given)}\n"
            f"  why: the one that is known here takes {signature}: {error}\n"
            f"  fix: poptorch.registerCustomOp({name!r}, domain, version, forward) says what yours computes"
        ) from None
    if name not in _warned_names:
        _warned_names.add(name)
        summary = (inspect.getdoc(function) or "").split("\n")[0]
        logger.warning("the custom operation %s is computed by poptorch's own: %s", name, summary)
    made = function(*inputs, **given)
    made = [made] if isinstance(made, Tensor) else [*made[: len(examples)]]
    if [value.numel() for value in made] != [example.numel() for example in examples]:
        found, wanted = shapes_text(shapes_of(made)), shapes_text(shapes_of(examples))
        raise Error(
            f"the custom operation {name} makes {found}; the program's example_outputs are {wanted}\n"
            f"  fix: an example of that shape, or poptorch.registerCustomOp({name!r}, domain, version, forward)"
        )
    return [v.reshape(example.shape).to(example.dtype) for v, example in zip(made, examples, strict=True)]
