"""Notes: extra outputs of a forward for the host, beside its return value.

A forward is captured once, so a side effect in Python (logging a value, appending it to a list) can't be a part of the
graph. `note` adds the value as an output: each call then returns it for every micro-batch, in any output mode.

    >>> note("accuracy", accuracy)         # in forward, while it is captured; elsewhere it does nothing
    >>> executor.notes                     # after a call of n micro-batches
    [("accuracy", tensor of shape [n])]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current, is_traced, paused
from popengine.compile.recording.leftovers import left_behind
from popengine.errors import CaptureError
from popengine.run.call import Results
from popengine.settings import Anchor, Counts

from ..logs import logger
from ..nested_values import constants_of, tensors_of, with_tensors


def note(what: Any, value: Any) -> None:
    """Add `value` to the outputs of each call. Outside a capture this does nothing.

    Args:
        what:  the note's key; it must pickle, since it becomes a part of the compiled model
        value: a tensor, or tensors in containers; values that forward does not compute are returned unchanged
    """
    capture = current()
    if capture is not None:
        capture.notes.append((what, value))


@dataclass(frozen=True)
class Note:
    """A note of a compiled model: its key, and the outputs of the graph that hold its tensors."""

    what: Any
    template: Any  # the value, with an empty "meta" tensor in place of each tensor of a call
    anchors: tuple[Anchor, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of one micro-batch

    def value(self, results: Results, counts: Counts) -> Any:
        """Return the note's value, each of its tensors as [iterations · accumulation · replicas, *shape]."""
        n = counts.iterations * counts.accumulation * counts.replicas
        columns = iter(
            results.anchored(anchor).reshape(n, *shape).to(dtype)
            for anchor, (shape, dtype) in zip(self.anchors, self.shapes, strict=True)
        )
        return filled(self.template, columns)


def without_values(value: Any, where: str) -> tuple[Any, list[Tensor]]:
    """Return a nested value with empty "meta" tensors in place of traced tensors, and the traced tensors.

    Args:
        where: the source line of the function that returned the value
    Raises:
        CaptureError: a traced tensor is in an object that is no container, so that no call could fill it
    """
    capture = current()
    for part, path, is_named in constants_of(value, "output"):
        _check_constant(part, path, is_named, where)
    tensors = [capture.recorder.adopted(t) if capture is not None else t for t in tensors_of(value)]
    with paused():
        marks = [torch.empty(0, device="meta") if is_traced(t) else t.detach() for t in tensors]
    return with_tensors(value, iter(marks)), [tensor for tensor in tensors if is_traced(tensor)]


def _check_constant(part: Any, path: str, is_named: bool, where: str) -> None:
    """Raise CaptureError if an object that is no container holds traced tensors.

    A program may never read an object in a named field, such as the cache of a language model. There the
    tensors are replaced by "meta" tensors, which torch refuses to read, and a warning is logged.
    """
    found = left_behind(part, path)
    if not found:
        return
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    what = f"{path}, a {kind}, holds tensors: {', '.join(leftover.path for leftover in found[:3])}"
    fix = (
        "return tensors in tuples, lists, dictionaries or dataclasses, or make the type known with"
        " poptorch.registerCustomArgParser"
    )
    if not is_named or not hasattr(part, "__dict__"):
        raise CaptureError(
            f"what forward returns can't be filled with a call's values: {what}\n"
            f"  returned by the function at {where}\n"
            "  why: only containers can be filled with each call's values; elsewhere a tensor would have none\n"
            f"  fix: {fix}"
        )
    logger.warning("%s; they have no values outside of the compiled model\n  fix: %s", what, fix)
    with paused():
        for leftover in found:
            leftover.put(torch.empty(leftover.value.shape, dtype=leftover.value.dtype, device="meta"))


def filled(template: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a template with the next of `tensors` in place of each "meta" tensor."""
    return with_tensors(template, (next(tensors) if t.is_meta else t for t in tensors_of(template)))


def notes_of(captured: Sequence[tuple[Any, Any]], outputs: list[Tensor], where: str) -> tuple[Note, ...]:
    """Return the notes of a capture, and append their tensors to `outputs`, which the graph returns."""
    notes = []
    for what, value in captured:
        template, tensors = without_values(value, where)
        places = range(len(outputs), len(outputs) + len(tensors))
        anchors = tuple(Anchor("output", str(place), "all") for place in places)
        notes.append(Note(what, template, anchors, tuple((tuple(t.shape), t.dtype) for t in tensors)))
        outputs += tensors
    return tuple(notes)
