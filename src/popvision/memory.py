"""Memory: the bytes that each ipu keeps from step to step, and those that it holds for micro-batches."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from popengine.profile import Event, Memory, Operation, Profile, Tensor, Track

from .units import size_text

MOST_POINTS = 20_000  # of one curve


@dataclass(frozen=True)
class Need:
    """The most bytes that one ipu holds, by kind."""

    ipu: int
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int | None  # None: not known before a kernel has run
    between: int  # values that were sent to the ipu, and that it has not received yet
    code: int = 0

    @property
    def always(self) -> int:
        """Return the bytes that are held during the whole step."""
        return self.weights + self.buffers + self.gradients + self.optimizer + self.code

    @property
    def total(self) -> int:
        return self.always + (self.activations or 0) + self.between


def memory_needs(profile: Profile) -> list[Need]:
    """Return the bytes that each ipu of replica 0 needs.

    Of activations and of values between ipus they are the peaks in the detailed step (0 without such a step);
    for a plan, whose profile has no steps, the upper bounds in its facts.
    """
    fixed, facts = {row.ipu: row for row in profile.memory if row.replica == 0}, profile.facts
    tracks, waiting = tracks_of_detailed_step(profile), peak_bytes_in_transit(profile)
    found = []
    for index, ipu in enumerate(profile.devices):
        row = fixed.get(ipu, Memory(0, ipu))
        peak = max(size for _, size in bytes_curve(profile, tracks[ipu])) if ipu in tracks else 0
        passing = peak, waiting.get(ipu, 0)
        if "activations" in facts:
            passing = facts["activations"][index], facts["between"][index]
        found.append(Need(ipu, row.weights, row.buffers, row.gradients, row.optimizer, *passing))
    return found


def memory_table(needs: Sequence[Need]) -> list[list[str]]:
    """Return a table with a row for each ipu's memory, after a row of column names."""
    rows = [["ipu", "weights", "gradients", "optimizer", "activations", "between", "total"]]
    for need in needs:
        sizes = need.weights + need.buffers, need.gradients, need.optimizer, need.activations, need.between
        rows.append([str(need.ipu), *map(size_text, sizes), size_text(need.total)])
    return rows


def capacity_and_need(profile: Profile, needs: Sequence[Need]) -> tuple[int | None, int]:
    """Return two numbers of bytes: the capacity (None: unknown), and the need. If all ipus share the memory,
    the need is the sum over all ipus and replicas; else it is that of the ipu that needs most."""
    of_profile = profile.facts.get("capacity") or {}
    totals = [need.total for need in needs]
    shared = profile.counts.get("replicas", 1) * sum(totals)
    return of_profile.get("bytes"), shared if of_profile.get("shared") else max(totals, default=0)


def tracks_of_detailed_step(profile: Profile) -> dict[int, Track]:
    """Return, by ipu, the track of replica 0 in the detailed step (see `is_in_detailed_step`)."""
    return {track.ipu: track for track in profile.tracks if is_in_detailed_step(profile, track)}


def is_in_detailed_step(profile: Profile, row: Track | Event) -> bool:
    """Return whether a track or event is of replica 0 in the detailed step, which has times of operations."""
    return [row.call, row.step] == list(profile.facts.get("detailed_step") or ()) and row.replica == 0


def held_bytes(tensors: list[Tensor], instructions: int) -> list[int]:
    """Return the bytes that `tensors` hold after each of the first `instructions` of an ipu's program."""
    change = [0] * (instructions + 1)
    for row in tensors:
        change[min(row.born, instructions)] += row.bytes
        if row.died >= 0:
            change[min(row.died, instructions)] -= row.bytes
    return list(accumulate(change[:instructions]))


def bytes_curve(profile: Profile, track: Track) -> list[tuple[int, int]]:
    """Return the curve of the bytes that an ipu holds for micro-batches in one step, as points (ns since the
    profile's origin, bytes).

    There is a point at the end of each instruction. In the detailed step, unless it is very long, there is
    also one at the end of each operation, at the time that `operation_end_shares` gives. If the curve has
    more than `MOST_POINTS` points, only the highest of each few neighbours is returned, so peaks stay.
    """
    program = profile.programs[track.ipu]
    # All steps hold the same tensors at the same instruction.
    after = held_bytes([row for row in profile.tensors if row.ipu == track.ipu], len(track.durations))
    has_operations = is_in_detailed_step(profile, track) and len(after) < MOST_POINTS // 4
    inside = operation_end_shares(profile) if has_operations else {}
    before = 0
    points = [(track.start, 0)]
    for index, (at, end) in enumerate(track.spans()):
        part = profile.parts[program[2 * index]]
        if part.kind == "compute":
            for share, operation in inside.get((part.phase, part.stage), ()):
                live = operation.live - profile.pieces[operation.piece].enters
                points.append((at + round((end - at) * share), before + live))
        before = after[index]
        points.append((end, before))
    size = -(-len(points) // MOST_POINTS)  # points of a group
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


def operation_end_shares(profile: Profile) -> dict[tuple[str, int], list[tuple[float, Operation]]]:
    """Return, by (phase, stage) of a piece, a list of (share, operation) in the order of the operations.

    `share` is the fraction of the piece's time that has passed when the operation ends, a mean over all runs
    of the piece in the detailed step.
    """
    rows = defaultdict(list)
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        rows[piece.phase, piece.stage].append(operation)
    found = {}
    for key, operations in rows.items():
        ends = list(accumulate(operation.ns for operation in operations))
        found[key] = [(end / (ends[-1] or 1), row) for end, row in zip(ends, operations, strict=True)]
    return found


def completed_transfers(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield the events (send, receive) of each completed transfer. `events`: those of one replica."""
    sent = {(row.channel, row.step, row.micro_batch, row.peer): row for row in events if row.kind == "send"}
    for row in events:
        key = row.channel, row.step, row.micro_batch, row.ipu
        if row.kind == "receive" and key in sent:
            yield sent[key], row


def peak_bytes_in_transit(profile: Profile) -> dict[int, int]:
    """Return, by ipu, the largest number of bytes in the detailed step that were sent to the ipu and that it
    had not received yet. An ipu for which no value waited is missing."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    in_detail = replace(profile, tracks=tuple(tracks_of_detailed_step(profile).values()))
    for send, receive in completed_transfers([*in_detail.events(frozenset({"send", "receive"}))]):
        if receive.end > send.end:
            changes[receive.ipu] += [(send.end, send.bytes), (receive.end, -send.bytes)]
    return {ipu: max(accumulate(size for _, size in sorted(rows))) for ipu, rows in changes.items()}
