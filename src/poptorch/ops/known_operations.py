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

from ..logs import logger
from .ctc import ctc_loss
from .library import shapes_of, shapes_text

_IGNORED_ATTRIBUTES = ("root_path", "grain_size")  # the path of code for IPUs, and its layout there
_warned_names: set[str] = set()  # of operations of which a warning was logged


def copy_tensor(x: Tensor) -> Tensor:
    """Return a copy of the tensor."""
    return x.clone()


def remap(x: Tensor) -> Tensor:
    """Return the same values; on IPUs their layout in memory changes."""
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


KNOWN: dict[str, Callable[..., Tensor]] = {
    "CopyTensor": copy_tensor,
    "RemapCE": remap,
    **dict.fromkeys(("Ctc", "CtcLoss", "CTCLoss"), ctc_loss),
    "ExpMovAvg": moving_average,
    "AutogradProxy": autograd_proxy,
    "L1Distance": l1_distance,
    "L2Distance": l2_distance,
    "SimulatedQuant": simulated_quant,
}


def compute_known_operation(
    name: str, inputs: Sequence[Tensor], attributes: dict[str, Any], examples: Sequence[Tensor]
) -> list[Tensor]:
    """Return the output of the operation `KNOWN[name]`, in a list. The first call for a name logs a warning.

    Args:
        examples: a list of one tensor: the output is converted to its shape and dtype
    Raises:
        Error: inputs or attributes don't fit the operation, or the output has another size than the example
    """
    function = KNOWN[name]
    signature = inspect.signature(function)
    given = {key: value for key, value in attributes.items() if key not in _IGNORED_ATTRIBUTES}
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
    if [made.numel()] != [example.numel() for example in examples]:
        found, wanted = shapes_text(shapes_of([made])), shapes_text(shapes_of(examples))
        raise Error(
            f"the custom operation {name} makes {found}; the program's example_outputs are {wanted}\n"
            f"  fix: an example of that shape, or poptorch.registerCustomOp({name!r}, domain, version, forward)"
        )
    return [made.reshape(examples[0].shape).to(examples[0].dtype)]
