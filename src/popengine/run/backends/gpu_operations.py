"""Operations on a GPU: what a piece calls there, instead of what its source names.

A model is captured on the CPU, the one device a captured program knows. Elsewhere the same source runs: an
operation that makes tensors makes them on the device it runs on, and the few kernels that only a CPU has get
stand-ins. `check` says before the first call what has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import Error
from ...ir import Partition
from . import gpu_attention
from .direct_calls import direct, operation_of

aten = torch.ops.aten
Operation = torch._ops.OpOverload

STAND_INS: dict[Operation, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: gpu_attention.forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: gpu_attention.backward,
    # Kernels of a GPU may lay out their results otherwise in memory, so that a view has to be a copy.
    aten.view.default: Tensor.reshape,
    aten._unsafe_view.default: Tensor.reshape,
}


@functools.cache  # draws of random numbers ask at each call
def for_device(operation: Operation, device: torch.device) -> Callable[..., Any]:
    """What to call for an operation on a device that is not the CPU, with the same arguments."""
    stand_in = STAND_INS.get(operation)
    if stand_in is not None:
        return stand_in
    if any(argument.name == "device" and argument.kwarg_only for argument in operation._schema.arguments):
        return _made_on(device, operation._op)
    return direct(operation)


def _made_on(there: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return function(*args, device=there, **kwargs)

    return make


# ---- what can't run there --------------------------------------------------------------------------------


def check(partition: Partition, device: torch.device) -> None:
    """Look at all pieces before the first call.

    Raises:
        Error: the model uses operations that have neither a kernel for the device nor a stand-in
    """
    missing = unsupported(partition, device)
    if missing:
        uses = "\n".join(f"  {name} at {where}" for name, where in missing.items())
        raise Error(
            f"the model uses operations that have no kernel for a {device.type!r} device\n{uses}\n"
            "  why: it was captured for a CPU, which has them, and nothing stands in for them elsewhere\n"
            "  fix: if it comes from a file or a cache of executables, compile it for this device; else replace them"
            f' in the model, or give your own ones a kernel (torch.library.register_kernel(..., "{device.type}"));'
            " or run on the CPU: POPTORCH_DEVICE=cpu"
        )


def unsupported(
    partition: Partition,
    device: torch.device,
    has_kernel: Callable[[Operation, torch.device], bool] | None = None,
) -> dict[str, str]:
    """The operations that can't run on the device, each with the user's line that uses it first."""
    has_kernel = has_kernel or _has_kernel
    found: dict[str, str] = {}
    for piece in partition.pieces:
        for name in piece.calls:
            operation = operation_of(name)
            if operation not in STAND_INS and not has_kernel(operation, device):
                uses = (line.where for line in piece.lines if line.call == name)
                found.setdefault(name, next(uses))
    return found


def _has_kernel(operation: Operation, device: torch.device) -> bool:
    if device.type == "cuda" and not torch.backends.cuda.is_built():
        return True  # a torch without any such kernels: nothing can be said here
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(operation.name(), device.type.upper())
