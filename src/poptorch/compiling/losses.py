"""Which scalar training differentiates: the loss that forward returns, or those that it marks.

forward returns                      trained
------------------------------------ ---------------------------------------------------------------------
anything, with `options.loss(name)`  the output with that name or index
anything, after `identity_loss`      PopTorch's rule: the one marked loss from which no other one is computed
an object with a field or key "loss" that field
a loss function's result, once       that result
a scalar, alone or first in a tuple  that scalar, if computed from all losses; if alone, from at most one
one scalar computed from the loss    that scalar

In all other cases, and with `options.loss(marked=True)`, PopTorch's rule is applied to the results of
`identity_loss` and torch's loss functions. A result of a loss function is a metric, and no loss, if no output has a
gradient with respect to it, unless forward returns no scalar that can be trained.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from popengine.compile.recording.current_capture import Capture, is_traced
from popengine.compile.recording.graph_recorder import sources_of
from popengine.errors import CaptureError
from poptorch.logs import logger
from poptorch.nested_values import loss_field, tensors_of
from poptorch.options import Options


def choose_loss(returned: Any, capture: Capture, options: Options) -> None:
    """Set the capture's loss by forward's return value, unless it has one, or PopTorch's rule applies."""
    if capture.chosen is not None or (options.exists("loss_is_marked") and options("loss_is_marked")):
        return
    capture.candidates = _losses_without_metrics(returned, capture)
    origin = f"the return of forward, {capture.forward_line}"
    if options.exists("loss_output"):
        chosen = _named_output(returned, options("loss_output"), capture.forward_line)
    elif capture.marked:
        return
    elif isinstance(field := loss_field(returned), Tensor) and is_traced(field):
        chosen, origin = field, f'the output "loss" of forward, {capture.forward_line}'
    else:
        chosen = _find_output_to_train(returned, capture)
    if chosen is not None:
        capture.choose_loss(chosen, origin)


def _losses_without_metrics(returned: Any, capture: Capture) -> list[tuple[Tensor, str]]:
    """Return the recorded losses without metrics; all of them, if all are metrics and forward returns no scalar that
    can be trained."""
    outputs = [value for value in tensors_of(returned) if value.requires_grad]
    functions: set[Any] = {value.grad_fn for value in outputs} - {None}
    stack = list(functions)
    while stack:
        new = {before for before, _ in stack.pop().next_functions} - functions - {None}
        functions |= new
        stack += new
    marked = set(map(id, capture.marked))
    losses = [loss for loss in capture.losses if loss[0].grad_fn in functions or id(loss[0]) in marked]
    return losses if losses or any(map(_is_loss_candidate, outputs)) else capture.losses


def _find_output_to_train(returned: Any, capture: Capture) -> Tensor | None:
    """Return the output of forward to train; None if an output is itself a loss, or no rule finds a scalar:

    1. the first output of a tuple, if it is a scalar computed from all losses
    2. the only output, if it is a scalar computed from all losses, and there is at most one loss
    3. with exactly one loss: the only scalar among the outputs that is computed from that loss

    With exactly one loss, log a warning if another scalar could be meant, since the trained one isn't computed from it.

    Raises: CaptureError, if several scalars are computed from the only loss
    """
    recorder, final = capture.recorder, capture.final_losses()
    scalars = {recorder.node_of(v): v for v in tensors_of(returned) if _is_loss_candidate(v)}
    # Of a returned loss, PopTorch's rule applies, which refuses several.
    is_returned = any(node in final for node in scalars)
    is_tuple = isinstance(returned, tuple | list)
    first = next(iter(returned), None) if is_tuple else returned
    may_be_first = not is_returned and (is_tuple or len(final) < 2)
    if may_be_first and isinstance(first, Tensor) and _is_loss_candidate(first):
        sources = sources_of([recorder.node_of(first)])
        if all(node in sources for node in final):
            return first
    if len(final) != 1:
        return None
    ((loss, (_, where)),) = final.items()
    derived = [] if is_returned else [node for node in scalars if loss in sources_of([node])]
    if len(derived) > 1:
        raise CaptureError(
            f"forward returns {len(derived)} scalars that are computed from the loss, but not the loss\n"
            f"  at {capture.forward_line}\n"
            "  why: one scalar is trained, and it is not clear which one\n"
            "  fix: name it: trainingModel(model, options, optimizer, loss=<its key or place>); or mark it with"
            ' poptorch.identity_loss(x, reduction="none")'
        )
    terms = sources_of(derived or [loss])
    if ignored := [node for node in scalars if node not in terms]:
        what = f"the scalar of {ignored[0].meta['where']}, which is"
        if loss in sources_of(ignored[:1]):
            what = "a scalar computed from it, whose other terms are"
        logger.warning(
            "forward returns the loss of %s, which is trained, and %s not trained\n"
            "  fix: name the scalar to train: trainingModel(model, options, optimizer, loss=<its key or place>); or"
            ' return it as "loss", or without the other one',
            where,
            what,
        )
    return scalars[derived[0]] if derived else None


def _is_loss_candidate(value: Tensor) -> bool:
    return is_traced(value) and value.is_floating_point() and value.dim() == 0 and value.requires_grad


def _named_output(returned: Any, name: str | int, where: str) -> Tensor:
    """Return forward's output with this key, attribute or index; a path with dots names a nested output."""
    value = returned
    for part in str(name).split("."):
        try:
            if isinstance(value, Mapping):
                value = value[part]
            elif part.lstrip("-").isdigit() and isinstance(value, tuple | list):
                value = value[int(part)]
            else:
                value = getattr(value, part)
        except (KeyError, IndexError, AttributeError):
            value = None
            break
    if not isinstance(value, Tensor) or not is_traced(value) or not value.is_floating_point():
        items = dict(enumerate(returned)) if isinstance(returned, tuple | list) else returned
        items = items if isinstance(items, Mapping) else {}
        losses = [key for key, item in items.items() if isinstance(item, Tensor) and _is_loss_candidate(item)]
        size = f" of {len(items)}" if items else ""
        fix = " or ".join(f"loss={key!r}" for key in losses)
        raise CaptureError(
            f"the loss is to be the output {name!r} of forward, and that is"
            f" {'no output' if value is None else f'no computed floating point tensor: {type(value).__name__}'}\n"
            f"  at {where}, which returns a {type(returned).__name__}{size}\n"
            f"  fix: {fix or 'a key or an attribute of what forward returns, or a place; nested ones with dots'}"
        )
    return value
