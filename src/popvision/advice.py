"""Advice: sentences about a profile's figures, each with the cause and the option or change that helps."""

from collections.abc import Iterator, Sequence

from popengine.order import ORDERS
from popengine.profile import Profile
from popengine.texts import counted

from .analysis import Figures
from .times import whole_steps
from .units import size_text
from .virtual import LEAST_GAIN, promised_speedup

_IDLE = 0.25  # that cores wait is a note if they wait for at least this share of a step
_FREE = 0.95  # computations that had a core for at least this share of their time did not wait
_CAUSES = {
    "stages": "The stages cost different amounts, and all wait for the slowest one",
    "micro-batches": "Filling and draining the pipeline and the update take their share of a step",
    "pipeline": "The stages work one after another",
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
    if share >= _FREE:
        return f"This program got {share:.0%} of its cores while it computed."
    return (
        f"The machine was busy: this program got {share:.0%} of a core. The costs of stages, blocks and operations are"
        " processor time; throughput and the trace of these cores include the waits."
    )


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
    if found := joined.get("devices"):
        several = len({tuple(replicas) for *_, replicas in found}) > 1
        texts = (
            f"{device} has {_named('ipu', ipus)}" + f" of {_named('replica', own)}" * several
            for device, ipus, own in found
        )
        return (
            f"The ipus are on {counted(len({device for device, *_ in found}), 'device')}: {', '.join(texts)}."
        )
    places = profile.facts["ipus_of_instances"]
    words = (f"instance {i} has {_named('ipu', own)}" for i, own in enumerate(places))
    clock = (
        "the clock of their host"
        if joined["one_clock"]
        else "their hosts' times of day, which differ a little"
    )
    return f"A replica spans {counted(len(places), 'instance')}: {', '.join(words)}. Their tasks are joined by {clock}."


def _named(what: str, numbers: Sequence[int]) -> str:
    """Return "ipu 0", or "ipus 0 and 1"."""
    return f"{what}{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"


def stages_sentence(figures: Figures) -> str:
    """Return a sentence that compares the slowest stage with the average stage; with fewer than two measured
    stages, a sentence that says how the page's times were measured."""
    if figures.slowest is None or len(figures.stages) < 2:
        return "Medians of the time that a core computed."
    return f"The slowest stage takes {figures.unevenness:.2f} times as long as the average stage."


def _fault_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these faults: no file of an instance, too little memory, failed calls."""
    for instance in figures.profile.facts.get("joined", {}).get("missing", ()):
        yield (
            f"The tasks of instance {instance} are missing: put its file profile.{instance}.pop beside profile.pop,"
            " and open the report again."
        )
    if figures.fits is False and figures.capacity:
        yield (
            f"Does not fit: {size_text(figures.wanted)} are needed, and {figures.capacity_of} is"
            f' {size_text(figures.capacity)}. Recomputation (options._Popart.set("autoRecomputation", 3)), a smaller'
            " micro-batch or more stages need less."
        )
    if failed := figures.profile.facts.get("failed_calls", 0):
        yield f"{counted(failed, 'call')} failed. The figures leave {'them' if failed > 1 else 'it'} out."


def _speed_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each change in `figures.changes`; if there is none, a sentence that says so."""
    for change in figures.changes:
        cause, gain = _CAUSES[change.kind], promised_speedup(change.apart, figures.spread)
        if change.kind == "stages" and figures.slowest is not None:
            slowest = figures.stages[figures.slowest]
            cause = (
                f"Stage {slowest.stage} is the slowest, with {figures.unevenness:.1f} times the average cost"
            )
        yield (
            f"{cause}. With {change.what}, a step on separate devices is at least {gain:.2f} times as fast."
            f" Then {change.also}."
        )
    if figures.step_apart and not figures.changes and figures.profile.facts.get("mode") in ORDERS:
        noise = " (the recorded times vary by as much)" if figures.spread > LEAST_GAIN else ""
        yield (
            "No change that the report simulates is sure to make a step on separate devices"
            f" {max(LEAST_GAIN, figures.spread):.0%} faster{noise}."
        )


def _note_sentences(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each of these that applies: the order is unknown; some cores ran no tasks, or too few;
    the ipus wait for the host between calls; the trace lacks steps or parts of them."""
    profile, idle = figures.profile, figures.idle_here
    threads, order = profile.facts.get("threads", 1), profile.facts.get("mode")
    if order and order not in ORDERS:
        yield f"{order!r} is your own schedule, so the report can't simulate changes of the program."
    if figures.usages and len(figures.usages) < threads:
        yield (
            f"Of {threads} cores {len(figures.usages)} ran tasks: tasks are so short that other cores would mostly wait"
            " for Python's lock."
        )
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
