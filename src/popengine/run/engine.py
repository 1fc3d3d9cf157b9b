"""The engine: loads a plan and runs calls of it.

One process; a worker for each ipu of each replica. A call hands all of them the same `Run` and waits; the device
loop (device iterations × accumulation) happens in the threads that drive the workers (`driver.py`). The first
failure stops all, and everything is put back to where it was before the call.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import Error, UnrecoverableError
from ..ir import Plan
from ..settings import Hyper, Settings
from . import devices
from .backends import load
from .drivers.driver import Driver
from .drivers.leading_thread import Crew
from .drivers.one_call import Channels, Run, Stopped
from .drivers.worker import Worker
from .instances.connections import PeerFailed, PeerLost
from .instances.consistency import Facts, facts_of_plan, facts_of_rates, hashes_of
from .instances.process_group import group_of
from .measure.recorder import Recorder
from .state.alignment import aligned
from .state.loaded_tensors import Tensors
from .state.mean_buffers import mean_over_replicas
from .state.results import Results
from .state.shared_state import SharedState

logger = logging.getLogger("popengine")

_OVERFLOW = (
    "gradients of step %d hold an infinity or a NaN, and so will the weights: the loss scale is %g\n"
    "  fix: a smaller loss_scaling; or options.Training.setAutomaticLossScaling(True), which leaves such updates out\n"
    "  where it is made: options.Precision.enableFloatingPointExceptions(True) names the operation"
)


class Engine(Tensors):
    """A loaded plan.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        device:  the device where all ipus are; by default the machine's of the settings' kind
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        several = settings.training and settings.counts.instances > 1
        self._group = group_of(settings.counts.instances) if several else None
        if self._group is not None:
            self._group.barrier("compilation", facts_of_plan(plan, settings, weights, seed))
        super().__init__(plan, settings, weights, device or devices.device_of(settings.device))
        self._unconfirmed: set[str] = set()  # weights that were written since the instances compared them
        group = self._group if self.shares_state else None
        self._shared_state = SharedState(self, group) if group is not None else None
        self._calls = 0
        self.random_state = seed, 0
        self._has_warned = False  # of gradients that overflow
        self._latest: Run | None = None  # the call that crews may still work on
        # Threads of the user's that call at the same time run one by one. (Re-entrant: after an interrupt at the very
        # end of a call it may still be held, and then its thread can call again.)
        self._turn = threading.RLock()
        self._workers: list[Worker] = []
        codes = load(plan, settings, self.device)
        for (replica, ipu), store in self.stores.items():
            self._workers.append(Worker(ipu, replica, plan, settings, store, self._group, codes, self.device))
        devices.settle(self.device)
        self._crews: dict[bool, Crew] = {}  # of calls that are recorded, and of others
        self._close = weakref.finalize(self, _close, self._crews)
        self._crew_for(None)

    def close(self) -> None:
        """End the threads."""
        if self._shared_state is not None:
            self._shared_state.keep()
        self._close()

    def _crew_for(self, recorder: Recorder | None) -> Crew:
        """Who runs a call. A recorder looks at ipus as separate devices: each does one thing at a time."""
        is_recorded = recorder is not None
        if is_recorded not in self._crews:
            self._crews[is_recorded] = self._hired(is_recorded)
        return self._crews[is_recorded]

    def _hired(self, is_recorded: bool) -> Crew:
        cores = devices.cores(self.settings.device)
        inside = threads_inside(self.plan, self.settings, cores)
        threads = cores // inside
        if self.settings.training and self.settings.counts.instances > 1:
            # Each may wait for the other instances at the same time.
            threads = max(threads, len(self._workers))
        return Crew(self._workers, Driver(self._workers, threads, is_recorded, inside, cores), self.device)

    # ---- running -----------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None = None) -> Results:
        """Run one call: all device iterations.

        Args:
            inputs: combined batches, each [iterations * accumulation * groups * micro-batch, ...]
            hyper:  the rates of its weight updates (None in inference)
        Raises:
            Error: a piece failed. Weights, buffers and optimizer state are as before the call.
        """
        with self._turn:
            return self._run(inputs, hyper, recorder)

    def _run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None) -> Results:
        if recorder is not None:
            recorder.begin_call()
        self._await_idle()
        self._check()
        name = f"call {self._calls + 1} of the training"
        if self._group is not None:
            self._group.barrier(name, self._facts(hyper))
            self._unconfirmed.clear()
        crew, before = self._crew_for(recorder), self.snapshot
        run = self._latest = Run(
            [devices.pinned(value, self.device) for value in self._by_micro_batch(inputs)],
            Results(self.plan.partition.signature, self.settings, self.device),
            hyper,
            self.settings.counts.iterations if self.settings.training else 1,
            before.step,
            before.seed,
            Channels(),
            recorder,
            torch.get_num_threads(),
            self._keep,
            self._tell_others,
            self._commit if self.writes_in_place else None,
            self._lose,
            name,
        )
        self._begin(self.writes_in_place)
        try:
            crew.start(run)
            run.wait()
        finally:
            self._await_idle()  # at once, but after Ctrl-C
            if recorder is not None:
                recorder.end_call(run.steps, failed=run.is_stopped)
        if run.failure is not None:
            raise run.failure
        if run.overflows and not self._has_warned:
            self._has_warned = True
            logger.warning(_OVERFLOW, *min(run.overflows))
        return run.results

    def _by_micro_batch(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Combined batches as [iterations, accumulation, groups, micro-batch, ...]; views, where micro-batches so
        begin well."""
        counts = self.settings.counts
        every = (counts.iterations, counts.accumulation, counts.groups, -1)
        batches = [
            value.reshape(*every, *value.shape[1:]) if value.dim() else value.expand(1, 1, 1)
            for value in inputs
        ]
        return [aligned(batch) if self.device.type == "cpu" and batch.is_cpu else batch for batch in batches]

    def _keep(self, run: Run) -> None:
        """A call is done, by this one assignment. A worker's thread makes it, where no interrupt comes.

        Where there are other instances, all agree on it first: then nobody has failed, and nobody will.
        """
        if not run.is_committed:
            self._agree_on_the_end(run)
        self._calls += 1
        self.snapshot = self._drafted(
            step=run.first_step + run.steps,
            host_is_stale=self.snapshot.host_is_stale or self.settings.training,
        )
        if run.is_committed:
            self.still.release()

    def _agree_on_the_end(self, run: Run) -> None:
        if self._group is not None:
            self._group.barrier(f"the end of {run.name}", final=True)

    def _commit(self, run: Run) -> None:
        """All that a call computes is done: let its update write to what is kept. From here on it can't be given up.

        Nothing that is large is made after this, so that nothing fails.
        """
        run.channels.go_on()
        try:
            self._agree_on_the_end(run)
        except BaseException:
            run.channels.go_on(False)
            raise
        self.still.acquire()
        run.is_committed = True

    def _lose(self, run: Run, error: BaseException) -> Error:
        """An update has failed that wrote to what is kept. Returns: what everybody is told from now on."""
        self.lost = UnrecoverableError(
            f"the weights are lost: some are those after {run.name}, and some those before"
            f" ({type(error).__name__}: {error})\n"
            "  why: the update failed while it was written, most likely for want of memory\n"
            "  fix: start again from a checkpoint, with more memory"
        )
        self.snapshot = replace(self.snapshot, host_is_stale=False)  # the host keeps what it has
        self.still.release()
        return self.lost

    def _facts(self, hyper: Hyper | None) -> Facts:
        """What has to be equal in all instances before a call."""
        assert hyper is not None
        facts: dict[str, dict[str, str]] = {
            "rates": facts_of_rates(hyper),
            "state": {
                "updates so far": str(self.snapshot.step),
                "loss scaling factor": repr(self.loss_factor),
            },
            "seed": {"random seed": str(self.snapshot.seed)},
        }
        if self._unconfirmed:
            facts["value"] = hashes_of({k: v for k, v in self.read().items() if k in self._unconfirmed})
        return facts

    @cached_property
    def writes_in_place(self) -> bool:
        """Whether a call's update waits until nothing else is left, and then writes to what is kept.

        So it is where a call has one update, but where instances exchange weights after it.
        """
        one = self.settings.training and self.settings.counts.iterations == 1
        return one and not self.shares_state

    @property
    def shares_state(self) -> bool:
        """Whether other instances keep a part of the optimizer's state."""
        return self._group is not None and self.settings.shard_optimizer is not None

    def read_whole_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """As `read_optimizer`, with what other instances keep. They take part: at once where they read it too, else
        when they come to their next call, or to their end.

        Raises:
            Error: another instance is gone, or has let go of its part
        """
        return self.read_optimizer() if self._shared_state is None else self._shared_state.read()

    def write(self, weights: Mapping[str, Tensor]) -> None:
        super().write(weights)
        parameters = {slot.key for slot in self._slots.values() if slot.role == "parameter"}
        self._unconfirmed = parameters.intersection(weights)

    def average_buffers(self) -> None:
        """Give all replicas of all instances the mean of their buffers that forward changes: of those that are
        floating point numbers."""
        with self._turn:
            self._await_idle()
            results = self.plan.partition.signature.results
            names = [r.key for r in results if r.kind == "buffer" and r.dtype.is_floating_point]
            if names:
                buffers = [{name: each[name] for name in names} for each in self.read_buffers()]
                mean = mean_over_replicas(buffers, self.settings.counts, self._group)
                self.write_buffers([mean] * len(buffers))
                self.snapshot = replace(self.snapshot, host_is_stale=True)

    def _tell_others(self, run: Run, error: BaseException) -> None:
        """As soon as something fails here: nobody need wait for this instance."""
        if self._group is not None and not isinstance(error, (PeerFailed, PeerLost, Stopped)):
            self._group.abort(f"failed at {run.name}: {error}")

    def _await_idle(self) -> None:
        """Stop the latest call, if it goes on without the caller, and wait for it."""
        if self._latest is None:
            return
        if not self._latest.is_over:
            self._latest.channels.stop()
            if self._group is not None and not self._latest.is_committed:
                self._group.abort(f"was interrupted at {self._latest.name}")
            for crew in self._crews.values():
                _until_idle(crew)
            # Libraries keep one number for the process, and another thread may have set it.
            torch.set_num_threads(torch.get_num_threads())
        self._latest = None


def threads_inside(plan: Plan, settings: Settings, cores: int) -> int:
    """Threads within an operation: as many cores as tasks leave idle. Of the counts, and never of the layout, so that
    all layouts give the bits of plain PyTorch with as many threads."""
    return max(1, cores // (plan.schedule.micro_batches * settings.counts.replicas))


def _until_idle(crew: Crew) -> None:
    """Wait until a crew does not run."""
    while True:
        try:
            crew.wait_until_idle()
            return
        except KeyboardInterrupt:  # a second one: it is stopping already
            continue


def _close(crews: dict[bool, Crew]) -> None:
    for crew in crews.values():
        crew.close()
