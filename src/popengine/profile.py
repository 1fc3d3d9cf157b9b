"""What a run did and when: events, and their JSON. Standard library only, so that viewers need no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction of one ipu: times in ns of the host's monotonic clock."""

    ipu: int
    replica: int
    kind: str  # compute, receive, send, load, accumulate, keep, store, update
    start: int
    end: int
    phase: str = ""
    stage: int = -1
    micro_batch: int = -1
    step: int = 0  # weight updates since the executor was compiled


@dataclass(frozen=True)
class Profile:
    """The events of one or more calls, with what the plan says of them."""

    training: bool
    ipus: tuple[int, ...]  # of each stage
    stages: tuple[str, ...]  # the blocks of each
    schedule: str  # the ideal order, drawn
    events: tuple[Event, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # counts, compile seconds

    def save(self, path: Path) -> None:
        """Write JSON: one object, `events` as rows in the order of `columns`."""
        data = asdict(self)
        data["version"] = VERSION
        data["columns"] = list(Event.__slots__)
        data["events"] = [[getattr(event, name) for name in Event.__slots__] for event in self.events]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))


def load(path: Path) -> Profile:
    """Read what `Profile.save` wrote.

    Raises:
        ValueError: not a profile, a damaged one, or one of a newer version
    """
    try:
        data = json.loads(path.read_text())
        version = data.pop("version")
        columns = data.pop("columns")
        events = tuple(Event(**dict(zip(columns, row, strict=True))) for row in data.pop("events"))
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a profile, or is damaged: {error}") from error
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version}; this program reads up to {VERSION}: upgrade pando-torch"
        )
    return Profile(
        data["training"], tuple(data["ipus"]), tuple(data["stages"]), data["schedule"], events, data["facts"]
    )
