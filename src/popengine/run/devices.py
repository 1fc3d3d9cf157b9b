"""Where tensors of an engine are: in the host's memory, or in that of one accelerator.

`torch.accelerator` is CUDA, ROCm or XPU, whichever this torch is built for. All ipus of all replicas are on its current
device. One thread starts their work, all of it on the device's default stream: so work runs in the order in which it
was started, transfers too, and no event is needed. The host waits only in `settle`, and where it reads a value.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
