"""Memory: the bytes that each ipu keeps from step to step, and those that it holds for micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from popengine.profile import Event, Memory, Operation, Profile, Tensor, Track

MOST_POINTS = 20_000  # of one curve


@dataclass(frozen=True)
class Need:
    """The most bytes that one ipu holds, by kind."""

    ipu: int
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    between: int  # values that were sent to the ipu, and that it has not received yet
    always: int  # weights, buffers, gradients and optimizer together, which are held during the whole step
    total: int


def needs(profile: Profile) -> list[Need]:
    """Return the bytes that each ipu of replica 0 needs. Those of activations and of values between ipus are of
    the step in which single operations were measured, 0 without it."""
    fixed = {row.ipu: row for row in profile.memory if row.replica == 0}
    tracks, waiting = detailed_tracks(profile), bytes_between(profile)
    found = []
    for ipu in profile.devices:
        row = fixed.get(ipu, Memory(0, ipu))
        peak = max(size for _, size in bytes_curve(profile, tracks[ipu])) if ipu in tracks else 0
        kept = row.weights, row.buffers, row.gradients, row.optimizer
        passing = peak, waiting.get(ipu, 0)
        found.append(Need(ipu, *kept, *passing, sum(kept), sum(kept + passing)))
    return found


def capacity(profile: Profile, needs: Sequence[Need]) -> tuple[int | None, int]:
    """Return the capacity in bytes (None: unknown), and the bytes that must fit into it: those of all ipus of
    all replicas if these share the memory, else those of the ipu that needs most."""
    of_profile = profile.facts.get("capacity") or {}
    totals = [need.total for need in needs]
    shared = profile.counts.get("replicas", 1) * sum(totals)
    return of_profile.get("bytes"), shared if of_profile.get("shared") else max(totals, default=0)


def detailed_tracks(profile: Profile) -> dict[int, Track]:
    """Return the track of each ipu of replica 0 in the step in which single operations were measured."""
    return {track.ipu: track for track in profile.tracks if is_detailed(profile, track)}


def is_detailed(profile: Profile, row: Track | Event) -> bool:
    """Return whether `row` belongs to replica 0 and to the step in which single operations were measured."""
    return [row.call, row.step] == list(profile.facts.get("detailed_step") or ()) and row.replica == 0


def held_bytes(tensors: list[Tensor], instructions: int) -> list[int]:
    """Return the bytes that an ipu's tensors hold after each of its program's first `instructions`."""
    change = [0] * (instructions + 1)
    for row in tensors:
        change[min(row.born, instructions)] += row.bytes
        if row.died >= 0:
            change[min(row.died, instructions)] -= row.bytes
    return list(accumulate(change[:instructions]))


def bytes_curve(profile: Profile, track: Track) -> list[tuple[int, int]]:
    """Return points (ns since the profile's origin, bytes held for micro-batches): one after each instruction
    of a step and, in a detailed step that is not too long, after each operation, at the times of its piece's
    average run. Of more than `MOST_POINTS`, the highest of each group remains: no peak is lost."""
    program = profile.programs[track.ipu]
    # All steps hold the same tensors at the same instruction.
    after = held_bytes([row for row in profile.tensors if row.ipu == track.ipu], len(track.durations))
    has_operations = is_detailed(profile, track) and len(after) < MOST_POINTS // 4
    inside = operation_ends(profile) if has_operations else {}
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


def operation_ends(profile: Profile) -> dict[tuple[str, int], list[tuple[float, Operation]]]:
    """Return, by (phase, stage) of a piece, its operations, each after the share of the piece's time that has
    passed when the operation ends. The shares are means over all runs in the detailed step."""
    rows = defaultdict(list)
    for operation in profile.operations:
        piece = profile.pieces[operation.piece]
        rows[piece.phase, piece.stage].append(operation)
    found = {}
    for key, operations in rows.items():
        ends = list(accumulate(operation.ns for operation in operations))
        found[key] = [(end / (ends[-1] or 1), row) for end, row in zip(ends, operations, strict=True)]
    return found


def transfers(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield (send, receive) of each value that was received, given the events of one replica."""
    sent = {(row.channel, row.step, row.micro_batch, row.peer): row for row in events if row.kind == "send"}
    for row in events:
        key = row.channel, row.step, row.micro_batch, row.ipu
        if row.kind == "receive" and key in sent:
            yield sent[key], row


def bytes_between(profile: Profile) -> dict[int, int]:
    """Return, by ipu, the most bytes at one time in the detailed step that were sent to it but not received
    yet. An ipu for which no value waited is missing."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    in_detail = replace(profile, tracks=tuple(detailed_tracks(profile).values()))
    for send, receive in transfers([*in_detail.events(frozenset({"send", "receive"}))]):
        if receive.end > send.end:
            changes[receive.ipu] += [(send.end, send.bytes), (receive.end, -send.bytes)]
    return {ipu: max(accumulate(size for _, size in sorted(rows))) for ipu, rows in changes.items()}
