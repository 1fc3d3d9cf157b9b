"""Attention on a GPU, in place of the kernel that only CPUs have: forward and backward, without dropout.

Captured on the CPU, `scaled_dot_product_attention` is one operation forward and one backward. Both choose here
between the GPU's fused kernels as torch itself would, from the same tensors, and so choose the same. Where none
fits (float64, odd widths, an old GPU), it is two matrix products and a softmax.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
Kernel = Literal["flash", "efficient", "math"]
_ALIGNED = 8  # elements: the widths of heads for the flash kernel, the step between rows of a bias


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,  # always 0: the CPU's kernel has no dropout
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As aten._scaled_dot_product_flash_attention_for_cpu.

    Returns: the output, laid out in memory as `query` is, and row sums that only `backward` understands
    """
    like = query
    query, key, value = _operands(query, key, value)
    bias = _bias(attn_mask, query, key)
    kernel = choose(query, key, value, bias, is_causal)
    if kernel == "flash":
        output, sums, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )
    elif kernel == "efficient":
        output, sums, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal, scale=scale
        )
    else:
        scores = _scores(query, key, bias, is_causal, scale)
        sums = scores.logsumexp(-1)
        output = (torch._safe_softmax(scores, -1) @ value.to(scores.dtype)).to(query.dtype)
    wanted = torch.empty_like(like)
    return (output if output.stride() == wanted.stride() else aten.copy.default(wanted, output)), sums


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As aten._scaled_dot_product_flash_attention_for_cpu_backward: the gradients of query, key and value."""
    heads = key.size(1)
    query, key, value = _operands(query, key, value)
    bias = _bias(attn_mask, query, key)
    grad_out, out = _by_position(grad_out), _by_position(out)
    given, options = (grad_out, query, key, value), {"scale": scale}
    kernel = choose(query, key, value, bias, is_causal)
    if kernel == "flash":
        undrawn = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        lengths = None, None, query.size(2), key.size(2)
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *given, out, logsumexp, *lengths, 0.0, is_causal, *undrawn, **options
        )
    elif kernel == "efficient":
        undrawn = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        wanted = [True, True, True, False]  # none of the bias
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            *given, bias, out, logsumexp, *undrawn, 0.0, wanted, is_causal, **options
        )
    else:
        gradients = _differentiated(*given, out, _scores(query, key, bias, is_causal, scale), scale)
    by_query, by_key, by_value = gradients[:3]
    return (
        _by_position(by_query),
        _by_position(_summed_over_groups(by_key, heads)),
        _by_position(_summed_over_groups(by_value, heads)),
    )


def choose(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool) -> Kernel:
    """The fastest kernel that torch allows for such tensors on their device."""
    given = torch.backends.cuda.SDPAParams(query, key, value, bias, 0.0, is_causal, False)
    if query.size(-1) % _ALIGNED == 0 and torch.backends.cuda.can_use_flash_attention(given):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(given) else "math"


# ---- what the kernels want to be given -------------------------------------------------------------------


def _operands(query: Tensor, *others: Tensor) -> list[Tensor]:
    """All with dense rows, and keys and values for each head of the query, where several heads share one."""
    groups = query.size(1) // others[0].size(1)
    wide = [each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in others]
    return [each if each.stride(-1) == 1 else _contiguous(each) for each in (query, *wide)]


def _summed_over_groups(gradient: Tensor, heads: int) -> Tensor:
    return gradient if gradient.size(1) == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _by_position(value: Tensor) -> Tensor:
    """[batch, heads, positions, width], laid out as [batch, positions, heads, width]."""
    return _contiguous(value.transpose(1, 2)).transpose(1, 2)


def _contiguous(value: Tensor) -> Tensor:
    # `Tensor.contiguous` asks for a driver first, and tests have fake tensors in place of a GPU's.
    return value if value.is_contiguous() else value.clone(memory_format=torch.contiguous_format)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as numbers to add to the scores [batch, heads, queries, keys], its rows aligned in memory."""
    if mask is None:
        return None
    shape, length = (*query.shape[:3], key.size(2)), key.size(2)
    mask = mask.to(query.dtype).expand(*mask.shape[:-1], length)
    *steps, last = mask.expand(shape).stride()
    if last != 1 or any(step % _ALIGNED for step in steps):
        mask = functional.pad(_contiguous(mask), (0, -length % _ALIGNED)).narrow(-1, 0, length)
    return mask.expand(shape)


# ---- without a fused kernel ------------------------------------------------------------------------------


def _scale(query: Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """What the softmax is taken of, in float32 or more: -inf where a query may not look."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * _scale(query, scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _differentiated(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scores: Tensor,
    scale: float | None,
) -> list[Tensor]:
    grad, weights = grad_out.to(scores.dtype), torch._safe_softmax(scores, -1)
    by_weights = grad @ value.to(scores.dtype).transpose(-2, -1)
    by_scores = weights * (by_weights - (grad * out).sum(-1, keepdim=True)) * _scale(query, scale)
    found = (
        by_scores @ key.to(scores.dtype),
        by_scores.transpose(-2, -1) @ query.to(scores.dtype),
        weights.transpose(-2, -1) @ grad,
    )
    return [gradient.to(query.dtype) for gradient in found]
