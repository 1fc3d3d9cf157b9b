"""Tables of several places: checks that only messages cross places, and that each read is ordered after its write.

An engine runs the rows of its place and ignores edges to other rows. So an edge that no message covers would be a race.
"""

from collections import defaultdict
from collections.abc import Iterator

from .errors import Error
from .ir import Place, Plan, Task

# A name, and how many micro-batches before a read it is written: a buffer 1, others 0.
_Access = tuple[str, int]


def check_order(plan: Plan) -> None:
    """Raise Error if an edge between places has no message, or a read may come before its write."""
    if faults := uncovered_edges(plan) or unordered_reads(plan):
        raise Error(
            f"the table of this step has {len(faults)} dependencies without a message or a path of edges:\n"
            + "".join(f"  {line}\n" for line in faults[:6])
            + "  fix: compile the model again with this version; if the error stays, please report it"
        )


def copies_at(plan: Plan, place: Place) -> set[str]:
    """Return the names of the slots that a place has, and that an earlier ipu has on another device of the process: the
    place has copies of these weights, which are written before each call."""
    homes: dict[str, Place] = {}
    for ipu, names in plan.slots_of.items():
        homes = {**dict.fromkeys(names, plan.places.get(ipu, place)), **homes}
    here = {name for names in plan.slots_at(place).values() for name in names}
    return {name for name in here if homes[name].process == place.process and homes[name] != place}


def uncovered_edges(plan: Plan) -> list[str]:
    """Return the edges between places that no message covers, such as "F1 (ipu 1) waits for F0 (ipu 0), 0 behind".
    Only the edge of a receive to its send is covered."""
    uncovered = []
    for task in plan.tasks:
        for edge in task.after:
            awaited = plan.tasks[edge.row]
            here, there = plan.places.get(task.ipu), plan.places.get(awaited.ipu)
            if here is None or there is None or here == there:
                continue
            is_message = (task.kind, awaited.kind, edge.behind) == ("receive", "send", 0)
            if not is_message or plan.places[awaited.instructions[0].peer] != here:
                uncovered.append(f"{_text(task)} waits for {_text(awaited)}, {edge.behind} behind")
    return uncovered


def unordered_reads(plan: Plan) -> list[str]:
    """Return the reads of values, weights and changed buffers that no path of edges orders after their write at the
    place, or before the row that frees the value; such as "F1 (ipu 1) reads relu, which receive F1 (ipu 1) writes"."""
    size, before = len(plan.tasks), _tasks_before(plan)
    writers = defaultdict[tuple[Place, _Access], list[int]](list)
    readers = defaultdict[tuple[Place, _Access], list[int]](list)
    for row, task in enumerate(plan.tasks):
        place = plan.places.get(task.ipu, Place())
        for access in _values_written(plan, task):
            writers[place, access].append(row)
        for access in _values_read(plan, task):
            readers[place, access].append(row)
    races = []
    for (place, (name, behind)), rows in readers.items():
        made = writers[place, (name, behind)][:1]  # ipus of a place load an input once
        for writer in made:
            first = writer + size * (not behind and plan.tasks[writer].index == "micro_batch")
            late = (row for row in rows if row != writer and not before[size + row] >> first & 1)
            races += (
                f"{_text(plan.tasks[row])} reads {name}, which {_text(plan.tasks[writer])} writes"
                for row in late
            )
    for row, task in enumerate(plan.tasks):
        for name in task.frees:
            users = readers[plan.places.get(task.ipu, Place()), (name, 0)]
            late = (user for user in users if user != row and not before[size + row] >> size + user & 1)
            races += (f"{_text(plan.tasks[user])} reads {name}, which {_text(task)} frees" for user in late)
    return races


def _tasks_before(plan: Plan) -> dict[int, int]:
    """Return for each task of two micro-batches, as bits, the tasks that end before it begins. Tasks are numbered by
    their row; those of the second micro-batch follow those of the first."""
    size, before = len(plan.tasks), dict[int, int]()
    for start in (0, size):
        for row, task in enumerate(plan.tasks):
            before[start + row] = 0
            for edge in task.after if task.index == "micro_batch" or not start else ():
                is_repeated = plan.tasks[edge.row].index == "micro_batch"
                shift = start - size * (edge.behind or 0) if is_repeated else 0
                if shift >= 0 and edge.behind is not None:
                    before[start + row] |= before[edge.row + shift] | 1 << edge.row + shift
    return before


def _values_read(plan: Plan, task: Task) -> Iterator[_Access]:
    """Yield the name of each value that a row of a micro-batch reads, and how many micro-batches before it was
    written."""
    partition = plan.partition
    if task.kind in ("send", "sum") and task.index == "micro_batch":
        yield from dict.fromkeys((name, 0) for x in task.instructions if x.kind != "free" for name in x.names)
    for name in partition.names_read_by(partition.pieces[task.piece]) if task.runs_piece else ():
        is_buffer = name in partition.signature.changed_buffers
        yield name, int(is_buffer and not partition.is_of_micro_batch(name, task.piece))


def _values_written(plan: Plan, task: Task) -> Iterator[_Access]:
    """Yield what a row writes at its place: values of a micro-batch, received weights, and next values of buffers."""
    partition = plan.partition
    slots = {slot.key: slot.name for slot in partition.signature.slots if slot.role == "buffer"}
    kept = [key for x in task.instructions if x.kind == "keep" for key in x.keys]
    yield from ((slots[key], 1) for key in kept)
    if task.runs_piece:
        yield from ((name, 0) for name in partition.pieces[task.piece].writes if name in partition.makers)
        yield from ((name, 0) for x in task.instructions if x.kind == "load" for name in x.names)
    elif task.kind == "receive" and not kept:
        yield from ((name, 0) for name in task.instructions[0].names)


def _text(task: Task) -> str:
    return f"{task} (ipu {task.ipu})"
