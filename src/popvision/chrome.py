"""A trace in the Chrome format, which Perfetto and chrome://tracing open.

The cores of the host have a track each, with the operations of the detailed step. Below is a simulated step on
separate devices: a track for each ipu, with arrows from sends to receives and counters of memory. The host has
its events and a counter of the time per step.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from popengine.profile import PHASES, Event, Profile

from . import memory
from .analysis import Figures


def chrome_trace(profiles: list[Profile]) -> str:
    """Return a trace as JSON: each profile's host, its cores and its separate devices are processes."""
    events: list[dict[str, Any]] = []
    for number, profile in enumerate(profiles):
        host, cores, apart = (3 * number + i for i in (1, 2, 3))
        devices, recorded, name = Figures(profile).devices, [*profile.events()], profile.name
        joined = profile.facts.get("joined", {"cores": {}})["cores"]  # of several instances
        names = {at: f"core {at}" if at >= 0 else "messages" for at in sorted({e.core for e in recorded})}
        names |= {int(at): text for at, (_, text) in joined.items()}
        ipus = {ipu: f"ipu {ipu}" for ipu in profile.devices}
        events += _track_names(host, f"{name}, host", {0: "calls"})
        events += _track_names(cores, f"{name}, these cores", names)
        events += _track_names(apart, f"{name}, separate devices (simulated)", ipus)
        events += _host_events(profile, host)
        events += [_task_slice(event, cores, event.core) for event in recorded]
        events += _operation_slices(profile, recorded, cores)
        events += [_task_slice(event, apart, event.ipu) for event in devices.events()]
        events += _flow_events(devices, apart)
        for ipu in profile.devices if profile.tensors else ():
            for ns, size in memory.bytes_curve(profile, devices.runs, ipu):
                events.append(_event("C", f"held on ipu {ipu}", apart, ipu, ns, args={"bytes": size}))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _event(phase: str, name: str, process: int, thread: int, ns: float, **more: Any) -> dict[str, Any]:
    """Return an event that begins at `ns`. `phase` is the format's letter for its type; `more` are further fields."""
    return {"name": name, "ph": phase, "ts": ns / 1e3, "pid": process, "tid": thread, **more}


def _slice(
    name: str, process: int, thread: int, start: float, end: float, kind: str = "host", **arguments: Any
) -> dict[str, Any]:
    """Return an event that lasts from `start` to `end` (ns)."""
    more = {"dur": (end - start) / 1e3, "cat": kind, "args": arguments}
    return _event("X", name, process, thread, start, **more)


def _track_names(process: int, name: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", process, 0, 0, args={"name": name})
    for thread, text in threads.items():
        yield _event("M", "thread_name", process, thread, 0, args={"name": text})


def _task_slice(event: Event, process: int, thread: int) -> dict[str, Any]:
    """Return the slice of a task, named by its phase or kind, its stage and its micro-batch: `forward 2.5`."""
    name = PHASES[event.phase] if event.computes else event.kind
    place = f" {event.stage}.{event.micro_batch}" if event.phase else ""
    arguments = {"stage": event.stage, "micro_batch": event.micro_batch} if event.phase else {}
    arguments |= {"step": event.step, "ipu": event.ipu, "replica": event.replica}
    return _slice(name + place, process, thread, event.start, event.end, event.kind, **arguments)


def _flow_events(profile: Profile, process: int) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each transfer between ipus."""
    for number, (sent, received, _) in enumerate(memory.transfers(profile, profile.runs)):
        source, target = (profile.tasks[run.task].ipu for run in (sent, received))
        more = {"cat": "transfer", "id": number + 1_000_000 * process}
        yield _event("s", "transfer", process, source, sent.end, **more)
        yield _event("f", "transfer", process, target, received.start, bp="e", **more)


def _operation_slices(profile: Profile, events: Sequence[Event], process: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each operation of the detailed step, as long as its share of its computation's time."""
    inside = memory.operation_end_shares(profile)
    detailed = list(profile.facts.get("detailed_step") or ())
    for event in events:
        if not event.computes or [event.call, event.step] != detailed or event.replica:
            continue
        start = event.start
        for share, row in inside.get(event.task, ()):
            end = event.start + (event.end - event.start) * share
            more = {"block": row.block, "where": row.where, "flops": row.flops}
            yield _slice(row.kind, process, event.core, start, end, "operation", **more)
            start = end


def _host_events(profile: Profile, process: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each host event and each call, and for each call a counter of the milliseconds per step."""
    for event in profile.host:
        yield _slice(event.kind, process, 0, event.start, event.end)
    for call in profile.calls:
        yield _slice("call", process, 0, call.start, call.end)
        if call.steps:
            ms = (call.end - call.start) / 1e6 / call.steps
            yield _event("C", "ms a step", process, 0, call.start, args={"ms": ms})
