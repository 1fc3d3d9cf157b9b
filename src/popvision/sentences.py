"""Sentences about a profile's figures: three facts about speed and memory, faults, and remarks."""

import math
from collections.abc import Iterator, Sequence

from popengine.order import BUILT_IN, ORDERS
from popengine.profile import Profile
from popengine.texts import counted

from .analysis import Figures
from .times import ideal_bubble, whole_steps
from .units import share_text, size_text

_IDLE = 0.25  # that cores wait is a note if they wait for at least this share of a step
_OTHERS = 0.2  # that other programs use cores is a note if their share is larger


def fact_sentences(figures: Figures) -> dict[str, str]:
    """Return three facts, of which none needs a simulation; those that are known.

    "stages": the slowest stage; "bubble": the bubble by the schedule's formula, and how many micro-batches halve it;
    "memory": the ipu that needs the most.
    """
    sentences = {}
    if figures.slowest is not None and len(figures.stages) > 1:
        slowest = figures.stages[figures.slowest].stage
        sentences["stages"] = (
            f"Stage {slowest} takes {figures.unevenness:.2f} times as long as the average stage."
        )
    if sentence := _bubble_sentence(figures.profile):
        sentences["bubble"] = sentence
    if len(figures.needs) > 1:
        most = max(figures.needs, key=lambda need: need.total)
        sentences["memory"] = f"ipu {most.ipu} needs the most memory, {size_text(most.total)}."
    return sentences


def _bubble_sentence(profile: Profile) -> str:
    """Return the bubble of equal stages by its formula, and the change that makes it smaller."""
    stages, count = len(profile.devices), profile.facts.get("schedule_micro_batches", 0)
    if (share := ideal_bubble(profile)) is None or stages < 2:
        return ""
    ideal, mode = f"With equal stages the bubble is {share_text(share)}", profile.facts.get("mode")
    if mode in BUILT_IN and not ORDERS[mode].overlaps:
        return f"{ideal} for any number of micro-batches, because the stages work one after another."
    if mode in BUILT_IN and math.isclose(share, (stages - 1) / (count + stages - 1)):
        formula = f"{stages - 1} / {count + stages - 1} = {share_text(share)}"
        change = f"{2 * count + stages - 1} micro-batches instead of {count} make it {share_text(share / 2)}"
        larger = " and the batch of an update larger" * profile.training
        count_text = counted(count, "micro-batch")
        return f"With {stages} equal stages and {count_text} the bubble is {formula}; {change}{larger}."
    return f"{ideal}."


def warning_sentences(figures: Figures) -> list[str]:
    """Return sentences about faults of the run, then about what disturbed it or is missing from the profile."""
    return [*_fault_sentences(figures), *_note_sentences(figures)]


def about_sentences(figures: Figures) -> list[str]:
    """Return sentences about the plan and the instances of a run; those that say something."""
    return [*filter(None, (plan_sentence(figures.profile), instances_sentence(figures.profile)))]


def plan_sentence(profile: Profile) -> str:
    """Return why a profile is of a second or later plan of a model; "" for the first plan."""
    if (number := profile.facts.get("plan", 1)) == 1:
        return ""
    rows, count = profile.counts.get("micro_batch_size", 1), profile.facts.get("schedule_micro_batches", 1)
    return (
        f"This is plan {number} of the model: a later call had another shape, as an incomplete batch has, or forward"
        f" read another value. Here a step has {counted(count * rows, 'row')}, {rows} in each micro-batch."
    )


def instances_sentence(profile: Profile) -> str:
    """Return which ipus each instance of a replica has, and by which clock their tasks are joined; or which each device
    of a process has. "" for one instance and device."""
    if not (joined := profile.facts.get("joined")):
        return ""
    if devices := joined.get("devices"):
        has_several = len({tuple(replicas) for *_, replicas in devices}) > 1
        texts = (
            f"{device} has {_named('ipu', ipus)}" + f" of {_named('replica', replicas)}" * has_several
            for device, ipus, replicas in devices
        )
        return f"The ipus are on {counted(len({device for device, *_ in devices}), 'device')}: {', '.join(texts)}."
    places = profile.facts["ipus_of_instances"]
    words = (f"instance {i} has {_named('ipu', ipus)}" for i, ipus in enumerate(places))
    clock = (
        "the clock of their host"
        if joined["one_clock"]
        else "their hosts' times of day, which differ a little"
    )
    return f"A replica spans {counted(len(places), 'instance')}: {', '.join(words)}. Their tasks are joined by {clock}."


def _named(what: str, numbers: Sequence[int]) -> str:
    """Return "ipu 0", or "ipus 0 and 1"."""
    return f"{what}{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"


def _fault_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these faults: no file of an instance, too little memory, failed calls."""
    for instance in figures.profile.facts.get("joined", {}).get("missing", ()):
        yield (
            f"The tasks of instance {instance} are missing: put its file profile.{instance}.pop beside profile.pop,"
            " and open the report again."
        )
    if figures.fits is False and figures.capacity:
        yield (
            f"Does not fit: {size_text(figures.wanted)} are needed, and this machine has"
            f' {size_text(figures.capacity)}. Recomputation (options._Popart.set("autoRecomputation", 3)), a smaller'
            " micro-batch or more stages need less."
        )
    if failed := figures.profile.facts.get("failed_calls", 0):
        yield f"{counted(failed, 'call')} failed. The figures leave {'them' if failed > 1 else 'it'} out."


def _note_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these that applies: other programs used cores; cores had too few tasks; the ipus
    wait for the host between calls; the trace lacks steps or parts of them."""
    profile, idle, others = figures.profile, figures.idle_here, figures.others_share or 0.0
    if others > _OTHERS:
        why = "most likely because other programs used them: throughput is too low, run again"
        yield f"Tasks had no core for {others:.0%} of their time, {why}."
    if idle is not None and idle >= _IDLE and len(figures.usages) > 1:
        yield (
            f"These {len(figures.usages)} cores waited for {idle:.0%} of a step: too few tasks can run at once."
            " More micro-batches that overlap (poptorch.PipelinedExecution), or replicas, give them work."
        )
    inside, between = figures.host.get("in calls", 0.0), figures.host.get("between calls", 0.0)
    if between >= max(0.05, 0.2 * (inside + between)):
        cause = "the program between calls: more deviceIterations make fewer calls"
        if figures.host.get("loader", 0.0) > between / 2:
            cause = "the data loader: use more workers, or DataLoaderMode.Async"
        yield f"The ipus are idle for {between / (inside + between):.0%} of the time, waiting for {cause}."
    kept, steps = len(whole_steps(profile)), profile.facts.get("steps", 0)
    if profile.runs and steps and not kept:
        yield "Steps are too long to be kept whole: the trace shows their beginning, and shares of time are unknown."
    elif kept < steps:
        yield f"The trace holds {kept} of {steps} steps, the first and the last ones; totals count all of them."
