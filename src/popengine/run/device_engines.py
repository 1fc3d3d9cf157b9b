"""The engines of a process with ipus or replicas on several devices: one engine, with its threads, for each device.

Each engine runs the rows of its place of the table, for the replicas that are on its device. A message is a copy on a
stream of its own, after an event of the sender's; the host waits in it only for a value that an accelerator sends to
the CPU.

The user's tensors are on the devices of replica 0. The engines of other replicas have copies of the weights, which are
written at the begin of each call and after each update. In a step the engines of a place sum their gradients, and the
optimizer's `step()` runs once, on those of replica 0's devices.
"""

import copy
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..ir import Plan
from ..settings import Hyper, Place, Settings
from . import devices
from .call import Commit, Results
from .device_mailbox import DeviceMailbox, Meetings
from .engine import Engine
from .recorder import Recorder
from .train_state import TrainState


class DeviceEngines(Engine):
    """The engines of a plan's devices as one engine, which is also its `State`."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        train_state: TrainState,
        find_constants: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self.plan, self.settings, self.train_state = plan, settings, train_state
        train_state.replicas = max(train_state.replicas, settings.counts.replicas)
        self._meetings = Meetings()
        self._engines: list[Engine] = []
        shifts = plan.shifts or (0,) * settings.counts.replicas
        for shift in dict.fromkeys(shifts):
            replicas = tuple(replica for replica, own in enumerate(shifts) if own == shift)
            for place in sorted(set(plan.places.values())) or [Place()]:
                name = settings.devices[(place.device + shift) % len(settings.devices)]
                mail = DeviceMailbox(self._meetings, place, replicas, devices.device_named(name))
                self._meetings.mail.append(mail)
                own, state = replace(settings, place=place, replicas=replicas), copy.copy(train_state)
                self._engines.append(Engine(plan, own, state, mail.device, mail, find_constants))
        self._queues = [engine._queues[0] for engine in self._engines]
        self._group = self._sums = None
        self._has_warned = False
        train_state.engines += 1

    def close(self) -> None:
        """End the threads of all engines."""
        self.train_state.engines -= 1
        for engine in self._engines:
            engine.close()

    def run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None = None) -> Results:
        """Run one call on all devices, as `Engine.run`."""
        self.train_state.commit.settle()
        self._meetings.begin_call()
        return super().run(inputs, hyper, recorder)

    @property
    def _wait_and_abort(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._wait_until_idle, self._stop

    def _wait_until_idle(self) -> None:
        """Wait until no engine runs a call, and take over what the call has changed."""
        for queue in self._queues:
            queue.wait_until_idle()
        self._take_state()

    def _stop(self, why: str) -> None:
        """Stop the calls of all engines: all have committed their step by then, or none will."""
        self._meetings.abort(why, [engine.state.train_state.commit for engine in self._engines])

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return this object, which has the methods of a `State`."""
        return self

    def bind(self) -> None:
        """Bind the weights and the optimizer state of each device, which move there. The engines get states with the
        same weights and optimizer, and with buffers, a loss factor and a `Commit` of their own."""
        lock = _LockOfAll(self.train_state.commit.lock)
        self.train_state.commit.check_not_lost()
        for engine in self._engines:  # those of replica 0 first, which move the user's tensors
            own = engine.state.train_state = copy.copy(self.train_state)
            own.commit, own.loss_factor = Commit(), self.train_state.loss_factor.clone()
            own.commit.lock, own.commit.complete_calls = lock, self.train_state.commit.complete_calls
            own.buffers = [dict(buffers) for buffers in self.train_state.buffers]
            # `bind` compares those of replica 0 with the model's, and then overwrites them.
            for first in own.buffers[:1]:
                first.update({key: value.clone() for key, value in first.items()})
            engine.state.bind()

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
        held = [state.held for state in states if state.held is not None]
        self.train_state.held = None
        if held:  # the buffers are equal
            sums, buffers = (ChainMap(*each) for each in zip(*held, strict=True))
            self.train_state.held = dict(sums), dict(buffers)
        for replica, buffers in enumerate(first.buffers):
            merged = dict(buffers)
            for engine in self._engines:
                own = engine.state.train_state.buffers[replica]
                if engine.settings.runs_replica(replica):
                    merged |= {key: own[key] for key in engine.state.changed_keys & own.keys()}
            first.buffers[replica] = merged
        self.train_state.buffers = first.buffers

    def devices_and_ipus(self) -> list[tuple[str, list[int], list[int]]]:
        """Return the device of each engine, with its ipus and replicas."""
        return [
            (str(e.state.device), [*self.plan.state_at(e.settings.place)], [*e.settings.replicas])
            for e in self._engines
        ]


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
