"""What a profile's figures mean for the user, in words: the cause, and what would help."""

from __future__ import annotations

from popengine.profile import Profile

from . import memory
from .analysis import Figures
from .gains import Change, at_most, least, promised
from .memory_changes import Saving
from .trace import cut_off, whole_steps
from .units import cores_in_words, size

_WORTH = 1.05  # of what was measured a few times


def sentences(profile: Profile, figures: Figures) -> list[str]:
    """The gravest first; none if there is nothing to say."""
    found = [
        _too_large(profile, figures),
        _failed(profile),
        *(_change(change, figures) for change in figures.changes),
        *_hints(profile),
        _shared_cores(profile, figures),
        _host(figures),
        _left_out(profile),
    ]
    return [sentence for sentence in found if sentence]


def _too_large(profile: Profile, figures: Figures) -> str:
    if figures.fits is not False or not figures.capacity:
        return ""
    is_shared, state = memory.capacity(profile)[2], any(need.optimizer for need in figures.needs)
    return " ".join(
        [
            f"Does not fit: {size(figures.wanted)} are needed, and {figures.capacity_of} is {size(figures.capacity)}.",
            *(_saving(saving, figures) for saving in figures.savings),
            *(["Offloading the optimizer's state frees nothing of it."] if is_shared and state else []),
            "A smaller micro-batch or more stages need less.",
        ]
    )


def _saving(saving: Saving, figures: Figures) -> str:
    change = saving.change
    machines = [("on separate devices", change.apart), (figures.here_is, change.here)]
    price = ", and ".join(
        f"at most {at_most(gain, figures.spread):.2f} times as long {where}"
        for where, gain in machines
        if gain
    )
    link = ", if their link were as fast as this machine's memory" if change.kind == "offload" else ""
    return (
        f"{change.what} would need {size(saving.wanted)}, which {'fits' if saving.fits else 'is still too much'}, and a"
        f" step would take {price}{link}. Then {change.also}."
    )


def _failed(profile: Profile) -> str:
    count = profile.facts.get("failed_calls", 0)
    return f"{count} call(s) failed and are not part of the figures." if count else ""


def _change(change: Change, figures: Figures) -> str:
    """What it gives, on which machine, and what else it changes."""
    causes = {
        "micro-batches": f"Filling and draining the pipeline and the update take their share of a step: {change.what}",
        "cut": _uneven(change, figures),
        "pipeline": f"The stages work one after another: {change.what}",
        "replicas": f"One replica leaves cores idle: {change.what}",
        "recomputation": f"There is memory to keep what backwards compute again: {change.what}",
        "offload": f"The optimizer's state goes to the host and back, and ipus have room for it: {change.what}",
        "fused": f"One kernel does an update faster on this machine: {change.what}",
        "threads": f"Threads mostly wait for Python's lock, or are too few: {change.what}",
    }
    machines = [
        ("on separate devices", promised(change.apart, figures.spread)),
        (figures.here_is, promised(change.here, figures.spread)),
    ]
    gains = [f"at least {gain:.2f} times as fast {where}" for where, gain in machines if gain is not None]
    text = f"{causes[change.kind]} would make it {', and '.join(gains)}"
    if change.here is None:  # no such host, or how well its cores share was not measured
        machines.pop()
    nothing = [where for where, gain in machines if gain is None]
    text += f"; nothing is promised {nothing[0]}" if nothing else ""
    return f"{text}. Then {change.also}." if change.also else f"{text}."


def _hints(profile: Profile) -> list[str]:
    """Options that were measured on the sample micro-batch when the model was compiled."""
    return [
        f"{option} makes the computations of a micro-batch at least {gain:.2f} times as fast on this machine, measured"
        " when the model was compiled. Results then differ in their last bits."
        for option, gain in profile.facts.get("hints", {}).items()
        if gain > _WORTH
    ]


def of_stages(figures: Figures) -> str:
    """How equal the stages are, and whether another cut would help."""
    if figures.slowest is None or len(figures.stages) < 2:
        return "Medians of the time that a core computed."
    text = f"The slowest stage takes {figures.unevenness:.2f} times the average one."
    cut = next((change for change in figures.changes if change.kind == "cut"), None)
    if cut is None:
        worth = least(figures.spread) - 1
        return f"{text} No other cut of its blocks was found to give more than {worth:.0%}."
    sure = promised(cut.apart, figures.spread) or 1.0
    return f"{text} On separate devices {cut.what} makes a step at least {sure:.2f} times as fast."


def _uneven(change: Change, figures: Figures) -> str:
    assert figures.slowest is not None
    slowest = figures.stages[figures.slowest]
    return (
        f"Stage {slowest.stage} ({slowest.blocks}) takes {figures.unevenness:.1f} times the average stage:"
        f" {change.what}"
    )


def _shared_cores(profile: Profile, figures: Figures) -> str:
    ipus = len(profile.devices) * profile.counts.get("replicas", 1)
    if figures.step_here is None or not figures.calls or ipus < 2:
        return ""
    return (
        f"While this was recorded each of the {ipus} ipus did one thing at a time, as separate devices do. Without a"
        f" recorder {cores_in_words(profile)} all of them, and the layout hardly matters."
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


def _left_out(profile: Profile) -> str:
    if cut_off(profile) and profile.facts.get("steps", 0):
        return "Steps are too long to be kept whole: the trace shows their beginning, and shares of time are unknown."
    kept = len(whole_steps(profile))
    steps = profile.facts.get("steps", 0)
    if kept >= steps:
        return ""
    return f"The trace holds {kept} of {steps} steps, the first and the last ones; totals count all of them."
