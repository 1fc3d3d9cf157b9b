"""The engine: loads a plan and runs calls of it.

One process; a worker for each ipu of each replica. A call hands all of them the same `Run` and waits; the device
loop (device iterations × accumulation) happens in the threads that drive the workers (`crew.py`). The first
failure stops all, and everything is put back to where it was before the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from ..ir import Plan
from ..settings import Hyper, Settings
from . import devices
from . import meeting as meetings
from .agreement import Facts, of_a_plan, of_rates, of_weights
from .backends import load
from .cores import Cores
from .crew import Crew
from .devices.base import Device
from .meeting import Broken, Left
from .recorder import Recorder
from .remote import RemoteWorker
from .replays import Replays, say_why_not
from .results import Results
from .tensors import Tensors
from .turns import Turns
from .worker import Channels, Run, Stopped, Worker


class Engine(Tensors):
    """A loaded plan.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        rules:   the module of update rules (init_state, update, norms, clip_, clamp_)
        device:  from the number of an ipu to a new device for it; by default of the settings' kind
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        rules: object,
        seed: int,
        device: Callable[[int], Device] | None = None,
    ) -> None:
        several = settings.training and settings.counts.instances > 1
        self._meeting = meetings.of(settings.counts.instances) if several else None
        if self._meeting is not None:
            self._meeting.agree("compilation", of_a_plan(plan, settings, weights, seed))
        super().__init__(plan, settings, weights, rules, device or devices.of(settings.device))
        self._unconfirmed: set[str] = set()  # weights that were written since the instances compared them
        self._calls = 0
        self.random_state = seed, 0
        self._latest: Run | None = None  # the call that crews may still work on
        self._turn = threading.Lock()  # threads of the user's that call at the same time run one by one
        self._workers: list[Worker] = []
        codes = {place: load(plan, settings, place) for place in {d.place for d in self.devices.values()}}
        for (replica, ipu), store in self.stores.items():
            home = self.devices[replica, ipu]
            kind = RemoteWorker if home.is_remote else Worker
            code, meeting = codes[home.place], self._meeting
            self._workers.append(kind(ipu, replica, plan, settings, store, rules, meeting, code, home))
        self._settle()
        self._crews = self._together() or self._apart()
        self._recorded_crews: list[Crew] = []
        self._close = weakref.finalize(self, _close, self._crews, self._recorded_crews)

    def close(self) -> None:
        """End the threads."""
        self._close()

    def _together(self) -> list[Crew]:
        """One crew for all workers; none for devices that need a thread each."""
        homes = self.devices.values()
        if len({home.place for home in homes}) == 1 and all(home.is_serial for home in homes):
            has_graphs = all(home.has_graphs for home in homes)
            perform = Replays(self._workers, self._rules) if has_graphs else Turns(self._workers)
            return [Crew(self._workers, "ipus", perform)]
        if any(home.is_remote for home in homes):
            if any(home.has_graphs for home in homes):
                say_why_not("the ipus are on several devices")
            return []
        count = torch.get_num_threads()
        if self.settings.training and self.settings.counts.instances > 1:
            count = max(count, len(self._workers))  # each may wait for the other instances at the same time
        return [Crew(self._workers, "core 0", Cores(self._workers, count))]

    def _apart(self) -> list[Crew]:
        return [
            Crew([worker], f"ipu {worker.ipu} replica {worker.replica}", worker.alone)
            for worker in self._workers
        ]

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
        self._await_idle()
        name = f"call {self._calls + 1} of the training"
        if self._meeting is not None:
            self._meeting.agree(name, self._facts(hyper))
            self._unconfirmed.clear()
        crews, before = self._crews_for(recorder), self.snapshot
        inputs = self._by_micro_batch(inputs)
        if crews is not self._crews or len(crews) > 1:
            inputs = [self._workers[0].device.on_host(value) for value in inputs]
        run = self._latest = Run(
            inputs,
            Results(self.plan.partition.signature, self.settings, self._workers[0].device.host_empty),
            hyper,
            self.settings.counts.iterations if self.settings.training else 1,
            before.step,
            before.seed,
            Channels(self.plan.credits, self.settings.counts.replicas),
            recorder,
            torch.get_num_threads(),
            len(crews),
            self._keep,
            self._tell_others,
            name,
        )
        self._begin()
        if recorder is not None:
            recorder.begin_call()
        try:
            for crew in crews:
                crew.inbox.put(run)
            run.wait()
        finally:
            self._await_idle()  # at once, but after Ctrl-C
        if run.failure is not None:
            raise run.failure
        return run.results

    def _by_micro_batch(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Combined batches as [iterations, accumulation, groups, micro-batch, ...], views."""
        counts = self.settings.counts
        every = (counts.iterations, counts.accumulation, counts.groups, -1)
        return [
            value.reshape(*every, *value.shape[1:]) if value.dim() else value.expand(1, 1, 1)
            for value in inputs
        ]

    def _keep(self, run: Run) -> None:
        """A call is done, by this one assignment. A worker's thread makes it, where no interrupt comes.

        Where there are other instances, all agree on it first: then nobody has failed, and nobody will.
        """
        if self._meeting is not None:
            self._meeting.agree(f"the end of {run.name}", final=True)
        self._calls += 1
        self.snapshot = self._drafted(
            step=run.first_step + run.steps,
            host_is_stale=self.snapshot.host_is_stale or self.settings.training,
        )

    def _facts(self, hyper: Hyper | None) -> Facts:
        """What has to be equal in all instances before a call."""
        assert hyper is not None
        facts: dict[str, dict[str, str]] = {
            "rates": of_rates(hyper),
            "state": {
                "updates so far": str(self.snapshot.step),
                "loss scaling factor": repr(self.loss_factor),
            },
            "seed": {"random seed": str(self.snapshot.seed)},
        }
        if self._unconfirmed:
            facts["value"] = of_weights({k: v for k, v in self.read().items() if k in self._unconfirmed})
        return facts

    def write(self, weights: Mapping[str, Tensor]) -> None:
        super().write(weights)
        parameters = {slot.key for slot in self._slots.values() if slot.role == "parameter"}
        self._unconfirmed = parameters.intersection(weights)

    def _tell_others(self, run: Run, error: BaseException) -> None:
        """As soon as something fails here: nobody need wait for this instance."""
        if self._meeting is not None and not isinstance(error, (Broken, Left, Stopped)):
            self._meeting.break_off(f"failed at {run.name}: {error}")

    def _await_idle(self) -> None:
        """Stop the latest call, if it goes on without the caller, and wait for it."""
        if self._latest is None:
            return
        if not self._latest.is_over:
            self._latest.channels.stop()
            if self._meeting is not None:
                self._meeting.break_off(f"was interrupted at {self._latest.name}")
            _until_idle([*self._crews, *self._recorded_crews])
            torch.set_num_threads(
                torch.get_num_threads()
            )  # for libraries that keep one number for the process
        self._latest = None

    def _crews_for(self, recorder: Recorder | None) -> list[Crew]:
        """A recorder looks at each ipu by itself, so there each has a thread, whatever it has else."""
        if recorder is None:
            return self._crews
        if not self._recorded_crews:
            self._recorded_crews += self._apart()
            if any(home.has_graphs for home in self.devices.values()):
                say_why_not("they are profiled")
        return self._recorded_crews


def _until_idle(crews: Sequence[Crew]) -> None:
    """Wait until no crew runs. They answer in turn, so all that they were told before has ended."""
    while True:
        answers: SimpleQueue[None] = SimpleQueue()
        try:
            for crew in crews:
                crew.inbox.put(answers)
            for _ in crews:
                answers.get()
            return
        except KeyboardInterrupt:  # a second one: it is stopping already
            continue


def _close(crews: list[Crew], recorded: list[Crew]) -> None:
    for crew in (*crews, *recorded):
        crew.close()
