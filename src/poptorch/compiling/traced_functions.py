"""Replacements, during capture, for torch functions that read the values of tensors.

Some functions read values only to check them, or to choose how to compute: their replacements give the same
result without reading. Functions that can't be replaced raise an error with a fix.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from popengine.compile.recording.current_capture import current, is_traced, recording_paused
from popengine.compile.recording.user_code import user_line
from popengine.errors import CaptureError
from popengine.torch_private import (
    PACK_SEQUENCE,
    UNPACK_SEQUENCE,
    BatchNorm,
    DisableTorchFunction,
    detect_is_causal_mask,
    value_checks_off,
)

from ..ops.ctc import ctc_loss


@contextlib.contextmanager
def replace_untraceable_functions() -> Iterator[None]:
    """In the body of a `with`, replace torch functions that can't be traced (`_REPLACEMENTS`), checks of
    torch.distributions, the reading of masks in nn.Transformer, and the momentum None of BatchNorm."""
    cls: Any = BatchNorm
    forward = cls.forward
    cls.forward = lambda norm, input: _forward_of_batch_norm(forward, norm, input)
    try:
        with value_checks_off(_is_causal_mask), _ReplacementMode():
            yield
    finally:
        cls.forward = forward


class _ReplacementMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = func.__hash__ is not None and func in _REPLACEMENTS
        return (_REPLACEMENTS[func] if is_known else func)(*args, **(kwargs or {}))


def _forward_of_batch_norm(forward: Callable[..., Tensor], norm: BatchNorm, x: Tensor) -> Tensor:
    """Return `forward(norm, x)`. With momentum=None, running statistics are means over all micro-batches."""
    statistics: Any = norm.running_mean, norm.running_var
    count: Any = norm.num_batches_tracked
    if norm.momentum is not None or not norm.training or count is None:
        return forward(norm, x)
    before = [value.clone() for value in statistics]
    norm.momentum = 1  # the statistics of the micro-batch alone
    try:
        result = forward(norm, x)
    finally:
        norm.momentum = None
    for value, old in zip(statistics, before, strict=True):
        value.copy_(torch.lerp(old.double(), value.double(), 1 / count.double()))
    return result


def _mark_as_loss(loss: Tensor) -> Tensor:
    """Mark a tensor, in the running capture, as the result of a loss function, and return it."""
    capture = current()
    assert capture is not None
    capture.mark_loss(loss)
    return loss


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Return torch's gaussian_nll_loss, without its check that no variance is negative."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    clamped = var.clone()
    with torch.no_grad():
        clamped.clamp_(min=eps)
    loss = 0.5 * (torch.log(clamped) + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _mark_as_loss({"mean": loss.mean, "sum": loss.sum, "none": loss.clone}[reduction]())


def _format_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> str:
    """Return a tensor's repr. A traced tensor has no values: then the text has size and dtype."""
    if not is_traced(tensor.data):
        with DisableTorchFunction():
            return Tensor.__repr__(tensor)
    prefix = "Parameter containing: tensor" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return f"{prefix}(<unavailable>, size={tuple(tensor.shape)}, dtype={tensor.dtype})"


def _value_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor with values: `tensor`, or what was computed from constants alone; else None."""
    capture = current()
    if capture is not None and is_traced(tensor.data):
        return capture.recorder.value_of(tensor)
    if capture is not None:
        capture.recorder.values_read.append(tensor)
    return tensor


def _of_known_value(read: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the method `read`: of a tensor without known values it calls `without`."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (value := _value_of(tensor)) is None:
            return without(tensor, *args, **kwargs)
        with DisableTorchFunction(), recording_paused():
            return read(value, *args, **kwargs)

    return call


def _refuse_numpy(*args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"{user_line()}: the forward takes a tensor's values to numpy, and it has none while the model is compiled\n"
        "  fix: compute with torch, such as torch.tanh; in inference poptorch.CPU(function, name) runs it on the host"
    )


def _pack_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the steps of padded sequences, one after another, and the number of sequences in each."""
    if (value := _value_of(lengths)) is None:
        raise CaptureError(
            f"{user_line()}: a sequence is packed by lengths that are only known in a call\n"
            "  why: the sizes of packed sequences depend on them, and a compiled model has fixed shapes\n"
            "  fix: compute on the padded sequences, with a mask; or use lengths that are constants of the model"
        )
    with recording_paused():
        mask = torch.arange(int(value.max()))[:, None] < value
        sizes, (steps, sequences) = mask.sum(1), mask.nonzero().unbind(1)
    return (input[sequences, steps] if batch_first else input[steps, sequences]), sizes


def _unpack_sequence(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return padded sequences and their lengths, of what `_pack_sequence` returns; `total`: steps, if positive."""
    with recording_paused():
        mask = torch.arange(int(sizes[0])) < sizes[:, None]
        lengths, places = mask.sum(0), mask.nonzero().unbind(1)
    steps = max(total, len(sizes))
    padded = data.new_full((steps, int(sizes[0]), *data.shape[1:]), padding).index_put(places, data)
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return the bincount of `input`, if it is traced with exactly `minlength` elements, since a graph needs
    fixed shapes. Then a larger value raises an error in a call."""
    if minlength < 1 or not is_traced(input):
        return torch.bincount(input, weights, minlength)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.long)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype).scatter_add(0, input.long(), weights)


def _with_sparse_constant(product: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return a matrix product. The first factor may be a sparse constant: each of its values multiplies a row."""
    if kwargs or args[0].layout is torch.strided or is_traced(args[0]) or not is_traced(args[1]):
        return product(*args, **kwargs)
    first, second = args
    with DisableTorchFunction(), recording_paused():
        constant = first.detach().to_sparse_coo().coalesce()
        (rows, columns), values = constant.indices(), constant.values()
    terms = values.reshape(-1, *[1] * (second.dim() - 1)) * second[columns]
    return terms.new_zeros(first.shape[0], *second.shape[1:]).index_add(0, rows, terms)


def _is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether a mask is causal, as torch computes it; False for a traced mask with unknown values."""
    if is_causal is None and mask is not None and is_traced(mask):
        capture = current()
        if capture is None or capture.recorder.value_of(mask) is None:
            return False
    return detect_is_causal_mask(mask, is_causal, size)


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"{user_line()}: backward() can't be called inside a forward\n"
        "  why: the executor differentiates the model's loss by itself\n"
        "  fix: return the loss from forward, and leave backward() out"
    )


_PRODUCTS: Any = torch.sparse.mm, torch.spmm, torch.mm, torch.matmul
_PRODUCTS += Tensor.mm, Tensor.matmul, Tensor.__matmul__
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    functional.ctc_loss: lambda *args, **kwargs: _mark_as_loss(ctc_loss(*args, **kwargs)),
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    Tensor.__repr__: _format_tensor,
    Tensor.__format__: _of_known_value(Tensor.__format__, _format_tensor),
    Tensor.numpy: _of_known_value(Tensor.numpy, _refuse_numpy),
    Tensor.__array__: _of_known_value(Tensor.__array__, _refuse_numpy),
    Tensor.tolist: _of_known_value(Tensor.tolist, Tensor.tolist),  # explains why it has no values
    Tensor.backward: _refuse_backward,
    PACK_SEQUENCE: _pack_sequence,
    UNPACK_SEQUENCE: _unpack_sequence,
    Tensor.bincount: _bincount,
    torch.bincount: _bincount,
    **{product: partial(_with_sparse_constant, product) for product in _PRODUCTS},
}
