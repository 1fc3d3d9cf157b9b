"""Advice: sentences about a profile's figures, each with the cause and the option or change that helps."""

from collections.abc import Iterator

from .analysis import Figures
from .times import whole_steps
from .units import sharing_cores_text, size_text
from .virtual import promised_speedup

_WORTH = 1.05  # an option is advised above this speedup, which was measured at compilation
_UNEVEN = 1.2  # other stages are advised if the slowest one costs at least this multiple of the average
_FREE = 0.95  # a machine is called free if computations had a core for this share of their time
_CAUSES = {
    "micro-batches": "Filling and draining the pipeline and the update take their share of a step",
    "pipeline": "The stages work one after another",
    "replicas": "One replica leaves cores idle",
}


def advice_sentences(figures: Figures) -> list[str]:
    """Return all sentences of advice about a profile, the most serious first."""
    topics = (_fault_sentences, _speed_sentences, _note_sentences)
    return [text for topic in topics for text in topic(figures)]


def machine_sentence(figures: Figures) -> str:
    """Return a text about `figures.core_share`, and which figures it affects; "" if it was not measured."""
    share = figures.core_share
    if share is None:
        return ""
    busy = "was free" if share >= _FREE else "was busy, or computations waited by themselves"
    return (
        f"The machine {busy}: computations had a core for {share:.0%} of their time. Times of stages, blocks and"
        " operations count that time alone; throughput, bubble and trace are as the clock went."
    )


def stages_sentence(figures: Figures) -> str:
    """Return a sentence that compares the slowest stage with the average stage; with fewer than two measured
    stages, a sentence that says how the page's times were measured."""
    if figures.slowest is None or len(figures.stages) < 2:
        return "Medians of the time that a core computed."
    return f"The slowest stage takes {figures.unevenness:.2f} times the average one."


def _fault_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these faults that the run has: too little memory, failed calls, and a
    stage of several blocks that is much slower than the average stage."""
    if figures.fits is False and figures.capacity:
        yield (
            f"Does not fit: {size_text(figures.wanted)} are needed, and {figures.capacity_of} is"
            f' {size_text(figures.capacity)}. Recomputation (options._Popart.set("autoRecomputation", 3)), a smaller'
            " micro-batch or more stages need less."
        )
    if failed := figures.profile.facts.get("failed_calls", 0):
        yield f"{failed} call(s) failed and are not part of the figures."
    if figures.slowest is not None and figures.unevenness >= _UNEVEN:
        slowest, count = figures.stages[figures.slowest], len(figures.stages)
        if sum(block.stage == slowest.stage for block in figures.profile.blocks) > 1:
            yield (
                f"Stage {slowest.stage} ({slowest.blocks}) takes {figures.unevenness:.1f} times the average stage,"
                " for which separate devices wait. Move one of its blocks,"
                f" or let poptorch.AutoBalance({count}) cut the stages."
            )


def _speed_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each change in `figures.changes`, and for each option that made computations at
    least 5 % faster when it was measured at compilation."""
    for change in figures.changes:
        machines = {"on separate devices": change.apart, figures.here_is: change.here}
        # `gain` is None without a host, or if the speed of its cores together was not measured.
        gains = {
            where: promised_speedup(gain, figures.spread)
            for where, gain in machines.items()
            if gain is not None
        }
        sure = [f"at least {gain:.2f} times as fast {where}" for where, gain in gains.items() if gain]
        unsure = [f"; nothing is promised {where}" for where, gain in gains.items() if not gain]
        said = f"{change.what} would make it {', and '.join(sure)}{''.join(unsure)}"
        yield f"{_CAUSES[change.kind]}: {said}. Then {change.also}."
    for option, gain in figures.profile.facts.get("hints", {}).items():
        if gain > _WORTH:
            yield (
                f"{option} makes the computations of a micro-batch at least {gain:.2f} times as fast on this machine,"
                " measured when the model was compiled. Results then differ in their last bits."
            )


def _note_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these that applies: ipus run as separate devices only while a profile is
    recorded; the ipus wait for the host between calls; the trace lacks steps or parts of them."""
    profile = figures.profile
    ipus = len(profile.devices) * profile.counts.get("replicas", 1)
    if figures.step_here is not None and figures.calls and ipus > 1:
        yield (
            f"While this was recorded each of the {ipus} ipus did one thing at a time, as separate devices do."
            f" Without a recorder {sharing_cores_text(profile)} all of them, and the layout hardly matters."
        )
    inside, between = figures.host.get("in calls", 0.0), figures.host.get("between calls", 0.0)
    if between >= max(0.05, 0.2 * (inside + between)):
        cause = "the program between calls: more deviceIterations make fewer calls"
        if figures.host.get("loader", 0.0) > between / 2:
            cause = "the data loader: use more workers, or DataLoaderMode.Async"
        yield f"The ipus stand still for {between / (inside + between):.0%} of the time, waiting for {cause}."
    kept, steps = len(whole_steps(profile)), profile.facts.get("steps", 0)
    if profile.tracks and steps and not kept:
        yield "Steps are too long to be kept whole: the trace shows their beginning, and shares of time are unknown."
    elif kept < steps:
        yield f"The trace holds {kept} of {steps} steps, the first and the last ones; totals count all of them."
