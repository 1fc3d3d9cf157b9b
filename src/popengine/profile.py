"""What a run did and when: tables of plain values, and their file. Standard library only, so viewers need no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .profile_rows import (
    TABLES,
    Block,
    Call,
    Event,
    HostEvent,
    Memory,
    Operation,
    Option,
    Part,
    Pass,
    Piece,
    Tensor,
    Tick,
    Track,
)

FORMAT, VERSION = "pando-profile", 1
PLAN_WISH = "PANDO_PLAN"  # a variable: where a program writes its first plan, and ends


@dataclass(frozen=True)
class Profile:
    """A run of one executor, with what the plan says of it.

    `programs[ipu]` is a flat list: part, micro-batch, part, micro-batch ... `counts` are the batch factors;
    `facts` whatever is one number or a few: see docs/profile-format.md.
    """

    name: str
    training: bool
    stages: tuple[str, ...] = ()  # the blocks of each, in words
    ipus: tuple[int, ...] = ()  # of each stage
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    programs: dict[int, list[int]] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    blocks: tuple[Block, ...] = ()
    pieces: tuple[Piece, ...] = ()
    operations: tuple[Operation, ...] = ()
    parts: tuple[Part, ...] = ()
    tracks: tuple[Track, ...] = ()
    calls: tuple[Call, ...] = ()
    host: tuple[HostEvent, ...] = ()
    memory: tuple[Memory, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    schedule: tuple[Tick, ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The ipus, each once."""
        return tuple(sorted(set(self.ipus)))

    def events(self, kinds: frozenset[str] | None = None) -> Iterator[Event]:
        """Every instruction that was recorded, or those of some kinds; in order for each ipu."""
        for track in self.tracks:
            program = self.programs[track.ipu]
            for index, (begin, end) in enumerate(track.spans()):
                part, micro_batch = self.parts[program[2 * index]], program[2 * index + 1]
                if kinds is None or part.kind in kinds:
                    yield Event(
                        part.ipu,
                        track.replica,
                        part.kind,
                        begin,
                        end,
                        part.phase,
                        part.stage,
                        micro_batch,
                        track.step,
                        track.call,
                        part.peer,
                        part.bytes,
                        track.cores[index] if track.cores else -1,
                        track.computed[index] if track.computed else 0,
                        part.channel,
                    )

    def to_json(self) -> str:
        """The file's text: an object; tables as their columns and rows."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in TABLES:
                value = {"columns": TABLES[entry.name]._fields, "rows": value}
            data[entry.name] = value
        return json.dumps(data, separators=(",", ":"))

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(self.to_json())
        draft.replace(path)


class ProfileError(ValueError):
    """A file that can't be read as a profile."""


def load(path: Path) -> Profile:
    """Read what `Profile.save` wrote.

    Raises:
        ProfileError: there is no such file, or it's no profile, damaged, cut short, or of a newer version
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ProfileError(
            f"{path} can't be read: {error.strerror}\n  fix: name a profile.pop, or a folder of them"
        ) from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a profile: it isn't text") from error
    try:
        return parse(text)
    except ProfileError as error:
        raise ProfileError(f"{path} {error}") from error


def parse(text: str) -> Profile:
    """A profile from the text of its file. Raises: ProfileError, see `load`."""
    again = "\n  fix: run the program again with profiling on"
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        kind = "is damaged or cut short" if text.lstrip().startswith("{") else "is not a profile"
        raise ProfileError(
            f"{kind}: line {error.lineno}, column {error.colno}: {error.msg}{again}"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"is not a profile: it does not say it is a {FORMAT!r}{again}")
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ProfileError(
            f"has version {version}, and this program reads up to {VERSION}\n  fix: update this installation of Pando"
        )
    try:
        profile = Profile(**{entry.name: _value(entry.name, data) for entry in fields(Profile)})
        _check(profile)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProfileError(f"is damaged: {type(error).__name__}: {error}{again}") from error
    return profile


def _value(name: str, data: dict[str, Any]) -> Any:
    value = data[name]
    if name in TABLES:
        row_type = TABLES[name]
        columns = value["columns"]
        if tuple(columns) == row_type._fields:
            return tuple(row_type(*row) for row in value["rows"])
        rows = (dict(zip(columns, row, strict=True)) for row in value["rows"])
        return tuple(row_type(**{k: v for k, v in row.items() if k in row_type._fields}) for row in rows)
    if name == "programs":
        return {int(ipu): program for ipu, program in value.items()}
    return tuple(value) if name in ("stages", "ipus") else value


def _check(profile: Profile) -> None:
    """The references between the tables hold."""
    if len(profile.stages) != len(profile.ipus):
        raise ValueError(f"{len(profile.stages)} stages on {len(profile.ipus)} ipus")
    for ipu, program in profile.programs.items():
        if len(program) % 2 or any(not 0 <= part < len(profile.parts) for part in program[::2]):
            raise ValueError(f"the program of ipu {ipu} names parts that aren't there")
    for operation in profile.operations:
        if not 0 <= operation.piece < len(profile.pieces):
            raise ValueError(f"operation {operation.name} names a piece that isn't there")
    for row in profile.tensors:
        if not 0 <= row.born <= len(profile.programs[row.ipu]) // 2 >= row.died:
            raise ValueError(f"tensor {row.name} lives outside the program of ipu {row.ipu}")
    for stage in (row.stage for table in (profile.blocks, profile.pieces, profile.parts) for row in table):
        if not -1 <= stage < len(profile.stages):
            raise ValueError(f"there is no stage {stage}")
    for track in profile.tracks:
        if 2 * len(track.durations) > len(profile.programs[track.ipu]):
            raise ValueError(f"a track of ipu {track.ipu} is longer than its program")
        if not all(isinstance(ns, int) for ns in [*track.durations, *(track.gaps or ())]):
            raise ValueError(f"a track of ipu {track.ipu} has durations that are no integers")
        columns = (track.gaps, track.cores, track.computed)
        if any(len(column) != len(track.durations) for column in columns if column is not None):
            raise ValueError(f"a track of ipu {track.ipu} has columns of different lengths")
