"""The contexts in which a forward is captured: Ctrl-C held back, torch's modes taken off, the running module known.

An exception that comes where C++ calls a mode's Python ends the process, and one that comes while a mode is left keeps
the mode on: all that torch computes later would be recorded.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .current_capture import Capture, active


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back while the body runs, and have its handler called afterwards."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # handlers run in the main thread
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


@contextlib.contextmanager
def modes_left() -> Iterator[None]:
    """Take off, in the end, torch's modes that the body has left on."""
    functions, modes = torch._C._len_torch_function_stack(), _get_current_dispatch_mode_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        for mode in _get_current_dispatch_mode_stack():
            if not any(mode is before for before in modes):
                key = getattr(mode, "_mode_key", None)  # torch's own modes have a place each
                if key is None:
                    torch._C._pop_torch_dispatch_stack(None)
                else:
                    torch._C._unset_dispatch_mode(key)


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
