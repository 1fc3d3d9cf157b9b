"""Profiles of models that have not run, from which popvision and `poptorch.plan` estimate for other machines.

A plan needs the shapes of weights and not their values. While `popvision plan` runs a program, new parameters are fake
tensors; `poptorch.plan` and `describe` take models whose parameters are on the meta device.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from popengine.profile import PLAN_WISH, Profile

if TYPE_CHECKING:
    from popengine.settings import Hyper, Settings

    from .compiling.executable import Executable


_BASE = 600 << 20  # bytes of Python, torch and the program's other libraries


class _WithoutValues(FakeTensorMode):
    """A fake tensor mode in which reading a number returns zero, so that loops in initializers end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        return super().__torch_dispatch__(func, types, args, kwargs)


def build_without_values() -> None:
    """Make every parameter that this process creates from now on a fake tensor, which has no memory. Do
    nothing if `popvision plan` has found that the program needs values."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    if "values" in json.loads(os.environ.get(PLAN_WISH, "{}")):
        return
    mode = _WithoutValues(allow_non_fake_inputs=True)
    make, swap = nn.Parameter.__new__, torch.utils.swap_tensors

    def without_values(cls: Any, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        if type(data) in (Tensor, nn.Parameter) and not data.is_meta:  # type: ignore[union-attr]
            with mode, torch.no_grad():
                data = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype)  # type: ignore[union-attr]
        return make(cls, data, requires_grad)

    def convert(one: Any, other: Any) -> None:  # called by module.half() and similar methods
        if isinstance(one, FakeTensor):
            one.data = other
        else:
            swap(one, other)

    nn.Parameter.__new__ = without_values  # type: ignore[method-assign]
    torch.utils.swap_tensors = convert


def available_memory() -> int:
    """Return the free bytes of this machine, limited by the control group of this process."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            files = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, used))
            free = min(free, next(files) - next(files))
    return free


def exit_if_only_planning(planned: Callable[[Sequence[str]], Mapping[str, Profile]]) -> None:
    """Write the profiles of a plan and exit, if `popvision plan` runs this program; else do nothing.

    Args: planned: returns `profiles(...)` for given kinds
    """
    if wish := os.environ.get(PLAN_WISH):
        wanted = json.loads(wish)
        for kind, found in planned(wanted["kinds"]).items():
            found.save(Path(wanted["folder"]) / f"{kind}.pop")
        raise SystemExit(0)


def profiles(
    compiled: Callable[[Settings], Executable],
    settings: Settings,
    hyper: Hyper | None,
    location: Mapping[str, Any],
    kinds: Sequence[str],
) -> dict[str, Profile]:
    """Return the profiles of a model that has not run, by kind.

    Args:
        compiled: returns the executable for given settings
        location: the user's location settings of the optimizer state
        kinds:    "apart": for machines whose ipus are separate devices; "here": with this machine's times
    """
    from .reporting.planned import planned

    found = {}
    for kind in kinds:
        # On separate devices neighbouring stages of an ipu are one, and attention is products and a softmax.
        apart = replace(settings, device="cuda", strategy=replace(settings.strategy, joined=True))
        with _half_attention() if kind == "apart" else contextlib.nullcontext():
            executable = compiled(apart if kind == "apart" else settings)
        plan, graph = executable.plan, executable.graph
        assert graph is not None
        # More micro-batches need no more memory; popvision computes the times of all micro-batches.
        short = replace(plan, micro_batches=min(plan.micro_batches, 3 * plan.partition.stages + 8))
        made = planned(short, executable.settings, graph)
        facts = {
            **made.facts,
            "schedule_micro_batches": plan.micro_batches,
            "optimizer_off_chip": location.get("on_chip_storage") is False,
            "shards_optimizer": bool(location.get("replicated_tensor_sharding", False)),
            "device": settings.device,
            "base": _BASE,
            "available": available_memory(),
        }
        if kind == "here":
            from .measuring import measured

            facts["measured"] = measured(executable, hyper, sum(row.flops for row in made.operations))
        found[kind] = replace(made, facts=facts)
    return found


@contextlib.contextmanager
def _half_attention() -> Iterator[None]:
    """Capture attention in half precision without casts to float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
