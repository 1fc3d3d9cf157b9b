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

from ..checks import checked
from ..logs import logger
from .ctc import ctc_loss
from .grouped_norm import sum_as_tree
from .library import shapes_of, shapes_text, with_gradient

_IGNORED_ATTRIBUTES = ("root_path", "debug_str")  # the path of code for IPUs, and a name
_Function = Callable[[Tensor], Tensor | None]
_warned_names: set[str] = set()  # of operations of which a warning was logged


def copy_tensor(x: Tensor) -> Tensor:
    """Return a copy of the tensor."""
    return x.clone()


def remap(x: Tensor, **layout: Any) -> Tensor:
    """Return the same values; on IPUs their layout in memory changes."""
    return torch.ops.poptorch.nop(x)


def moving_average(average: Tensor, value: Tensor, factor: Tensor | float) -> Tensor:
    """Return factor · average + (1 - factor) · value, in the dtype of `average`. No input is changed."""
    return (factor * average + (1 - factor) * value).to(average.dtype)


def popart_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int | str = "mean",
    zeroInfinity: bool = False,
    enableReducedClassesInLabel: bool = False,
    outDataType: str = "UNDEFINED",
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss as `torch.nn.functional.ctc_loss`, and its gradient of `log_probs`.

    `enableReducedClassesInLabel` has no effect. The dtype is that of the example output.
    """
    checked("Ctc: outDataType", outDataType, ("UNDEFINED", "FLOAT", "FLOAT16"), Error)
    lengths = input_lengths, target_lengths
    return ctc_loss(log_probs, targets, *lengths, blank, reduction, bool(zeroInfinity), returns_gradient=True)


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient


def autograd_proxy(value: Tensor, proxy: Tensor) -> Tensor:
    """Return a copy of `value`; its gradient becomes the gradient of `proxy`, and `value` gets none."""
    return with_gradient(proxy, lambda _: value.clone(), _unchanged)


def l1_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the L1 distance of each row of `first`, [m, k], from each row of `second`, [n, k]: [m, n]."""
    return (first.unsqueeze(1) - second.unsqueeze(0)).abs().sum(-1)


def l2_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the L2 distance of each row of `first`, [m, k], from each row of `second`, [n, k]: [m, n]."""
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
    """

    def quantise(values: Tensor) -> Tensor:
        return round_to_float_format(values, exponent_bits, mantissa_bits, rounding)

    rules: dict[str | int, _Function] = {
        "ste": _unchanged,
        "quantise": quantise,
        "stop": lambda gradient: None,
    }
    rules |= {0: _unchanged, 1: quantise}
    checked("SimulatedQuant: rounding", rounding, ("nearest", "stochastic"), Error)
    checked("SimulatedQuant: fwd", fwd, (True, False), Error)
    checked("SimulatedQuant: bwd", bwd, tuple(rules), Error)
    return with_gradient(x, quantise if fwd else torch.clone, rules[bwd])


def replicated_all_reduce(x: Tensor, op: str = "sum", backwards: bool = False, **grouping: Any) -> Tensor:
    """Return the sum of `x` over groups of neighbouring replicas, whose gradient is passed unchanged; if
    `backwards`, return `x`, whose gradient becomes the sum over the group."""
    replicas, stride, size = grouping.get("__collectiveReplicaGrouping", (0, 1, 0))
    if op.lower() not in ("sum", "add") or len(grouping) != 1 or stride != 1 or size < 1 or replicas % size:
        raise Error(
            f"ReplicatedAllReduceTP has op {op!r} and {grouping}\n"
            '  fix: op="sum", __collectiveReplicaGrouping=[replicas, stride 1, size of a group], such as [4, 1, 2]'
        )

    def sum_over_group(values: Tensor) -> Tensor:
        return sum_as_tree(gather_over_replicas(values, size))

    if backwards:
        return with_gradient(x, torch.clone, sum_over_group)
    return with_gradient(x, sum_over_group, _unchanged)


def all_gather(x: Tensor, examples: Sequence[Tensor]) -> Tensor:
    """Return the values of n neighbouring replicas, [n, *x.shape]; an example output of that shape gives n."""
    return all_to_all(x.expand(examples[0].numel() // x.numel(), *x.shape))


def all_to_all(x: Tensor) -> Tensor:
    """Return row i of the values of n neighbouring replicas on the i-th of them; `x` is [n, ...]."""

    def exchange(values: Tensor) -> Tensor:
        return gather_over_replicas(values.contiguous(), len(values), exchange=True)

    return with_gradient(x, exchange, exchange)


KNOWN: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "CopyTensor": copy_tensor,
    "RemapCE": remap,
    **dict.fromkeys(("Ctc", "CtcLoss", "CTCLoss"), popart_ctc),
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
    """Return the outputs of the operation `KNOWN[name]`, in the shapes and dtypes of the examples."""
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
