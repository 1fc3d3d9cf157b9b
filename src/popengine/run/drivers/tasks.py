"""Tasks: one step of all ipus, cut into what can be done without waiting, and what has to be done before it.

Every driver runs these tasks, and nothing else says what waits for what. Where cores share all ipus, an ipu is a
place and not a core: two cores may work for the same ipu, on different micro-batches, as long as no result can
tell. So a task is some successive instructions of one ipu on one micro-batch, and waits for no more than
    the values that it receives, and what its ipu has done on the same micro-batch before;
    where it adds to sums, or keeps or reads a buffer: the same of the micro-batch before, 0 + 1 + 2 in this order (but
    buffers in a chain are waited for within a piece; and where there are other instances, a piece may add up its
    gradients itself on the last micro-batch);
    where few micro-batches may be under way, the end of an earlier one;
    if it is an update: all that its ipu does in the step.
Where each ipu is a lane of its own, it also waits for what its program has before it: so the schedule is kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from popengine.ir import (
    Accumulate,
    Compute,
    Free,
    Instruction,
    Keep,
    Load,
    Piece,
    Plan,
    Receive,
    Send,
    Store,
    Update,
)
from popengine.settings import Settings
from popengine.virtual_time import Timeline, simulate

from ..state.buffer_chain import chains

_AT_ONCE = -1  # in place of a micro-batch: what frees memory, or others wait for


@dataclass(eq=False, slots=True)
class Task:
    """Instructions `start` to `stop` of an ipu's program, to be run when those in `after` have been."""

    ipu: int
    start: int
    stop: int
    micro_batch: int = _AT_ONCE
    piece: int = -1  # -1: it computes none
    after: list[Task] = field(default_factory=list)


def tasks(
    plan: Plan,
    in_flight: int,
    *,
    adds_outputs: bool,
    in_order: bool,
    lanes: bool = False,
    hands_over: bool = False,
    chained: Container[str] = (),
) -> list[Task]:
    """The tasks of a step in the order of its schedule: whoever takes tasks takes the first that is ready.

    Args:
        in_flight:    micro-batches that may be under way
        adds_outputs: outputs are summed up
        in_order:     each piece sees micro-batches in their order, whatever it does
        lanes:        each ipu does one thing at a time, in the order of its program; else depth first
        hands_over:   on the last micro-batch pieces add up their gradients themselves
        chained:      buffers that a piece waits for itself
    """
    found: list[Task] = []
    for ipu, program in plan.programs.items():
        mine = _of_ipu(ipu, program, plan, adds_outputs, in_order, hands_over, chained)
        if lanes:
            for before, task in pairwise(mine):
                task.after.append(before)
        found += mine
    _join(found, plan)
    _bound(found, plan, in_flight)
    if not lanes:
        return sorted(found, key=lambda task: (task.micro_batch, task.piece))
    costs = [float(task.piece >= 0) for task in found]
    return [found[number] for number in timeline(found, costs, len(found)).order]


def timeline(found: Sequence[Task], costs: Sequence[float], devices: int | Sequence[int]) -> Timeline:
    """When tasks run in virtual time: see `virtual_time.simulate`."""
    place = {id(task): number for number, task in enumerate(found)}
    return simulate([[place[id(other)] for other in task.after] for task in found], costs, devices)


def _of_ipu(
    ipu: int,
    program: Sequence[Instruction],
    plan: Plan,
    adds_outputs: bool,
    in_order: bool,
    hands_over: bool,
    chained: Container[str],
) -> list[Task]:
    """The tasks of one ipu, with what each of them waits for there."""
    pieces, micro_batches = plan.partition.pieces, plan.schedule.micro_batches
    keeper = _keepers(program, plan)
    waits_for_itself = [in_order or _shows(piece) for piece in pieces]
    gradients = {r.name for r in plan.partition.signature.results if r.kind == "gradient"}
    adds_up = {i for i, piece in enumerate(pieces) if hands_over and not gradients.isdisjoint(piece.writes)}
    mine: list[Task] = []
    moves: list[Task] = []  # of weights, at the start
    latest: dict[int, Task] = {}  # by micro-batch: its last computation
    ended: dict[int, Task] = {}  # by piece: the last task of its last micro-batch
    summed: dict[int, Task] = {}  # by piece: its last sums
    for start, stop in _cuts(program, adds_outputs):
        task = Task(ipu, start, stop)
        compute = next((x for x in program[start:stop] if isinstance(x, Compute)), None)
        if compute is not None:
            task.micro_batch, task.piece = compute.micro_batch, compute.piece
            task.after += [latest[task.micro_batch]] if task.micro_batch in latest else moves
            waits = {keeper[name] for name in compute.held if name in keeper and name not in chained}
            if waits_for_itself[task.piece]:
                waits.add(task.piece)
            if task.piece in adds_up and task.micro_batch == micro_batches - 1:
                waits.add(task.piece)
            task.after += [ended[piece] for piece in waits if piece in ended]
            latest[task.micro_batch] = ended[task.piece] = task
        elif isinstance(program[start], Update):
            task.micro_batch, task.after = micro_batches, list(mine)
        elif isinstance(program[start], (Send, Receive)):
            moves.append(task)
        else:  # sums of what was computed just before
            piece = mine[-1].piece
            task.after += [mine[-1], *([summed[piece]] if piece in summed else [])]
            summed[piece] = ended[piece] = task
            if _leaves(program[start:stop]):
                latest[mine[-1].micro_batch] = task
        mine.append(task)
    return mine


def _cuts(program: Sequence[Instruction], adds_outputs: bool) -> Iterator[tuple[int, int]]:
    """Where tasks start and stop: each computes one piece, adds up what one has computed, moves weights or updates."""
    begins = {Receive, Load, Compute}
    ordered = {Accumulate, Keep, Store} if adds_outputs else {Accumulate, Keep}
    start, computed, sums, moves = 0, False, False, False
    for index, instruction in enumerate(program):
        kind = type(instruction)
        if index > start and (
            moves or kind is Update or (computed and (kind in begins or (kind in ordered and not sums)))
        ):
            yield start, index
            start, computed, sums = index, False, False
        computed |= kind is Compute or kind in ordered
        sums |= kind in ordered
        moves = kind in (Send, Receive) and instruction.micro_batch is None  # pyright: ignore
    if start < len(program):
        yield start, len(program)


def _leaves(sums: Sequence[Instruction]) -> bool:
    """Whether a later piece reads what was added up or kept, and then forgets it."""
    freed = {name for x in sums if isinstance(x, Free) for name in x.names}
    return any(not freed.issuperset(x.names) for x in sums if isinstance(x, (Accumulate, Keep, Store)))


def _keepers(program: Sequence[Instruction], plan: Plan) -> dict[str, int]:
    """For each buffer that a piece of this ipu writes (by slot), which one."""
    slots = {slot.key: slot.name for slot in plan.partition.signature.slots if slot.role == "buffer"}
    found, piece = {}, -1
    for instruction in program:
        if isinstance(instruction, Compute):
            piece = instruction.piece
        elif isinstance(instruction, Keep):
            found |= {slots[key]: piece for key in instruction.keys}
    return found


def _shows(piece: Piece) -> bool:
    """Whether somebody may see when a piece runs: its own operations print, or call the host."""
    return not all(call.startswith(("aten.", "prims.")) for call in piece.calls)


def _join(found: Sequence[Task], plan: Plan) -> None:
    """Let tasks that receive wait for those that send."""
    sent: dict[Any, Task] = {}
    received: list[tuple[Any, Task]] = []
    for task in found:
        for instruction in plan.programs[task.ipu][task.start : task.stop]:
            if isinstance(instruction, (Send, Receive)):
                name = instruction.channel, instruction.micro_batch
                if isinstance(instruction, Send):
                    sent[name] = task
                else:
                    received.append((name, task))
    for name, task in received:
        task.after.append(sent[name])


def _bound(found: Sequence[Task], plan: Plan, in_flight: int) -> None:
    """Let a micro-batch begin when an earlier one has ended."""
    pieces = plan.partition.pieces
    ends = {task.micro_batch: task for task in found if task.piece == len(pieces) - 1}
    first = {task.micro_batch: task for task in found if task.piece == 0}
    for micro_batch, task in first.items():
        if micro_batch >= in_flight:
            task.after.append(ends[micro_batch - in_flight])


def tasks_of(plan: Plan, settings: Settings, threads: int, lanes: bool) -> list[Task]:
    """The tasks of a step of each replica, in the order in which `threads` threads take them."""
    schedule = plan.schedule
    in_flight = max(schedule.in_flight, threads) if schedule.overlaps and not lanes else schedule.in_flight
    # What instances exchange has no names: one micro-batch after another, so that all exchange in the same order.
    meets_others = any(piece.gathers > settings.counts.replicas for piece in plan.partition.pieces)
    return tasks(
        plan,
        1 if meets_others else in_flight,
        adds_outputs="sum" in (settings.outputs, *(anchor.outputs for anchor in settings.anchors)),
        in_order=settings.finite_checks,
        lanes=lanes,
        hands_over=settings.training and settings.counts.instances > 1,
        chained={name for chain in chains(plan, settings).values() for name in chain},
    )
