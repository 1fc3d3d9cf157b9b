"""Memory: the bytes that each ipu keeps from step to step, and those that it holds for micro-batches over a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from popengine.profile import Memory, Profile, Tensor, Track

MOST_POINTS = 20_000  # of one curve


@dataclass(frozen=True)
class Need:
    """The most bytes of one ipu. `always` is held all the time; `between`: values sent to it and not received yet."""

    ipu: int
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    between: int

    @property
    def always(self) -> int:
        return self.weights + self.buffers + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.always + self.activations + self.between


def needs(profile: Profile) -> list[Need]:
    """Return what each ipu of replica 0 needs."""
    fixed = {row.ipu: row for row in profile.memory if row.replica == 0}
    waiting = between(profile)
    found = []
    for ipu in profile.devices:
        row = fixed.get(ipu, Memory(0, ipu))
        peak = max((size for _, size in curve(profile, ipu)), default=0)
        kept = row.weights, row.buffers, row.gradients, row.optimizer
        found.append(Need(ipu, *kept, peak, waiting.get(ipu, 0)))
    return found


def capacity(profile: Profile) -> tuple[int | None, str, bool]:
    """Return the capacity in bytes (None: unknown), its name, and whether all ipus share it."""
    found = profile.facts.get("capacity") or {}
    return found.get("bytes"), found.get("of", ""), bool(found.get("shared"))


def wanted(profile: Profile, needs: Sequence[Need]) -> int:
    """Return the bytes to be held against the capacity: of all ipus of all replicas if they share it, else of the
    fullest ipu."""
    if capacity(profile)[2]:
        return profile.counts.get("replicas", 1) * sum(need.total for need in needs)
    return max((need.total for need in needs), default=0)


def fits(profile: Profile, needs: Sequence[Need]) -> bool | None:
    limit = capacity(profile)[0]
    return wanted(profile, needs) <= limit if limit and needs else None


def detailed(profile: Profile) -> dict[int, Track]:
    """Return the tracks of the step in which single operations were measured, by ipu."""
    place = profile.facts.get("detailed_step")
    if place is None:
        return {}
    return {
        track.ipu: track
        for track in profile.tracks
        if (track.call, track.step) == tuple(place) and track.replica == 0
    }


def held(tensors: list[Tensor], instructions: int) -> list[int]:
    """Return the bytes held after each instruction."""
    change = [0] * (instructions + 1)
    for row in tensors:
        change[min(row.born, instructions)] += row.bytes
        if row.died >= 0:
            change[min(row.died, instructions)] -= row.bytes
    total, found = 0, []
    for difference in change[:instructions]:
        total += difference
        found.append(total)
    return found


def curve(profile: Profile, ipu: int) -> list[tuple[int, int]]:
    """Return points (ns since the profile's origin, bytes held for micro-batches) of the detailed step: after each
    instruction, and within pieces after each operation. Times inside a piece are those of its average run."""
    track = detailed(profile).get(ipu)
    if track is None:
        return []
    program = profile.programs[ipu]
    after = held([row for row in profile.tensors if row.ipu == ipu], len(track.durations))
    inside = _inside(profile) if len(after) < MOST_POINTS // 4 else {}
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
    return points if len(points) <= MOST_POINTS else _thinned(points)


def curve_of(profile: Profile, track: Track) -> list[tuple[int, int]]:
    """Return points (ns since the profile's origin, bytes held for micro-batches) of any step, after each instruction
    that changes them: every step holds the same tensors at the same instructions."""
    rows = [row for row in profile.tensors if row.ipu == track.ipu]
    points = [(track.start, 0)]
    for (_, end), size in zip(track.spans(), held(rows, len(track.durations)), strict=True):
        if size != points[-1][1]:
            points.append((end, size))
    return points


def _inside(profile: Profile) -> dict[int, list[tuple[float, int]]]:
    """Return for each piece (share of its time, bytes alive in it) after each operation."""
    rows = defaultdict(list)
    for operation in profile.operations:
        rows[operation.piece].append(operation)
    found = {}
    for piece, operations in rows.items():
        whole = sum(operation.ns for operation in operations) or 1
        spent, points = 0, []
        for operation in operations:
            spent += operation.ns
            points.append((spent / whole, operation.live))
        found[piece] = points
    return found


def _thinned(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return fewer points: of each group of neighbours the highest, so that no peak is lost."""
    size = -(-len(points) // MOST_POINTS)
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


def between(profile: Profile) -> dict[int, int]:
    """Return for each ipu the most bytes that other ipus had sent and that it had not received yet."""
    sent: dict[tuple[str, int, int], tuple[int, int]] = {}
    received: dict[tuple[str, int, int], int] = {}
    for track in detailed(profile).values():
        program = profile.programs[track.ipu]
        for index, (_, end) in enumerate(track.spans()):
            part, micro_batch = profile.parts[program[2 * index]], program[2 * index + 1]
            if part.kind == "send":
                sent[part.channel, part.peer, micro_batch] = (end, part.bytes)
            elif part.kind == "receive":
                received[part.channel, track.ipu, micro_batch] = end
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key, (time, size) in sent.items():
        if key in received and received[key] > time:
            changes[key[1]] += [(time, size), (received[key], -size)]
    most = {}
    for ipu, rows in changes.items():
        total = peak = 0
        for _, difference in sorted(rows):
            total += difference
            peak = max(peak, total)
        most[ipu] = peak
    return most
