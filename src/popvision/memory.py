"""Memory: the bytes that each ipu keeps from step to step, and those that it holds for micro-batches."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from popengine.profile import KeptBytes, Operation, Profile, TaskRun

from .times import group_by
from .units import size_text

MOST_POINTS = 20_000  # of one curve


@dataclass(frozen=True)
class IpuMemory:
    """The most bytes that one ipu holds, by kind."""

    ipu: int
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int | None  # None: not known
    between: int  # values that were sent to the ipu, and that it has not received yet

    @property
    def always(self) -> int:
        """Return the bytes that are held during the whole step."""
        return self.weights + self.buffers + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.always + (self.activations or 0) + self.between


def memory_needs(profile: Profile, runs: Sequence[TaskRun] = ()) -> list[IpuMemory]:
    """Return the bytes that each ipu of replica 0 needs, at the peaks of a step on separate devices, whose tasks are
    `runs`."""
    fixed = {row.ipu: row for row in profile.memory if row.replica == 0}
    waiting, needs = peak_bytes_in_transit(profile, runs), []
    for ipu in profile.devices:
        row = fixed.get(ipu, KeptBytes(0, ipu))
        peak = (
            max((size for _, size in bytes_curve(profile, runs, ipu)), default=0) if profile.tensors else None
        )
        kept = row.weights, row.buffers, row.gradients, row.optimizer
        needs.append(IpuMemory(ipu, *kept, peak, waiting.get(ipu, 0)))
    return needs


def memory_table(needs: Sequence[IpuMemory]) -> list[list[str]]:
    """Return a table with a row for each ipu's memory, after a row of column names."""
    rows = [["ipu", "weights", "gradients", "optimizer", "activations", "between", "total"]]
    for need in needs:
        sizes = need.weights + need.buffers, need.gradients, need.optimizer, need.activations, need.between
        rows.append([str(need.ipu), *map(size_text, sizes), size_text(need.total)])
    return rows


def bytes_curve(profile: Profile, runs: Sequence[TaskRun], ipu: int) -> list[tuple[int, int]]:
    """Return the bytes that an ipu holds for micro-batches in a step of these `runs`, as points (ns, bytes). A
    value that a row loads is held from the row's start, a result from its end. Of more than `MOST_POINTS` points
    only the highest of each few neighbours is returned, so peaks stay."""
    at_start, at_end = defaultdict(int), defaultdict(int)  # by row, the change of the bytes
    for tensor in profile.tensors:
        if tensor.ipu == ipu:
            (at_end if tensor.kind == "activation" else at_start)[tensor.born] += tensor.bytes
            if tensor.died >= 0:
                at_end[tensor.died] -= tensor.bytes
    ipu_runs = [run for run in runs if profile.tasks[run.task].ipu == ipu]
    inside = operation_end_shares(profile)
    if len(ipu_runs) * len(profile.operations) > MOST_POINTS * len(inside):  # only the peak of each row
        inside = {task: [max(rows, key=lambda row: row[1].held)] for task, rows in inside.items()}
    held, points = 0, [(ipu_runs[0].start, 0)] if ipu_runs else []
    for run in ipu_runs:
        held += at_start[run.task]
        points.append((run.start, held))
        for share, operation in inside.get(run.task, ()) if profile.tasks[run.task].computes else ():
            points.append((run.start + round((run.end - run.start) * share), held + operation.held))
        held += at_end[run.task]
        points.append((run.end, held))
    size = -(-len(points) // MOST_POINTS) or 1  # points of a group
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


def operation_end_shares(profile: Profile) -> dict[int, list[tuple[float, Operation]]]:
    """Return, by row of the table, a list of (share, operation) in the order of the operations; `share` is the fraction
    of the row's time that has passed when the operation ends."""
    shares = {}
    for task, operations in group_by(profile.operations, lambda operation: operation.task).items():
        ends = list(accumulate(operation.ns for operation in operations))
        shares[task] = [(end / (ends[-1] or 1), row) for end, row in zip(ends, operations, strict=True)]
    return shares


def peak_bytes_in_transit(profile: Profile, runs: Sequence[TaskRun]) -> dict[int, int]:
    """Return, by ipu for which a value waited, the most bytes that were sent to it and not received yet."""
    run_of = {(run.call, run.step, run.replica, run.task, run.micro_batch): run for run in runs}
    moves = [(row, task, part) for row, task, part in profile.moves() if task.phase]
    senders = {(part.channel, part.peer): (row, part.bytes) for row, _, part in moves if part.kind == "send"}
    senders_of = defaultdict(list)  # by row of the receiver
    for row, task, part in moves:
        if part.kind == "receive" and (part.channel, task.ipu) in senders:
            senders_of[row].append(senders[part.channel, task.ipu])
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        for sender, size in senders_of[run.task]:
            sent = run_of.get((run.call, run.step, run.replica, sender, run.micro_batch))
            if sent is not None and run.start > sent.end:
                changes[profile.tasks[run.task].ipu] += [(sent.end, size), (run.start, -size)]
    return {ipu: max(accumulate(size for _, size in sorted(rows))) for ipu, rows in changes.items()}
