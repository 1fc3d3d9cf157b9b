"""Profiles of models that have not run, from which popvision and `poptorch.plan` estimate for other machines.

A plan needs the shapes of weights and not their values. While `popvision plan` runs a program, new parameters are fake
tensors; `poptorch.plan` and `describe` take models whose parameters are on the meta device.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from popengine.compile.describe import describe, peak_bytes
from popengine.ir import Graph, Plan
from popengine.profile import PLAN_WISH, Profile
from popengine.run.state import State
from popengine.settings import Hyper, Settings

from .compiling.executable import compile_model
from .compiling.runs import Run
from .measuring import measured
from .options import Options

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


def exit_if_only_planning(*program: Any) -> None:
    """Write the profiles of a plan and exit, if `popvision plan` runs this program; else do nothing.

    Args: program: the arguments of `profiles` but `kinds`
    """
    if wish := os.environ.get(PLAN_WISH):
        wanted = json.loads(wish)
        for kind, found in profiles(*program, kinds=wanted["kinds"]).items():
            found.save(Path(wanted["folder"]) / f"{kind}.pop")
        raise SystemExit(0)


def profiles(
    model: nn.Module,
    run: Run,
    options: Options,
    settings: Settings,
    hyper: Hyper | None,
    kinds: Sequence[str],
) -> dict[str, Profile]:
    """Return the profiles of a model that has not run, by kind.

    Args:
        model, run, options, settings: as for `compile_model`
        hyper: the rates of an update; None in inference
        kinds: "apart": for machines whose ipus are separate devices; "here": with this machine's times
    """
    location = options.TensorLocations.location_optimizer.toDict()
    found = {}
    for kind in kinds:
        chosen, attention = settings, contextlib.nullcontext()
        if kind == "apart":  # neighbouring stages of an ipu are one, and attention is products and a softmax
            chosen = replace(settings, device="cuda", strategy=replace(settings.strategy, joined=True))
            attention = _half_attention()
        with attention:
            executable = compile_model(model, run, options, chosen, is_plan_only=True)
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
            facts["measured"] = measured(executable, hyper, sum(row.flops for row in made.operations))
        found[kind] = replace(made, facts=facts)
    return found


def planned(plan: Plan, settings: Settings, graph: Graph) -> Profile:
    """Return the profile of a plan that has not run, with each ipu's peak memory as a separate device."""
    found, ipus = describe(plan, settings, graph), sorted(set(plan.partition.ipus))
    alive = {index: -piece.enters for index, piece in enumerate(found.pieces)}
    for operation in found.operations:
        row = operation.piece
        alive[row] = max(alive[row], operation.live - found.pieces[row].enters)
    facts = {
        **found.facts,
        "calls": 0,
        "steps": 0,
        "activations": peak_bytes(graph, plan, alive),
        "between": [_between(found, ipu) for ipu in ipus],
    }
    weights = {
        slot.key: torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        for slot in plan.partition.signature.weights
    }
    whole = replace(settings, replica_groups={}, shard_optimizer=None)
    state = State(plan, whole, weights, torch.device("meta"))
    return replace(found, facts=facts, memory=tuple(state.memory(0, ipu) for ipu in ipus))


def _between(found: Profile, ipu: int) -> int:
    """Return an upper bound, for any timing, of the bytes that were sent to an ipu and not received yet."""
    stages, micro_batches = len(found.ipus), found.facts["schedule_micro_batches"]
    sent = {part.channel: part for part in found.parts if part.kind == "send" and part.peer == ipu}
    total = 0
    for part in {part for part in found.parts if part.kind == "receive" and part.ipu == ipu}:
        sender, count = sent[part.channel], 1
        if sender.phase and found.facts["mode"] == "pipelined":
            # The number of micro-batches that a stage begins before it ends the first one.
            ahead = stages - (sender.stage if sender.phase == "F" else part.stage)
            count = min(micro_batches, ahead if found.training else found.facts["in_flight"])
        total += count * part.bytes
    return total


@contextlib.contextmanager
def _half_attention() -> Iterator[None]:
    """Capture attention in half precision without casts to float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
