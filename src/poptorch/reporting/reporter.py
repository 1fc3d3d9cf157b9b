"""Profiles of executors: measured times and the tables of the plan, written when devices are released.

The files are `<directory>/training/profile.pop` or `<directory>/inference/profile.pop`, and a page of all
profiles there, `<directory>/report.html`. Profiles that are open when the program ends are written then.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from popengine import profile
from popengine.compile.describe import describe
from popengine.run.engine import Engine, threads_inside
from popengine.run.recorder import Detail, Recorder, Times
from popengine.settings import Optimizer
from popengine.update.optimizer_rules import RULES
from poptorch.compiling.executable import Executable

from ..data.loader import wait_recorders
from ..logs import counted, logger
from ..options import Options
from ..options.freeze_options import resolved
from ..version import __version__

_SAVE_EVERY = 60.0  # seconds; saving takes at most 1 / `_SHARE` of the program's time
_SHARE = 100
_live_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()


class Reporter:
    """An object that collects the data of a plan's profile, and saves it.

    Args: path: the profile's file; number: that of the plan, from 1
    """

    def __init__(self, path: Path, options: Options, number: int) -> None:
        self.path, self.options, self.number = path, options, number
        self.recorder = Recorder()
        self.passes: dict[str, float] = {}  # seconds of each pass of the compilation
        self._running: tuple[Engine, Executable] | None = None
        self._save_next = time.perf_counter() + _SAVE_EVERY

    def on_attach(self, engine: Engine, executable: Executable) -> None:
        """Store the plan's engine and executable, whose profile `save` writes from now on."""
        self._running = engine, executable

    def on_release(self) -> None:
        """Save the profile and drop the engine, when the executor releases its devices."""
        self.save()
        self._running = None

    def after_call(self) -> None:
        """Save the profile, at most once per minute, so that a killed program leaves one, too."""
        if time.perf_counter() >= self._save_next:
            began = time.perf_counter()
            self.save()
            now = time.perf_counter()
            self._save_next = now + max(_SAVE_EVERY, _SHARE * (now - began))

    def save(self) -> None:
        """Write the profile and the page of all profiles, if attached, in instance 0. Warn if that fails."""
        if self._running is None or self._running[0].settings.counts.instance != 0:
            return
        try:
            self._profile(*self._running).save(self.path)
            from popvision import html  # loaded only for a profile

            html.write_report(self.path.parent.parent)
        except OSError as error:
            logger.warning("the profile could not be written to %s: %s", self.path.parent.parent, error)

    def _profile(self, engine: Engine, executable: Executable) -> profile.Profile:
        recorder, options, settings = self.recorder, self.options, engine.settings
        detail = recorder.detail
        found, origin = describe(engine.plan, settings, executable.graph), recorder.origin
        inside = threads_inside(engine.plan, settings, torch.get_num_threads())
        facts = {
            "calls": recorder.calls,
            "failed_calls": recorder.failed_calls,
            "steps": recorder.steps,
            "ns_in_calls": recorder.ns_in_calls,
            "detailed_step": None if detail is None else [detail.call, detail.step],
            "capacity": _capacity(settings.strategy.capacity),
            "threads": torch.get_num_threads() // inside,
            "threads_inside": inside,
            "versions": {
                "pando": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "strategy": _strategy_in_words(options, settings.strategy.mode),
            "optimizer": _optimizer_in_words(settings.optimizer),
            **executable.hints,
        }
        return replace(
            found,
            name=(options("model_name") if options.exists("model_name") else found.name)
            + (f" (plan {self.number})" if self.number > 1 else ""),
            facts={**found.facts, **facts},
            passes=tuple(profile.Pass(name, round(seconds, 6)) for name, seconds in self.passes.items()),
            operations=tuple(_with_times(found.operations, detail)),
            tracks=tuple(_tracks(recorder)),
            calls=tuple(
                profile.Call(call, start - origin, end - origin, steps)
                for call, start, end, steps in recorder.in_calls
            ),
            host=tuple(
                profile.HostEvent(kind, start - origin, end - origin, size)
                for kind, start, end, size in recorder.host
            ),
            memory=tuple(
                engine.state.memory(replica, ipu)
                for replica in range(settings.counts.replicas)
                for ipu in engine.plan.state
            ),
            tensors=tuple(row for meter in detail.meters.values() for row in meter.tensors) if detail else (),
            options=tuple(_changed_options(options, settings.training)),
        )


def _capacity(of_ipu: float) -> dict[str, Any]:
    """Return a profile's "capacity": bytes of each ipu, as `AutoBalance` was given, else of this machine."""
    if of_ipu < math.inf:
        return {"bytes": int(of_ipu), "of": "the capacity of an ipu", "shared": False}
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"bytes": machine, "of": "this machine's memory", "shared": True}


def start_reporter(executor: Any, options: Options, training: bool, number: int) -> Reporter | None:
    """Return a new reporter of a plan, which records waits for loaders; None if no profile is requested.

    It saves also when the executor is garbage-collected, and at SIGTERM if the program has no handler for it.

    Args: number: of the plan, from 1; plans after the first have a profile in a folder of their own
    """
    directory = options._profile_directory(training)
    if directory is None:
        return None
    if number > 1:
        directory = directory.with_name(f"{directory.name}_{number}")
    reporter = Reporter(directory / "profile.pop", options, number)
    weakref.finalize(executor, reporter.on_release)
    wait_recorders.add(reporter.recorder)
    _live_reporters.add(reporter)
    if threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _save_and_end)
    return reporter


def _save_and_end(number: int, frame: Any) -> None:
    """Handle SIGTERM: save all profiles, and end the process by the signal."""
    signal.signal(number, signal.SIG_DFL)
    try:
        for reporter in list(_live_reporters):
            reporter.save()
    finally:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def recording_event(reporter: Reporter | None, kind: str) -> Iterator[None]:
    """Record the body's duration as an event `kind` of the host; not without a reporter, nor on an error."""
    start = time.perf_counter_ns()
    yield
    if reporter is not None:
        reporter.recorder.note(kind, start)


# ---- what was recorded, as rows ---------------------------------------------------------------------------


def _tracks(recorder: Recorder) -> list[profile.Track]:
    """Return the recorded steps of each ipu, in order; of a failed step only the instructions that ran."""
    steps = [entry for step in recorder.kept for entry in step.items()]
    steps += [(place, times) for place, times in recorder.broken.items() if any(times.ends[:1])]
    found = [_track(recorder, place, times) for place, times in steps]
    return sorted(found, key=lambda track: (track.call, track.step, track.replica, track.ipu))


def _track(recorder: Recorder, place: tuple[int, int], times: Times) -> profile.Track:
    """Return one ipu's times in a step, up to the first unfinished instruction; `place`: (replica, ipu)."""
    length = next((index for index, end in enumerate(times.ends) if not end), times.length)
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


def _with_times(operations: Sequence[profile.Operation], detail: Detail | None) -> list[profile.Operation]:
    """Return the operations with their runs and nanoseconds in the detailed step, if there is one."""
    runs = {} if detail is None else detail.runs
    lines = {} if detail is None else {piece: iter(detail.times(piece)) for piece in detail.lines}
    return [
        operation._replace(calls=runs[operation.piece], ns=next(lines[operation.piece]))
        if operation.piece in runs
        else operation
        for operation in operations
    ]


# ---- options, strategy and optimizer in words ---------------------------------------------------------------


def _changed_options(options: Options, training: bool) -> list[profile.Option]:
    """Return (name, value, default), as texts, of each option that differs from its default."""
    mine, default = _texts_of(options), _texts_of(resolved(Options(), training))
    return [
        profile.Option(name, mine.get(name, "not set"), default.get(name, "not set"))
        for name in sorted(mine.keys() | default.keys())
        if mine.get(name) != default.get(name)
    ]


def _strategy_in_words(options: Options, mode: str) -> str:
    """Return the user's strategy and its mode here: a pipeline with few micro-batches may run sharded."""
    name = type(options._execution_strategy).__name__
    return name if name.lower().startswith(mode) else f"{name}, run {mode}"


def _optimizer_in_words(optimizer: Optimizer | None) -> str:
    """Return, as text, an optimizer's rule, size, and differences from the rule's defaults (not rates)."""
    if optimizer is None:
        return "none"
    groups, plain = len(set(optimizer.group_of.values())), Optimizer(optimizer.kind, optimizer.group_of)
    many = counted(len(optimizer.group_of), "parameter")
    words = [f"{optimizer.kind}, {many} in {counted(groups, 'group')}"]
    words += [f"{flag} {optimizer.flags[flag]}" for flag in RULES[optimizer.kind].changed_flags(optimizer)]
    words += [
        f"{state} in {dtype}" for state, dtype in optimizer.state_types.items() if dtype != torch.float32
    ]
    for name in (field.name for field in fields(optimizer) if field.name not in ("flags", "state_types")):
        if (value := getattr(optimizer, name)) != getattr(plain, name):
            words.append(f"{name.replace('_', ' ')} {value}")
    return "; ".join(words)


def _texts_of(options: Options) -> dict[str, str]:
    """Return the value of each option, as text, by its name."""
    parts = options.toDict(), options.Jit.toDict(), options.Precision.toDict()
    found = {name: str(value) for part in parts for name, value in part.items()}
    return {**found, "execution_strategy": type(options._execution_strategy).__name__}
