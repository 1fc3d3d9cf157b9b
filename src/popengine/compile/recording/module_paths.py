"""Module paths: while it is on, a capture knows which of the model's modules runs, so that a profile can say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from .current_capture import Capture, active


@contextlib.contextmanager
def module_paths(module: nn.Module, capture: Capture) -> Iterator[None]:
    """Keep `capture.module`, the name of the module that runs.

    Not by hooks: some modules take another way where they have hooks, and torch passes over those of a module that
    fails while it is compiling.
    """
    names = {child: name for name, child in module.named_modules()}
    own = nn.Module.__call__

    def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if active.get() is not capture:  # another thread, or code that is hidden from the capture
            return own(child, *args, **kwargs)
        around, capture.module = capture.module, names.get(child, capture.module)
        try:
            return own(child, *args, **kwargs)
        finally:
            capture.module = around

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = own
