"""Replays: a call that is like the one before is captured as one graph, and from then on run as a whole.

The first call of some rates runs as it is; the second is captured and replayed, as are all that follow. Starting
some thousand kernels one by one from Python takes longer than many of them run.

A graph works on the memory it was captured with. So it has inputs and results of its own, into which and out of
which each call is copied; whatever was put in the place of its weights and buffers meanwhile is copied into them;
and of what changes from call to call the learning rates are tensors where the update rule allows, and the seeds of
random numbers are set before each replay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from popengine.control_flow import calls_within
from popengine.update.group_update import reads_numbers, takes_tensors

from ..state.random_draws import drawing_from
from .call_generators import Numbers
from .driver import Driver
from .one_call import Run, Stopped
from .worker import Worker

logger = logging.getLogger("popengine")

_CHANGES = 2  # of rates, in a row: from then on graphs are not worth their capture

# Operations that read values on the host, by the beginning of their name.
_READERS = {
    "popengine.cond": "poptorch.cond chooses its branch on the host",
    "poptorch.host_call": "Python on the host (poptorch.CPU, custom_op) runs in the middle of it",
    "poptorch.ipu_print_tensor": "ipu_print_tensor prints values",
}


def obstacle(workers: Sequence[Worker]) -> str | None:
    """Why calls of this plan can't be captured, if that can be seen beforehand."""
    plan, settings = workers[0].plan, workers[0].settings
    if settings.automatic_loss_scaling:
        return "automatic loss scaling looks at the gradients after each step"
    if settings.finite_checks:
        return "floating point exceptions look at the result of every operation"
    if settings.counts.instances > 1:
        return "the gradients are summed with those of other processes"
    if any(result.kind == "input" for result in plan.partition.signature.results):
        return "the model writes into its inputs"
    for piece in plan.partition.pieces:
        calls = set(calls_within(piece))
        for name, why in _READERS.items():
            if any(call.startswith(name) for call in calls):
                return why
    optimizer = settings.optimizer
    if optimizer is not None and any(reads_numbers(optimizer, weight) for weight in _trained(workers)):
        return f"the update rule ({optimizer.kind}) reads how many updates there were"
    return None


def _trained(workers: Sequence[Worker]) -> list[Tensor]:
    return [worker.store.state[worker.store.slot[key]] for worker in workers for key in worker.store.sums]


class Replays:
    """Runs calls of workers that one thread drives, on devices that have graphs."""

    def __init__(self, workers: Sequence[Worker], driver: Driver) -> None:
        self._workers, self._driver = workers, driver
        self._device = workers[0].device
        self._rates_are_tensors = workers[0].settings.optimizer is not None and all(
            takes_tensors(workers[0].settings.optimizer, weight) for weight in _trained(workers)
        )
        self._key: Any = None  # what is compiled into the graph
        self._changes = 0
        self._numbers: Numbers | None = None  # those of the last call that ran as it is
        self._graph: Any = None
        self._static: Run | None = None  # what the graph reads and writes
        # What the graph reads and writes of a worker's store: of which parameter's state ("": of no one's), the name.
        self._homes: list[tuple[Worker, str, str, Tensor]] = []
        self._is_off = False
        if why := obstacle(workers):
            self._give_up(why)

    def __call__(self, run: Run) -> None:
        if self._is_off:
            self._driver(run)
        elif (key := self._compiled_in(run)) != self._key or self._numbers is None:
            self._run_as_it_is(run, key)
        elif self._graph is not None or self._capture(run):
            self._replay(run)
        else:
            self._driver(run)

    def _compiled_in(self, run: Run) -> Any:
        """The rates that a graph would hold as numbers."""
        if run.hyper is None:
            return ()
        left_out = {"lr"} if self._rates_are_tensors else set()
        groups = [
            tuple(sorted((name, rate) for name, rate in group.items() if name not in left_out))
            for group in run.hyper.groups
        ]
        return run.hyper.loss_scaling, *groups

    def _run_as_it_is(self, run: Run, key: Any) -> None:
        changed, self._numbers = self._key is not None and key != self._key, None
        self._forget()
        numbers = Numbers(run, self._workers[0].plan, self._workers[0].settings)
        with drawing_from(numbers):
            self._driver(run)
        self._key, self._numbers = key, numbers
        self._changes += changed
        if numbers.refused is not None:
            self._give_up(f"{numbers.refused} draws from torch's own generator")
        elif self._changes > _CHANGES:
            self._give_up("rates that it would hold as numbers change again and again")

    # ---- capture -----------------------------------------------------------------------------------------

    def _capture(self, run: Run) -> bool:
        """Note the call down; whether that went well. Nothing is computed."""
        device, stores = self._device, [worker.store for worker in self._workers]
        assert self._numbers is not None
        static = replace(run, inputs=[_copied(device, value) for value in run.inputs])
        drafts = [store.draft() for store in stores]
        for store, draft in zip(stores, drafts, strict=True):
            store.begin(draft, in_place=True)
        self._homes = [
            (worker, key, name, value)
            for worker in self._workers
            for key, holder in (
                ("", {name: worker.store.state[name] for name in worker.plan.state[worker.ipu]}),
                *worker.store.states.items(),
            )
            for name, value in holder.items()
        ]
        self._driver.begin(static)
        for worker in self._workers:
            worker.device.settle()
        try:
            graph = device.graph(self._numbers.seeded(run))
            with graph.capturing(), drawing_from(self._numbers):
                self._capture_steps(static)
        except Stopped:
            raise
        except Exception as error:
            for worker, draft in zip(self._workers, drafts, strict=True):
                worker.frames.clear()
                worker.store.begin(draft)
            run.channels.reset()
            self._give_up(f"{type(error).__name__} while it was captured: {error}")
            return False
        self._graph, self._static = graph, static
        return True

    def _capture_steps(self, static: Run) -> None:
        self._fork()
        try:
            self._driver.steps(static)
        except BaseException:
            with suppress(Exception):  # a capture ends only once all its streams have come back
                self._join()
            raise
        self._join()
        # Only now has everybody read what buffers were at the beginning.
        self._fork()
        self._bring_home()
        self._join()

    def _fork(self) -> None:
        """All devices go on after this one."""
        start = self._device.record_event()
        for worker in self._workers:
            worker.device.fork(start)

    def _join(self) -> None:
        """This device goes on after all of them."""
        for worker in self._workers:
            self._device.wait(worker.device.join())

    def _bring_home(self) -> None:
        """What was put in the place of a tensor that the graph reads is copied into that."""
        for worker, key, name, home in self._homes:
            holder = worker.store.states[key] if key else worker.store.state
            if (value := holder[name]) is not home:
                with worker.device.running():
                    home.copy_(value)
                holder[name] = home

    # ---- replays -----------------------------------------------------------------------------------------

    def _replay(self, run: Run) -> None:
        assert self._static is not None and self._numbers is not None
        device = self._device
        self._bring_home()
        for target, value in zip(self._static.inputs, run.inputs, strict=True):
            target.copy_(value)
        self._driver.begin(run)
        self._join()
        self._numbers.seeded(run)
        if run.channels.stopped:
            raise Stopped
        self._graph.replay()  # from here on the call is done, also where the caller is interrupted
        device.settle()
        run.results = self._static.results.copied()

    def _forget(self) -> None:
        self._graph = self._static = None
        self._homes = []

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._forget()
        say_why_not(why)


def say_why_not(why: str) -> None:
    logger.warning("calls are not captured as a graph, and run operation by operation: %s", why)


def _copied(device: Any, value: Tensor) -> Tensor:
    return device.host_empty(value.shape, value.dtype).copy_(value)
