"""Profiles of executors: measured times and the tables of the plan, written when devices are released.

The files are `<directory>/training/profile.pop` or `<directory>/inference/profile.pop`, and a page of all
profiles in the directory, `<directory>/report.html`. At the end of the program the open profiles are written. If a
replica spans several instances, all of replica 0 write one: `profile.pop`, `profile.1.pop` and so on.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from popengine import profile
from popengine.compile.describe import describe, held_tensors
from popengine.environment import pando_version
from popengine.errors import Error
from popengine.run.engine import Engine
from popengine.run.recorder import Recorder, StepDetail
from popengine.settings import Optimizer

from .compiling.executable import Executable
from .data.loader import wait_recorders
from .enums import OutputMode
from .logs import logger
from .options import Options
from .options.freeze_options import resolve_options

_SAVE_INTERVAL = 60.0  # seconds, at least, between two saves of a profile during training
_SAVE_FACTOR = 100  # the interval is at least so many times the duration of the last save


class Reporter:
    """An object that collects the data of the profile of an executor's `number`-th plan, and saves it."""

    def __init__(self, path: Path, options: Options, number: int) -> None:
        self.path, self.options, self.number = path, options, number
        self.recorder = Recorder()
        self.passes: dict[str, float] = {}  # seconds of each pass of the compilation
        self._running: tuple[Engine, Executable] | None = None
        self._next_save = time.perf_counter() + _SAVE_INTERVAL

    def on_attach(self, engine: Engine, executable: Executable) -> None:
        """Store the plan's engine and executable, from which `save` writes the profile; report the compilation to
        the recorders of other plans, between whose calls it may have run."""
        self._running = engine, executable
        counts = engine.settings.counts
        if not self.recorder.calls:
            if counts.parts > 1 and not counts.instance:  # a file of an earlier run would be joined
                profile.file_of_part(self.path, counts.part).unlink(missing_ok=True)
            self._mark_others("compilation", time.perf_counter_ns() - round(1e9 * sum(self.passes.values())))

    def _mark_others(self, kind: str, start: int) -> None:
        """Record work of this plan, from `start` until now, as a host event of all other plans."""
        for recorder in wait_recorders - {self.recorder}:
            recorder.record_host_event(kind, start)

    def on_release(self) -> None:
        """Save the profile and drop the engine; called when the executor releases its devices."""
        self.save()
        self._running = None

    def after_call(self) -> None:
        """Report the call to other plans; save the profile if the last save is a minute old, since programs may be
        killed."""
        self._mark_others("other calls", self.recorder.origin + self.recorder.in_calls[-1].start)
        began = time.perf_counter()
        if began >= self._next_save:
            self.save()
            now = time.perf_counter()
            self._next_save = now + max(_SAVE_INTERVAL, _SAVE_FACTOR * (now - began))

    def save(self) -> None:
        """Write the profile and the page of all profiles, if an engine is attached, in the instances of replica 0. The
        page has what the other instances have written before."""
        if self._running is None or (counts := self._running[0].settings.counts).instance != 0:
            return
        try:
            self._make_profile(*self._running).save(profile.file_of_part(self.path, counts.part))
            if self.path.exists():
                from popvision import report  # loaded only for a profile

                report.write_report(self.path.parent.parent)
        except OSError as error:
            logger.warning("the profile could not be written to %s: %s", self.path.parent.parent, error)

    def _make_profile(self, engine: Engine, executable: Executable) -> profile.Profile:
        recorder, options, settings = self.recorder, self.options, engine.settings
        detail = recorder.detail
        tables = describe(engine.plan, settings, executable.graph)
        name = options("model_name") if options.exists("model_name") else tables.name
        facts = {
            "calls": recorder.calls,
            "failed_calls": recorder.failed_calls,
            "steps": recorder.steps,
            "step_tasks": recorder.step_tasks,
            "ns_in_calls": recorder.ns_in_calls,
            "part": settings.counts.part,
            "clock": {
                "host": platform.node(),
                "monotonic": recorder.origin,
                "time": recorder.time_of_origin,
            },
            "detailed_step": None if detail is None else [detail.call, detail.step],
            "capacity": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "threads": len(engine.queue.cores),
            "plan": self.number,
            "versions": {
                "pando": pando_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            # A pipeline with few micro-batches may run sharded.
            "strategy": f"{type(options._execution_strategy).__name__} ({engine.plan.order})",
            "optimizer": _describe_optimizer(settings.optimizer),
        }
        return replace(
            tables,
            name=f"{name} (plan {self.number})" if self.number > 1 else name,
            facts={**tables.facts, **facts, **_joined_devices(engine)},
            passes=tuple(profile.Pass(name, round(seconds, 6)) for name, seconds in self.passes.items()),
            operations=tuple(_add_times(tables, detail)),
            runs=tuple(itertools.chain(*recorder.kept, recorder.broken)),
            calls=tuple(recorder.in_calls),
            host=tuple(recorder.host),
            memory=tuple(
                engine.memory(replica, ipu)
                for replica in range(settings.counts.replicas)
                for ipu in tables.facts["ipus_of_instances"][settings.counts.part]
            ),
            tensors=tuple(held_tensors(engine.plan, executable.graph)),
            options=tuple(_changed_options(options, settings.training)),
        )


def _joined_devices(engine: Engine) -> dict[str, Any]:
    """Return the entry "joined" of a profile's facts, if several devices run the plan: see `popvision.joined`."""
    states = [worker.state for worker in engine.workers]
    if len(states) == 1:
        return {}
    cores = {
        str(core.number): (core.lane, f"{states[core.lane].device}.{core.index}")
        for core in engine.queue.cores
    }
    parts = [(str(s.device), [*engine.plan.slots_at(s.where.place)], [*s.where.replicas]) for s in states]
    return {"joined": {"cores": cores, "one_clock": True, "missing": [], "devices": parts}}


def start_reporter(executor: Any, options: Options, training: bool, number: int) -> Reporter | None:
    """Return a new reporter of one plan, or None if the options request no profile. It gets the waits for
    loaders, and saves its profile also when the executor is garbage-collected, and at SIGTERM unless the
    program handles SIGTERM. Raises Error if the folder can't be written to."""
    directory = options._profile_directory(training)
    if directory is None:
        return None
    if number > 1:
        directory = directory.with_name(f"{directory.name}_{number}")
    present = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not present.is_dir() or not os.access(present, os.W_OK):
        raise Error(
            f"the profile can't be written to {directory}: {present} is no folder in which this user may write\n"
            "  fix: options.enableProfiling(another folder)"
        )
    reporter = Reporter(directory / "profile.pop", options, number)
    weakref.finalize(executor, reporter.on_release)
    wait_recorders.add(reporter.recorder)
    return reporter


def _add_times(recorded: profile.Profile, detail: StepDetail | None) -> Iterator[profile.Operation]:
    """Yield the operations with their number of runs and nanoseconds in the detailed step, if there is one."""
    lines = {piece: iter(detail.line_times(piece)) for piece in detail.lines} if detail else {}
    for operation in recorded.operations:
        piece = recorded.tasks[operation.task].piece
        if detail and piece in lines:
            operation = operation._replace(calls=detail.runs[piece], ns=next(lines[piece]))
        yield operation


# ---- options and optimizer as text --------------------------------------------------------------------------


def _changed_options(options: Options, training: bool) -> list[profile.Option]:
    mine, default = _option_texts(options), _option_texts(resolve_options(Options(), training))
    return [
        profile.Option(name, mine.get(name, "not set"), default.get(name, "not set"))
        for name in sorted(mine.keys() | default.keys())
        if mine.get(name) != default.get(name)
    ]


def _describe_optimizer(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "none"
    bounds = {"max grad norm": optimizer.max_grad_norm, "max grad value": optimizer.max_grad_value}
    texts = (f"{name} {bound}" for name, bound in bounds.items() if bound < math.inf)
    return "; ".join([optimizer.kind, *texts])


def _option_texts(options: Options) -> dict[str, str]:
    parts = options.toDict(), options.Jit.toDict(), options.Precision.toDict()
    texts = {name: str(value) for part in parts for name, value in part.items()}
    mode, strategy = OutputMode(options.output_mode).name, type(options._execution_strategy).__name__
    return {**texts, "output_mode": mode, "execution_strategy": strategy}
