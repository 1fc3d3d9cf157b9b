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
        devices = Figures(profile).devices
        recorded = [*profile.events()]
        events += _host_events(profile, host)
        events.append(_name_event("process_name", cores, 0, f"{profile.name}, these cores"))
        names = sorted({event.core for event in recorded})
        events += [
            _name_event("thread_name", cores, core, f"core {core}" if core >= 0 else "messages")
            for core in names
        ]
        events += [_task_slice(event, cores, event.core) for event in recorded]
        events += _operation_slices(profile, recorded, cores)
        events.append(_name_event("process_name", apart, 0, f"{profile.name}, separate devices (simulated)"))
        events += [_name_event("thread_name", apart, ipu, f"ipu {ipu}") for ipu in profile.devices]
        events += [_task_slice(event, apart, event.ipu) for event in devices.events()]
        events += _flow_events(devices, apart)
        for ipu in profile.devices if profile.tensors else ():
            for ns, size in memory.bytes_curve(profile, devices.runs, ipu):
                events.append(_event("C", f"held on ipu {ipu}", apart, ipu, ns, args={"bytes": size}))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _event(phase: str, name: str, process: int, thread: int, ns: float, **more: Any) -> dict[str, Any]:
    """Return an event of the Chrome format that begins at `ns`. `phase` is the format's letter for the type
    of event (its field `ph`); `more` are further fields."""
    return {"name": name, "ph": phase, "ts": ns / 1e3, "pid": process, "tid": thread, **more}


def _name_event(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    """Return the event that names a process or thread `text`. `kind`: "process_name" or "thread_name"."""
    return _event("M", kind, process, thread, 0, args={"name": text})


def _task_slice(event: Event, process: int, thread: int) -> dict[str, Any]:
    """Return the slice of a task, named by its phase or kind, its stage and its micro-batch: `forward 2.5`."""
    name = PHASES[event.phase] if event.computes else event.kind
    place = f" {event.stage}.{event.micro_batch}" if event.phase else ""
    arguments = {"stage": event.stage, "micro_batch": event.micro_batch} if event.phase else {}
    arguments |= {"step": event.step, "ipu": event.ipu, "replica": event.replica}
    more = {"cat": event.kind, "dur": (event.end - event.start) / 1e3, "args": arguments}
    return _event("X", name + place, process, thread, event.start, **more)


def _flow_events(profile: Profile, process: int) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each transfer between ipus."""
    for number, (sent, received, _) in enumerate(memory.transfers(profile, profile.runs)):
        source, target = (profile.tasks[run.task].ipu for run in (sent, received))
        more = {"cat": "transfer", "id": number + 1_000_000 * process}
        yield _event("s", "transfer", process, source, sent.end, **more)
        yield _event("f", "transfer", process, target, received.start, bp="e", **more)


def _operation_slices(profile: Profile, events: Sequence[Event], process: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each operation of each computation of the detailed step. Its length is the operation's
    share of the computation's time (see `memory.operation_end_shares`)."""
    inside = memory.operation_end_shares(profile)
    detailed = list(profile.facts.get("detailed_step") or ())
    for event in events:
        if not event.computes or [event.call, event.step] != detailed or event.replica:
            continue
        start, whole = event.start, event.end - event.start
        for share, operation in inside.get(event.piece, ()):
            end = event.start + whole * share
            arguments = {"block": operation.block, "where": operation.where, "flops": operation.flops}
            more: dict[str, Any] = {"cat": "operation", "dur": (end - start) / 1e3, "args": arguments}
            yield _event("X", operation.kind, process, event.core, start, **more)
            start = end


def _host_events(profile: Profile, process: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the host's process: its name, a slice for each host event and each call, and for
    each call a counter of the milliseconds per step."""
    yield _name_event("process_name", process, 0, f"{profile.name}, host")
    yield _name_event("thread_name", process, 0, "calls")
    for event in profile.host:
        yield _event("X", event.kind, process, 0, event.start, dur=(event.end - event.start) / 1e3)
    for call in profile.calls:
        ms = (call.end - call.start) / 1e6
        yield _event("X", "call", process, 0, call.start, dur=1e3 * ms)
        if call.steps:
            yield _event("C", "ms a step", process, 0, call.start, args={"ms": ms / call.steps})
