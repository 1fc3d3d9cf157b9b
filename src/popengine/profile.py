"""Profiles: what a run did and when, as tables of plain values, and their file. Reading it needs no torch.

Each table has rows of one kind; `docs/profile-format.md` describes them. `Profile.runs` holds what the cores of
the host ran. What separate devices would do is simulated from it (`popvision.virtual`), and not stored.
"""

import json
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from .order import Action
from .table import COMPUTING, Instruction, Task, actions

# The phases of a stage in words. A plan has those that its schedule needs.
PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_MOVES = ("load", "send", "receive", "store")  # kinds of instructions


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
    parameters: int = 0  # elements of its parameters; a tied one counts in the first block that has it


class Operation(NamedTuple):
    """One operation of a row, with its times in replica 0 in the step `facts["detailed_step"]`."""

    task: int  # index of the row in `Profile.tasks`
    name: str
    kind: str
    block: str
    where: str
    calls: int = 0
    ns: int = 0  # of all calls
    flops: int = 0  # of one call
    bytes: int = 0  # read and written by one call
    held: int = 0  # bytes that are alive after it, minus those before the row's first operation
    module: str = "?"  # as `named_modules` names it; "": the model's own forward, "?": not known


class TaskRun(NamedTuple):
    """One run of a task, by one core; ns since the profile's origin."""

    call: int
    step: int  # weight updates (calls, in inference) since the executor was compiled
    task: int  # index in `Profile.tasks`
    micro_batch: int  # -1: a task of the whole step, such as the update
    replica: int  # -1: once for all replicas
    core: int  # index of the thread that ran it; negative: a thread that talks to other processes
    start: int
    end: int
    computed: int = 0  # CPU time of the thread, in ns; 0: not measured


class Call(NamedTuple):
    """One call of the executor, timed on the host; ns since the profile's origin."""

    call: int
    start: int
    end: int
    steps: int


class HostEvent(NamedTuple):
    """An action or a wait of the host; ns since the profile's origin."""

    kind: str  # loader, compilation or other calls: of other plans and models of the program
    start: int
    end: int


class KeptBytes(NamedTuple):
    """Bytes that an ipu keeps from step to step."""

    replica: int
    ipu: int
    weights: int = 0
    buffers: int = 0  # and constants
    gradients: int = 0
    optimizer: int = 0


class Tensor(NamedTuple):
    """A tensor that an ipu holds for each micro-batch, from its row `born` to `died` (-1: to the end of the step)."""

    ipu: int
    name: str
    kind: str  # input, received, activation; the first two are there when row `born` begins, the last when it ends
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


class Event(namedtuple("Event", ("kind", "ipu", "phase", "stage", *TaskRun._fields))):
    """A `TaskRun`, joined with fields of its row."""

    @property
    def computes(self) -> bool:
        """Return whether the row runs operations of the model."""
        return self.kind in COMPUTING

    @property
    def cost(self) -> int:
        """Return the CPU time of the run in ns; its duration if the CPU time was not measured."""
        return self.computed or self.end - self.start


FORMAT, VERSION = "pando-profile", 3


@dataclass(frozen=True)
class Profile:
    """The profile of one executor's run: recorded times, and tables that follow from its plan.

    `counts` are the batch factors; `facts` hold single numbers and texts: see docs/profile-format.md. A new field, or
    a new column of a table, needs a default, which older profiles get.
    """

    name: str
    training: bool
    stages: tuple[str, ...] = ()  # the names of each stage's blocks
    ipus: tuple[int, ...] = ()  # of each stage
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    blocks: tuple[ProfiledBlock, ...] = ()
    operations: tuple[Operation, ...] = ()
    tasks: tuple[Task, ...] = ()
    runs: tuple[TaskRun, ...] = ()
    calls: tuple[Call, ...] = ()
    host: tuple[HostEvent, ...] = ()
    memory: tuple[KeptBytes, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    schedule: tuple[Tick, ...] = ()
    options: tuple[Option, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ipus in ascending order, each once."""
        return tuple(sorted(set(self.ipus)))

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the phases that the stages have, in the order of `PHASES`."""
        return tuple(phase for phase in PHASES if any(task.phase == phase for task in self.tasks))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Return the phases of stages, which run for each micro-batch."""
        return tuple(actions(self.tasks)[0])

    def moves(self) -> Iterator[tuple[int, Task, Instruction]]:
        """Yield (index of its row, row, instruction) of each load, send, receive and store."""
        for row, task in enumerate(self.tasks):
            yield from ((row, task, part) for part in task.instructions if part.kind in _MOVES)

    def events(self) -> Iterator[Event]:
        """Yield the recorded runs of tasks, in the order of `runs`."""
        for run in self.runs:
            task = self.tasks[run.task]
            yield Event(task.kind, task.ipu, task.phase, task.stage, *run)

    def to_json(self) -> str:
        """Return the file's text: a JSON object, in which each table is an object of `columns` and `rows`."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in TABLES:
                columns = _columns(TABLES[entry.name])
                value = {
                    "columns": columns,
                    "rows": [[getattr(row, name) for name in columns] for row in value],
                }
            data[entry.name] = value
        return json.dumps(data, separators=(",", ":"))

    def save(self, path: Path) -> None:
        """Write the profile to a file, atomically, and make missing folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(self.to_json())
        draft.replace(path)


def _columns(row_type: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass or named tuple."""
    return getattr(row_type, "_fields", ()) or tuple(entry.name for entry in fields(row_type))


_HINTS = get_type_hints(Profile)
# The row type of each field that is a table.
TABLES: dict[str, type[Any]] = {
    name: get_args(hint)[0]
    for name, hint in _HINTS.items()
    if get_origin(hint) is tuple and hasattr(get_args(hint)[0], "__annotations__")
}


def file_of_part(path: Path, part: int) -> Path:
    """Return the profile's file of one process of a replica that spans several (profile.1.pop), given the first
    one's."""
    return path.with_name(f"{path.stem}.{part}{path.suffix}") if part else path


class ProfileError(ValueError):
    """The error for a file that can't be read as a profile."""


def load(path: Path) -> Profile:
    """Return the profile in a file that `Profile.save` wrote. Raise ProfileError if it can't be read."""

    name = "name a profile.pop, or a folder of them"

    def fault(what: str, fix: str = "run the program again with profiling on") -> ProfileError:
        return ProfileError(f"{path} {what}\n  fix: {fix}")

    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise fault(f"can't be read: {error.strerror}", name) from error
    except UnicodeDecodeError as error:
        raise fault("is not a profile: it isn't text", name) from error
    except RecursionError as error:
        raise fault("is not a profile: its values are nested too deeply", name) from error
    except json.JSONDecodeError as error:
        if not error.doc.lstrip().startswith("{"):
            raise fault("is not a profile", name) from error
        raise fault(f"is damaged or cut short: line {error.lineno}, column {error.colno}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise fault(f"is not a profile: it does not say it is a {FORMAT!r}", name)
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        what = f"has version {version}, and this program reads up to {VERSION}"
        raise fault(what, "update this installation of Pando")
    if version < VERSION:
        raise fault(f"has version {version}, which recorded other things")
    try:
        names = [entry.name for entry in fields(Profile) if entry.name in data]
        return Profile(**{name: _parse_field(name, data[name]) for name in names})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise fault(f"is damaged: {type(error).__name__}: {error}") from error


def _parse_field(name: str, value: Any) -> Any:
    """Return the value of a field of `Profile` from its JSON. Unknown columns are left out; a missing column has its
    default."""
    if name not in TABLES:
        return _parse(_HINTS[name], value)
    row_type, hints = TABLES[name], get_type_hints(TABLES[name])
    columns = [(i, column) for i, column in enumerate(value["columns"]) if column in hints]
    tuples = [column for _, column in columns if get_origin(hints[column]) is tuple]
    rows = []
    for row in value["rows"]:
        cells = {column: row[i] for i, column in columns}
        cells |= {column: _parse(hints[column], cells[column]) for column in tuples}
        rows.append(row_type(**cells))
    return tuple(rows)


def _parse(hint: Any, value: Any) -> Any:
    """Return a value of a type from its JSON: tuples and named tuples are lists there."""
    if get_origin(hint) is tuple:
        return tuple(_parse(get_args(hint)[0], item) for item in value)
    if hasattr(hint, "_fields"):
        hints = get_type_hints(hint)
        return hint(*(_parse(hints[name], item) for name, item in zip(hint._fields, value, strict=True)))
    return value
