"""Notes: values that forward passes to the host beside its outputs.

A forward is captured once, so Python side effects (logging a value, appending it to a list) are not in the
graph. `note` adds a value as an output: each call returns it for every micro-batch, in any output mode.
"""

from typing import Any

from popengine.compile.recording.current_capture import current

__all__ = ["note"]


def note(what: Any, value: Any) -> None:
    """Add `value` to the notes that each call returns. In plain PyTorch this does nothing.

    >>> poptorch.notes.note("accuracy", accuracy)  # in forward
    >>> executor.notes                             # after a call of n micro-batches
    [("accuracy", tensor of shape [n])]

    Args:
        what:  the note's key
        value: a tensor, or tensors in containers; a constant in it is returned unchanged
    """
    if (capture := current()) is not None:
        capture.notes.append((what, value))
