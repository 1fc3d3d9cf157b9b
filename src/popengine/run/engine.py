"""The engine: loads a plan and runs calls of it.

One process; a worker for each ipu of each replica. A call hands all of them the same `Run` and waits; the device
loop (device iterations × accumulation) happens in the threads that drive the workers (`crew.py`). The first
failure stops all, and everything is put back to where it was before the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Error, UnrecoverableError
from ..ir import Plan
from ..settings import Hyper, Settings
from . import devices
from .backends import load
from .cores import Cores
from .crew import Crew
from .devices.base import Device
from .recorder import Recorder
from .remote import RemoteWorker
from .replays import Replays, say_why_not
from .results import Results
from .tensors import Tensors
from .turns import Turns
from .worker import Channels, Run, Worker

_PATIENCE = 0.2  # seconds; an interrupt that comes without a signal wakes nobody who waits


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
        super().__init__(plan, settings, weights, rules, device or devices.of(settings.device))
        self.seed, self.step = seed, 0
        self._channels = Channels()
        self._turn = threading.Lock()  # threads of the user's that call at the same time run one by one
        self._workers: list[Worker] = []
        codes = {place: load(plan, settings, place) for place in {d.place for d in self.devices.values()}}
        groups = _process_groups(plan, settings)
        for (replica, ipu), store in self.stores.items():
            group, home = groups.get((replica, ipu)), self.devices[replica, ipu]
            kind = RemoteWorker if home.is_remote else Worker
            code = codes[home.place]
            self._workers.append(kind(ipu, replica, plan, settings, store, rules, group, code, home))
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
        counts, training = self.settings.counts, self.settings.training
        every = (counts.iterations, counts.accumulation, counts.groups, -1)
        home = self._workers[0].device
        run = Run(
            [
                value.reshape(*every, *value.shape[1:]) if value.dim() else value.expand(1, 1, 1)
                for value in inputs
            ],
            Results(self.plan.partition.signature, self.settings, home.host_empty),
            hyper,
            counts.iterations if training else 1,
            self.step,
            self.seed,
            self._channels,
            recorder,
        )
        self._channels.reset(self.plan.credits, counts.replicas)
        for store in self.stores.values():
            store.begin()
        if recorder is not None:
            recorder.begin_call()
        failure: BaseException | None = None
        crews = self._crews_for(recorder)
        if crews is not self._crews or len(crews) > 1:
            run.inputs = [home.on_host(value) for value in run.inputs]
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # some libraries keep one number for the process
            failure = self._await(run, crews)
        except BaseException as interrupt:  # Ctrl-C arrives here, in the main thread
            failure = interrupt
            self._channels.stop()
            _until_idle(crews)
        finally:
            torch.set_num_threads(threads)
        if self.plan.credits or failure is not None:
            self._channels = Channels()
        if recorder is not None:
            recorder.end_call(run.steps, failed=failure is not None)
        if failure is not None and isinstance(failure, UnrecoverableError):
            raise failure
        if failure is not None and not run.cannot_be_undone:
            self._restore()
            raise failure
        self.step += run.steps
        if failure is not None:
            raise failure
        return run.results

    def _crews_for(self, recorder: Recorder | None) -> list[Crew]:
        """A recorder looks at each ipu by itself, so there each has a thread, whatever it has else."""
        if recorder is None:
            return self._crews
        if not self._recorded_crews:
            self._recorded_crews += self._apart()
            if any(home.has_graphs for home in self.devices.values()):
                say_why_not("they are profiled")
        return self._recorded_crews

    def _await(self, run: Run, crews: Sequence[Crew]) -> BaseException | None:
        """Hand the run to all crews and wait for them; the first failure."""
        failure, unfinished = None, len(crews)
        for crew in crews:
            crew.inbox.put(run)
        while unfinished:
            try:
                error = run.finished.get(timeout=_PATIENCE)
            except Empty:
                continue
            unfinished -= 1
            if error is not None and failure is None:
                failure = error
                self._channels.stop()
        return failure


def _process_groups(plan: Plan, settings: Settings) -> dict[tuple[int, int], Any]:
    """By replica and ipu, a group over all instances for each worker that meets its kind there: they come at
    different times."""
    counts = settings.counts
    if counts.instances == 1 or not settings.training:
        return {}
    if not dist.is_initialized():
        raise Error(
            f"the model trains in {counts.instances} processes, but they have not met\n"
            "  fix: call popdist.init() before the model; or options.Distributed.disable() to train alone"
        )
    firsts = {0} | {
        groups.members(r)[0] for groups in settings.replica_groups.values() for r in range(counts.replicas)
    }
    return {(replica, ipu): dist.new_group() for replica in sorted(firsts) for ipu in sorted(plan.programs)}


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
