"""The figures of a profile: everything that the page, the text and the comparison say, computed here only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from popengine.profile import Event, Profile

from . import advice, memory, trace


@dataclass(frozen=True)
class Figures:
    """What a profile says. Shares are fractions, times seconds unless the name says otherwise."""

    samples_per_call: int
    samples_per_second: float | None  # while a call runs, without the first call if there are more
    samples_per_second_overall: float | None  # with the time between calls
    calls: int
    steps: int
    step_seconds: float | None
    compile_seconds: float
    bubble_ideal: float | None
    bubble_measured: float | None
    usages: list[trace.Usage]
    stages: list[trace.StageTime]
    slowest: int | None
    moves: list[trace.Move]
    even_cut: float
    needs: list[memory.Need]
    capacity: int | None
    capacity_of: str
    fits: bool | None
    host: dict[str, float]
    copies: dict[str, dict[str, float]]  # of a step, over all ipus: ns and bytes, by kind of instruction
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For the page; with the sums that properties give."""
        data = asdict(self)
        data["needs"] = [{**asdict(need), "always": need.always, "total": need.total} for need in self.needs]
        data["stages"] = [{**asdict(stage), "total": stage.total} for stage in self.stages]
        return data


def figures(profile: Profile) -> Figures:
    """Compute all figures; what a profile has no events for is None or empty."""
    events = trace.steady(profile)
    usages, times = trace.usage(events), trace.stage_times(profile, events)
    computed = any(time.total for time in times)
    needs = memory.needs(profile)
    capacity = profile.facts.get("capacity") or {}
    replicas = profile.counts.get("replicas", 1)
    shared = bool(capacity.get("shared"))
    wanted = (
        replicas * sum(need.total for need in needs)
        if shared
        else max((need.total for need in needs), default=0)
    )
    limit = capacity.get("bytes")
    first = Figures(
        samples_per_call=samples_per_call(profile),
        samples_per_second=_rate(profile, between=False),
        samples_per_second_overall=_rate(profile, between=True),
        calls=profile.facts.get("calls", 0),
        steps=profile.facts.get("steps", 0),
        step_seconds=_step_seconds(profile),
        compile_seconds=sum(entry.seconds for entry in profile.passes),
        bubble_ideal=trace.ideal_bubble(profile),
        bubble_measured=trace.measured_bubble(usages),
        usages=usages,
        stages=times,
        slowest=max(times, key=lambda time: time.total).stage if computed else None,
        moves=trace.moves(profile, times) if computed else [],
        even_cut=trace.even_cut(profile, times) if computed else 1.0,
        needs=needs,
        capacity=limit,
        capacity_of=capacity.get("of", "") + (", which all ipus share" if shared else ""),
        fits=None if not limit or not needs else wanted <= limit,
        host=host_times(profile),
        copies=copies(events),
        warnings=[],
    )
    return Figures(**{**vars(first), "warnings": advice.warnings(profile, first)})


def samples_per_call(profile: Profile) -> int:
    counts = profile.counts
    per_step = counts.get("micro_batch_size", 1) * counts.get("accumulation", 1) * counts.get("groups", 1)
    return per_step * counts.get("iterations", 1) * counts.get("instances", 1)


def _rate(profile: Profile, between: bool) -> float | None:
    facts, calls = profile.facts, profile.calls
    count, ns = facts.get("calls", 0), facts.get("ns_in_calls", 0)
    if not calls or not count:
        return None
    first, last = calls[0], calls[-1]
    if count > 1:  # the first call pays for cold memory
        count, ns = count - 1, ns - (first.end - first.start)
    if between:
        ns = last.end - (first.end if len(calls) > 1 else first.start)
    return samples_per_call(profile) * count / ns * 1e9 if ns > 0 else None


def _step_seconds(profile: Profile) -> float | None:
    steps, ns = profile.facts.get("steps", 0), profile.facts.get("ns_in_calls", 0)
    return ns / steps / 1e9 if steps else None


def host_times(profile: Profile) -> dict[str, float]:
    """Seconds of the host: in calls, between them, and by what it noted meanwhile."""
    found: dict[str, float] = defaultdict(float)
    calls = profile.calls
    found["in calls"] = profile.facts.get("ns_in_calls", 0) / 1e9
    if calls:
        whole = (calls[-1].end - calls[0].start) / 1e9
        found["between calls"] = max(0.0, whole - found["in calls"])
    for event in profile.host:
        found[event.kind] += (event.end - event.start) / 1e9
    return dict(found)


def copies(events: list[Event]) -> dict[str, dict[str, float]]:
    """What moves data: inputs, values between ipus and outputs."""
    steps = len({(event.call, event.step) for event in events}) or 1
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.kind in ("load", "send", "store"):
            row = found.setdefault(event.kind, {"ns": 0.0, "bytes": 0.0})
            row["ns"] += (event.end - event.start) / steps
            row["bytes"] += event.bytes / steps
    return found


def block_rows(profile: Profile) -> list[dict[str, Any]]:
    """Per block and phase: all of the detailed step, but for `calls`, its micro-batches."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        key = (operation.block, piece.phase, piece.stage)
        row = rows.setdefault(
            key,
            {
                "block": operation.block,
                "phase": piece.phase,
                "stage": piece.stage,
                "ipu": piece.ipu,
                "ns": 0,
                "calls": 0,
                "flops": 0,
                "bytes": 0,
            },
        )
        row["ns"] += operation.ns
        row["calls"] = max(row["calls"], operation.calls)
        row["flops"] += operation.flops * operation.calls
        row["bytes"] += operation.bytes * operation.calls
    return list(rows.values())
