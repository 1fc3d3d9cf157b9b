"""Engines of several places in one process. Their mailboxes are in memory, and deliver messages late and reordered."""

import random
import threading
import time
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import torch
from engine_models import train_state_of

from popengine.run.engine import Engine
from popengine.run.instances.connections import PeerFailed
from popengine.torch_private import ALIGNMENT

LIMIT = 300  # seconds until a call that hangs fails


def copy_as_it_lies(value):
    """A copy with the strides of a value, and its offset from a multiple of 64 bytes, as a message carries it."""
    size = (
        1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        if value.numel()
        else 0
    )
    start = value.data_ptr() % ALIGNMENT // value.itemsize
    memory = torch.full((start + size,), float("nan")).to(value.dtype)
    memory[start:].copy_(value.as_strided((size,), (1,), value.storage_offset()))
    return memory.as_strided(value.shape, value.stride(), start)


class World:
    """The mailboxes of all places. `held`: most messages that are held back; each arrival releases a random one."""

    def __init__(self, places, held=0, seed=0):
        self.mail = {place: MemoryMailbox(self, place) for place in places}
        self.held, self.pick, self.drop = held, random.Random(seed), None
        self.begin()

    def begin(self):
        """Begin a call of all engines."""
        self.lock, self.meeting, self.parts = threading.Lock(), threading.Barrier(len(self.mail)), {}
        self.late, self.failure, self.sent = [], "", Counter()
        for mail in self.mail.values():
            mail.arrived, mail.waiting = defaultdict(deque), {}

    def meet(self, place=None, part=None):
        """Wait for all places; return their parts, by place."""
        with self.lock:
            self.parts.update({} if place is None else {place: part})
        try:
            self.meeting.wait(30)
            parts = dict(self.parts)
            self.meeting.wait(30)
        except threading.BrokenBarrierError:
            raise PeerFailed(self.failure) from None
        return parts

    def post(self, target, key, values):
        """Take a message, and deliver some: with `held`, late and in a random order, but those of a key in theirs."""
        with self.lock:
            self.sent[key[0]] += 1
            if self.drop != (key[0], self.sent[key[0]]):
                self.late.append((target, key, values))
        self.release(self.held)

    def release(self, most):
        wakes = []
        with self.lock:
            while len(self.late) > most:
                target, key, _ = self.late[self.pick.randrange(len(self.late))]
                number = next(n for n, other in enumerate(self.late) if other[:2] == (target, key))
                *_, values = self.late.pop(number)
                self.mail[target].arrived[key].append(values)
                wakes.append(self.mail[target].waiting.pop(key, None))
        for wake in filter(None, wakes):  # without the lock, as a waiting queue holds its own
            wake()

    def abort(self, why):
        with self.lock:
            self.failure = self.failure or why
            self.meeting.abort()
            wakes = [wake for mail in self.mail.values() for wake in mail.waiting.values()]
            for mail in self.mail.values():
                mail.waiting.clear()
        for wake in wakes:
            wake()


class MemoryMailbox:
    """A `popengine.run.mailbox.ProcessMailbox`, in memory."""

    def __init__(self, world, place):
        self.world, self.place = world, place

    def begin_step(self):
        pass

    def send(self, place, key, values):
        assert place != self.place
        self.world.post(place, key, [copy_as_it_lies(value) for value in values])

    def begin_receive(self, key, wake):
        with self.world.lock:
            if self.arrived[key] or self.world.failure:
                return True
            self.waiting[key] = wake
            return False

    def take(self, key):
        if self.world.failure:
            raise PeerFailed(self.world.failure)
        with self.world.lock:
            return self.arrived[key].popleft()

    def sum(self, values):
        values.copy_(sum(self.world.meet(self.place, values.clone()).values()))

    def share(self, tensors, owners):
        parts = self.world.meet(self.place, tensors)
        for tensor, (owner, _), number in zip(tensors, owners, range(len(tensors)), strict=True):
            if owner != self.place:
                tensor.copy_(parts[owner][number])
        self.world.meet()

    def commit_together(self, commit):
        self.world.meet()
        commit()
        self.world.meet()

    def abort(self, why):
        self.world.abort(why)


class SeveralEngines:
    """The engines of the places of a plan, each with the weights of its ipus, and the interface of an engine."""

    def __init__(self, plan, settings, train_state, held=0, seed=0):
        self.plan, self.settings = plan, settings
        places = sorted(set(plan.places.values()))
        self.world, weights = World(places, held, seed), train_state.find_weights()
        slots = {slot.name: slot.key for slot in plan.partition.signature.slots}
        self.unread = dict(weights)
        self.train_state, self.engines = {}, {}
        for place in places:
            held_here = {slots[name] for names in plan.slots_at(place).values() for name in names}
            own = {key: value.clone() for key, value in weights.items() if key in held_here}
            kind = None if settings.optimizer is None else settings.optimizer.kind
            trained, seed = plan.partition.signature.trained, train_state.random_state[0]
            self.train_state[place] = train_state_of(own, trained, kind, seed, settings.counts.replicas)
            own_settings = replace(settings, counts=replace(settings.counts, part=place.process))
            mail = self.world.mail[place]
            self.engines[place] = Engine(plan, own_settings, self.train_state[place], mail=mail)

    def run(self, inputs, hyper, recorder=None):
        self.world.begin()
        with ThreadPoolExecutor(len(self.engines)) as pool:
            runs = [pool.submit(engine.run, inputs, hyper) for engine in self.engines.values()]
            until = time.monotonic() + LIMIT
            while wait(runs, timeout=0.002).not_done:
                self.world.release(max(0, len(self.world.late) - 1))
                if time.monotonic() > until:
                    waiting = {place: list(mail.waiting) for place, mail in self.world.mail.items()}
                    self.world.abort(f"the places wait for each other: {waiting}")
            errors = [error for run in runs if (error := run.exception()) is not None]
        own = [error for error in errors if not isinstance(error, PeerFailed)]
        if errors:
            raise (own or errors)[0]
        assert not any(messages for mail in self.world.mail.values() for messages in mail.arrived.values())
        for engine in self.engines.values():
            assert not any(frame for frames in engine.workers[0].frames for frame in frames.values())
        results = [run.result() for run in runs]
        for other in results[1:]:
            for mine, theirs in zip(results[0].outputs(), other.outputs(), strict=True):
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        return results[0]

    def find_weights(self):
        """All weights; trained ones and buffers from the places that hold them, which have equal bits."""
        found = dict(self.unread)
        for train_state in self.train_state.values():
            found |= train_state.find_weights()
        return found

    def optimizer_states(self):
        return {
            key: state
            for train_state in self.train_state.values()
            for key, state in train_state.optimizer_states().items()
        }

    def close(self):
        for engine in self.engines.values():
            engine.close()
