"""A trace in the Chrome format, which Perfetto and chrome://tracing open.

Each ipu of each replica has a track, with arrows from sends to receives. Replica 0 also has the operations of
the detailed step and counters of memory; the host has its events and a counter of the time per step.
"""

import json
from collections.abc import Iterator
from typing import Any

from popengine.profile import Event, Profile

from . import memory


def chrome_trace(profiles: list[Profile]) -> str:
    """Return a trace as JSON: each profile's host and replicas are processes, ipus are threads."""
    events: list[dict[str, Any]] = []
    process = 0
    for profile in profiles:
        process += 1
        events += _host_events(profile, process)
        for replica in range(profile.counts.get("replicas", 1)):
            process += 1
            events.append(_name_event("process_name", process, 0, f"{profile.name}, replica {replica}"))
            events += [_name_event("thread_name", process, ipu, f"ipu {ipu}") for ipu in profile.devices]
            own = [event for event in profile.events() if event.replica == replica]
            events += [_instruction_slice(event, process) for event in own]
            events += _flow_events(own, process)
            if replica == 0:
                events += _operation_slices(profile, own, process)
                for track in (track for track in profile.tracks if track.replica == 0):
                    name = f"held on ipu {track.ipu}"
                    for ns, size in memory.bytes_curve(profile, track):
                        events.append(_event("C", name, process, track.ipu, ns, args={"bytes": size}))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _event(phase: str, name: str, process: int, thread: int, ns: float, **more: Any) -> dict[str, Any]:
    """Return an event of the Chrome format that begins at `ns`. `phase` is the format's letter for the type
    of event (its field `ph`); `more` are further fields."""
    return {"name": name, "ph": phase, "ts": ns / 1e3, "pid": process, "tid": thread, **more}


def _name_event(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    """Return the event that names a process or thread `text`. `kind`: "process_name" or "thread_name"."""
    return _event("M", kind, process, thread, 0, args={"name": text})


def _instruction_slice(event: Event, process: int) -> dict[str, Any]:
    """Return the slice of an instruction, named by its kind, stage and micro-batch: `forward 2.5`."""
    kind = {"F": "forward", "B": "backward"}[event.phase] if event.kind == "compute" else event.kind
    place = ".".join(str(number) for number in (event.stage, event.micro_batch) if number >= 0)
    arguments = {"stage": event.stage, "micro_batch": event.micro_batch, "step": event.step}
    arguments |= {"bytes": event.bytes} if event.bytes else {}
    more = {"cat": event.kind, "dur": (event.end - event.start) / 1e3, "args": arguments}
    return _event("X", f"{kind} {place}".strip(), process, event.ipu, event.start, **more)


def _flow_events(events: list[Event], process: int) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow from the start of each send to the end of its receive."""
    for send, receive in memory.completed_transfers(events):
        place = send.channel, send.step, send.micro_batch, receive.ipu
        more = {"cat": "transfer", "bp": "e", "id": " ".join(map(str, (process, *place)))}
        yield _event("s", send.channel, process, send.ipu, send.start, **more)
        yield _event("f", send.channel, process, receive.ipu, receive.end, **more)


def _operation_slices(profile: Profile, events: list[Event], process: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each operation in the computations of the detailed step. Its start and end are the
    operation's share of the computation's time (see `memory.operation_end_shares`)."""
    inside = memory.operation_end_shares(profile)
    for event in events:
        if event.kind != "compute" or not memory.is_in_detailed_step(profile, event):
            continue
        start, whole = event.start, event.end - event.start
        for share, operation in inside.get((event.phase, event.stage), ()):
            end = event.start + whole * share
            arguments = {"block": operation.block, "where": operation.where, "flops": operation.flops}
            more: dict[str, Any] = {"cat": "operation", "dur": (end - start) / 1e3, "args": arguments}
            yield _event("X", operation.kind, process, event.ipu, start, **more)
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
