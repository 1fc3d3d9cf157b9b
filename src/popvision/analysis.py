"""The figures of a profile, which page and text show, and a comparison of two runs."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from popengine.profile import PHASES, Profile
from popengine.texts import table_text

from . import memory, times, virtual
from .units import cores_text, rate_text, seconds_text, share_text, size_text


class Figure(NamedTuple):
    """The declaration of a figure, which the page, the summary and a comparison of two runs read. Its value is the
    attribute `name` of `Figures`. Of two rates the larger one is better, of all other figures but `OTHERS` the smaller
    one."""

    name: str
    words: str
    text: Callable[[float | None], str]  # adds the unit
    tile: str = ""  # the tile of the overview, which begins with its first figure; "": in no tile
    rows: str = ""  # the attribute with the rows of the batch by which a comparison divides the value


OTHERS = "cores used by other programs"
FIGURES = (
    Figure("bubble_apart", "bubble of separate devices", share_text, "bubble"),
    Figure("bubble_measured", "measured bubble", share_text, "bubble"),
    Figure("bubble_ideal", "bubble with equal stages", share_text),
    Figure("step_apart", "a step on separate devices", seconds_text, "apart", "replica_rows"),
    Figure("step_seconds", "a step on these cores", seconds_text, "here", "step_rows"),
    Figure("step_here", "a step without waits", seconds_text, "here", "step_rows"),
    Figure("others_share", OTHERS, share_text, "here"),
    Figure("idle_here", "time without a ready task", share_text, "here"),
    Figure("samples_per_second", "throughput", rate_text, "throughput"),
    Figure("samples_per_second_overall", "throughput with the time between calls", rate_text, "throughput"),
    Figure("wanted", "memory", size_text, "memory"),
    Figure("largest", "memory of the largest ipu", size_text),
    Figure("activations", "activations", size_text),
    Figure("compile_seconds", "compilation", seconds_text),
)


class Figures:
    """All figures of a profile. A figure whose events were not recorded is None, empty or 0.

    Shares are fractions. Times are in seconds, except in `usages`, `device_usages`, `stages` and `groups`, where
    they are in ns. What the cores of this host did is recorded. What separate devices would do, of which each is
    an ipu and does one thing at a time, is simulated with the recorded costs: `step_apart`, `bubble_apart`,
    `device_usages`, `needs`, and `devices`, the profile of one such step.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        facts, events = profile.facts, times.steady_events(profile)
        replicas = profile.counts.get("replicas", 1)
        calls, steps, ns, ns_with_gaps = _sum_warm_calls(profile)
        factors = ("micro_batch_size", "accumulation", "groups", "iterations", "instances")
        rows = math.prod(profile.counts.get(name, 1) for name in factors)
        self.samples_per_call = rows  # over all instances
        self.replica_rows = profile.counts.get("micro_batch_size", 1) * facts.get("schedule_micro_batches", 1)
        self.step_rows = self.replica_rows * profile.counts.get("groups", 1)  # of a step
        self.samples_per_second = calls * rows / ns * 1e9 if ns > 0 else None  # in the time of calls
        self.samples_per_second_overall = calls * rows / ns_with_gaps * 1e9 if ns_with_gaps > 0 else None
        self.calls, self.steps = facts.get("calls", 0), facts.get("steps", 0)
        self.step_seconds = ns / steps / 1e9 if steps else None

        costs, updates = times.row_costs(events), times.update_costs(profile, events)
        self.stages = times.stage_times(profile, costs, updates)
        of_step = [(call.end - call.start) / call.steps for call in profile.calls[1:] if call.steps]
        self.spread = max(times.cost_spread(events), times.relative_spread(of_step))  # of equal steps' times
        self.others_share = times.others_share(events)
        totals = [stage.total for stage in self.stages]
        computing = {row for row, task in enumerate(profile.tasks) if task.computes}
        computed = sum(totals) > 0 and computing <= costs.keys()
        self.slowest = totals.index(max(totals)) if computed else None
        self.unevenness = max(totals) * len(totals) / sum(totals) if computed else 1.0  # slowest / average
        self.timed = times.with_row_costs(profile, costs)
        self.groups = operation_sums(self.timed)

        # The shares of a step's time are unknown if each recorded step was cut off.
        whole_steps = events if times.whole_steps(profile) else []
        self.usages = times.core_usages(whole_steps)
        self.idle_here = times.waiting_share(self.usages)
        self.cores = cores_text(profile, len(self.usages))
        self.bubble_ideal = times.ideal_bubble(profile)
        joined = facts.get("joined", {})  # of a profile with the tasks of several instances or devices
        self.bubble_measured = None
        if joined and not joined["missing"]:
            place_of = {int(core): place for core, (place, _) in joined["cores"].items()}
            self.bubble_measured = times.measured_bubble(whole_steps, place_of)
        self.step_apart, self.bubble_apart, self.device_usages, runs = None, None, [], []
        self.step_here = None  # on these cores, if none of them waited
        step = virtual.DeviceStep.of(profile, costs, updates)
        if computed and step.is_known:
            self.step_apart, self.bubble_apart = step.ns / 1e9, step.bubble
            self.step_here = replicas * step.work / max(1, facts.get("threads", 1)) / 1e9
            self.device_usages = times.ipu_usages(self.stages, step.micro_batches, step.ns)
            runs = step.runs(profile, costs)
        self.devices = replace(profile, runs=tuple(runs))

        self.compile_seconds = sum(entry.seconds for entry in profile.passes)
        self.needs = memory.memory_needs(profile, runs)
        totals = [need.total for need in self.needs]
        self.largest = max(totals, default=None)
        self.activations = sum(need.activations or 0 for need in self.needs)
        self.wanted = replicas * sum(totals)
        self.capacity = facts.get("capacity")  # bytes of the machine's memory; None: unknown
        self.fits = self.wanted <= self.capacity if self.capacity and self.needs else None

        self.host = _host_seconds(profile)


def _sum_warm_calls(profile: Profile) -> tuple[int, int, int, int]:
    """Return the number of calls, of their steps, the ns spent in these calls, and the ns with those between them.
    The first of several calls is left out: it is slower, since memory is cold."""
    calls, steps, ns = (profile.facts.get(name, 0) for name in ("calls", "steps", "ns_in_calls"))
    if not profile.calls:
        return calls, steps, ns, 0
    first, end = profile.calls[0], profile.calls[-1].end
    if calls > 1 and steps > first.steps:
        return calls - 1, steps - first.steps, ns - (first.end - first.start), end - first.end
    return calls, steps, ns, end - first.start


def _host_seconds(profile: Profile) -> dict[str, float]:
    """Return the host's seconds "in calls", "between calls" (without other plans), and by kind of `HostEvent`."""
    durations = defaultdict(float, {"in calls": profile.facts.get("ns_in_calls", 0) / 1e9})
    if calls := profile.calls:
        durations["between calls"] = max(0.0, (calls[-1].end - calls[0].start) / 1e9 - durations["in calls"])
    for event in profile.host:
        seconds = (event.end - event.start) / 1e9
        durations[event.kind] += seconds
        is_between = calls and calls[0].start <= event.start < calls[-1].end
        if is_between and event.kind in ("compilation", "other calls"):
            durations["between calls"] -= seconds
    return dict(durations)


def operation_sums(profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `_sums_by` for "block", "where" and "kind", and as "tree" those of `_module_tree`."""
    groups = {by: _sums_by(profile, by) for by in ("block", "where", "kind")}
    return {**groups, "tree": _module_tree(profile)}


def _sums_by(profile: Profile, by: str) -> list[dict[str, Any]]:
    """Return a dictionary of sums for each group of operations with the same phase and the same value of the field
    `by`. A block that is in two stages is two groups. `calls` is the number of micro-batches; `stage` and `ipu` are
    -1 if they differ between the group's operations."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for operation in profile.operations:
        task, name = profile.tasks[operation.task], getattr(operation, by)
        start = {by: name, "phase": task.phase, "stage": task.stage, "ipu": task.ipu}
        start |= dict.fromkeys(("ns", "calls", "flops", "bytes"), 0)
        row = rows.setdefault((name, task.phase, task.stage if by == "block" else -1), start)
        for number in ("stage", "ipu"):
            row[number] = row[number] if row[number] == getattr(task, number) else -1
        row["ns"] += operation.ns
        row["calls"] = max(row["calls"], operation.calls)
        row["flops"] += operation.flops * operation.calls
        row["bytes"] += operation.bytes * operation.calls
    return list(rows.values())


def _module_tree(profile: Profile) -> list[dict[str, Any]]:
    """Return a dictionary of sums for each module of the model, with all that it contains: "path" (as `named_modules`
    has it; "": the model; "?": not known), "ns" by phase of a step's micro-batches, and "bytes" that its results hold
    until a backward or another ipu has read them, of one micro-batch. A module stands before those that it contains."""
    held = {tensor.name: tensor.bytes for tensor in profile.tensors if tensor.kind == "activation"}
    rows: dict[str, dict[str, Any]] = {}
    for operation in profile.operations:
        phase, names = profile.tasks[operation.task].phase, operation.module.split(".")
        paths = [".".join(names[:depth]) for depth in range(1, len(names) + 1)]
        for path in dict.fromkeys(["", *paths]):
            row = rows.setdefault(path, {"path": path, "ns": defaultdict(int), "bytes": 0})
            row["ns"][phase] += operation.ns
            row["bytes"] += held.get(operation.name, 0)
    return list(rows.values())


# ---- two runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One figure of two runs."""

    name: str
    first: str  # with a unit; "–" if the run lacks the figure
    second: str
    ratio: float | None  # second / first; None if a run lacks the figure
    spread: float  # the share by which the figure differs between equal runs
    better: str  # "first", "second", or "" if one is missing, or they differ by at most `spread` or 1 %


def compare_figures(a: Figures, b: Figures) -> list[Row]:
    """Return a row for each figure of two runs: the declared ones, then the times of each stage and block of either."""
    runs, rows = (_compared_values(a), _compared_values(b)), []
    steady = a.spread + b.spread  # of times and rates
    for name in {**runs[0], **runs[1]}:
        (first, text), (second, _) = (run.get(name, (None, seconds_text)) for run in runs)
        spread, ratio, better = steady if text in (seconds_text, rate_text) else 0.0, None, ""
        if first is None and second is None:
            continue
        if first is not None and second is not None:
            ratio = second / first if first else None
            if abs(first - second) > max(0.01, spread) * max(abs(first), abs(second)) and name != OTHERS:
                better = "second" if (second > first) == (text is rate_text) else "first"
        rows.append(Row(name, text(first), text(second), ratio, spread, better))
    return rows


def _compared_values(figures: Figures) -> dict[str, tuple[float | None, Callable[[float | None], str]]]:
    """Return (value, function that adds the unit) of each compared figure of a run, by name. Times are those of a row
    of the batch."""
    values, size = {}, figures.profile.counts.get("micro_batch_size", 1)  # rows
    for figure in FIGURES:
        value, rows = getattr(figures, figure.name), getattr(figures, figure.rows, 1)
        values[figure.words + ", per row" * bool(figure.rows)] = value and value / rows, figure.text
    for stage in figures.stages:
        times = {PHASES[phase]: ns / size for phase, ns in stage.phases.items()}
        for phase, ns in {**times, "update": stage.update / figures.replica_rows}.items():
            if ns:
                values[f"stage {stage.stage}, {phase}, per row"] = ns / 1e9, seconds_text
    for row in figures.groups["block"]:
        name = f"block {row['block']}, {PHASES[row['phase']]}, per row"
        before = values[name][0] if name in values else 0.0  # of another stage
        ns = row["ns"] / max(row["calls"], 1) / size
        values[name] = (before or 0.0) + ns / 1e9, seconds_text
    return values


def comparison_text(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Return a comparison of two runs as a table for the terminal, with a tick after the better figure."""
    lines = [["", names[0][-24:], names[1][-24:], "ratio", "spread"]]
    for row in rows:
        sides = {"first": row.first, "second": row.second}
        cells = [text + " ✓" * (row.better == side) for side, text in sides.items()]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append([row.name[:40], *cells, ratio, f"± {row.spread:.0%}" if row.spread >= 0.005 else ""])
    foot = "✓ is better; spread: between equal steps (a smaller difference says nothing)"
    return f"{table_text(lines)}\n{foot}\n"
