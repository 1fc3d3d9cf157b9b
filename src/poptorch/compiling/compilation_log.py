"""A compilation as text: its log, and the overview that `describe` and `executor.plan` return.

The log has the time of each pass and the schedule (DEBUG), and the ipu of each block (INFO). On request the
number of ipus is checked against the limits of real hardware.
"""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from textwrap import wrap

import torch

with warnings.catch_warnings():  # a notebook without ipywidgets gets tqdm's bar of text, and no red box
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm

from popengine.compile.describe import sized_tasks
from popengine.drawing import schedule_svg
from popengine.errors import CaptureError, Error, PartitionError
from popengine.ir import Graph, Plan
from popengine.run.devices import core_count
from popengine.schedules import SimulatedStep, drawn_schedule, simulate_step
from popengine.settings import Place, Settings
from popengine.texts import counted

from ..logs import listed, logger

HARDWARE_RULES = "POPTORCH_CHECK_HARDWARE_RULES"  # the environment variable that requests the check
_LARGEST_SYSTEM = 64
_DRAWN = 64  # micro-batches; a wider drawing can't be read in a log
_WIDTH, _MOST_TRANSFERS = 80, 8  # columns and lines of an overview
_PASSES = ("capture", "partition", "tasks", "load")


@contextlib.contextmanager
def progress(shown: bool, times: dict[str, float]) -> Iterator[Callable[[str], None]]:
    """Draw a progress bar, log each pass's time, and name the failed pass in an error. Yields a function, to
    be called with the name of each finished pass; `times` gets each pass's seconds."""
    since = time.perf_counter()
    layout = {"bar_format": "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]", "leave": False}
    with tqdm(total=len(_PASSES), desc="Graph compilation", disable=not shown, **layout) as bar:

        def done(name: str) -> None:
            """Note the time since the previous pass as that of pass `name`, log it, and move the bar."""
            nonlocal since
            now = time.perf_counter()
            times[name], since = now - since, now
            logger.debug("compilation: pass %s took %.1f ms", name, 1000 * times[name])
            bar.update()

        try:
            yield done
            bar.leave = True  # else it disappears
            text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
            logger.info("compiled in %.2f s: %s", sum(times.values()), text)
        except (CaptureError, PartitionError) as error:  # the message stays as it is
            failed = _PASSES[len(times)]
            error.mark_as_engine_error(f"Error raised in:\n  [0] {failed}\n  [1] PoplarExecutor.compile")
            raise


def log_plan(plan: Plan, settings: Settings) -> None:
    """Log the ipu of each stage, the devices, blocks that only the strategy has, and the schedule at level DEBUG."""
    partition, counts = plan.partition, settings.counts
    used = {name for names in partition.names for name in names.split(", ")}
    if unused := [name for stage in settings.strategy.stages for name in stage.blocks if name not in used]:
        # A model for inference often lacks the blocks of the loss.
        logger.log(
            logging.WARNING if settings.training else logging.INFO,
            "the strategy names blocks in which forward has no operation: %s; blocks of forward: %s\n"
            "  fix: mark them in the model (poptorch.BeginBlock, poptorch.Block), or leave them out of the strategy",
            listed([*map(repr, unused)]),
            listed([*map(repr, sorted(used - {"no block"}))]) or "none",
        )
    for stage, (blocks, ipu) in enumerate(zip(partition.names, partition.ipus, strict=True)):
        logger.info("stage %d (%s) is on %s", stage, blocks, ipu_text(plan, settings, ipu))
    ipus, replicas = counted(len(set(partition.ipus)), "logical ipu"), counted(counts.replicas, "replica")
    threads = f"{torch.get_num_threads()} threads of this process"
    logger.info(
        "%s × %s, run by %s", ipus, replicas, threads if settings.device == "cpu" else settings.device
    )
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", schedule_text(plan, settings))


def ipu_text(plan: Plan, settings: Settings, ipu: int) -> str:
    """Return "ipu 1"; with its process or devices, such as "ipu 1 of instance 1", if a replica spans several; with the
    device of each replica, if they differ."""
    if not (plan.places or plan.shifts):
        return f"ipu {ipu}"
    process, device = plan.places.get(ipu, Place())
    if settings.counts.parts == 1:
        names = (settings.devices[(device + shift) % len(settings.devices)] for shift in plan.shifts or (0,))
        return f"ipu {ipu} on {', '.join(names)}"
    return f"ipu {ipu} of instance {settings.counts.processes_of_replica()[process]}"


def schedule_text(plan: Plan, settings: Settings) -> str:
    """Return a drawing of a step on this machine and, for several ipus, on separate devices."""
    if plan.micro_batches > _DRAWN:
        return f"schedule of a step: {plan.micro_batches} micro-batches, too many to draw"
    here, apart = drawn_schedule(plan, core_count(settings.device)), drawn_schedule(plan)
    cores = counted(core_count(settings.device), "core") + " of this machine"
    text = f"schedule of a step on {cores}, {here[0]}:\n{here[1].rstrip()}"
    if len(set(plan.partition.ipus)) > 1:
        text += f"\n\nthe same as if each ipu were a device of its own, {apart[0]}:\n{apart[1].rstrip()}"
    return text


def check_hardware_rules(plan: Plan, settings: Settings) -> None:
    """With POPTORCH_CHECK_HARDWARE_RULES=1, raise Error if this process's replicas use more than 64 ipus."""
    used = (max(plan.partition.ipus) + 1) * settings.counts.replicas
    if os.environ.get(HARDWARE_RULES, "0") != "0" and used > _LARGEST_SYSTEM:
        raise Error(
            f"Too many IPUs requested ({used})\n"
            f"  why: one process has at most {_LARGEST_SYSTEM} on real hardware\n"
            "  fix: distributed execution: several processes, each with some of the replicas (popdist, poprun);"
            f" here there is no such limit: unset {HARDWARE_RULES}"
        )


# ---- the overview ----------------------------------------------------------------------------------------


class Overview:
    """A compiled model: its stages, the transfers between ipus, the schedule and the code.

    `print(overview)` shows all but the code, on a screen of 80 columns. A notebook displays the drawing as a picture.

    >>> overview = poptorch.describe(model, options, batch)
    >>> print(overview)
    >>> print(overview.code["F0"])

    Attributes:
        title:     the numbers of stages, ipus, replicas, device iterations and micro-batches
        stages:    (number, ipu, names of blocks, number of parameters) of each stage
        transfers: (from ipu, to ipu, bytes, "micro-batch" or "step", time in words): the bytes of one
            micro-batch or step
        drawing:   a step as if each ipu were a device of its own: a row for each ipu, a column for each tick; F2 is
            the forward of micro-batch 2, B2 its backward, `..` waiting
        schedule:  the step of this machine's cores and, for several ipus, the drawing, with titles
        code:      the Python source that each stage runs, by phase and stage: "F0" is the forward of stage 0,
            "B0" its backward
    """

    def __init__(self, plan: Plan, settings: Settings, graph: Graph) -> None:
        partition, counts = plan.partition, settings.counts
        sizes = dict.fromkeys(range(partition.stages), 0)
        for slot in partition.signature.slots:
            if slot.role == "parameter" and slot.name in partition.home:
                sizes[partition.home[slot.name]] += torch.Size(slot.shape).numel()
        mode = "training" if settings.training else "inference"
        self.title = (
            f"{mode}, {settings.strategy.order}: {counted(partition.stages, 'stage')}"
            f" on {counted(len(set(partition.ipus)), 'ipu')}, {counted(counts.replicas, 'replica')}; a call is"
            f" {counted(counts.iterations, 'device iteration')} of {counted(counts.accumulation, 'micro-batch')}"
        )
        self.stages = [(s, partition.ipus[s], names, sizes[s]) for s, names in enumerate(partition.names)]
        self.transfers = [
            (task.ipu, part.peer, part.bytes, "micro-batch", f"after {task.phase}{task.stage}")
            if task.phase
            else (task.ipu, part.peer, part.bytes, "step", "at its start (shared weights)")
            for task in sized_tasks(plan, graph)
            for part in task.instructions
            if part.kind == "send"
        ]
        self._plan, self._settings, self.schedule = plan, settings, schedule_text(plan, settings)
        self.drawing = self.schedule if plan.micro_batches > _DRAWN else drawn_schedule(plan)[1].rstrip()
        self.code = {f"{piece.phase}{piece.stage}": piece.source for piece in partition.pieces}

    def simulate(self, F: float = 1, B: float = 2, W: float = 0) -> SimulatedStep:
        """Simulate a step as if each ipu were a device of its own. Values between ipus take no time.

        Args:    ticks of a stage's forward, of its backward and, in the order "zero-bubble", of the gradients of its
                 weights; B is then the rest of the backward
        Returns: `length` of the step in ticks; `bubble`, the share of the time in which ipus wait; `most_in_flight`,
                 by ipu the most micro-batches between a stage's forward and the end of its backward

        >>> poptorch.describe(model, options, batch).simulate(F=1, B=2).bubble
        """
        return simulate_step(self._plan, {"F": F, "B": B, "W": W})

    def _repr_svg_(self) -> str | None:
        """Return the drawing as SVG, which notebooks display; None if it is too long."""
        return schedule_svg(self.drawing, self.title) if self._plan.micro_batches <= _DRAWN else None

    def __str__(self) -> str:
        lines = [*wrap(self.title, _WIDTH), ""]
        for stage, ipu, blocks, size in self.stages:
            on = ipu_text(self._plan, self._settings, ipu)
            text = f"stage {stage} on {on}, {size:,} parameters: {blocks}"
            lines += wrap(text, _WIDTH, max_lines=2, placeholder=" ...", subsequent_indent="    ")
        lines += [""] if self.transfers else []
        for source, target, size, per, when in self.transfers[:_MOST_TRANSFERS]:
            lines.append(f"ipu {source} -> ipu {target}: {size:,} bytes a {per} {when}")
        if (rest := len(self.transfers) - _MOST_TRANSFERS) > 0:
            lines.append(f"... and {rest} more transfers, in .transfers")
        # The last paragraph is the schedule on separate devices, or that of a single ipu.
        schedule = self.schedule.split("\n\n")[-1].replace("the same as if", "a step, as if").splitlines()
        lines += ["", *(wrap(line, _WIDTH, max_lines=1, placeholder=" ...")[0] for line in schedule)]
        lines += ["", f'The code of each stage: .code["{next(iter(self.code))}"] and so on']
        return "\n".join(lines)

    __repr__ = __str__
