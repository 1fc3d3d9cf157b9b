"""A trace in the Chrome format, which Perfetto and chrome://tracing open.

Each ipu has a track, with the operations of the detailed step; there are arrows from sends to receives, and counters
for memory and for the time of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from popengine.profile import Event, Operation, Profile

from . import memory


def chrome_trace(profiles: list[Profile]) -> str:
    """Return a trace as JSON: each profile's host and each of its replicas is a process, and each ipu a thread."""
    events: list[dict[str, Any]] = []
    process = 1
    for profile in profiles:
        events += _host(profile, process)
        for replica in range(profile.counts.get("replicas", 1)):
            process += 1
            title = f"{profile.name}, replica {replica}"
            events.append(_name("process_name", process, 0, title))
            events += [_name("thread_name", process, ipu, f"ipu {ipu}") for ipu in profile.devices]
            own = [event for event in profile.events() if event.replica == replica]
            events += [_slice(event, process) for event in own]
            events += _flows(own, process)
            if replica == 0:
                events += _memory(profile, process) + _operations(profile, own, process)
        process += 1
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def title(event: Event) -> str:
    """`forward 2.5`: stage 2, micro-batch 5; other instructions by their kind."""
    kinds = {"F": "forward", "B": "backward"}
    kind = kinds[event.phase] if event.kind == "compute" else event.kind
    place = f" {event.stage}" if event.stage >= 0 else ""
    return f"{kind}{place}.{event.micro_batch}" if event.micro_batch >= 0 else kind + place


def _slice(event: Event, process: int) -> dict[str, Any]:
    arguments = {"stage": event.stage, "micro_batch": event.micro_batch, "step": event.step}
    if event.bytes:
        arguments["bytes"] = event.bytes
    return {
        "name": title(event),
        "cat": event.kind,
        "ph": "X",
        "ts": event.start / 1e3,
        "dur": (event.end - event.start) / 1e3,
        "pid": process,
        "tid": event.ipu,
        "args": arguments,
    }


def _flows(events: list[Event], process: int) -> list[dict[str, Any]]:
    """Return an arrow from each send to the end of its receive."""
    sent = {
        (event.channel, event.peer, event.step, event.micro_batch): event
        for event in events
        if event.kind == "send"
    }
    found = []
    for event in events:
        key = (event.channel, event.ipu, event.step, event.micro_batch)
        if event.kind == "receive" and key in sent:
            name = f"{process} " + " ".join(map(str, key))
            for phase, end in (("s", sent[key]), ("f", event)):
                time = end.start if phase == "s" else end.end
                found.append(
                    {
                        "name": event.channel,
                        "cat": "transfer",
                        "ph": phase,
                        "bp": "e",
                        "id": name,
                        "ts": time / 1e3,
                        "pid": process,
                        "tid": end.ipu,
                    }
                )
    return found


def _operations(profile: Profile, events: list[Event], process: int) -> list[dict[str, Any]]:
    """Return the operations of the detailed step's computations, each as long as its share of the average run."""
    place = profile.facts.get("detailed_step")
    inside: dict[tuple[str, int], list[Operation]] = {}
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        inside.setdefault((piece.phase, piece.stage), []).append(operation)
    found = []
    for event in events:
        if place is None or event.kind != "compute" or [event.call, event.step] != list(place):
            continue
        operations = inside.get((event.phase, event.stage), [])
        whole, at = sum(operation.ns for operation in operations) or 1, float(event.start)
        for operation in operations:
            lasted = (event.end - event.start) * operation.ns / whole
            found.append(
                {
                    "name": operation.kind,
                    "cat": "operation",
                    "ph": "X",
                    "ts": at / 1e3,
                    "dur": lasted / 1e3,
                    "pid": process,
                    "tid": event.ipu,
                    "args": {"block": operation.block, "where": operation.where, "flops": operation.flops},
                }
            )
            at += lasted
    return found


def _memory(profile: Profile, process: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"held on ipu {ipu}",
            "ph": "C",
            "ts": time / 1e3,
            "pid": process,
            "tid": ipu,
            "args": {"bytes": size},
        }
        for ipu, time, size in _held(profile)
    ]


def _held(profile: Profile) -> Iterator[tuple[int, int, int]]:
    """Yield (ipu, ns, bytes held) in all steps that were kept; in the detailed step within computations, too."""
    detailed = memory.detailed(profile)
    for track in profile.tracks:
        if track.replica == 0:
            is_detailed = detailed.get(track.ipu) is track
            points = memory.curve(profile, track.ipu) if is_detailed else memory.curve_of(profile, track)
            yield from ((track.ipu, time, size) for time, size in points)


def _host(profile: Profile, process: int) -> list[dict[str, Any]]:
    rows = [("call", call.start, call.end) for call in profile.calls]
    rows += [(event.kind, event.start, event.end) for event in profile.host]
    spans = [
        {
            "name": kind,
            "ph": "X",
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "pid": process,
            "tid": 0,
        }
        for kind, start, end in rows
    ]
    names = [
        _name("process_name", process, 0, f"{profile.name}, host"),
        _name("thread_name", process, 0, "calls"),
    ]
    return [*names, *spans, *_rates(profile, process)]


def _rates(profile: Profile, process: int) -> list[dict[str, Any]]:
    """Return a counter: how long a step took in each call that was kept."""
    return [
        {
            "name": "ms a step",
            "ph": "C",
            "ts": call.start / 1e3,
            "pid": process,
            "tid": 0,
            "args": {"ms": (call.end - call.start) / 1e6 / call.steps},
        }
        for call in profile.calls
        if call.steps
    ]


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
