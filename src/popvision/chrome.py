"""A trace in the Chrome format, which Perfetto and chrome://tracing open: a track an ipu, counters for memory."""

from __future__ import annotations

import json
from typing import Any

from popengine.profile import Event, Profile

from . import memory


def chrome_trace(profiles: list[Profile]) -> str:
    """JSON; each profile's replicas are processes, their ipus threads, the host is a process of its own."""
    events: list[dict[str, Any]] = []
    process = 1
    for profile in profiles:
        events += _host(profile, process)
        for replica in range(profile.counts.get("replicas", 1)):
            process += 1
            title = f"{profile.name}, replica {replica}"
            events.append(_name("process_name", process, 0, title))
            events += [_name("thread_name", process, ipu, f"ipu {ipu}") for ipu in profile.devices]
            events += [_slice(event, process) for event in profile.events() if event.replica == replica]
            if replica == 0:
                events += _memory(profile, process)
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
        for ipu in profile.devices
        for time, size in memory.curve(profile, ipu)
    ]


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
    return [_name("process_name", process, 0, f"{profile.name}, host"), *spans]


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
