"""The contexts of a capture: they delay Ctrl-C, remove modes that were left on, and set torch's global state.

Ctrl-C is delayed because an exception that is raised where C++ calls a mode's Python ends the process; one
raised while a mode exits leaves the mode on, which would record all later operations.
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

from .current_capture import active
from .graph_recorder import TORCH, user_line

logger = logging.getLogger("poptorch::python")


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay SIGINT while the body runs, and then call its handler. In other threads, only run the body."""
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
def modes_restored() -> Iterator[None]:
    """Remove the torch modes that the body has left on, after the body has run."""
    functions, modes = torch._C._len_torch_function_stack(), _get_current_dispatch_mode_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        for mode in _get_current_dispatch_mode_stack():
            if not any(mode is before for before in modes):
                _pop_mode(getattr(mode, "_mode_key", None))  # torch keeps its own modes by key


# `tracing_settings` sets state of the whole process: threads that capture take turns.
_CAPTURING = threading.RLock()


@contextlib.contextmanager
def tracing_settings(module: nn.Module, training: bool, device: str) -> Iterator[None]:
    """Set torch's global state while the body runs. Only one thread at a time can be in this context.

    Torch's layers don't branch on data, gradients are on in training only, autograd has one thread, and anomaly
    detection and garbage collection are off. Functions of torch.compile run uncompiled; a warning says so if
    `module` has any. For an accelerator, oneDNN is off and attention is recorded as products and a softmax:
    otherwise recurrent layers and attention would be operations that only CPUs have.
    """
    with _CAPTURING, contextlib.ExitStack() as contexts:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None:  # unless it is loaded, nothing is compiled
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
            modules = module.modules()
            if any(
                isinstance(m, dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in modules
            ):
                logger.warning("torch.compile is left out of the compiled model, which runs as it is written")
        if device != "cpu":
            mkldnn = torch.backends.mkldnn  # whose `flags` would also set TF32, and warn
            contexts.callback(mkldnn.set_flags, *mkldnn.set_flags(False)[:1])
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Anomaly detection looks for NaN, and fake tensors have no values.
        contexts.enter_context(torch.autograd.set_detect_anomaly(False))
        contexts.enter_context(torch.set_grad_enabled(training))
        is_compiling, reported = torch.compiler.is_compiling, set[str]()
        contexts.callback(setattr, torch.compiler, "is_compiling", is_compiling)
        torch.compiler.is_compiling = lambda: is_compiling() or _is_called_by_torch_layer(reported)
        if gc.isenabled():
            contexts.callback(gc.enable)
        gc.disable()  # finalizers (of executors that write their weights back) would be recorded
        yield


def _is_called_by_torch_layer(reported: set[str]) -> bool:
    """Return whether a torch layer calls `torch.compiler.is_compiling` in a thread that captures.

    For torch's layers the result is True, so that they don't branch on data. For the model's own code it is
    False, so that it takes the branches of plain PyTorch. Each layer is logged once, and added to `reported`.
    """
    code = sys._getframe(2).f_code
    if active.get() is None or not code.co_filename.startswith(TORCH):
        return False
    where = f"{code.co_name} in {Path(code.co_filename).name}, called at {user_line()},"
    if where not in reported and code.co_name != "_call_impl":  # which calls hooks of modules that fail
        logger.info("%s takes its branch for compilers: its results may differ from plain PyTorch's", where)
    reported.add(where)
    return True
