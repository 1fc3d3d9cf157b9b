"""What a profile's figures mean for the user, in words: the cause, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popengine.profile import Profile

if TYPE_CHECKING:
    from .analysis import Figures


def warnings(profile: Profile, figures: Figures) -> list[str]:
    """Sentences, the gravest first; none if there is nothing to say."""
    found = [
        _too_large(figures),
        _failed(profile),
        _few_micro_batches(profile, figures),
        _uneven(figures),
        _shared_cores(profile),
        _host(figures),
        _waits(figures),
        _left_out(profile),
    ]
    return [sentence for sentence in found if sentence]


def _too_large(figures: Figures) -> str:
    if figures.fits is not False or not figures.capacity:
        return ""
    need = sum(need.total for need in figures.needs)
    return (
        f"Does not fit: {size(need)} are needed, and {figures.capacity_of} is {size(figures.capacity)}. "
        "A smaller micro-batch, recomputation or more stages need less."
    )


def _failed(profile: Profile) -> str:
    count = profile.facts.get("failed_calls", 0)
    return f"{count} call(s) failed and are not part of the figures." if count else ""


def _few_micro_batches(profile: Profile, figures: Figures) -> str:
    bubble, count = figures.bubble_ideal, profile.facts.get("schedule_micro_batches", 0)
    if bubble is None or bubble < 0.2 or profile.facts.get("mode") != "pipelined":
        return ""
    wanted = 9 * (len(profile.devices) - 1)  # (p-1)/(m+p-1) = 10 %
    option = "Training.gradientAccumulation" if profile.training else "deviceIterations"
    return (
        f"{bubble:.0%} of the ipus' time is lost to filling and draining the pipeline: {count} micro-batches"
        f" over {len(profile.devices)} ipus. options.{option}({wanted}) would bring it down to 10%."
    )


def _uneven(figures: Figures) -> str:
    if figures.slowest is None or figures.even_cut < 1.1:
        return ""
    slowest = figures.stages[figures.slowest]
    mean = sum(stage.total for stage in figures.stages) / len(figures.stages)
    text = (
        f"Stage {slowest.stage} ({slowest.blocks}) takes {slowest.total / mean:.1f} times the average stage."
        f" Stages of equal cost would make a step {figures.even_cut:.2f} times as fast"
    )
    if figures.moves:
        best = figures.moves[0]
        return text + (
            f"; moving block {best.block} from stage {best.source} to stage {best.target} gives"
            f" {best.speedup:.2f} times."
        )
    return text + "; no single block at a border would help: split a block of that stage."


def _shared_cores(profile: Profile) -> str:
    cores = profile.facts.get("cores", 0)
    ipus = len(profile.devices) * profile.counts.get("replicas", 1)
    if profile.facts.get("device", "cpu") != "cpu" or not cores or ipus <= cores:
        return ""
    return (
        f"{ipus} ipus share {cores} cores: an ipu's times hold the waiting for a core, and the pipeline can't be"
        f" {ipus} times as fast as one ipu here."
    )


def _host(figures: Figures) -> str:
    inside, between = figures.host.get("in calls", 0.0), figures.host.get("between calls", 0.0)
    if between < 0.2 * (inside + between) or between < 0.05:
        return ""
    waited = figures.host.get("loader", 0.0)
    cause = (
        "the data loader: use more workers, or DataLoaderMode.Async"
        if waited > between / 2
        else "the program between calls: more deviceIterations make fewer calls"
    )
    return f"The ipus stand still for {between / (inside + between):.0%} of the time, waiting for {cause}."


def _waits(figures: Figures) -> str:
    ideal, measured = figures.bubble_ideal, figures.bubble_measured
    if ideal is None or measured is None or measured < ideal + 0.15 or figures.even_cut >= 1.1:
        return ""
    return f"Ipus wait {measured:.0%} of the time, and only {ideal:.0%} follow from the schedule."


def _left_out(profile: Profile) -> str:
    kept = len({(track.call, track.step) for track in profile.tracks})
    steps = profile.facts.get("steps", 0)
    if any(2 * len(track.durations) < len(profile.programs[track.ipu]) for track in profile.tracks):
        return "Steps are too long to be kept whole: the trace shows their beginning."
    if kept >= steps:
        return ""
    return f"The trace holds {kept} of {steps} steps, the first and the last ones; totals count all of them."


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds(value: float | None) -> str:
    """Seconds for people."""
    if value is None:
        return "–"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError
