"""Operations that mark tensors for the compiler; outside compilation they compute what their name says."""

from torch import Tensor

from popengine.compile.recording.current_capture import current


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark a tensor as the loss that training differentiates.

    Args:
        reduction: "mean" or "sum" over all elements, or "none" for a tensor that is a scalar already
    """
    assert reduction in ("mean", "sum", "none"), (
        f"Unsupported reduction type! found {reduction!r}; identity_loss takes 'mean', 'sum' or 'none'"
    )
    loss = {"mean": x.mean, "sum": x.sum, "none": x.clone}[reduction]()
    capture = current()
    if capture is not None:
        capture.mark_loss(loss)
    return loss


def isRunningOnIpu() -> bool:
    """True while a model's forward is traced for an executor."""
    return current() is not None
