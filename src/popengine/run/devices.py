"""Where tensors of an engine are: in the host's memory or in that of one accelerator, and where in memory they begin.

`torch.accelerator` is CUDA, ROCm or XPU, whichever this torch is built for. All ipus of all replicas are on its current
device. One thread starts their work, all of it on the device's default stream: so work runs in the order in which it
was started, transfers too, and no event is needed. The host waits only in `settle`, and where it reads a value.

Kernels of MKL and oneDNN are chosen by the alignment of what they read, and so are bits. All tensors that pieces are
given begin at a multiple of 64 bytes, as torch's own allocations do: so a row's bits don't depend on its place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import Error, UnrecoverableError
from ..settings import DeviceKind

CPU = torch.device("cpu")


def check(kind: DeviceKind, processes: int = 1) -> None:
    """Look whether the engine can run on this kind of device, on this machine.

    Args:
        processes: how many train together
    Raises:
        Error: it can't
    """
    if kind == "cpu":
        return
    if processes > 1:
        raise Error(
            f'the device is "{kind}", and {processes} processes train together\n'
            "  why: gradients are summed over processes in the host's memory only\n"
            '  fix: one process; or the CPU: options.device("cpu"), POPTORCH_DEVICE=cpu'
        )
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        seen = "no accelerator" if found is None else f"one of kind {found.type!r}"
        raise Error(
            f'the device is "{kind}", but torch {torch.__version__} finds {seen}\n'
            "  fix: run where there is one, with a build of torch and a driver for it (pytorch.org); or choose the"
            ' CPU: options.device("cpu"), POPTORCH_DEVICE=cpu'
        )


def device_of(kind: DeviceKind) -> torch.device:
    """Return the device of this kind where all ipus are."""
    return CPU if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def cores(kind: DeviceKind) -> int:
    """Return how many threads run the tasks of a step: as many as torch has; for an accelerator one."""
    return torch.get_num_threads() if kind == "cpu" else 1


def running(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device of a thread: each thread has one of its own."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def pinned(value: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor, where `upload` need not wait for the copy: in pinned memory."""
    if device.type == "cpu" or not value.is_cpu or value.is_pinned() or not value.numel():
        return value
    return value.pin_memory()


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Return the value on a device; the host does not wait for the copy, if the value is pinned."""
    return value.to(device, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait until all work that was started on the device is done.

    Raises:
        UnrecoverableError: some of it has failed
    """
    if device.type == "cpu":
        return
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        raise UnrecoverableError(
            f"the device {device} failed while it ran this call: {error}\n"
            "  why: kernels run after they were started, so the line that is at fault is not known; an index out of"
            " range does this, such as a class label\n"
            "  fix: POPTORCH_DEVICE=cpu runs the same program on the CPU and names the line. The device can't be"
            " used again in this process"
        ) from error


BYTES = 64


def aligned(batch: Tensor) -> Tensor:
    """Return the same values, [iterations, accumulation, groups, ...], with slices that begin at multiples of 64 bytes.

    The batch itself where that is so; else one copy, with room between the slices."""
    size, first = batch.element_size(), batch.shape[:3]
    steps = [stride for stride, count in zip(batch.stride()[:3], first, strict=True) if count > 1]
    if not batch.numel() or all(
        number % BYTES == 0 for number in (batch.data_ptr(), *(s * size for s in steps))
    ):
        return batch
    inner = torch.empty_like(batch[0, 0, 0]).stride()  # channels_last stays what it is
    row = -(-prod(batch.shape[3:]) * size // BYTES) * BYTES // size
    strides = (first[1] * first[2] * row, first[2] * row, row, *inner)
    room = torch.empty(prod(first) * row, dtype=batch.dtype)
    return room.as_strided(batch.shape, strides).copy_(batch)


def begins_well(value: Tensor) -> Tensor:
    """Return the tensor itself, or a copy that begins at a multiple of 64 bytes."""
    return value.clone() if value.is_cpu and value.data_ptr() % BYTES else value
