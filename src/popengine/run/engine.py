"""The engine: loads a plan, runs calls of it, and holds the only mutable state there is.

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
from .offloading import offloading_of
from .recorder import Recorder
from .remote import RemoteWorker
from .replays import Replays, say_why_not
from .results import Results
from .sharing import owners
from .store import Store
from .turns import Turns
from .worker import Channels, Run, Worker

_PATIENCE = 0.2  # seconds; an interrupt that comes without a signal wakes nobody who waits


class Engine:
    """A loaded plan.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        rules:   the module of update rules (init_state, update, norms, clip_)
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
        self.plan, self.settings, self.seed, self.step = plan, settings, seed, 0
        self._slots = {slot.name: slot for slot in plan.partition.graph.slots}
        self._rules = rules
        self._channels = Channels()
        self._turn = threading.Lock()  # threads of the user's that call at the same time run one by one
        self._workers: list[Worker] = []
        self.stores: dict[tuple[int, int], Store] = {}  # by replica and ipu
        self.devices: dict[tuple[int, int], Device] = {}
        device = device or devices.of(settings.device)
        for replica in range(settings.counts.replicas):
            for ipu in plan.programs:
                keys = {n: s.key for n, s in self._slots.items() if s.role in ("parameter", "buffer")}
                self.stores[replica, ipu] = Store(keys)
                self.devices[replica, ipu] = device(ipu)
        for place, store in self.stores.items():
            self._fill(place, store)
        self.write(weights)
        for place, store in self.stores.items():
            with self.devices[place].running():
                self._prepare_updates(place, store)
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

    def _fill(self, place: tuple[int, int], store: Store) -> None:
        home = self.devices[place]
        with home.running():
            for name in self.plan.state[place[1]]:
                slot = self._slots[name]
                if slot.role == "constant":
                    store.state[name] = self.plan.partition.graph.constants[slot.key].to(home.place)
                elif slot.role == "loss_scale":
                    store.state[name] = torch.ones(slot.shape, dtype=slot.dtype, device=home.place)
                else:
                    store.state[name] = torch.empty(slot.shape, dtype=slot.dtype, device=home.place)

    def _prepare_updates(self, place: tuple[int, int], store: Store) -> None:
        replica, ipu = place
        offloading = offloading_of(self.devices[place], self.settings, self._rules)
        optimizer = self.settings.optimizer
        if optimizer is None:
            return
        gradients = {result.key for result in self.plan.partition.graph.results if result.kind == "gradient"}
        slots = [self._slots[name] for name in self.plan.state[ipu]]
        weights = {
            slot.key: store.state[slot.name]
            for slot in slots
            if slot.role == "parameter" and slot.key in gradients
        }
        updated = {key: weight.numel() for key, weight in weights.items() if key in optimizer.group_of}
        store.owner = owners(updated, self.settings, replica)
        for key, weight in weights.items():
            store.sums[key] = torch.zeros_like(weight, dtype=optimizer.accumulator_type)
            if key in updated and store.owner.get(key, replica) == replica:
                store.states[key] = self._rules.init_state(optimizer, weight)  # type: ignore[attr-defined]
                if offloading is not None:
                    store.states[key] = offloading.on_host(weight, store.states[key])

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
            Results(self.plan.partition.graph, self.settings, home.host_empty),
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

    def _restore(self) -> None:
        for place, store in self.stores.items():
            with self.devices[place].running():
                store.restore()
        self._settle()

    def _settle(self) -> None:
        """Wait for all devices."""
        for home in self.devices.values():
            home.settle()

    # ---- weights and state -------------------------------------------------------------------------------

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers into every replica."""
        with torch.no_grad():
            for place, store in self.stores.items():
                with self.devices[place].running():
                    for key, value in store.held(weights).items():
                        weight = self._row(key, weights[key], place[0])
                        store.state[store.slot[key]] = torch.empty_like(value).copy_(weight)
        self._settle()

    def read(self) -> dict[str, Tensor]:
        """Replica 0's parameters and buffers, by canonical name: references where they are the host's, so copy
        what you keep.

        A parameter with replica groups has one row a group."""
        found: dict[str, Tensor] = {}
        for ipu in self.plan.programs:
            for name in self.plan.state[ipu]:
                slot = self._slots[name]
                if slot.role in ("parameter", "buffer"):
                    values = [self._fetch((r, ipu), name) for r in self._rows(slot.key)]
                    found[slot.key] = torch.stack(values) if self._is_grouped(slot.key) else values[0]
        return found

    def _fetch(self, place: tuple[int, int], name: str) -> Tensor:
        with self.devices[place].running():
            return self.devices[place].fetch(self.stores[place].state[name])

    @property
    def loss_factor(self) -> float:
        """What automatic loss scaling multiplies the user's loss scale with at the moment."""
        return next(iter(self.stores.values())).loss_factor

    @loss_factor.setter
    def loss_factor(self, factor: float) -> None:
        for store in self.stores.values():
            store.loss_factor = factor

    def read_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """Copies of a replica's optimizer state, by parameter; one row a group where there are groups."""
        found: dict[str, dict[str, Tensor]] = {}
        for ipu in self.plan.programs:
            for key in self.stores[0, ipu].sums:
                keepers = [place for place in self._keepers(ipu, key) if key in self.stores[place].states]
                rows = [self._fetch_state(place, key) for place in keepers]
                if rows:
                    found[key] = {
                        name: torch.stack([row[name] for row in rows]) if self._is_grouped(key) else value
                        for name, value in rows[0].items()
                    }
        return found

    def _fetch_state(self, place: tuple[int, int], key: str) -> dict[str, Tensor]:
        with self.devices[place].running():
            state = self.stores[place].states[key]
            return {name: self.devices[place].fetch(value).clone() for name, value in state.items()}

    def write_optimizer(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy optimizer state into every replica; what is not given stays."""
        for place, store in self.stores.items():
            offloading = offloading_of(self.devices[place], self.settings, self._rules)
            for key, state in store.states.items():
                with self.devices[place].running():
                    for name, value in states.get(key, {}).items():
                        like = state.get(name, value)
                        home = like.device if name in state else store.state[store.slot[key]].device
                        row = self._row(key, value, place[0]).detach()
                        state[name] = row.to(home, like.dtype, copy=True)
                        if offloading is not None:
                            state[name] = offloading.kept(state[name])
        self._settle()

    def _is_grouped(self, key: str) -> bool:
        return key in self.settings.replica_groups

    def _rows(self, key: str) -> tuple[int, ...]:
        """The replicas whose values the host receives."""
        return self.settings.replica_groups[key].rows if self._is_grouped(key) else (0,)

    def _keepers(self, ipu: int, key: str) -> list[tuple[int, int]]:
        """The places that hold what the host receives of a parameter's optimizer state."""
        return [(self.stores[row, ipu].owner.get(key, row), ipu) for row in self._rows(key)]

    def _row(self, key: str, value: Tensor, replica: int) -> Tensor:
        """A replica's share of a host value."""
        if not self._is_grouped(key):
            return value
        return value[self.settings.replica_groups[key].row_for(replica, len(value))]


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
