"""Finds the losses of a model: which calls of torch's loss functions its forward makes.

At the level of tensor operations a cross entropy is a log-softmax and a gather; only the call in Python
says "this is a loss". The outermost call counts: a mode is off while it handles a call.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NAMES = """
    l1_loss mse_loss smooth_l1_loss huber_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
    nll_loss cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
    gaussian_nll_loss multilabel_soft_margin_loss multilabel_margin_loss multi_margin_loss
    cosine_embedding_loss triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
"""
LOSSES = frozenset(getattr(functional, name) for name in _NAMES.split())


class Marks(Protocol):
    def mark_loss(self, value: Tensor) -> None: ...


class LossFinder(TorchFunctionMode):
    """Marks what torch's loss functions return while it is on."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LOSSES:
            self._marks.mark_loss(result)
        return result
