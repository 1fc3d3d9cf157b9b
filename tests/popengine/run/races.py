"""Finds races between streams: GPUs' streams are stood in for by clocks, and each operation is held against them.

Every stream has a vector clock: how much of each stream's work is known to have happened before what it does next.
An operation may read what was written, and write to what was written or read, only as far as its stream knows of
it; and memory that another stream has allocated only if the allocator was told.
"""

import contextlib
import functools
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from popengine.run.devices.cuda import Cuda


class Races:
    """What all streams have done."""

    def __init__(self):
        self.lock = threading.Lock()
        self.host = {}  # what the host has waited for: a clock, as those of streams
        self.written = {}  # memory -> (stream, time)
        self.read = {}  # memory -> {stream: time}
        self.owner, self.kept, self.alive = {}, {}, {}
        self.found = []

    def operation(self, stream, func, args, kwargs, out):
        places = _places_written(func)
        if places is None:
            return  # a view touches no memory
        given = [self._memory(value) for value in args]
        writes = {memory for place in places if place < len(given) for memory in given[place]}
        reads = {memory for place, some in enumerate(given) if place not in places for memory in some}
        reads |= self._memory(kwargs)
        made = self._storages(out) - self._storages((args, kwargs)) - self.owner.keys()
        if "empty" in func.name():
            reads = set()
        with self.lock:
            stream.learn(self.host)
            now = stream.clock[stream] = stream.clock.get(stream, 0) + 1
            for memory in made:
                self.owner[memory] = stream
            for memory in reads | writes:
                self._check(stream, func, memory, is_written=memory in writes)
            for memory in reads:
                self.read.setdefault(memory, {})[stream] = now
            for memory in writes | made:
                self.written[memory] = stream, now
                self.read.pop(memory, None)

    def _storages(self, values):
        found = set()
        for value in _tensors(values):
            storage = value.untyped_storage()
            self.alive.setdefault(storage._cdata, storage)  # so that no number is given twice
            found.add(storage._cdata)
        return found

    def _memory(self, values):
        """Whole storages; of the host's, which no stream has allocated, the rows that are meant."""
        self._storages(values)
        return {
            storage
            if (storage := value.untyped_storage()._cdata) in self.owner
            else (storage, value.data_ptr())
            for value in _tensors(values)
        }

    def _check(self, stream, func, memory, is_written):
        events = [self.written[memory]] if memory in self.written else []
        if is_written:
            events += self.read.get(memory, {}).items()
        for other, time in events:
            if other is not stream and stream.clock.get(other, 0) < time:
                self.found.append(f"{func} on {stream} does not wait for {other}")
        owner = self.owner.get(memory, stream)
        if owner is not stream and stream not in self.kept.get(memory, ()):
            self.found.append(f"{func} on {stream} uses memory of {owner}, which may have been freed")


@functools.cache
def _places_written(func):
    """The positions of the arguments that an operation writes to; None for a view."""
    schema = func._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    arguments = enumerate(schema.arguments)
    return {place for place, a in arguments if a.alias_info is not None and a.alias_info.is_write}


def _tensors(values):
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


class Stream:
    """A stream by its clock."""

    def __init__(self, races, name):
        self.races, self.name, self.clock = races, name, {}

    def __repr__(self):
        return self.name

    def learn(self, clock):
        """All that another clock knows of has happened before what comes now."""
        for stream, time in clock.items():
            if self.clock.get(stream, 0) < time:
                self.clock[stream] = time

    def record_event(self):
        with self.races.lock:
            return self.clock.copy()

    def wait_event(self, event):
        with self.races.lock:
            self.learn(event)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        with self.races.lock:
            for stream, time in self.clock.items():
                if self.races.host.get(stream, 0) < time:
                    self.races.host[stream] = time


class _On(TorchDispatchMode):
    def __init__(self, races, stream):
        super().__init__()
        self._races, self._stream = races, stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._races.operation(self._stream, func, args, kwargs, out)
        return out


class Watched(Cuda):
    """A GPU whose streams are watched; what it computes, the CPU does."""

    has_graphs = False
    _on_top = threading.local()

    def __init__(self, races, name):
        self.races, self._name, self._made = races, name, iter(("computes", "brings", "takes"))
        super().__init__(0)
        self.place = torch.device("cpu")

    def _stream(self):
        return Stream(self.races, f"{self._name} {next(self._made)}")

    @contextlib.contextmanager
    def _on(self, stream):
        # As with torch.cuda.stream, the innermost one counts, and only that.
        before = getattr(self._on_top, "mode", None)
        if before is not None:
            before.__exit__(None, None, None)
        mode = self._on_top.mode = _On(self.races, stream)
        mode.__enter__()
        try:
            yield
        finally:
            mode.__exit__(None, None, None)
            self._on_top.mode = before
            if before is not None:
                before.__enter__()

    def _keep(self, value, stream):
        with self.races.lock:
            self.races.kept.setdefault(value.untyped_storage()._cdata, set()).add(stream)

    def host_empty(self, shape, dtype):
        with _disable_current_modes():  # no stream makes it
            return torch.empty(tuple(shape), dtype=dtype)

    def on_host(self, value):
        return value

    def fetch(self, value):
        return value.clone()
