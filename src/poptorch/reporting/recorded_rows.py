"""What a recorder has kept, as rows of a profile: tracks, and the operations' times."""

from popengine import profile
from popengine.compile.describe import Description
from popengine.run.measure.recorder import Recorder, Times


def tracks(recorder: Recorder) -> list[profile.Track]:
    """Steps in order of their start; of the last one that failed what was done until then."""
    found = [
        _track(recorder, place, times, times.length)
        for place, kept in recorder.kept.items()
        for times in [*kept.first, *kept.last]
    ]
    for place, times in recorder.broken.items():
        done = next((index for index, end in enumerate(times.ends) if not end), times.length)
        if done:
            found.append(_track(recorder, place, times, done))
    return sorted(found, key=lambda track: (track.call, track.step, track.replica, track.ipu))


def _track(recorder: Recorder, place: tuple[int, int], times: Times, length: int) -> profile.Track:
    """The first `length` instructions."""
    begins, ends = times.begins[:length], times.ends[:length]
    return profile.Track(
        times.call,
        times.step,
        *place,
        begins[0] - recorder.origin,
        [end - begin for begin, end in zip(begins, ends, strict=True)],
        [0, *(begin - end for end, begin in zip(ends, begins[1:], strict=False))],
        list(times.cores[:length]),
        list(times.computed[:length]),
    )


def timed(described: Description, recorder: Recorder) -> list[profile.Operation]:
    """The operations with their times in the detailed step."""
    lines, runs = {}, {}
    for detail in recorder.details.values():
        lines.update({piece: detail.times(piece) for piece in detail.lines})
        runs.update(detail.runs)
    return [
        operation._replace(calls=runs[operation.piece], ns=lines[operation.piece][line])
        if operation.piece in runs
        else operation
        for line, operation in described.operations
    ]


def detailed_step(recorder: Recorder) -> list[int] | None:
    """Call and step that were looked at closer."""
    details = list(recorder.details.values())
    return [details[0].call, details[0].step] if details else None
