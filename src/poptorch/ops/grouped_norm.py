"""Batch norm over the micro-batches of several replicas, by one gather in forward and one in backward."""

from typing import Any

import torch
from torch import Tensor, nn

from popengine.compile.recording.current_capture import current
from popengine.errors import Error
from popengine.operations import gather_over_replicas

from ..checks import checked

_PER_CHANNEL = (1, -1, 1, 1)  # shape of channels in [rows, channels, height, width]


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """*Pando*: Batch norm with the mean and variance of a group of neighbouring replicas.

    A group consists of replicas of one process, or of all replicas of several processes. The `state_dict()`
    is that of `nn.BatchNorm2d`, and so is the output in evaluation and outside a compiled model.

    Args:
        num_features: channels; inputs are [rows, channels, height, width]
        group_size:   number of replicas in a group; it must divide the number of replicas of all instances
        args, kwargs: other arguments of `nn.BatchNorm2d`
    """

    def __init__(self, num_features: int, group_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.group_size = checked("GroupedBatchNorm2d: group_size", group_size, int, Error, least=1)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized `input`, [rows, channels, height, width]."""
        uses_batch_statistics = self.training or self.running_mean is None
        if self.group_size == 1 or not uses_batch_statistics or current() is None:
            return super().forward(input)
        self._check_input_dim(input)
        arguments = input, self.weight, self.bias, self.eps, self.group_size
        made, mean, variance = _GroupedNormFunction.apply(*arguments)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None
            values = self.group_size * input.numel() // input.shape[1]  # of each channel
            unbiased = variance * (values / (values - 1))
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share: Any = self.momentum
                if share is None:  # the running statistics are the mean of all updates
                    share = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
                for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.mul_(1 - share).add_(share * value.to(running.dtype))
        return made

    def extra_repr(self) -> str:
        """Return the arguments, which `repr` prints."""
        return f"{super().extra_repr()}, group_size={self.group_size}"


class _GroupedNormFunction(torch.autograd.Function):
    """The autograd function of grouped batch norm: it returns (x − μ)·γ/σ + β, and the group's μ and σ².

    The gradient of x is γ/σ·(dy − mean(dy) − x̂·mean(dy·x̂)), with means over the group. The gradients of γ
    and β are those of this replica: like other gradients, they are reduced over replicas before the update.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.eps, ctx.group = eps, group
        ctx.types = [None if v is None else v.dtype for v in (x, weight, bias)]
        x, weight, bias = _widen_half(x), _widen_half(weight), _widen_half(bias)
        mine = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0))
        means, variances = gather_over_replicas(mine, group).unbind(1)
        mean = sum_as_tree(means) / group
        variance = sum_as_tree(variances + (means - mean).square()) / group
        made = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return made.to(ctx.types[0]), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        dy, statistics = _widen_half(gradients[0]), (mean, variance)
        # dx for constant statistics, and the two sums Σ dy·x̂ and Σ dy.
        dx, weights, biases = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, *statistics, *statistics, False, ctx.eps, [True, True, True]
        )
        values = ctx.group * x.numel() // x.shape[1]
        scaled, plain = sum_as_tree(gather_over_replicas(torch.stack([weights, biases]), ctx.group)).unbind(0)
        scale = torch.rsqrt(variance + ctx.eps)
        factor = scale if weight is None else scale * weight
        slope = -factor * scale * scaled / values
        offset = -factor * plain / values - slope * mean
        dx = torch.addcmul(dx + offset.view(_PER_CHANNEL), x, slope.view(_PER_CHANNEL))
        made = [dx, weights, biases]
        return *(v.to(t) if t is not None else None for v, t in zip(made, ctx.types, strict=True)), None, None


def _widen_half(value: Tensor | None) -> Any:
    """Return a float16 or bfloat16 tensor as float32; return another tensor or None unchanged."""
    return value.float() if value is not None and value.dtype in (torch.float16, torch.bfloat16) else value


def sum_as_tree(parts: Tensor) -> Tensor:
    """Return the sum over dimension 0, added as a binary tree, so that its bits are equal in every layout."""
    values = list(parts.unbind(0))
    while len(values) > 1:
        left, right = values[::2], values[1::2]
        values = [a + b for a, b in zip(left, right, strict=False)] + left[len(right) :]
    return values[0]
