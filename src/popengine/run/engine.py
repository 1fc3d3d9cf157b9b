"""The engine: loads a plan, runs calls of it, and holds the only mutable state there is.

One process; a thread for each ipu of each replica. A call hands all of them the same `Run` and waits; the
device loop (device iterations × accumulation) happens in the threads. The first failure stops all, and
everything is put back to where it was before the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Error
from ..ir import Plan
from ..settings import Hyper, Settings
from .backends import load
from .recorder import Recorder
from .results import Results
from .sharing import owners
from .store import Store
from .worker import Channels, Run, Worker

_PATIENCE = 0.2  # seconds; an interrupt that comes without a signal wakes nobody who waits


class Engine:
    """A loaded plan.

    Args:
        weights: parameters and buffers by canonical name; they are copied
        rules:   the module of update rules (init_state, update, norms, clip_)
    """

    def __init__(
        self, plan: Plan, settings: Settings, weights: Mapping[str, Tensor], rules: object, seed: int
    ) -> None:
        self.plan, self.settings, self.seed, self.step = plan, settings, seed, 0
        self._slots = {slot.name: slot for slot in plan.partition.graph.slots}
        self._rules = rules
        self._channels = Channels()
        self._turn = threading.Lock()  # threads of the user's that call at the same time run one by one
        self._workers: list[Worker] = []
        self.stores: dict[tuple[int, int], Store] = {}  # by replica and ipu
        for replica in range(settings.counts.replicas):
            for ipu in plan.programs:
                keys = {n: s.key for n, s in self._slots.items() if s.role in ("parameter", "buffer")}
                self.stores[replica, ipu] = Store(keys)
        for (_, ipu), store in self.stores.items():
            self._fill(ipu, store)
        self.write(weights)
        for (replica, ipu), store in self.stores.items():
            self._prepare_updates(replica, ipu, store)
        codes = load(plan, settings)
        groups = _process_groups(plan, settings)
        for (replica, ipu), store in self.stores.items():
            group = groups.get((replica, ipu))
            self._workers.append(Worker(ipu, replica, plan, settings, store, rules, group, codes))
        self.close = weakref.finalize(self, _close, list(self._workers))

    def _fill(self, ipu: int, store: Store) -> None:
        for name in self.plan.state[ipu]:
            slot = self._slots[name]
            if slot.role == "constant":
                store.state[name] = self.plan.partition.graph.constants[slot.key]
            elif slot.role == "loss_scale":
                store.state[name] = torch.ones(slot.shape, dtype=slot.dtype)
            else:
                store.state[name] = torch.empty(slot.shape, dtype=slot.dtype)

    def _prepare_updates(self, replica: int, ipu: int, store: Store) -> None:
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
        run = Run(
            [
                value.reshape(*every, *value.shape[1:]) if value.dim() else value.expand(1, 1, 1)
                for value in inputs
            ],
            Results(self.plan.partition.graph, self.settings),
            hyper,
            counts.iterations if training else 1,
            self.step,
            self.seed,
            self._channels,
            recorder,
        )
        for channel, tokens in self.plan.credits.items():
            for replica in range(counts.replicas):
                for _ in range(tokens):
                    self._channels[channel, replica].put(())
        for store in self.stores.values():
            store.begin()
        if recorder is not None:
            recorder.begin_call()
        failure: BaseException | None = None
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # some libraries keep one number for the process
            failure = self._await(run)
        except BaseException as interrupt:  # Ctrl-C arrives here, in the main thread
            failure = interrupt
            self._channels.stop()
            self._settle()
        finally:
            torch.set_num_threads(threads)
        if self.plan.credits or failure is not None:
            self._channels = Channels()
        if recorder is not None:
            recorder.end_call(run.steps, failed=failure is not None)
        if failure is not None:
            for store in self.stores.values():
                store.restore()
            raise failure
        self.step += run.steps
        return run.results

    def _await(self, run: Run) -> BaseException | None:
        """Hand the run to all workers and wait for them; the first failure."""
        failure, unfinished = None, len(self._workers)
        for worker in self._workers:
            worker.inbox.put(run)
        while unfinished:
            try:
                _, error = run.finished.get(timeout=_PATIENCE)
            except Empty:
                continue
            unfinished -= 1
            if error is not None and failure is None:
                failure = error
                self._channels.stop()
        return failure

    def _settle(self) -> None:
        """Wait until no worker runs. They answer in turn, so all that they were told before has ended."""
        while True:
            answers: SimpleQueue[None] = SimpleQueue()
            try:
                for worker in self._workers:
                    worker.inbox.put(answers)
                for _ in self._workers:
                    answers.get()
                return
            except KeyboardInterrupt:  # a second one: it is stopping already
                continue

    # ---- weights and state -------------------------------------------------------------------------------

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers into every replica."""
        with torch.no_grad():
            for (replica, _), store in self.stores.items():
                for key, value in store.held(weights).items():
                    weight = self._row(key, weights[key], replica)
                    store.state[store.slot[key]] = torch.empty_like(value).copy_(weight)

    def read(self) -> dict[str, Tensor]:
        """References to replica 0's parameters and buffers, by canonical name: copy what you keep.

        A parameter with replica groups has one row a group."""
        found: dict[str, Tensor] = {}
        for ipu in self.plan.programs:
            for name in self.plan.state[ipu]:
                slot = self._slots[name]
                if slot.role in ("parameter", "buffer"):
                    values = [self.stores[replica, ipu].state[name] for replica in self._rows(slot.key)]
                    found[slot.key] = torch.stack(values) if self._is_grouped(slot.key) else values[0]
        return found

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
                rows = [store.states[key] for store in self._keepers(ipu, key) if key in store.states]
                if rows:
                    found[key] = {
                        name: torch.stack([row[name] for row in rows])
                        if self._is_grouped(key)
                        else value.clone()
                        for name, value in rows[0].items()
                    }
        return found

    def write_optimizer(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy optimizer state into every replica; what is not given stays."""
        for (replica, _), store in self.stores.items():
            for key, state in store.states.items():
                for name, value in states.get(key, {}).items():
                    dtype = state[name].dtype if name in state else value.dtype
                    state[name] = self._row(key, value, replica).detach().to(dtype).clone()

    def _is_grouped(self, key: str) -> bool:
        return key in self.settings.replica_groups

    def _rows(self, key: str) -> tuple[int, ...]:
        """The replicas whose values the host receives."""
        return self.settings.replica_groups[key].rows if self._is_grouped(key) else (0,)

    def _keepers(self, ipu: int, key: str) -> list[Store]:
        """The stores that hold what the host receives of a parameter's optimizer state."""
        own = [(replica, self.stores[replica, ipu]) for replica in self._rows(key)]
        return [self.stores[store.owner.get(key, replica), ipu] for replica, store in own]

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


def _close(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()
