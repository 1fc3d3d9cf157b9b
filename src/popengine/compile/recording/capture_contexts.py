"""The contexts in which a forward is captured: Ctrl-C held back, torch's modes taken off, the running module known.

Ctrl-C is held back because an exception that comes where C++ calls a mode's Python ends the process, and one that comes
while a mode is left keeps the mode on: all that torch computes later would be recorded.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from .current_capture import Capture, active
from .graph_recorder import user_line

logger = logging.getLogger("poptorch::python")


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
                _pop_mode(getattr(mode, "_mode_key", None))  # torch's own modes have a place each


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


# What `traced` replaces is one for the process: threads that compile take turns.
_CAPTURING = threading.RLock()
_TORCH = str(Path(torch.__file__).parent)


def _is_asked_by_torch(reported: set[str]) -> bool:
    """Return whether a layer of torch's calls `is_compiling`, in a thread that captures; log each layer once.

    Torch's layers must branch on no data. For the model's code nothing compiles it: so it takes the branches of plain
    PyTorch.
    """
    code = sys._getframe(2).f_code
    if active.get() is None or not code.co_filename.startswith(_TORCH):
        return False
    where = f"{code.co_name} in {Path(code.co_filename).name}, called at {user_line()},"
    if where not in reported and code.co_name != "_call_impl":  # which calls hooks of modules that fail
        logger.info("%s takes its branch for compilers: its results may differ from plain PyTorch's", where)
    reported.add(where)
    return True


def without_torch_compile(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch.compile's modules and functions run as they are written."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # unless it is loaded nothing is compiled by it
    if dynamo is None:
        return contextlib.nullcontext()
    modules = module.modules()
    if any(isinstance(m, dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in modules):
        logger.warning("torch.compile is left out of the compiled model, which runs as it is written")
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def traced(training: bool, device: str) -> Iterator[None]:
    """Run the body as a capture's: torch's layers branch on no data, autograd is in one thread and quiet.

    For an accelerator without oneDNN and with attention as products and a softmax: a recurrent layer and attention are
    else one operation each that only CPUs have.
    """
    with _CAPTURING, contextlib.ExitStack() as contexts:
        is_compiling, collects, reported = torch.compiler.is_compiling, gc.isenabled(), set[str]()
        if device != "cpu":
            contexts.enter_context(torch.backends.mkldnn.flags(enabled=False))
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
        contexts.enter_context(
            torch.autograd.set_detect_anomaly(False)
        )  # it looks for NaN: there are no values
        contexts.enter_context(torch.set_grad_enabled(training))
        torch.compiler.is_compiling = lambda: is_compiling() or _is_asked_by_torch(reported)
        gc.disable()  # what it finalizes (executors that write their weights back) would be recorded
        try:
            yield
        finally:
            torch.compiler.is_compiling = is_compiling
            if collects:
                gc.enable()
