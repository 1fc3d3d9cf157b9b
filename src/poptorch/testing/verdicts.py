"""How a tensor of a loop differs from plain PyTorch's, as text: equal, by rounding, by a factor, or at an element."""

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements that are compared at once: large tensors need no large copies in float64
HALF = (torch.bfloat16, torch.float16)  # coarsest first: most values of the first are values of the second

ZEROS = "zeros, plain has none"  # of an unused parameter


def rounding_bound(largest: float, dtype: torch.dtype) -> float:
    """Return the largest error that counts as rounding, among values of this dtype up to `largest`."""
    return (8 if dtype in HALF else 64) * torch.finfo(dtype).eps * largest


def is_rounding(verdict: str) -> bool:
    """Return whether a result of `describe_difference` is "equal", "none" or a rounding error."""
    return verdict in ("equal", "none") or verdict.startswith("rounding")


def rounding_of(verdicts: Iterable[str]) -> str:
    """Return "equal", "equal up to rounding" or "equal up to rounding of bfloat16", by verdicts that are rounding."""
    roundings = {verdict.partition(",")[0] for verdict in verdicts if verdict.startswith("rounding")}
    return f"equal up to {max(roundings)}" if roundings else "equal"


def describe_difference(
    actual: Tensor | None,
    plain: Tensor | None,
    scale: float = 0.0,
    allowed: Callable[[Tensor], Tensor] | None = None,
    gradient: Tensor | None = None,
    half: torch.dtype | None = None,
) -> str:
    """Return how a tensor differs from plain PyTorch's: "equal", "rounding, 2e-07", "rounding of bfloat16, 3e-03",
    "1/4 of plain", "at [0, 0]: 0.1, plain 0.2", "missing", "plain has none", "zeros, plain has none"; "none" for None.

    Args:
        scale:   magnitude that rounding errors are relative to, if no value of `plain` is larger
        allowed: the errors that count as rounding, in addition, where plain PyTorch's `gradient` has some values
        half:    the dtype that the loop computed or reduced in, if it is coarser
    """
    if actual is None:
        return "none" if plain is None else "missing"
    if plain is None:
        return "plain has none" if actual.any() else ZEROS
    if actual.shape != plain.shape:
        return f"shape {list(actual.shape)}, plain {list(plain.shape)}"
    if actual.dtype == plain.dtype and torch.equal(actual, plain):
        return "equal"
    scale = max(scale, _largest(there.abs() for _, there in _chunks(actual, plain)))
    error = _largest((here - there).abs() for here, there in _chunks(actual, plain))
    first = None
    for dtype in filter(None, (plain.dtype, half)):
        first = _first_above(rounding_bound(scale, dtype), actual, plain, allowed, gradient)
        if first is None:
            of = "" if dtype is plain.dtype else f" of {str(dtype).removeprefix('torch.')}"
            return f"rounding{of}, {error / scale if scale else error:.0e}"
    factor = factor_between(_chunks(actual, plain))
    bound = rounding_bound(scale, half or plain.dtype) * abs(factor)
    if factor and _largest((h - factor * t).abs() for h, t in _chunks(actual, plain)) <= bound:
        return format_factor(factor)
    index = [int(value) for value in torch.unravel_index(torch.tensor(first), actual.shape)]
    values = f"{float(actual[tuple(index)]):.4g}, plain {float(plain[tuple(index)]):.4g}"
    return f"at {index}: {values}" if index else values


def factor_between(pairs: Iterable[tuple[Tensor, ...]]) -> float:
    """Return the factor k for which the difference of `actual` and k * `plain` is least; pairs are (actual, plain)."""
    product = square = 0.0
    for actual, plain in pairs:
        product += float(actual.dot(plain))
        square += float(plain.dot(plain))
    return product / square if square else 0.0


def format_factor(factor: float) -> str:
    """Return a factor between gradients as text: "1/4 of plain", "12 times plain", "0.7 times plain"."""
    ratio = Fraction(factor).limit_denominator(1 << 16)
    if ratio.denominator > 1 and ratio.numerator == 1:
        return f"{ratio} of plain"
    return f"{ratio if ratio.denominator == 1 else format(factor, '.4g')} times plain"


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of tensors of one shape, in float64, some at once."""
    for parts in zip(*(tensor.detach().reshape(-1).split(_CHUNK) for tensor in tensors), strict=True):
        yield tuple(part.double() for part in parts)


def _largest(parts: Iterable[Tensor]) -> float:
    """Return the largest value; NaN, if one is NaN."""
    return float(torch.stack([part.max() for part in parts]).max())


def _first_above(
    bound: float,
    actual: Tensor,
    plain: Tensor,
    allowed: Callable[[Tensor], Tensor] | None,
    gradient: Tensor | None,
) -> int | None:
    """Return the index, in the flattened tensors, of the first error above the bound; None if there is none."""
    chunks = _chunks(actual, plain, plain if gradient is None else gradient)
    for turn, (here, there, slope) in enumerate(chunks):
        wrong = ~((here - there).abs() <= (bound + allowed(slope) if allowed else bound))
        if wrong.any():
            return turn * _CHUNK + int(wrong.nonzero()[0])
    return None
