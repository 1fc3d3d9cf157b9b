"""The page of a plan, before anything has run: stages, memory, an ideal timeline, and the bottleneck."""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from popengine.profile import PLAN_WISH, Operation, Profile, ProfileError, load

from . import virtual
from .changes import changes
from .times import StageTime, step_of
from .units import seconds, size

FLOPS, BYTES = 50e9, 10e9  # a second; a core, which the timeline takes for each device
_DRAWN = 600  # tasks; in a wider picture they are too small to see
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8794a3")


def plan_of(program: Sequence[str]) -> Profile:
    """Run a program until its first model is compiled, and return the plan; nothing is computed.

    Raises:
        ProfileError: the program ended before that; its own output stands above
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.pop"
        environment = {**os.environ, PLAN_WISH: str(target)}
        done = subprocess.run([sys.executable, *program], env=environment, check=False)
        if not target.exists():
            raise ProfileError(
                f"{' '.join(program)} compiled no model (it ended with {done.returncode})\n"
                "  fix: call an executor, or its compile(...), in that program"
            )
        return load(target)


def estimated(profile: Profile) -> Profile:
    """Return the plan with a time for each operation: that of its FLOPs or of its bytes, whichever is longer."""

    def timed(operation: Operation) -> Operation:
        ns = 1e9 * max(operation.flops / FLOPS, operation.bytes / BYTES)
        return operation._replace(calls=1, ns=max(1, round(ns)))

    return replace(profile, operations=tuple(map(timed, profile.operations)))


def step_times(profile: Profile) -> list[StageTime]:
    """Return what each stage of an `estimated` plan costs."""
    spent = {(phase, stage): 0.0 for stage in range(len(profile.ipus)) for phase in "FB"}
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        spent[piece.phase, piece.stage] += operation.ns
    return [
        StageTime(stage, ipu, profile.stages[stage], spent["F", stage], spent["B", stage], 0.0, 0.0)
        for stage, ipu in enumerate(profile.ipus)
    ]


def memory_rows(profile: Profile) -> list[tuple[int | None, ...]]:
    """Return for each ipu its number, and the bytes at the most of weights and buffers, gradients, optimizer,
    activations, values between ipus, and all of them; None: not known."""
    facts, unknown = profile.facts, [None] * len(profile.memory)
    rows = zip(profile.memory, facts.get("activations", unknown), facts.get("between", unknown), strict=True)
    found = []
    for row, activations, between in rows:
        own = (row.weights + row.buffers, row.gradients, row.optimizer, activations, between)
        found.append((row.ipu, *own, None if activations is None else sum(own)))
    return found


def bottleneck(profile: Profile) -> list[str]:
    """Return sentences: what bounds an `estimated` plan, and what would make it faster."""
    times = step_times(profile)
    step = step_of(profile, [], times)
    loads: dict[int, float] = {}
    for time in times:
        loads[time.ipu] = loads.get(time.ipu, 0.0) + time.total
    slowest = max(loads, key=lambda ipu: loads[ipu])
    mean = sum(loads.values()) / len(loads)
    waiting = virtual.bubble_apart(step)
    found = [
        f"ipu {slowest} has the most to do: {loads[slowest] / (mean or 1):.2f} times the average ipu."
        f" On separate devices they wait {waiting:.0%} of the time."
    ]
    found += [
        f"{change.what} would make it {change.apart:.2f} times as fast there."
        + (f" Then {change.also}." if change.also else "")
        for change in changes(profile, step, 0.0)
        if change.apart > 1.03
    ]
    return found


def page(profile: Profile) -> str:
    """Return the HTML of the page, which needs no other file."""
    profile = estimated(profile)
    times = step_times(profile)
    flops = {(phase, stage): 0 for stage in range(len(profile.ipus)) for phase in "FB"}
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        flops[piece.phase, piece.stage] += operation.flops
    parameters = [sum(b.parameters for b in profile.blocks if b.stage == s) for s in range(len(times))]
    stages = [
        (
            *(t.stage, t.ipu, t.blocks, f"{parameters[t.stage]:,}"),
            *(f"{flops[phase, t.stage]:,}" for phase in "FB"),
            seconds(t.total / 1e9),
        )
        for t in times
    ]
    memory = [
        (ipu, *("–" if count is None else size(count) for count in rest))
        for ipu, *rest in memory_rows(profile)
    ]
    sends = [
        (part.ipu, part.peer, size(part.bytes), *part.often_and_when)
        for part in profile.parts
        if part.kind == "send"
    ]
    counts = profile.counts
    title = (
        f"Plan: {profile.facts.get('mode', '')} {profile.name}, {len(times)} stage(s) on {len(profile.devices)} ipu(s),"
        f" {counts.get('replicas', 1)} replica(s)"
    )
    head = (
        "stage",
        "ipu",
        "blocks",
        "parameters",
        "FLOPs forward",
        "FLOPs backward",
        "a micro-batch, estimated",
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p class=say>{html.escape(text)}</p>" for text in bottleneck(profile)),
        "<h2>One step on separate devices</h2>",
        timeline(profile),
        f"<p>Imagined devices with {FLOPS / 1e9:.0f} GFLOP/s and {BYTES / 1e9:.0f} GB/s, which wait for nothing else;"
        " light: forward, dark: backward. Nothing has run yet.</p>",
        "<h2>Stages</h2>",
        _table(head, stages),
        "<h2>Memory of an ipu at the most, on separate devices</h2>",
        _table(("ipu", "weights", "gradients", "optimizer", "activations", "between", "in all"), memory),
        "<h2>Between ipus</h2>" if sends else "",
        _table(("from ipu", "to ipu", "bytes", "each", "when"), sends) if sends else "",
    ]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def timeline(profile: Profile) -> str:
    """Return the picture (SVG) of one step of an `estimated` plan, with a row for each ipu."""
    step = step_of(profile, [], step_times(profile))
    most = max(1, _DRAWN // len(step.phases))
    cut = step.micro_batches > most
    step = replace(step, micro_batches=min(step.micro_batches, most))
    found, phases = virtual.on_devices(step), step.phases
    rows, width, tall = sorted(set(step.ipus)), 1000, 30
    unit = width / (found.length or 1)
    boxes = []
    for task in range(step.micro_batches * len(phases)):
        micro_batch, i = divmod(task, len(phases))
        phase, stage = phases[i]
        x, wide = 60 + found.starts[task] * unit, max(0.4, (found.ends[task] - found.starts[task]) * unit)
        y = rows.index(step.ipus[stage]) * tall
        label = f"{'forward' if phase == 'F' else 'backward'} of stage {stage}, micro-batch {micro_batch}"
        text = f'<text x="{x + 3:.1f}" y="{y + 17}">{micro_batch}</text>' if wide > 18 else ""
        boxes.append(
            f'<g><title>{label}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{tall - 6}"'
            f' fill="{_COLOURS[stage % len(_COLOURS)]}" fill-opacity="{0.55 if phase == "F" else 1}"/>{text}</g>'
        )
    names = [f'<text x="0" y="{i * tall + 17}">ipu {ipu}</text>' for i, ipu in enumerate(rows)]
    note = f"<p>The first {most} micro-batches of each step are drawn.</p>" if cut else ""
    return (
        f'<svg role="img" aria-label="Timeline of a step" viewBox="0 0 {width + 64} {len(rows) * tall}">'
        + "".join([*names, *boxes])
        + f"</svg>{note}"
    )


def write(profile: Profile, target: Path) -> Path:
    target.write_text(page(profile))
    return target


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return (
        "<div class=wide><table>"
        + line(head, "th")
        + "".join(line(row, "td") for row in rows)
        + "</table></div>"
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 16px; margin-top: 28px; }}
svg {{ width: 100%; }} svg text {{ font-size: 12px; fill: currentColor; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #8888; }}
.say {{ border-left: 4px solid #e69f00; padding-left: 12px; }}
</style>
{body}
</html>
"""
