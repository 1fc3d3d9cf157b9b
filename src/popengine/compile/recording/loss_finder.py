"""Finds the losses of a model: which calls of torch's loss functions its forward makes.

At the level of tensor operations a cross entropy is a log-softmax and a gather; only the call in Python
says "this is a loss". The outermost call counts: a mode is off while it handles a call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from popengine.errors import CaptureError

from .current_capture import Capture
from .graph_recorder import Recorder

_NAMES = """
    l1_loss mse_loss smooth_l1_loss huber_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
    nll_loss cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
    gaussian_nll_loss multilabel_soft_margin_loss multilabel_margin_loss multi_margin_loss
    cosine_embedding_loss triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
"""
LOSSES = frozenset(getattr(functional, name) for name in _NAMES.split())


class LossFinder(TorchFunctionMode):
    """Marks what torch's loss functions return while it is on."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LOSSES:
            self._capture.mark_loss(result)
        return result


def final_loss(
    losses: list[tuple[Tensor, str]], chosen: tuple[Tensor, str] | None, recorder: Recorder
) -> Tensor:
    """The chosen loss, else the one marked loss that no later marked loss is computed from."""
    if chosen is not None:
        return _scalar(*chosen)
    if not losses:
        raise CaptureError(
            "Couldn't find a loss in graph!\n"
            "  why: training differentiates one loss, which forward must compute\n"
            "  fix: compute a torch.nn loss in forward, or mark your own scalar with"
            ' `poptorch.identity_loss(x, reduction="mean")`, and return it'
        )
    nodes = [recorder.node(value) for value, _ in losses]
    reached: set[fx.Node] = set()  # everything that some marked loss is computed from
    stack = [operand for node in nodes for operand in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    final = {node: loss for node, loss in zip(nodes, losses, strict=True) if node not in reached}
    if len(final) > 1:
        places = "\n".join(f"  a loss at {where}" for _, where in final.values())
        raise CaptureError(
            f"Multiple independent losses found in graph\n{places}\n"
            '  fix: join them into one final loss: `poptorch.identity_loss(a + b, reduction="none")`'
        )
    return _scalar(*next(iter(final.values())))


def _scalar(loss: Tensor, where: str) -> Tensor:
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss at {where} has shape {tuple(loss.shape)}, and training needs a scalar\n"
            '  fix: give the loss reduction="mean" or "sum", or wrap it in'
            ' `poptorch.identity_loss(x, reduction="mean")`'
        )
    return loss
