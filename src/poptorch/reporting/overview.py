"""The overview of a compiled model as text: stages, transfers between ipus, the schedule and the code."""

from dataclasses import dataclass
from textwrap import indent

import torch

from popengine.compile.describe import parts_of
from popengine.ir import Plan
from popengine.programs import drawn
from popengine.run.devices import cores
from popengine.settings import Settings

from ..compiling.executable import Executable
from ..logs import counted

_DRAWN = 64  # micro-batches; a wider drawing does not fit a screen


@dataclass(frozen=True)
class Overview:
    """A compiled model as text.

    `stages`: (number, ipu, blocks, parameters); `transfers`: (from ipu, to ipu, bytes, each "micro-batch" or "step",
    when), where bytes are None if a loaded executable lacks them; `pieces`: (name, ipu, source).
    """

    title: str
    stages: tuple[tuple[int, int, str, int], ...]
    transfers: tuple[tuple[int, int, int | None, str, str], ...]
    schedule: str
    pieces: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        lines = [self.title, ""]
        lines += [
            f"stage {s} on ipu {i}: {blocks}; {size:,} parameters" for s, i, blocks, size in self.stages
        ]
        lines += [""] if self.transfers else []
        lines += [
            f"ipu {a} -> ipu {b}: {_bytes(size)} a {per} {when}" for a, b, size, per, when in self.transfers
        ]
        lines += ["", self.schedule, ""]
        lines += [
            f"piece {name} on ipu {ipu}:\n{indent(source, '    ')}" for name, ipu, source in self.pieces
        ]
        return "\n".join(lines)

    __repr__ = __str__


def overview(executable: Executable) -> Overview:
    """Return the overview of a compiled model. Without the captured graph, bytes between ipus are unknown."""
    plan, settings, graph = executable.plan, executable.settings, executable.graph
    partition, counts = plan.partition, settings.counts
    sizes = dict.fromkeys(range(partition.stages), 0)
    for slot in partition.signature.slots:
        if slot.role == "parameter" and slot.name in partition.home:
            sizes[partition.home[slot.name]] += torch.Size(slot.shape).numel()
    kind = "training" if settings.training else "inference"
    micro_batches = plan.micro_batches
    title = (
        f"{kind}, {settings.strategy.mode}: {counted(partition.stages, 'stage')}"
        f" on {counted(len(set(partition.ipus)), 'ipu')}, {counted(counts.replicas, 'replica')}; a call is"
        f" {counted(counts.iterations, 'device iteration')} of {counted(counts.accumulation, 'micro-batch')}"
    )
    transfers = tuple(
        (part.ipu, part.peer, part.bytes if graph else None, *part.often_and_when)
        for part in parts_of(plan, graph)
        if part.kind == "send"
    )
    return Overview(
        title,
        tuple((s, partition.ipus[s], names, sizes[s]) for s, names in enumerate(partition.names)),
        transfers,
        _schedules(plan, settings)
        if micro_batches <= _DRAWN
        else f"schedule of a step: {micro_batches} micro-batches, too many to draw",
        tuple(
            (f"{piece.phase}{piece.stage}", partition.ipus[piece.stage], piece.source)
            for piece in partition.pieces
        ),
    )


def _schedules(plan: Plan, settings: Settings) -> str:
    """Return a drawing of a step's schedule on this machine and, for several ipus, on separate devices."""
    here, apart = drawn(plan, cores(settings.device)), drawn(plan)
    kind = counted(cores(settings.device), "core") + " of this machine"
    found = f"schedule of a step on {kind}, {here[0]}:\n{here[1].rstrip()}"
    if len(set(plan.partition.ipus)) > 1:
        found += f"\n\nthe same as if each ipu were a device of its own, {apart[0]}:\n{apart[1].rstrip()}"
    return found


def _bytes(size: int | None) -> str:
    return "an unknown number of bytes" if size is None else f"{size:,} bytes"
