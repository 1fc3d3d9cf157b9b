"""The device of an engine's tensors (the CPU, or one accelerator), and the alignment of tensors in memory.

One thread starts all work of an accelerator, on the default stream, after the work that the caller has started on his
own. The host waits only in `synchronize`, and where it reads a value.

MKL and oneDNN choose kernels by the alignment of their inputs, so the bits of a result depend on it. All tensors that
pieces receive begin at a multiple of 64 bytes, as torch's own allocations do.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import Error, UnrecoverableError
from ..settings import DeviceKind
from ..torch_private import ALIGNMENT, is_aligned, spanned_elements

CPU = torch.device("cpu")
_LARGEST_OF_PART = 16_000_000  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


def check_available(kind: DeviceKind, processes: int = 1) -> None:
    """Raise Error if this machine has no device of this kind, or if several processes train on accelerators."""
    if kind == "cpu":
        return
    if processes > 1:
        raise Error(
            f'the device is "{kind}", and {processes} processes train together\n'
            "  why: gradients are summed over processes in the host's memory only\n"
            '  fix: one process; or the CPU: options.device("cpu"), POPTORCH_DEVICE=cpu'
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        seen = "no accelerator" if accelerator is None else f"one of kind {accelerator.type!r}"
        raise Error(
            f'the device is "{kind}", but torch {torch.__version__} finds {seen}\n'
            "  fix: run where there is one, with a build of torch and a driver for it (pytorch.org); or choose the"
            ' CPU: options.device("cpu"), POPTORCH_DEVICE=cpu'
        )


@functools.cache
def keep_freed_memory(is_part: bool) -> None:
    """Make glibc keep up to 2 GB of freed memory, unless an environment variable sets its limits: the kernel clears
    each page that the next micro-batch allocates again, a tenth of a step of ResNet-18. Where a process has a
    part of a replica, for its memory, large blocks are given back: after a small block was allocated in one, it can't
    hold the next gradient."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "gnu_get_libc_version") and not any(name in os.environ for name in names):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_OF_PART if is_part else 2**31 - 1)


def device_of(kind: DeviceKind) -> torch.device:
    """Return the device that holds all ipus: the CPU, or the current accelerator, which is of this kind."""
    return CPU if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def device_named(name: str) -> torch.device:
    """Return the device of a name of `Settings.devices`."""
    return torch.device(name)


def accelerator_count() -> int:
    """Return the number of accelerators of this machine that torch finds."""
    return torch.accelerator.device_count()


def core_count(kind: str) -> int:
    """Return the number of cores that tasks may use: torch's number of threads; 1 for an accelerator."""
    return torch.get_num_threads() if kind == "cpu" else 1


def as_current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which an accelerator is this thread's current device; for the CPU an empty one."""
    return torch.accelerator.device_index(device.index) if has_queue(device) else nullcontext()


def in_pinned_memory(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor in pinned memory, from which a copy to an accelerator is faster; the tensor
    itself if `device` is the CPU, or if the tensor is empty, pinned, or not on the CPU."""
    if device.type == "cpu" or not value.is_cpu or value.is_pinned() or not value.numel():
        return value
    return value.pin_memory()


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Return a value on a device, without a wait of the host: from the CPU it goes through pinned memory."""
    return in_pinned_memory(value, device).to(device, non_blocking=True)


def has_queue(device: torch.device) -> bool:
    """Return whether operations on a device are done only some time after their functions return."""
    return device.type not in ("cpu", "meta")


def download(value: Tensor) -> Tensor:
    """Return a copy of an accelerator's tensor in the host's memory, which has its values after `synchronize`."""
    return value.to(CPU, non_blocking=True)


def new_graph(device: torch.device) -> Any:
    """Return an empty graph of an accelerator's work (torch.cuda.CUDAGraph); None if torch has none for this kind."""
    module = torch.get_device_module(device)
    graph_class: Any = getattr(module, "CUDAGraph", None) or getattr(module, "XPUGraph", None)
    return graph_class() if hasattr(graph_class, "register_generator_state") else None


# torch's allocators support one capture of a process at a time.
_capture_lock = threading.Lock()


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """Return the stream for captures of an accelerator. (Those of `torch.cuda.graph` are all on the first one's.)"""
    return new_stream(device)


def capture(graph: Any, pool: Any, device: torch.device, work: Callable[[], Any]) -> None:
    """Record what `work` starts on an accelerator as the work of a graph, without running it. The graph's memory is in
    the `pool` of another graph, if it is not None: they never run at the same time. Raises what `work` raises, and
    RuntimeError for work that no graph can hold; then this thread's stream and torch's generator are as before."""
    options = {} if pool is None else {"pool": pool}
    if device.type == "cuda":
        options["capture_error_mode"] = "thread_local"
    before = current_stream(device)
    with _capture_lock:
        synchronize(device)
        set_stream(_capture_stream(device))
        try:
            graph.capture_begin(**options)
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    _end_capture(graph, device)
                raise
            _end_capture(graph, device)
        finally:
            set_stream(before)


def _end_capture(graph: Any, device: torch.device) -> None:
    """End a capture. If it failed, torch's own random generator is still in it, until another one has succeeded."""
    try:
        graph.capture_end()
    except RuntimeError:
        spare = new_graph(device)
        spare.capture_begin()
        torch.empty(1, device=device).zero_()
        spare.capture_end()
        raise


def new_stream(device: torch.device) -> Any:
    """Return a new stream of an accelerator: work of different streams is not in order."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which this thread starts work of an accelerator."""
    return torch.accelerator.current_stream(device)


def record_stream(value: Tensor, stream: Any) -> None:
    """Delay the reuse of a value's memory, once freed, until `stream`, which has not allocated it, has used it."""
    value.record_stream(stream)


def set_stream(stream: Any) -> None:
    """Set the stream on which this thread starts work of the stream's accelerator."""
    torch.accelerator.set_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until all work that was started on the device is done. Raises UnrecoverableError if it failed."""
    if not has_queue(device):
        return
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise UnrecoverableError(
            f"the device {device} failed while it ran this call: {error}\n"
            "  why: kernels run after they were started, so the line that is at fault is not known; an index out of"
            " range does this, such as a class label\n"
            "  fix: POPTORCH_DEVICE=cpu runs the same program on the CPU and names the line. The device can't be"
            " used again in this process, and the weights and the optimizer's state, which are on it, are lost: start"
            " again from a checkpoint"
        ) from error


def keep_for_ever(value: Any) -> None:
    """Never free an object that a failed device may have used, because torch ends the process if it frees pinned memory
    then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


Layout = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset, as `as_strided` takes them


def memory_and_layout(value: Tensor) -> tuple[Tensor, Layout]:
    """Return the memory that a value spans, as it lies, and the layout of a copy with equal strides and the value's
    offset from a multiple of 64 bytes: `torch.empty(offset + len(memory)).as_strided(*layout)`."""
    value = value.resolve_conj().resolve_neg()
    memory = value.as_strided((spanned_elements(value),), (1,))
    return memory, (value.shape, value.stride(), value.data_ptr() % ALIGNMENT // value.itemsize)


class Transfer:
    """A value on its way to another device. It is started by the thread that runs the value's device, and finished by
    the thread of the other device. The copy has the value's strides, and its offset from a multiple of 64 bytes,
    because kernels choose by both."""

    def __init__(self, value: Tensor, target: torch.device) -> None:
        self._target, self._event = target, None
        self._memory, self._layout = memory_and_layout(value)
        if has_queue(value.device):
            if not has_queue(target):
                self._memory = download(self._memory)
            self._event = event_of(value.device)

    def finish(self) -> Tensor:
        """Return the copy. The host waits only if the value goes from an accelerator to the CPU."""
        source, start = self._memory, self._layout[-1]
        if has_queue(source.device) and source.device != self._target:
            return copy_after(self._event, source, start, self._target).as_strided(*self._layout)
        if self._event is not None and not has_queue(self._target):
            self._event.synchronize()
        memory = torch.empty(start + len(source), dtype=source.dtype, device=self._target)
        memory[start:].copy_(source, non_blocking=True)  # work of one device is in order
        return memory.as_strided(*self._layout)


def event_of(device: torch.device) -> Any:
    """Return an event that an accelerator records after all work that this thread has started."""
    event = torch.Event(device)
    event.record(current_stream(device))
    return event


def wait_for(event: Any, device: torch.device) -> None:
    """Delay the work that this thread starts on an accelerator from now on until an event of another one."""
    current_stream(device).wait_event(event)


def join(devices: Iterable[torch.device]) -> None:
    """Delay the work that this thread starts on each accelerator from now on until the others' present work is done."""
    events = {device: event_of(device) for device in devices if has_queue(device)}
    for device in events:
        for source, event in events.items():
            if source != device:
                wait_for(event, device)


@functools.cache
def _copy_streams(source: torch.device, target: torch.device) -> tuple[Any, Any]:
    """Return the streams, of both accelerators, of the copies from one to the other."""
    return new_stream(source), new_stream(target)


def copy_after(event: Any, source: Tensor, start: int, target: torch.device) -> Tensor:
    """Start to copy from another accelerator once its event is done, beside other work of both; return the copy's
    memory, which begins `start` elements before it. Work that this thread starts from now on waits for the copy."""
    sends, receives = _copy_streams(source.device, target)
    sends.wait_event(event)
    # torch copies on `sends`, which waits for `receives`; then `receives` waits for the copy.
    with sends, receives:
        memory = torch.empty(start + len(source), dtype=source.dtype, device=target)
        memory[start:].copy_(source, non_blocking=True)
    stream = current_stream(target)
    stream.wait_stream(receives)
    record_stream(source, sends)
    record_stream(memory, stream)
    return memory


def timing_event(device: torch.device) -> Any:
    """Return an event that an accelerator records after all work that was started; None for the CPU.
    `first.elapsed_time(second)` returns milliseconds, after `synchronize`."""
    if not has_queue(device):
        return None
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def with_aligned_micro_batches(batch: Tensor) -> Tensor:
    """Return a CPU batch, [turns, groups, micro-batch, ...], or a copy with padding that aligns the micro-batches."""
    size, (turns, groups), (turn, group) = batch.element_size(), batch.shape[:2], batch.stride()[:2]
    is_unaligned = batch.data_ptr() % ALIGNMENT or (turns > 1 and turn * size % ALIGNMENT)
    if not batch.numel() or not (is_unaligned or (groups > 1 and group * size % ALIGNMENT)):
        return batch
    return empty_micro_batches(batch, CPU).copy_(batch)


def empty_micro_batches(batch: Tensor, device: torch.device) -> Tensor:
    """Return memory for a batch like this, [turns, groups, micro-batch, ...], with aligned micro-batches."""
    size, (turns, groups) = batch.element_size(), batch.shape[:2]
    row = -(-prod(batch.shape[2:]) * size // ALIGNMENT) * ALIGNMENT // size
    inner = torch.empty_like(batch[0, 0], device="meta").stride()  # keeps channels_last
    padded = torch.empty(turns * groups * row, dtype=batch.dtype, device=device)
    return padded.as_strided(batch.shape, (groups * row, row, *inner))


def with_aligned_start(value: Tensor) -> Tensor:
    """Return an aligned copy of a CPU tensor that isn't at a multiple of 64 bytes; otherwise the tensor."""
    return value if is_aligned(value) else value.clone()
