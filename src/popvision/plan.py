"""Plans: estimates of a program's speed and memory on machines that may be absent, and their page."""

import html
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from popengine.environment import NEEDS_VALUES, PLAN_WISH
from popengine.order import ORDERS
from popengine.profile import PHASES, Profile, ProfileError, load

from . import virtual
from .costs import CATEGORIES, Costs, Spent
from .machine import Machine
from .memory import Need, memory_needs, memory_table
from .units import layout_text, seconds_text, share_text, size_text, table_text

_CORE_FLOPS, _CORE_BYTES = 50e9, 10e9  # FLOPs and bytes per second of a core, roughly
_DRAWN = 600  # tasks; in a wider picture they are too small to see
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8794a3")


class Estimate:
    """The estimated time and memory of a program on a machine.

    Args:
        profile: a plan, as `compile_profiles` returns it for this kind of machine
        accumulation: micro-batches of a step and replica
    """

    def __init__(self, profile: Profile, machine: Machine, replicas: int, accumulation: int) -> None:
        if (order := profile.facts["mode"]) not in ORDERS:
            raise ProfileError(
                f"the schedule {order!r} is known to the program that made it only\n"
                "  fix: make the plan in that program: poptorch.plan(model, options, batch)"
            )
        self.profile, self.machine = profile, machine
        self.replicas, self.accumulation = replicas, accumulation
        self.needs, self.costs = memory_needs(profile), None  # of a replica; no costs on this host
        self.problems: list[str] = []  # reasons why the program would fail on the machine; empty: it fits
        if any(need.activations is None for need in self.needs):
            self.problems.append("a kernel needs memory of a size that only it knows")
        loaded = accumulation * sum(part.bytes for part in profile.instructions if part.kind == "load")
        # `bubble`: share of time in which the ipus (on this host: the cores) wait. `spent`: seconds of the
        # busiest ipu (on this host: of a core), by category.
        if machine.kind == "here":
            taken, self.bubble, self.spent = _step_seconds_on_host(profile, replicas, accumulation)
            self.problems += _problems_on_host(profile, self.needs, replicas, loaded)
        else:
            self.costs = Costs(profile, machine, replicas, accumulation)
            ns = virtual.simulated_ns(self.costs.step)
            taken, self.bubble = ns / 1e9, self.costs.step.bubble(ns)
            self.spent = max(self.costs.by_ipu.values(), key=lambda spent: sum(spent.values())).copy()
            # A chip has its program, and of the optimizer's state only what the options keep there.
            shards = replicas if profile.facts.get("shards_optimizer") else 1
            is_on_chip, code = not profile.facts.get("optimizer_off_chip"), round(machine.code)
            self.needs = [
                replace(need, optimizer=is_on_chip * -(-need.optimizer // shards), code=code)
                for need in self.needs
            ]
            self.problems += _problems_on_chips(self.needs, machine, replicas)
            if loaded / machine.host > taken:  # a replica's rows reach its first ipu
                taken = self.spent["host input"] = loaded / machine.host
        counts = profile.counts
        # With a group for each replica, other numbers of replicas have as many groups.
        groups = counts.get("groups", 1)
        groups = replicas if groups == counts.get("replicas", 1) else groups
        self.fits = not self.problems
        self.memory_per_ipu = [need.total for need in self.needs]
        self.bound_by = max(CATEGORIES, key=lambda category: self.spent[category])
        self.seconds_per_update = taken
        self.items_per_second = counts.get("micro_batch_size", 1) * accumulation * groups / taken

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as `popvision plan --json` prints it."""
        own = ("items_per_second", "seconds_per_update", "memory_per_ipu", "fits", "bound_by")
        return {"machine": self.machine.name, **{name: getattr(self, name) for name in own}}

    def table_row(self) -> dict[str, str]:
        """Return the estimate's row of `Estimates.table`: texts with units, by column name."""
        return {
            "machine": self.machine.name,
            "replicas": str(self.replicas),
            "micro-batches": str(self.accumulation),
            "items/s": f"{self.items_per_second:,.1f}",
            "an update": seconds_text(self.seconds_per_update),
            "bubble": share_text(self.bubble),
            "bound by": self.bound_by,
            "largest ipu": size_text(max(self.memory_per_ipu, default=0)),
            "": "fits" if self.fits else "DOES NOT FIT: " + "; ".join(self.problems),
        }


class Estimates:
    """An estimate of a program for each machine and combination of `replicas` and `accumulation`, machine by
    machine; the estimates of a machine begin with the best.

    Args:
        profiles: by kind of machine, as `compile_profiles` returns them
        replicas, accumulation: numbers to compare; empty: the program's own number
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        machines: Iterable[Machine],
        replicas: Sequence[int] = (),
        accumulation: Sequence[int] = (),
    ) -> None:
        self.estimates: list[Estimate] = []
        for machine in machines:
            profile = profiles[machine.kind]
            choices = [
                Estimate(profile, machine, count, micro_batches)
                for count in replicas or [profile.counts.get("replicas", 1)]
                for micro_batches in accumulation or [profile.facts["schedule_micro_batches"]]
            ]
            self.estimates += sorted(choices, key=lambda one: (not one.fits, -one.items_per_second))

    def to_json(self) -> str:
        return json.dumps([one.to_dict() for one in self.estimates], indent=1)

    def save(self, path: str | Path) -> None:
        """Write an HTML page to the file `path`: machines, advice, a timeline, stages and memory."""
        Path(path).write_text(_plan_page(self))

    @property
    def drawn(self) -> tuple[Estimate, Costs] | None:
        """Return the estimate whose step the page draws, and its costs: the first estimate on a machine with
        a chip per ipu. Return None without such a machine."""
        return next(((one, one.costs) for one in self.estimates if one.costs), None)

    def advice(self) -> list[str]:
        """Return a sentence about the busiest ipu of the estimate `drawn`, and one about each change that
        makes a step at least 3 % faster. The list is empty if all estimates are of this host."""
        if self.drawn is None:
            return []
        drawn, costs = self.drawn
        loads = {ipu: sum(spent.values()) for ipu, spent in costs.by_ipu.items()}
        slowest, mean = max(loads, key=lambda ipu: loads[ipu]), fmean(loads.values())
        return [
            f"ipu {slowest} has the most to do: {loads[slowest] / (mean or 1):.2f} times the average ipu."
            f" On {drawn.machine.name} ipus wait {drawn.bubble:.0%} of the time."
        ] + [
            f"{change.what} would make it {change.apart:.2f} times as fast there. Then {change.also}."
            for change in virtual.advised_changes(drawn.profile, costs.step, costs.operation_ns, 0.0)
            if change.apart > 1.03
        ]

    def table(self) -> list[list[str]]:
        """Return a table of all estimates: a row of column names, then a row for each estimate."""
        rows = [one.table_row() for one in self.estimates]
        return [list(cells) for cells in (*rows[:1], *(row.values() for row in rows))]

    def __str__(self) -> str:
        return table_text(self.table())

    __repr__ = __str__


def compile_profiles(program: Sequence[str], kinds: Sequence[str]) -> dict[str, Profile]:
    """Run a program until its first model is compiled, and return a profile of the model by kind of machine.

    The model is not trained. Its weights have no values, so that they take no memory. A program that may have
    failed for this reason (see `poptorch.planning.make_parameters_fake`) is run again with values.

    Args:   program: the path of a Python file, and its arguments; kinds: "apart" or "here" or both
    Raises: ProfileError, if there is no such file, or the program ended before it compiled a model
    """
    if not Path(program[0]).is_file():
        raise ProfileError(f"there is no file {program[0]}\n  fix: popvision plan [OPTIONS] PROGRAM.py")
    code = 0
    for more in ({}, {"values": True}):
        with tempfile.TemporaryDirectory() as folder:
            wish = json.dumps({"folder": folder, "kinds": list(kinds), **more})
            # Its output goes to standard error, since another program may read the plan on standard output.
            code = subprocess.run(
                [sys.executable, *program], env={**os.environ, PLAN_WISH: wish}, stdout=2, check=False
            ).returncode
            found = {kind: Path(folder) / f"{kind}.pop" for kind in kinds}
            if all(path.exists() for path in found.values()):
                return {kind: load(path) for kind, path in found.items()}
            needs_values = Path(folder) / NEEDS_VALUES
            if not needs_values.exists():
                break
            reason = f"{needs_values.read_text()}, since weights had no values"
            print(f"popvision: {reason}: running the program again, with values", file=sys.stderr)
    if code:
        raise ProfileError(f"{program[0]} failed before it compiled a model (exit code {code}): see above")
    raise ProfileError(
        f"{program[0]} ended before it compiled a model\n"
        "  fix: call an executor, or its compile(...), in that program"
    )


def _problems_on_chips(needs: Sequence[Need], machine: Machine, replicas: int) -> Iterator[str]:
    """Yield each reason why a plan fails on a machine with a chip per ipu."""
    if (chips := len(needs) * replicas) > machine.chips:
        yield f"needs {chips} chips, and has {machine.chips}"
    for need in needs:
        if need.total > machine.memory:
            yield f"ipu {need.ipu} needs up to {size_text(need.total)}, and has {size_text(machine.memory)}"


# ---- this machine ----------------------------------------------------------------------------------------


def _step_seconds_on_host(profile: Profile, replicas: int, micro_batches: int) -> tuple[float, float, Spent]:
    """Return a step's seconds on this host, the idle share of its cores, and a core's rough seconds by
    category. If whole steps were measured, the seconds are extrapolated from these, and the idle share is 0;
    else a step with the measured costs of pieces is simulated."""
    measured, cores, spent = profile.facts["measured"], profile.facts.get("threads", 1), Spent(float)
    for operation in profile.operations:  # only to compare the two categories
        spent["compute"] += operation.flops / _CORE_FLOPS
        spent["memory bandwidth"] += operation.bytes / _CORE_BYTES
    if "steps" in measured:
        return _extrapolated_seconds(measured["steps"], micro_batches * replicas), 0.0, spent
    costs: dict[tuple[str, int], float] = defaultdict(float)
    for piece, took in zip(profile.pieces, measured["pieces"], strict=True):
        costs[piece.phase, piece.stage] += took * 1e9
    step = virtual.StepModel.of(
        profile,
        costs,
        updates={ipu: 1e9 * t for ipu, t in zip(profile.devices, measured["updates"], strict=True)},
        micro_batches=micro_batches,
        replicas=replicas,
    )
    work, taken = step.work_ns * replicas, virtual.simulated_ns(step, cores)
    return taken / 1e9, max(0.0, 1 - work / (taken * cores)), spent


def _problems_on_host(profile: Profile, needs: Sequence[Need], replicas: int, loaded: int) -> Iterator[str]:
    """Yield a text if a plan needs more memory than this host has. `loaded`: bytes of a replica's inputs."""
    facts = profile.facts
    # The host's module has a copy of the weights; `base`: memory of a process and its libraries.
    kept = facts["base"] + sum(2 * (need.weights + need.buffers) + need.optimizer for need in needs)
    # In depth-first order up to twice as many micro-batches wait as on separate devices.
    each = sum(need.gradients + 2 * (need.activations or 0) + need.between for need in needs)
    each += 2 * loaded * profile.counts.get("iterations", 1)  # the loader holds those of the next call, too
    wanted = kept * facts.get("processes", 1) + replicas * each
    if wanted > facts["available"]:
        yield f"needs {size_text(wanted)}, and {size_text(facts['available'])} are free"


def _extrapolated_seconds(rows: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds of a step of so many micro-batches, extrapolated from one or two measured steps.

    One measured step is scaled in proportion; through two goes a line. With fewer micro-batches than the
    first measured step the result is the larger of these two numbers.

    Args: rows: (micro-batches, seconds) of each measured step
    """
    first, taken = rows[0]
    in_proportion = taken * micro_batches / first
    if len(rows) == 1:
        return in_proportion
    each = max(0.0, rows[1][1] - taken) / (rows[1][0] - first)
    on_line = taken + each * (micro_batches - first)
    return max(in_proportion, on_line) if micro_batches < first else on_line


# ---- the page --------------------------------------------------------------------------------------------


def _plan_page(plan: Estimates) -> str:
    """Return the page of a plan as HTML that needs no other file."""
    drawn, costs = plan.drawn or (plan.estimates[0], None)
    profile = drawn.profile
    title = f"Plan: {layout_text(profile)}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _html_table(plan.table()),
        *(f"<p class=say>{html.escape(text)}</p>" for text in plan.advice()),
    ]
    phases = profile.phases
    head = ["stage", "ipu", "blocks", "parameters", *(f"FLOPs {PHASES[phase]}" for phase in phases)]
    if costs is not None:
        name = drawn.machine.name
        head += [f"{PHASES[phase]} on {name}" for phase in phases]
        parts += [
            f"<h2>One step on {html.escape(name)}</h2>",
            _timeline(drawn, costs),
            f"<p>{html.escape(drawn.machine.description)}; light: forward, dark: backward. Nothing has run yet.</p>",
        ]
    flops: Counter[tuple[str, int]] = Counter()
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        flops[piece.phase, piece.stage] += operation.flops
    stages = []
    for stage, ipu in enumerate(profile.ipus):
        parameters = sum(block.parameters for block in profile.blocks if block.stage == stage)
        row = [stage, ipu, profile.stages[stage], f"{parameters:,}"]
        row += [f"{flops[phase, stage]:,}" for phase in phases]
        if costs is not None:
            row += [seconds_text(sum(costs.phases.get((p, stage), {}).values())) for p in phases]
        stages.append(row)
    memory = [
        (one.machine.name, *row, size_text(need.code))
        for one in plan.estimates
        for need, row in zip(one.needs, memory_table(one.needs)[1:], strict=True)
    ]
    parts += [
        "<h2>Stages, for a micro-batch</h2>",
        _html_table([head, *stages]),
        "<h2>Memory of an ipu at the most</h2>",
        _html_table([("machine", *memory_table([])[0], "code (in total)"), *memory]),
    ]
    sends = [
        (part.ipu, part.peer, size_text(part.bytes), *part.frequency_and_time)
        for part in profile.instructions
        if part.kind == "send"
    ]
    if sends:
        parts += [
            "<h2>Between ipus</h2>",
            _html_table([("from ipu", "to ipu", "bytes", "each", "when"), *sends]),
        ]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _timeline(drawn: Estimate, costs: Costs) -> str:
    """Return a picture of a simulated step as HTML, with a row for each ipu, and a caption. A step of very
    many micro-batches is drawn with the first ones only."""
    actions = costs.step.actions
    micro_batches = min(drawn.accumulation, max(1, _DRAWN // len(actions)))
    tasks, found = virtual.simulate_step(replace(costs.step, micro_batches=micro_batches))
    rows, width, tall = drawn.profile.devices, 1000, 30
    unit = width / (found.length or 1)
    boxes = [f'<text x="0" y="{i * tall + 17}">ipu {ipu}</text>' for i, ipu in enumerate(rows)]
    for (row, micro_batch), start, end in zip(tasks, found.starts, found.ends, strict=False):
        phase, stage, ipu, _ = actions[row]
        x, wide = 60 + start * unit, max(0.4, (end - start) * unit)
        y = rows.index(ipu) * tall
        label = f"{PHASES[phase]} of stage {stage}, micro-batch {micro_batch}"
        text = f'<text x="{x + 3:.1f}" y="{y + 17}">{micro_batch}</text>' if wide > 18 else ""
        boxes.append(
            f'<g><title>{label}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{tall - 6}"'
            f' fill="{_COLOURS[stage % len(_COLOURS)]}" fill-opacity="{0.55 if phase == "F" else 1}"/>{text}</g>'
        )
    spans = f"{seconds_text(found.length / 1e9)} of the step's {seconds_text(drawn.seconds_per_update)}"
    return (
        f'<svg role="img" aria-label="Timeline of a step" viewBox="0 0 {width + 64} {len(rows) * tall}">'
        f"{''.join(boxes)}</svg>"
        f"<p>Drawn are {micro_batches} of {drawn.accumulation} micro-batches, and the updates: {spans}.</p>"
    )


def _html_table(rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table, whose first row is the names of the columns."""
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
