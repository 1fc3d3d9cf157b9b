"""Memory: the bytes that each ipu keeps from step to step, and those that it holds for micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from popengine.profile import Event, Memory, Profile, Tensor, Track

MOST_POINTS = 20_000  # of one curve


@dataclass(frozen=True)
class Need:
    """The most bytes that one ipu holds."""

    ipu: int
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    between: int  # values that were sent to it and are not received yet
    always: int  # held during the whole step
    total: int


def needs(profile: Profile) -> list[Need]:
    """Return the memory need of each ipu of replica 0; bytes of micro-batches are the detailed step's."""
    fixed = {row.ipu: row for row in profile.memory if row.replica == 0}
    tracks, waiting = detailed(profile), bytes_between(profile)
    found = []
    for ipu in profile.devices:
        row = fixed.get(ipu, Memory(0, ipu))
        peak = max(size for _, size in curve(profile, tracks[ipu])) if ipu in tracks else 0
        kept = row.weights, row.buffers, row.gradients, row.optimizer
        passing = peak, waiting.get(ipu, 0)
        found.append(Need(ipu, *kept, *passing, sum(kept), sum(kept + passing)))
    return found


def capacity(profile: Profile, needs: Sequence[Need]) -> tuple[int | None, int]:
    """Return the capacity in bytes (None: unknown), and the bytes to compare with it.

    These are the bytes of all ipus of all replicas if they share the memory, else of the ipu that needs most.
    """
    of_profile = profile.facts.get("capacity") or {}
    totals = [need.total for need in needs]
    shared = profile.counts.get("replicas", 1) * sum(totals)
    return of_profile.get("bytes"), shared if of_profile.get("shared") else max(totals, default=0)


def detailed(profile: Profile) -> dict[int, Track]:
    """Return, by ipu, the track of the step in which single operations were measured."""
    return {track.ipu: track for track in profile.tracks if is_detailed(profile, track)}


def is_detailed(profile: Profile, row: Track | Event) -> bool:
    """Return whether `row` belongs to replica 0 and to the step in which single operations were measured."""
    return [row.call, row.step] == list(profile.facts.get("detailed_step") or ()) and row.replica == 0


def held_bytes(tensors: list[Tensor], instructions: int) -> list[int]:
    """Return, for each instruction of an ipu's program, the bytes that its tensors hold after it."""
    change = [0] * (instructions + 1)
    for row in tensors:
        change[min(row.born, instructions)] += row.bytes
        if row.died >= 0:
            change[min(row.died, instructions)] -= row.bytes
    return list(accumulate(change[:instructions]))


def curve(profile: Profile, track: Track) -> list[tuple[int, int]]:
    """Return points (ns since the profile's origin, bytes held for micro-batches): one after each instruction
    of a step and, in a detailed step that is not too long, after each operation, at the times of its piece's
    average run. Of more than `MOST_POINTS`, the highest of each group remains: no peak is lost."""
    program = profile.programs[track.ipu]
    # All steps hold the same tensors at the same instruction.
    after = held_bytes([row for row in profile.tensors if row.ipu == track.ipu], len(track.durations))
    inside = _inside(profile) if is_detailed(profile, track) and len(after) < MOST_POINTS // 4 else {}
    piece_at = {(piece.phase, piece.stage): i for i, piece in enumerate(profile.pieces)}
    before = 0
    points = [(track.start, 0)]
    for index, (at, end) in enumerate(track.spans()):
        part = profile.parts[program[2 * index]]
        if part.kind == "compute" and (piece := piece_at[part.phase, part.stage]) in inside:
            base = before - profile.pieces[piece].enters
            points += [(at + round((end - at) * share), base + live) for share, live in inside[piece]]
        before = after[index]
        points.append((end, before))
    size = -(-len(points) // MOST_POINTS)  # points of a group
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


def _inside(profile: Profile) -> dict[int, list[tuple[float, int]]]:
    """Return, by the index of a piece, (share of the piece's time, bytes alive) after each operation."""
    rows = defaultdict(list)
    for operation in profile.operations:
        rows[operation.piece].append(operation)
    found = {}
    for piece, operations in rows.items():
        ends = list(accumulate(operation.ns for operation in operations))
        shares = (end / (ends[-1] or 1) for end in ends)
        found[piece] = list(zip(shares, (operation.live for operation in operations), strict=True))
    return found


def bytes_between(profile: Profile) -> dict[int, int]:
    """Return, by ipu, the most bytes at one time in the detailed step that were sent to it but not received
    yet. An ipu to which nothing waited is missing."""
    sent: dict[tuple[str, int, int], tuple[int, int]] = {}
    received: dict[tuple[str, int, int], int] = {}
    in_detail = replace(profile, tracks=tuple(detailed(profile).values()))
    for event in in_detail.events(frozenset({"send", "receive"})):
        if event.kind == "send":
            sent[event.channel, event.peer, event.micro_batch] = (event.end, event.bytes)
        else:
            received[event.channel, event.ipu, event.micro_batch] = event.end
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key, (time, size) in sent.items():
        if received.get(key, time) > time:
            changes[key[1]] += [(time, size), (received[key], -size)]
    return {ipu: max(accumulate(size for _, size in sorted(rows))) for ipu, rows in changes.items()}
