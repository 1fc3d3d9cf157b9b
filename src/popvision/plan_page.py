"""The page of a plan: the machines, a timeline of a step on one of them, stages, memory and sends."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from typing import Any

from popengine.profile import Profile

from . import virtual
from .costs import Costs
from .units import kind_of_run, seconds, size

_DRAWN = 600  # tasks; in a wider picture they are too small to see
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8794a3")


def page(plan: Any) -> str:
    """Return the HTML of the page of an `Estimates`; it needs no other file."""
    machine, profile, costs = plan.drawn
    flops: Counter[tuple[str, int]] = Counter()
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        flops[piece.phase, piece.stage] += operation.flops
    parameters: Counter[int] = Counter()
    for block in profile.blocks:
        parameters[block.stage] += block.parameters
    stages = [
        (
            *(stage, ipu, profile.stages[stage], f"{parameters[stage]:,}"),
            *(f"{flops[phase, stage]:,}" for phase in "FB"),
            *(seconds(sum(costs.phases[phase, stage].values())) for phase in "FB"),
        )
        for stage, ipu in enumerate(profile.ipus)
    ]
    memory = [
        (one.machine.name, ipu, *map(size, kinds.values()), size(whole))
        for one in plan.estimates
        for (ipu, kinds), whole in zip(one.memory.items(), one.memory_per_ipu, strict=True)
    ]
    kinds = next((kinds for one in plan.estimates for kinds in one.memory.values()), {})
    sends = [
        (part.ipu, part.peer, size(part.bytes), *part.frequency_and_time)
        for part in profile.parts
        if part.kind == "send"
    ]
    title = f"Plan: {kind_of_run(profile)}"
    head = ("stage", "ipu", "blocks", "parameters", "FLOPs forward", "FLOPs backward", "forward", "backward")
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(plan.table()),
        *(f"<p class=say>{html.escape(text)}</p>" for text in plan.advice()),
        f"<h2>One step on {html.escape(machine.name)}</h2>",
        timeline(profile, costs),
        f"<p>{html.escape(machine.description)}; light: forward, dark: backward. Nothing has run yet.</p>",
        "<h2>Stages, and their times for a micro-batch</h2>",
        _table([head, *stages]),
        "<h2>Memory of an ipu at the most</h2>",
        _table([("machine", "ipu", *kinds, "in all"), *memory]),
    ]
    if sends:
        parts += ["<h2>Between ipus</h2>", _table([("from ipu", "to ipu", "bytes", "each", "when"), *sends])]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def timeline(profile: Profile, costs: Costs) -> str:
    """Return the HTML of a picture of one simulated step, with a row for each ipu. A step of many
    micro-batches is simulated with fewer, and a note below the picture says so."""
    actions = costs.step(1).actions
    most, micro_batches = max(1, _DRAWN // len(actions)), profile.facts["schedule_micro_batches"]
    step = costs.step(min(micro_batches, most))
    tasks, found = virtual.on_devices(step)
    rows, width, tall = sorted(set(step.ipus)), 1000, 30
    unit = width / (found.length or 1)
    boxes = []
    for (row, micro_batch), start, end in zip(tasks, found.starts, found.ends, strict=False):
        phase, stage, ipu, _ = actions[row]
        x, wide = 60 + start * unit, max(0.4, (end - start) * unit)
        y = rows.index(ipu) * tall
        label = f"{'forward' if phase == 'F' else 'backward'} of stage {stage}, micro-batch {micro_batch}"
        text = f'<text x="{x + 3:.1f}" y="{y + 17}">{micro_batch}</text>' if wide > 18 else ""
        boxes.append(
            f'<g><title>{label}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{tall - 6}"'
            f' fill="{_COLOURS[stage % len(_COLOURS)]}" fill-opacity="{0.55 if phase == "F" else 1}"/>{text}</g>'
        )
    names = [f'<text x="0" y="{i * tall + 17}">ipu {ipu}</text>' for i, ipu in enumerate(rows)]
    note = f"<p>The first {most} micro-batches of each step are drawn.</p>" if micro_batches > most else ""
    return (
        f'<svg role="img" aria-label="Timeline of a step" viewBox="0 0 {width + 64} {len(rows) * tall}">'
        + "".join([*names, *boxes])
        + f"</svg>{note}"
    )


def _table(rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table; its first row has the names of the columns."""
    cells = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<div class=wide><table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table></div>"


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
td {{ padding: 3px 14px 3px 0; border-bottom: 1px solid #8888; }}
tr:first-child {{ font-weight: bold; }}
.say {{ border-left: 4px solid #e69f00; padding-left: 12px; }}
</style>
{body}
</html>
"""
