"""Profiles: what a run did and when, as tables of plain values, and their file. Reading it needs no torch.

Each table has rows of one kind; `docs/profile-format.md` describes them. An ipu's program is the same in each
step, so a `Track` holds only the times of its instructions, and `Profile.programs` the instructions.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints


class Pass(NamedTuple):
    """A pass of the compiler, and its duration."""

    name: str
    seconds: float


class ProfiledBlock(NamedTuple):
    """A block of the model, its stage and ipu, and the line that opened it."""

    name: str
    stage: int
    ipu: int
    where: str
    parameters: int = 0  # elements of its parameters


class ProfiledPiece(NamedTuple):
    """One phase of one stage, or a part of it."""

    phase: str  # F or B
    stage: int
    ipu: int
    where: str  # the user's line of its first operation
    enters: int = 0  # bytes of its inputs that are freed while the piece runs


class Operation(NamedTuple):
    """One operation of a piece, with its times in replica 0 in the step `facts["detailed_step"]`."""

    piece: int
    name: str
    kind: str
    block: str
    where: str
    calls: int = 0
    ns: int = 0  # of all calls
    flops: int = 0  # of one call
    bytes: int = 0  # read and written by one call
    live: int = 0  # bytes alive in the piece after it
    width: int = 4  # bytes of an element of its result
    module: str = "?"  # as `named_modules` names it; "": the model's own forward, "?": not known


class ProfiledInstruction(NamedTuple):
    """An instruction of an ipu's program, which runs for each micro-batch; if `phase` is "", once per step."""

    ipu: int
    kind: str  # compute, receive, send, load, accumulate, keep, store, free, update
    phase: str = ""
    stage: int = -1
    peer: int = -1  # the ipu at the other end of a send or receive
    bytes: int = 0  # moved by a load, send, receive, store; read by an update
    channel: str = ""  # of a send or receive: the same name at both ends

    @property
    def frequency_and_time(self) -> tuple[str, str]:
        """Return the period of a transfer, "micro-batch" or "step", and when in it, such as "after F0"."""
        if self.phase:
            return "micro-batch", f"after {self.phase}{self.stage}"
        return "step", "at its start (shared weights)"


class Track(NamedTuple):
    """One step of one ipu: its start, and lists with a value for each instruction of the ipu's program.

    `gaps` are the idle times before the instructions, `cores` the indices of the cores that ran them, and
    `computed` the CPU times of these cores' threads (0: not measured). A list that was not recorded is None.
    """

    call: int
    step: int  # weight updates (calls, in inference) since the executor was compiled
    replica: int
    ipu: int
    start: int  # ns since the profile's origin
    durations: list[int]  # ns
    gaps: list[int] | None = None  # ns
    cores: list[int] | None = None
    computed: list[int] | None = None  # ns

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each instruction, in ns."""
        at = self.start
        for index, duration in enumerate(self.durations):
            at += self.gaps[index] if self.gaps else 0
            yield at, at + duration
            at += duration


class Call(NamedTuple):
    """One call of the executor, timed on the host; ns since the profile's origin."""

    call: int
    start: int
    end: int
    steps: int


class HostEvent(NamedTuple):
    """An action or a wait of the host; ns since the profile's origin."""

    kind: str  # loader
    start: int
    end: int
    bytes: int = 0


class Memory(NamedTuple):
    """Bytes that an ipu keeps from step to step."""

    replica: int
    ipu: int
    weights: int = 0
    buffers: int = 0  # and constants
    gradients: int = 0
    optimizer: int = 0


class Tensor(NamedTuple):
    """A tensor of a micro-batch of replica 0 in the detailed step: after which instructions it is alive.

    These are the instructions `born` to `died` - 1; if `died` is -1, all from `born` to the end of the step.
    """

    ipu: int
    name: str
    kind: str  # input, activation
    micro_batch: int
    bytes: int
    born: int
    died: int


class Tick(NamedTuple):
    """One phase of a stage on a micro-batch, and the tick at which it starts if each phase takes one tick."""

    ipu: int
    phase: str
    stage: int
    micro_batch: int
    tick: int


class Option(NamedTuple):
    """An option that differs from its default."""

    name: str
    value: str
    default: str


class Event(NamedTuple):
    """One run of a `ProfiledInstruction` on an ipu: its fields, joined with the times of a `Track`."""

    ipu: int
    kind: str
    phase: str
    stage: int
    peer: int
    bytes: int
    channel: str
    replica: int
    start: int
    end: int
    micro_batch: int
    step: int
    call: int
    core: int  # -1: not recorded
    computed: int

    @property
    def cost(self) -> int:
        """Return the CPU time of the instruction in ns; its duration if the CPU time was not measured."""
        return self.computed or self.end - self.start


FORMAT, VERSION = "pando-profile", 1


@dataclass(frozen=True)
class Profile:
    """The profile of one executor's run: recorded times, and tables that follow from its plan.

    `programs[ipu]` is a flat list: index in `parts`, micro-batch, index, micro-batch ... (-1: whole step).
    `counts` are the batch factors; `facts` hold single numbers and texts: see docs/profile-format.md.
    """

    name: str
    training: bool
    stages: tuple[str, ...] = ()  # the names of each stage's blocks
    ipus: tuple[int, ...] = ()  # of each stage
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    programs: dict[int, list[int]] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    blocks: tuple[ProfiledBlock, ...] = ()
    pieces: tuple[ProfiledPiece, ...] = ()
    operations: tuple[Operation, ...] = ()
    parts: tuple[ProfiledInstruction, ...] = ()
    tracks: tuple[Track, ...] = ()
    calls: tuple[Call, ...] = ()
    host: tuple[HostEvent, ...] = ()
    memory: tuple[Memory, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    schedule: tuple[Tick, ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ipus in ascending order, each once."""
        return tuple(sorted(set(self.ipus)))

    def events(self, kinds: frozenset[str] | None = None) -> Iterator[Event]:
        """Yield the recorded instructions of all kinds, or only of `kinds`, one track after another."""
        for track in self.tracks:
            program = self.programs[track.ipu]
            for index, span in enumerate(track.spans()):
                part, micro_batch = self.parts[program[2 * index]], program[2 * index + 1]
                if kinds is None or part.kind in kinds:
                    core = track.cores[index] if track.cores else -1
                    computed = track.computed[index] if track.computed else 0
                    times = (*span, micro_batch, track.step, track.call, core, computed)
                    yield Event(*part, track.replica, *times)

    def to_json(self) -> str:
        """Return the file's text: a JSON object, in which each table is an object of `columns` and `rows`."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in TABLES:
                value = {"columns": TABLES[entry.name]._fields, "rows": value}
            data[entry.name] = value
        return json.dumps(data, separators=(",", ":"))

    def save(self, path: Path) -> None:
        """Write the profile to a file, atomically, and make missing folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(self.to_json())
        draft.replace(path)


# The row type of each field that is a table.
TABLES: dict[str, type[Any]] = {
    name: get_args(hint)[0]
    for name, hint in get_type_hints(Profile).items()
    if get_origin(hint) is tuple and hasattr(get_args(hint)[0], "_fields")
}


class ProfileError(ValueError):
    """The error for a file that can't be read as a profile."""


def load(path: Path) -> Profile:
    """Return the profile in a file that `Profile.save` wrote.

    Raises:
        ProfileError: the file is missing, no profile, damaged, cut short, or of a newer version
    """
    again = "\n  fix: run the program again with profiling on"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ProfileError(
            f"{path} can't be read: {error.strerror}\n  fix: name a profile.pop, or a folder of them"
        ) from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a profile: it isn't text{again}") from error
    except json.JSONDecodeError as error:
        kind = "is damaged or cut short" if error.doc.lstrip().startswith("{") else "is not a profile"
        why = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ProfileError(f"{path} {kind}: {why}{again}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"{path} is not a profile: it does not say it is a {FORMAT!r}{again}")
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ProfileError(
            f"{path} has version {version}, and this program reads up to {VERSION}\n"
            "  fix: update this installation of Pando"
        )
    try:
        profile = Profile(**{entry.name: _parse_field(entry.name, data) for entry in fields(Profile)})
        _check_tables(profile)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProfileError(f"{path} is damaged: {type(error).__name__}: {error}{again}") from error
    return profile


def _parse_field(name: str, data: dict[str, Any]) -> Any:
    """Return the value of a field of `Profile` from a file's JSON object, without unknown columns."""
    value = data[name]
    if name in TABLES:
        row_type = TABLES[name]
        rows = (zip(value["columns"], row, strict=True) for row in value["rows"])
        return tuple(row_type(**{k: v for k, v in row if k in row_type._fields}) for row in rows)
    if name == "programs":
        return {int(ipu): program for ipu, program in value.items()}
    return tuple(value) if name in ("stages", "ipus") else value


def _check_tables(profile: Profile) -> None:
    """Raise ValueError or KeyError if the tables of a profile contradict each other: a row refers to a
    missing row of another table, for example, or a track has columns of different lengths."""
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
