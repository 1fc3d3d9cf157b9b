"""The page of a plan: machines, what would make it fit, memory against its limit, a step, stages and transfers."""

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from popengine.profile import PHASES, Profile

from . import virtual
from .estimate import Estimate
from .units import count_text, layout_text, seconds_text, size_text

_DRAWN = 600  # tasks; in a wider picture they are too small to see
_STAGES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7a6fd0")
_MEMORY = {
    "weights": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "between": "#d55e00",
    "program": "#8794a3",
    "inputs": "#56b4e9",
}


def plan_page(
    estimates: Sequence[Estimate], drawn: Estimate | None, table: list[list[str]], advice: Sequence[str]
) -> str:
    """Return the page of a plan as HTML that needs no other file.

    Args: drawn: the estimate whose step is drawn, on a machine with a chip per ipu; None: no step is drawn
    """
    drawn = drawn or estimates[0]
    title = f"Plan: {layout_text(drawn.profile)}"
    parts = [_list(advice), _card("Machines", _table(table)), _memory_card(estimates)]
    if drawn.costs is not None:
        parts.append(_card(f"One step on {drawn.machine.name}", _timeline(drawn)))
    parts.append(_card("Stages, for a micro-batch", _table(_stage_rows(drawn))))
    if sends := [
        (part.ipu, part.peer, size_text(part.bytes), *part.frequency_and_time)
        for part in drawn.profile.instructions
        if part.kind == "send"
    ]:
        parts.append(_card("Between ipus", _table([("from ipu", "to ipu", "bytes", "each", "when"), *sends])))
    style = (files("popvision") / "viewer" / "viewer.css").read_text()
    return _PAGE.format(title=html.escape(title), style=style, body="\n".join(filter(None, parts)))


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{html.escape(title)}</h2>\n{body}</section>'


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _table(rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table, whose first row is the names of the columns."""
    head, *body = ([html.escape(str(cell)) for cell in row] for row in rows)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _memory_card(estimates: Sequence[Estimate]) -> str:
    """Return a bar for each memory of each estimate, with a mark at its capacity, and a legend."""
    parts, shown = [], dict[str, None]()
    for one in estimates:
        scale = max(one.capacity, *(sum(kinds.values()) for kinds in one.memory.values()))
        limit = 100 * one.capacity / (scale or 1)
        bars = []
        for name, kinds in one.memory.items():
            total = sum(kinds.values())
            shown |= dict.fromkeys(kind for kind, size in kinds.items() if size)
            pieces = "".join(
                f'<i title="{kind}: {size_text(size)}" style="width:{100 * size / (scale or 1):.2f}%;'
                f'background:{_MEMORY[kind]}"></i>'
                for kind, size in kinds.items()
                if size
            )
            state = ' class="number bad"' if total > one.capacity else ' class="number"'
            bars.append(
                f'<span class="name">{name}</span><div class="bar">{pieces}<b style="left:{limit:.2f}%"></b></div>'
                f"<span{state}>{size_text(total)}</span>"
            )
        said = f"{one.choice}: {'fits' if one.fits else 'does not fit'}, limit {size_text(one.capacity)}"
        parts.append(f'<h3>{html.escape(said)}</h3><div class="bars">{"".join(bars)}</div>')
    legend = "".join(f'<span><i style="background:{_MEMORY[kind]}"></i>{kind}</span>' for kind in shown)
    legend += '<span><i class="limit"></i>limit</span>'
    rows = [
        [one.choice, name, *(size_text(kinds.get(kind, 0)) for kind in shown), size_text(sum(kinds.values()))]
        for one in estimates
        for name, kinds in one.memory.items()
    ]
    table = _table([["machine", "ipu", *shown, "total"], *rows])
    legend = f'<div class="legend">{legend}</div><details><summary>As a table</summary>{table}</details>'
    return _card("Memory of each ipu, at most", "".join(parts) + legend)


def _stage_rows(drawn: Estimate) -> list[list[str]]:
    """Return a row for each stage, after a row of column names."""
    profile, phases, costs = drawn.profile, drawn.profile.phases, drawn.costs
    rows = [["stage", "ipu", "blocks", "parameters", *(f"FLOPs {PHASES[phase]}" for phase in phases)]]
    rows[0] += [f"{PHASES[phase]} on {drawn.machine.name}" for phase in phases] if costs else []
    flops = _flops(profile)
    for stage, ipu in enumerate(profile.ipus):
        parameters = sum(block.parameters for block in profile.blocks if block.stage == stage)
        row = [str(stage), str(ipu), profile.stages[stage], count_text(parameters)]
        row += [count_text(flops[phase, stage]) for phase in phases]
        if costs is not None:
            row += [seconds_text(sum(costs.phases.get((phase, stage), {}).values())) for phase in phases]
        rows.append(row)
    return rows


def _flops(profile: Profile) -> Counter[tuple[str, int]]:
    """Return the FLOPs of each (phase, stage) for a micro-batch."""
    found: Counter[tuple[str, int]] = Counter()
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        found[piece.phase, piece.stage] += operation.flops
    return found


def _timeline(drawn: Estimate) -> str:
    """Return a picture of a simulated step as HTML, with a row for each ipu, and a caption. A step of very
    many micro-batches is drawn with the first ones only."""
    assert drawn.costs is not None
    step, rows, width, tall = drawn.costs.step, drawn.profile.devices, 1000, 30
    micro_batches = min(drawn.accumulation, max(1, _DRAWN // len(step.actions)))
    tasks, found = virtual.simulate_step(replace(step, micro_batches=micro_batches))
    unit = width / (found.length or 1)
    boxes = [f'<text x="0" y="{i * tall + 17}">ipu {ipu}</text>' for i, ipu in enumerate(rows)]
    for (row, micro_batch), start, end in zip(tasks, found.starts, found.ends, strict=False):
        phase, stage, ipu, _ = step.actions[row]
        x, wide = 60 + start * unit, max(0.4, (end - start) * unit)
        y = rows.index(ipu) * tall
        ink = "#fff" if phase == "B" else "#000"
        number = f'<text x="{x + 3:.1f}" y="{y + 17}" style="fill:{ink}">{micro_batch}</text>'
        boxes.append(
            f"<g><title>{PHASES[phase]} of stage {stage}, micro-batch {micro_batch}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{tall - 6}" fill="{_shade(stage, phase)}"/>'
            f"{number if wide > 18 else ''}</g>"
        )
    said = f"The step takes {seconds_text(drawn.seconds_per_update)}"
    if micro_batches < drawn.accumulation:
        said += f"; {micro_batches} of its {drawn.accumulation} micro-batches and the updates are drawn"
    return (
        f'<div class="scroll"><svg role="img" aria-label="Timeline of a step" '
        f'viewBox="0 0 {width + 64} {len(rows) * tall}">{"".join(boxes)}</svg></div>'
        f'<p class="hint">{html.escape(drawn.machine.description)}. Nothing has run: the step is simulated. Light:'
        f" forward; dark: backward; empty: waiting. The numbers are micro-batches. {said}.</p>"
    )


def _shade(stage: int, phase: str) -> str:
    """Return a stage's colour: darker for backward, lighter for forward and weight gradients."""
    own, ground, share = _STAGES[stage % len(_STAGES)], 0 if phase == "B" else 255, 0.38
    channels = (int(own[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (ground - value) * share):02x}" for value in channels)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
h3 {{ margin-top: 12px; }}
.bar {{ position: relative; }}
.bar b {{ position: absolute; top: 0; bottom: 0; width: 3px; margin-left: -3px; background: var(--ink);
  box-shadow: 0 0 0 2px var(--card); }}
.legend .limit {{ width: 3px; background: var(--ink); box-shadow: none; }}
.scroll svg {{ min-width: 640px; display: block; }}
td:last-child {{ white-space: normal; min-width: 160px; }}
.hint {{ margin-top: 10px; }}
</style>
<script>
if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.dataset.theme = "dark";
</script>
<header class="top"><h1><span class="mark" aria-hidden="true"></span>{title}</h1></header>
<main>
{body}
</main>
</html>
"""
