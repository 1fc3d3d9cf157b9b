"""The figures of a profile, which page, texts and comparisons show.

Each figure is declared once, by `figure`: a method of `Figures` that returns its value.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from popengine.order import BUILT_IN, ORDERS
from popengine.profile import PHASES, Profile
from popengine.texts import counted, table_text

from . import memory, times, virtual
from .units import (
    cores_text,
    count_text,
    factor_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    stage_text,
)

_T = TypeVar("_T")


class Figure(cached_property[_T]):
    """A figure of a profile, which `FIGURES` lists; see `figure`."""

    def __init__(
        self,
        value: Callable[[Any], _T],
        words: str,
        unit: Callable[[Any], str],
        better: str = "",
        shown: str = "",
        note: Callable[[Any], str] = lambda run: "",
        spread: str = "",
    ) -> None:
        super().__init__(value)
        self.words, self.unit, self.better, self.note = words, unit, better, note
        self.shown, self._spread = shown.split(), spread

    def spread(self, run: "Figures") -> float:
        """Return the share by which the figure differs between equal runs."""
        return getattr(run, self._spread, 0.0)


def figure(
    words: str, unit: Callable[[Any], str], **more: Any
) -> Callable[[Callable[[Any], _T]], cached_property[_T]]:
    """Declare a figure: decorate the method of `Figures` that returns its value (None: not recorded). The method's name
    is the figure's key in `Report.figures()`.

    Args:
        words:  the figure's name for readers
        unit:   returns a value, or None, as a text with its unit
        better: which of two runs' values is better: "less", "more", or "": neither
        shown:  where else, with spaces: "tile" (of the page's overview), "summary", "compare"
        note:   returns what tile and summary say beside the value
        spread: the name of the figure that is its spread: equal runs differ by this share
    """
    return lambda value: Figure(value, words, unit, **more)


# ---- what tiles and summary say of a figure ----------------------------------------------------------------


def fact_sentences(figures: "Figures") -> list[str]:
    """Return three facts that need no simulation, if they are known: the slowest stage; the bubble by the schedule's
    formula, and how many micro-batches halve it; the ipu that needs the most memory."""
    facts = _stage_sentence(figures), _bubble_sentence(figures.profile), _memory_sentence(figures)
    return [fact for fact in facts if fact]


def bubble_note(figures: "Figures") -> str:
    """Return the bubble's formula, and the measured bubble."""
    share, where = figures.bubble_measured, figures.profile.facts.get("joined", {})
    place = "on the devices" if "devices" in where else "in the instances"
    measured = "" if share is None else f"Measured {place}: {share_text(share)}."
    return " ".join(filter(None, ["Simulated.", _bubble_sentence(figures.profile), measured]))


def stage_note(figures: "Figures") -> str:
    """Return what the slowest stage takes, alone and relative to the average stage."""
    slowest = figures.stages[figures.slowest or 0]
    text = f"{slowest.blocks}, {seconds_text(slowest.total / 1e9)} a micro-batch."
    return " ".join(filter(None, [text, _stage_sentence(figures)]))


def memory_note(figures: "Figures") -> str:
    """Return whether the memory fits, and which ipu needs the most."""
    fits = "" if figures.fits is None else "Fits into" if figures.fits else "Does not fit into"
    text = f"{fits} {size_text(figures.capacity)}: {figures.capacity_of}." if fits else "At the most."
    return " ".join(filter(None, [text, _memory_sentence(figures)]))


def cores_note(figures: "Figures") -> str:
    """Return what a step on these cores is made of: waits for a core, time without a ready task, and the rest."""
    cores, idle = f"On {cores_text(figures.profile)}", figures.idle_here
    if idle is None:
        return f"{cores}."
    waited = (1 - idle) * (1 - (1 if figures.core_share is None else figures.core_share))
    if waited >= 0.005:
        without = seconds_text((figures.step_seconds or 0.0) * (1 - waited))
        waits = f"the waits for other programs and Python's lock, which took {waited:.0%}"
        cores = f"{cores}: {without} without {waits}"
    return f"{cores}; no task was ready for {share_text(idle)}."


def calls_note(figures: "Figures") -> str:
    """Return what the throughput counts."""
    count = counted(figures.calls, "call")
    overall = rate_text(figures.samples_per_second_overall)
    return (
        f"In {count} of {counted(figures.samples_per_call, 'sample')}; {overall} with the time between calls."
    )


def passes_note(figures: "Figures") -> str:
    """Return the time of each pass."""
    return ", ".join(f"{entry.name} {seconds_text(entry.seconds)}" for entry in figures.profile.passes)


def _stage_sentence(figures: "Figures") -> str:
    if figures.slowest is None or len(figures.stages) < 2:
        return ""
    slowest = figures.stages[figures.slowest].stage
    return f"Stage {slowest} takes {figures.unevenness:.2f} times as long as the average stage."


def _memory_sentence(figures: "Figures") -> str:
    if len(figures.needs) < 2:
        return ""
    most = max(figures.needs, key=lambda need: need.total)
    return f"ipu {most.ipu} needs the most memory, {size_text(most.total)}."


def _bubble_sentence(profile: Profile) -> str:
    """Return the bubble of n equal stages and m micro-batches by its formula, and the change that makes it smaller."""
    stages, count = len(profile.devices), profile.facts.get("schedule_micro_batches", 0)
    if (share := times.ideal_bubble(profile)) is None or stages < 2:
        return ""
    ideal, mode = f"With equal stages the bubble is {share_text(share)}", profile.facts.get("mode")
    if mode in BUILT_IN and not ORDERS[mode].overlaps:
        return f"{ideal} for any number of micro-batches, because the stages work one after another."
    if mode in BUILT_IN and math.isclose(share, (stages - 1) / (count + stages - 1)):
        formula = f"(n - 1) / (m + n - 1) = {stages - 1} / {count + stages - 1}"
        return f"{ideal} = {formula}; {2 * count + stages - 1} micro-batches instead of {count} halve it."
    return f"{ideal}."


# ---- the figures -------------------------------------------------------------------------------------------


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
        self._replicas = profile.counts.get("replicas", 1)
        self._events, self._warm = events, _sum_warm_calls(profile)
        costs, updates = times.row_costs(events), times.update_costs(events)
        self.stages = times.stage_times(profile, costs, updates)
        computing = {row for row, task in enumerate(profile.tasks) if task.computes}
        self._is_computed = any(stage.total for stage in self.stages) and computing <= costs.keys()
        self.timed = times.with_row_costs(profile, costs)
        self.groups = operation_sums(self.timed)
        # The shares of a step's time are unknown if each recorded step was cut off.
        self._whole = events if times.whole_steps(profile) else []
        self.usages = times.core_usages(self._whole)

        step = virtual.DeviceStep.of(profile, costs, updates)
        self._step = step if self._is_computed and step.is_known else None
        self.device_usages, runs = list[times.Usage](), list[Any]()
        self.schedules: list[dict[str, Any]] = []  # the same step in the order of each schedule
        if self._step:
            self.device_usages = times.ipu_usages(self.stages, step.micro_batches, step.ns)
            runs = step.runs(profile, costs)
            self.schedules = [_schedule_entry(profile, one, costs) for one in virtual.other_schedules(step)]
        self.devices = replace(profile, runs=tuple(runs))
        self.needs, held_by = memory.memory_needs(profile, runs), facts.get("capacity") or {}
        self.capacity = held_by.get("bytes")  # None: unknown
        self.capacity_of = held_by.get("of", "") + (", which all ipus share" if held_by.get("shared") else "")
        self.is_shared = bool(held_by.get("shared"))
        self.fits = self.wanted <= self.capacity if self.capacity and self.needs else None
        self.host = _host_seconds(profile)

    # ---- the overview's tiles

    @figure(
        "bubble on separate devices",
        share_text,
        better="less",
        shown="tile summary compare",
        note=bubble_note,
    )
    def bubble_apart(self) -> float | None:
        return self._step.bubble if self._step else None

    @figure(
        "step on separate devices",
        seconds_text,
        shown="tile summary",
        note=lambda run: "Simulated with the recorded costs.",
    )
    def step_apart(self) -> float | None:
        return self._step.ns / 1e9 if self._step else None

    @figure("step on these cores", seconds_text, shown="tile summary", note=cores_note)
    def step_seconds(self) -> float | None:
        _, steps, ns, _ = self._warm
        return ns / steps / 1e9 if steps else None

    @figure("slowest stage", stage_text, shown="tile summary", note=stage_note)
    def slowest(self) -> int | None:
        totals = [stage.total for stage in self.stages]
        return totals.index(max(totals)) if self._is_computed else None

    @figure("memory", size_text, shown="tile summary", note=memory_note)
    def wanted(self) -> int:
        """Return the bytes of the memory that must hold the most: that which all ipus share, or that of an ipu."""
        totals = [need.total for need in self.needs]
        return self._replicas * sum(totals) if self.is_shared else max(totals, default=0)

    @figure(
        "throughput",
        rate_text,
        better="more",
        shown="tile summary compare",
        note=calls_note,
        spread="step_spread",
    )
    def samples_per_second(self) -> float | None:
        calls, _, ns, _ = self._warm
        return calls * self.samples_per_call / ns * 1e9 if ns > 0 else None  # in the time of calls

    # ---- further figures

    @figure(
        "throughput with the time between calls",
        rate_text,
        better="more",
        shown="compare",
        spread="step_spread",
    )
    def samples_per_second_overall(self) -> float | None:
        calls, _, _, ns = self._warm
        return calls * self.samples_per_call / ns * 1e9 if ns > 0 else None

    @figure(
        "step on these cores, per row", seconds_text, better="less", shown="compare", spread="step_spread"
    )
    def step_per_row(self) -> float | None:
        groups = self.profile.counts.get("groups", 1)
        return self.step_seconds and self.step_seconds / self._rows_of_step / groups

    @figure(
        "step on separate devices, per row", seconds_text, better="less", shown="compare", spread="spread"
    )
    def step_apart_per_row(self) -> float | None:
        return self.step_apart and self.step_apart / self._rows_of_step

    @figure("compilation", seconds_text, better="less", shown="summary compare", note=passes_note)
    def compile_seconds(self) -> float:
        return sum(entry.seconds for entry in self.profile.passes)

    @figure("bubble, measured", share_text, better="less", shown="compare")
    def bubble_measured(self) -> float | None:
        joined = self.profile.facts.get(
            "joined", {}
        )  # of a profile with the tasks of several instances or devices
        if not joined or joined["missing"]:
            return None
        place_of = {int(core): place for core, (place, _) in joined["cores"].items()}
        return times.measured_bubble(self._whole, place_of)

    @figure("bubble, ideal", share_text, better="less", shown="compare")
    def bubble_ideal(self) -> float | None:
        return times.ideal_bubble(self.profile)

    @figure("these cores waited", share_text, better="less", shown="compare")
    def idle_here(self) -> float | None:
        return times.waiting_share(self.usages)

    @figure("slowest stage / average stage", factor_text, better="less", shown="compare", spread="spread")
    def unevenness(self) -> float:
        totals = [stage.total for stage in self.stages]
        return max(totals) * len(totals) / sum(totals) if self._is_computed else 1.0

    @figure("largest ipu", size_text, better="less", shown="compare")
    def largest_ipu(self) -> int | None:
        return max((need.total for need in self.needs), default=None)

    @figure("all ipus", size_text, better="less", shown="compare")
    def all_ipus(self) -> int | None:
        return sum(need.total for need in self.needs) or None

    @figure("activations", size_text, better="less", shown="compare")
    def activations(self) -> int:
        return sum(need.activations or 0 for need in self.needs)

    @figure("calls", count_text)
    def calls(self) -> int:
        return self.profile.facts.get("calls", 0)

    @figure("steps", count_text)
    def steps(self) -> int:
        return self.profile.facts.get("steps", 0)

    @figure("samples of a call, over all instances", count_text)
    def samples_per_call(self) -> int:
        factors = ("micro_batch_size", "accumulation", "groups", "iterations", "instances")
        return math.prod(self.profile.counts.get(name, 1) for name in factors)

    @figure("share of a core that computations got", share_text)
    def core_share(self) -> float | None:
        return times.core_share(self._events)

    @figure("spread of steps", share_text)
    def step_spread(self) -> float:
        return times.relative_spread([(c.end - c.start) / c.steps for c in self.profile.calls[1:] if c.steps])

    @figure("spread of costs", share_text)
    def spread(self) -> float:
        return times.cost_spread(self._events)

    @property
    def _rows_of_step(self) -> int:
        """Return the rows that a replica reads in a step."""
        size = self.profile.counts.get("micro_batch_size", 1)
        return size * self.profile.facts.get("schedule_micro_batches", 1)


FIGURES: dict[str, Figure[Any]] = {
    name: entry for name, entry in vars(Figures).items() if isinstance(entry, Figure)
}


def shown_figures(run: Figures, place: str) -> list[tuple[str, str, str]]:
    """Return (words, value with its unit, note) of each known figure that is shown at a place."""
    entries = [(name, entry) for name, entry in FIGURES.items() if place in entry.shown]
    values = [(entry, getattr(run, name)) for name, entry in entries]
    return [(entry.words, entry.unit(value), entry.note(run)) for entry, value in values if value is not None]


def _schedule_entry(profile: Profile, step: virtual.DeviceStep, costs: Mapping[int, float]) -> dict[str, Any]:
    """Return what the page compares of a step on separate devices: the name of its order, its ns, its bubble, the most
    activations of an ipu in bytes (None: not recorded), and the rows of its runs."""
    runs = step.runs(profile, costs, most=600)
    held = [need.activations for need in memory.memory_needs(profile, runs) if need.activations is not None]
    return {
        "name": step.order,
        "ns": step.ns,
        "bubble": step.bubble,
        "activations": max(held, default=None),
        "rows": runs,
    }


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
    found = defaultdict(float, {"in calls": profile.facts.get("ns_in_calls", 0) / 1e9})
    if calls := profile.calls:
        found["between calls"] = max(0.0, (calls[-1].end - calls[0].start) / 1e9 - found["in calls"])
    for event in profile.host:
        seconds = (event.end - event.start) / 1e9
        found[event.kind] += seconds
        is_between = calls and calls[0].start <= event.start < calls[-1].end
        if is_between and event.kind in ("compilation", "other calls"):
            found["between calls"] -= seconds
    return dict(found)


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
    has it; "": the model), "ns" by phase of a step's micro-batches, and "bytes" that its results hold until a
    backward or another ipu has read them, of one micro-batch. A module stands before those that it contains."""
    held = {tensor.name: tensor.bytes for tensor in profile.tensors if tensor.kind == "activation"}
    rows: dict[str, dict[str, Any]] = {}
    for operation in profile.operations:
        phase, names = profile.tasks[operation.task].phase, operation.module.split(".")
        paths = [".".join(names[:depth]) for depth in range(1, len(names) + 1)]
        for path in dict.fromkeys(["", *(path for path in paths if path not in ("", "?"))]):
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
    """Return a row for each compared figure of two runs, then for the time of each stage and block of either run."""
    rows = []
    for name, entry in FIGURES.items():
        if "compare" in entry.shown:
            values, spread = (getattr(a, name), getattr(b, name)), entry.spread(a) + entry.spread(b)
            rows.append(_compared(entry.words, entry.unit, entry.better, *values, spread))
    first, second = _part_seconds(a), _part_seconds(b)
    rows += [
        _compared(name, seconds_text, "less", first.get(name), second.get(name), a.spread + b.spread)
        for name in {**first, **second}
    ]
    return rows


def _compared(
    words: str, unit: Callable[[Any], str], better: str, one: float | None, other: float | None, spread: float
) -> Row:
    ratio, side = None, ""
    if one is not None and other is not None:
        ratio = other / one if one else None
        if better and abs(one - other) > max(0.01, spread) * max(abs(one), abs(other)):
            side = "second" if (other > one) == (better == "more") else "first"
    return Row(words, unit(one), unit(other), ratio, spread, side)


def _part_seconds(run: Figures) -> dict[str, float]:
    """Return the seconds of each phase of each stage and block, for a row of the batch."""
    size, found = run.profile.counts.get("micro_batch_size", 1), defaultdict[str, float](float)
    for stage in run.stages:
        spent = {PHASES[phase]: ns / size for phase, ns in stage.phases.items()}
        for phase, ns in {**spent, "update": stage.update / run._rows_of_step}.items():
            if ns:
                found[f"stage {stage.stage}, {phase}, per row"] = ns / 1e9
    for row in run.groups["block"]:  # a block may be in several stages
        name = f"block {row['block']}, {PHASES[row['phase']]}, per row"
        found[name] += row["ns"] / max(row["calls"], 1) / size / 1e9
    return found


def comparison_text(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Return a comparison of two runs as a table for the terminal, with ✓ after the better figure."""
    lines = [["", names[0][-24:], names[1][-24:], "ratio", "spread"]]
    for row in rows:
        sides = {"first": row.first, "second": row.second}
        cells = [text + " ✓" * (row.better == side) for side, text in sides.items()]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append([row.name[:40], *cells, ratio, f"± {row.spread:.0%}" if row.spread >= 0.005 else ""])
    foot = "✓ is better; spread: between equal steps (a smaller difference says nothing)"
    return f"{table_text(lines)}\n{foot}\n"
