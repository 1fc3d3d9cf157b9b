"""Finds races between streams: GPUs' streams are stood in for by clocks, and each operation is held against them.

Every stream has a vector clock: how much of each stream's work is known to have happened before what it does next.
An operation may read what was written, and write to what was written or read, only as far as its stream knows of
it; and memory that another stream has allocated only if the allocator was told.
"""

import contextlib
import threading
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from popengine.run.devices.cuda import Cuda


class Races:
    """What all streams have done."""

    def __init__(self):
        self.lock = threading.Lock()
        self.host = Counter()  # what the host has waited for
        self.written = {}  # memory -> (stream, time)
        self.read = {}  # memory -> {stream: time}
        self.owner, self.kept, self.alive = {}, {}, []
        self.found = []

    def operation(self, stream, func, args, kwargs, out):
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return  # a view touches no memory
        writes, reads = set(), set()
        for argument, value in zip(schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).update(self._memory(value))
        reads.update(self._memory(kwargs))
        made = self._storages(out) - self._storages((args, kwargs)) - self.owner.keys()
        if "empty" in str(func):
            reads = set()
        with self.lock:
            stream.clock |= self.host
            stream.clock[stream] += 1
            now = stream.clock[stream]
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
        storages = [v.untyped_storage() for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
        self.alive += storages  # so that no number is given twice
        return {storage._cdata for storage in storages}

    def _memory(self, values):
        """Whole storages; of the host's, which no stream has allocated, the rows that are meant."""
        self._storages(values)
        found = set()
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()._cdata
                found.add(storage if storage in self.owner else (storage, value.data_ptr()))
        return found

    def _check(self, stream, func, memory, is_written):
        events = dict([self.written[memory]] if memory in self.written else [])
        if is_written:
            events = {**events, **self.read.get(memory, {})}
        for other, time in events.items():
            if other is not stream and stream.clock[other] < time:
                self.found.append(f"{func} on {stream} does not wait for {other}")
        owner = self.owner.get(memory, stream)
        if owner is not stream and stream not in self.kept.get(memory, ()):
            self.found.append(f"{func} on {stream} uses memory of {owner}, which may have been freed")


class Stream:
    """A stream by its clock."""

    def __init__(self, races, name):
        self.races, self.name, self.clock = races, name, Counter()

    def __repr__(self):
        return self.name

    def record_event(self):
        with self.races.lock:
            return self.clock.copy()

    def wait_event(self, event):
        with self.races.lock:
            self.clock |= event

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        with self.races.lock:
            self.races.host |= self.clock


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
