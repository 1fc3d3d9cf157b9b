"""The engines of a process whose ipus are on several devices: one engine, with its threads, for each device.

Each engine runs the rows of its place of the table. A message is a copy on a stream of its own, after an event of the
sender's; the host waits in it only for a value that an accelerator sends to the CPU.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import Error
from ..ir import Plan
from ..profile import KeptBytes
from ..settings import Hyper, Place, Settings
from . import devices
from .call import Commit, Results
from .devices import Transfer
from .engine import Engine
from .instances.connections import PeerFailed
from .mailbox import Arrivals, MessageKey
from .recorder import Recorder
from .train_state import OptimizerState, TrainState

_WAIT = 0.2  # seconds; an interrupt without a signal wakes no waiting thread, so waits are repeated


class DeviceEngines:
    """The engines of a plan's devices, with the methods of one `Engine`, and of its `State`, that executors call."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        train_state: TrainState,
        find_constants: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self.plan, self.settings, self.train_state = plan, settings, train_state
        self._meetings = _Meetings()
        self._engines: list[Engine] = []
        for place in sorted(set(plan.places.values())):
            device = devices.device_named(settings.devices[place.device])
            mail = self._meetings.mail[place] = DeviceMailbox(self._meetings, place, device)
            own, state = replace(settings, place=place), copy.copy(train_state)
            self._engines.append(Engine(plan, own, state, device, mail, find_constants))
        used = [engine.state.device for engine in self._engines]
        self._accelerator = next(device for device in used if devices.has_queue(device))
        self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="device")
        train_state.engines += 1

    def close(self) -> None:
        """End the threads of all engines."""
        self.train_state.engines -= 1
        self._pool.shutdown(wait=False)
        for engine in self._engines:
            engine.close()

    def run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None = None) -> Results:
        """Run one call on all devices, as `Engine.run`. A recorder records the rows of the first device."""
        commit = self.train_state.commit
        commit.settle()
        self.bind(hyper)
        self._meetings.begin_call()
        # Once for all engines.
        inputs = [devices.in_pinned_memory(value, self._accelerator) for value in inputs]
        steps = self.settings.counts.iterations if self.settings.training else 1
        threads = torch.get_num_threads()
        runs: list[Future[Results]] = []
        commit.begin(f"call {commit.complete_calls + 1}", steps, lambda: wait(runs) and None, self._stop)
        try:
            for engine in self._engines:
                own = recorder if engine is self._engines[0] else None
                runs.append(self._pool.submit(self._run_engine, engine, inputs, hyper, own, threads))
            while wait(runs, _WAIT).not_done:
                pass
        finally:
            if wait(runs, 0).not_done:  # after Ctrl-C
                commit.settle()
            self._take_state()
            commit.settle()
        errors = [error for run in runs if (error := run.exception()) is not None]
        for error in [error for error in errors if not isinstance(error, PeerFailed)] or errors:
            raise error
        return runs[0].result()

    @staticmethod
    def _run_engine(
        engine: Engine, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None, threads: int
    ) -> Results:
        torch.set_num_threads(threads)  # it is a number of this thread
        return engine.run(inputs, hyper, recorder, is_bound=True)

    def _stop(self, why: str) -> None:
        """Stop the calls of all engines: all have committed their step by then, or none will."""
        self._meetings.stop([engine.state.train_state.commit for engine in self._engines])
        self._meetings.abort(why)

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> "DeviceEngines":
        """Return this object, which has the methods of a `State`."""
        return self

    def bind(self, hyper: Hyper | None) -> None:
        """Bind the weights and the optimizer state of each device, which move there. The engines get states with the
        same weights and optimizer, and with buffers, a loss factor and a `Commit` of their own."""
        lock = _LockOfAll(self.train_state.commit.lock)
        self.train_state.commit.check_not_lost()
        for engine in self._engines:
            own = engine.state.train_state = copy.copy(self.train_state)
            own.commit, own.loss_factor = Commit(), self.train_state.loss_factor.clone()
            own.commit.lock, own.commit.complete_calls = lock, self.train_state.commit.complete_calls
            own.buffers = [dict(buffers) for buffers in self.train_state.buffers]
            engine.state.bind(hyper)

    def _take_state(self) -> None:
        """Take over what a call has changed in the states of the engines, which are equal but for buffers."""
        states, commit = [engine.state.train_state for engine in self._engines], self.train_state.commit
        first = min(states, key=lambda state: state.commit.done)
        commit.done = first.commit.done
        commit.end(None)
        for state in states:
            if state.commit.state == "lost":
                commit.lose(state.commit.why_lost)
        self.train_state.random_state, self.train_state.updates = first.random_state, first.updates
        self.train_state.loss_factor.copy_(first.loss_factor)
        replicas = zip(*(state.buffers for state in states), strict=False)
        self.train_state.buffers = [{k: v for own in each for k, v in own.items()} for each in replicas]

    def memory(self, replica: int, ipu: int) -> KeptBytes:
        """Return the bytes that an ipu keeps."""
        place = self.plan.places[ipu]
        return next(e for e in self._engines if e.settings.place == place).state.memory(replica, ipu)

    def gather_optimizer_states(self) -> dict[str, OptimizerState]:
        """Return the optimizer state of all devices, by parameter."""
        return self.train_state.optimizer_states()

    def read_weights_elsewhere(self) -> dict[str, Tensor]:
        """Return no weights: no other process holds any."""
        return {}

    def average_buffers(self) -> None:
        """Raise Error: running statistics of several devices are not averaged."""
        raise Error(
            "the mean of running statistics over replicas is not computed if the ipus are on several devices\n"
            "  fix: leave the call out: the running statistics of replica 0 are saved"
        )


class _LockOfAll:
    """The lock of the weights, for engines that commit together: it is held until all have released it."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._counts, self._held = lock, threading.Lock(), 0

    def acquire(self) -> None:
        with self._counts:
            if not self._held:
                self._lock.acquire()
            self._held += 1

    def release(self) -> None:
        with self._counts:
            self._held -= 1
            if not self._held:
                self._lock.release()


class _Meetings:
    """The mailboxes of all devices, and their meetings."""

    def __init__(self) -> None:
        self.mail: dict[Place, DeviceMailbox] = {}
        self._changed = threading.Condition()
        self.begin_call()

    def begin_call(self) -> None:
        """Forget a call that failed."""
        self._meeting, self._failure = _Meeting(), ""
        for mail in self.mail.values():
            mail.arrivals = Arrivals()

    def meet(self, place: Place, part: Any, then: Callable[[dict[Place, Any]], Any] = dict) -> Any:
        """Wait for all places; return `then`, which is called once, of what each has brought. Raises PeerFailed after
        `abort`, unless the meeting was over before."""
        with self._changed:
            meeting = self._meeting
            meeting.parts[place] = part
            if len(meeting.parts) == len(self.mail) and not self._failure:
                meeting.result, meeting.is_over = then(meeting.parts), True
                self._meeting = _Meeting()
                self._changed.notify_all()
            self._changed.wait_for(lambda: meeting.is_over or self._failure)
            if not meeting.is_over:
                raise PeerFailed(self._failure)
        return meeting.result

    def stop(self, commits: Sequence[Commit]) -> None:
        """Stop calls: in a meeting all commit, or none."""
        with self._changed:
            for commit in commits:
                commit.stop()

    def abort(self, why: str) -> None:
        """End the waits of all places, which raise PeerFailed."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()
        for mail in self.mail.values():
            mail.arrivals.fail(PeerFailed(self._failure))


@dataclass
class _Meeting:
    parts: dict[Place, Any] = field(default_factory=dict)
    result: Any = None
    is_over: bool = False


class DeviceMailbox:
    """The mailbox of a device, for messages of other devices of this process."""

    def __init__(self, meetings: _Meetings, place: Place, device: torch.device) -> None:
        self._meetings, self._place, self._device = meetings, place, device
        self.arrivals = Arrivals()

    def begin_step(self) -> None:
        """Do nothing: messages of a step may be here before it begins, and none is left of the previous one."""

    def send(self, place: Place, key: MessageKey, values: Sequence[Tensor]) -> None:
        """Send values to a place without waiting."""
        other = self._meetings.mail[place]
        other.arrivals.add(key, [Transfer(value, other._device) for value in values])

    def is_here(self, key: MessageKey, wake: Callable[[], None]) -> bool:
        """Return whether a message or a failure can be taken; if not, `wake` is called when it can."""
        return self.arrivals.has(key, wake)

    def take(self, key: MessageKey) -> Sequence[Tensor]:
        """Return the values of a message, whose copies are started; raise the error if a device has failed."""
        return [transfer.finish() for transfer in self.arrivals.take(key)]

    def sum(self, values: Tensor) -> None:
        """Sum values over all devices, in place."""
        total = values.to(self._device, non_blocking=True, copy=True)
        for other, *_ in self._bring([total.clone()], [*self._meetings.mail]).values():
            total.add_(other)
        values.copy_(total)

    def share(self, tensors: Sequence[Tensor], owners: Sequence[Place]) -> None:
        """Overwrite the tensors of the first place, whose results a call returns, by those of their owners."""
        for place, own in self._bring(tensors, [min(self._meetings.mail)]).items():
            for target, value, owner in zip(tensors, own, owners, strict=True):
                if owner == place:
                    target.copy_(value)

    def _bring(self, tensors: Sequence[Tensor], to: Sequence[Place]) -> dict[Place, list[Tensor]]:
        """Return the tensors of each other place on this device, if this place is in `to`. All places must call it."""
        mail = self._meetings.mail
        others = [place for place in to if place != self._place]
        sent = {place: [Transfer(value, mail[place]._device) for value in tensors] for place in others}
        parts = self._meetings.meet(self._place, sent)
        return {
            p: [each.finish() for each in own[self._place]] for p, own in parts.items() if self._place in own
        }

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Wait for all devices, and commit at all or, after an interrupt, at none."""
        self._meetings.meet(self._place, commit, lambda commits: [each() for each in commits.values()])

    def abort(self, why: str) -> None:
        """End the waits of all devices."""
        self._meetings.abort(why)
