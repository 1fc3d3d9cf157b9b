"""The process group of a run: barriers, at which instances compare fingerprints; reads of sharded state.

`connections.py` sends the messages and handles failures.
"""

from __future__ import annotations

import atexit
import io
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Error
from ...torch_private import default_store, leaves_of, tree_map_only
from .connections import Connections, InstancesDiffer, Message, Tag, TorchThread, join_torch_threads
from .consistency import (
    HEADER,
    Fingerprint,
    barrier_header,
    barrier_name,
    describe_differences,
    headers_are_equal,
)

_POLL_INTERVAL = 0.2  # seconds; an interrupt does not wake a thread that waits in torch
_EXIT_TIMEOUT = 2.0  # seconds
_PREFIX = "the reading of "  # of the names of reads

T = TypeVar("T")


def call_in_thread(work: Callable[[], T]) -> T:
    """Call `work`, which may wait in torch, in a new thread, and return its result. An interrupt ends only the wait."""
    future: Future[T] = Future()

    def call_work() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, the caller raises it
            future.set_exception(error)

    TorchThread(call_work).start()
    while not future.done():
        wait([future], timeout=_POLL_INTERVAL)
    return future.result()


Names = Mapping[str, Sequence[str]]  # of "weights", and of parameters with optimizer state ("optimizer")
Entries = dict[str, dict[str, Any]]  # their values, in the same two groups


class Readable(Protocol):
    """A `TrainState`, of which peers can read entries."""

    def entries(self, names: Names) -> Entries: ...


class ProcessGroup(Connections):
    """Barriers and gathers over all instances of a run, or a subset. Arguments: see `Connections`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str = "all", ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(store, rank, size, name, ranks)
        self._barrier_lock = threading.Lock()  # one thread at a time is at a barrier
        self._subgroups: dict[tuple[int, ...], ProcessGroup] = {}
        # The states that peers may read, by the name that `publish_state` returned.
        self._published = 0  # number of names
        self._states: weakref.WeakValueDictionary[str, Readable] = weakref.WeakValueDictionary()
        self._kept: list[Readable] = []  # until the next barrier

    # ---- barriers ----------------------------------------------------------------------------------------

    def barrier(
        self, what: str, fingerprint: Fingerprint | None = None, work: Callable[[], Any] = lambda: None
    ) -> Any:
        """Wait until all instances are at the barrier `what` with equal fingerprints; then call `work` in a thread, and
        return its result. An interrupt closes the connections, so that the peers raise PeerFailed.

        Raises: Error in all instances, if they differ; PeerFailed, if one has failed; PeerLost, if one has ended
        """
        is_abandoned = threading.Event()

        def barrier_and_work() -> Any:
            self.connect(what)
            if is_abandoned.is_set():
                raise KeyboardInterrupt
            self._barrier(what, fingerprint or {})
            return work()

        with self._barrier_lock:
            try:
                return call_in_thread(barrier_and_work)
            except KeyboardInterrupt:
                is_abandoned.set()
                self.abort(f"was interrupted at {what}")
                raise

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup:
        """Return the process group of the instances with these global ranks, this one included. Cached."""
        key = tuple(ranks)
        if key not in self._subgroups:
            name = "-".join(map(str, ranks))
            self._subgroups[key] = ProcessGroup(self._store, ranks.index(self.rank), len(ranks), name, ranks)
        return self._subgroups[key]

    def _barrier(self, what: str, fingerprint: Fingerprint) -> None:
        """Exchange headers: the barrier's name, and a hash of the fingerprint. If peers read states (`read`), send them
        what they read, and exchange headers again; if `what` is the first such read, return."""
        header = barrier_header(what, fingerprint)
        while True:
            headers = self._all_gather_vectors(header, [HEADER] * self.size, Tag.BARRIER, what)
            if headers_are_equal(headers):
                if not what.startswith(_PREFIX):
                    self._kept.clear()
                return
            readings = [name for name in map(barrier_name, headers) if name.startswith(_PREFIX)]
            if not readings:
                break
            if min(readings) == what:
                return
            self._exchange_entries(min(readings), {})
        texts = self.all_gather_bytes(json.dumps([what, fingerprint]).encode(), Tag.FINGERPRINT, what)
        whats, fingerprints = zip(*map(json.loads, texts), strict=True)
        raise InstancesDiffer(describe_differences(whats, fingerprints, self.ranks))

    # ---- sharded state -----------------------------------------------------------------------------------

    def publish_state(self, state: Readable) -> str:
        """Let peers read this instance's weights and optimizer state, held by a weak reference; return its name, for
        `read`. All instances must publish their states in the same order."""
        self._published += 1
        name = f"{_PREFIX}weights or state by state_dict(), which all instances must call; one may save it"
        name = f"{name} ({self._published})"
        self._states[name] = state
        return name

    def keep_state(self, state: Readable) -> None:
        """Refer to a published state until the next barrier, so that peers can read it."""
        if not self._has_ended:
            self._kept.append(state)

    def read(self, name: str, wanted: Mapping[int, Names]) -> Entries:
        """Return entries of the state `name` of other instances: those `wanted` of each rank, if it has them. Waits
        until each peer reads, too, or is at its next barrier. Raises PeerFailed if a peer has dropped its state,
        PeerLost if a peer has ended."""
        return self.barrier(name, work=lambda: self._exchange_entries(name, wanted))

    def _exchange_entries(self, name: str, wanted: Mapping[int, Names]) -> Entries:
        """Send peers the entries of the state `name` that they want, and return those `wanted` of each peer, which come
        tensor by tensor, so that no process needs memory for more."""
        texts = self.all_gather_bytes(json.dumps(wanted).encode(), Tag.READ, name)
        requested = {peer: json.loads(texts[peer]).get(str(self.rank)) for peer in self.peers}
        sending, gathered = list[Message](), Entries(weights={}, optimizer={})
        for peer in (peer for peer in self.peers if requested[peer]):
            try:
                entries = self._states[name].entries(requested[peer])
            except BaseException as error:
                why = "has let go of it" if isinstance(error, KeyError) else f"failed: {error}"
                self.abort(f"was asked for its part of {name.removeprefix(_PREFIX)}, and {why}")
                raise self._new_error() from error
            plain = tree_map_only(Tensor, lambda x: x.detach().cpu().resolve_conj().resolve_neg(), entries)
            file = io.BytesIO()
            torch.save(tree_map_only(Tensor, lambda x: x.to("meta"), plain), file)
            form = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
            values = (value for value in leaves_of(Tensor, plain) if value.numel())
            for value in (torch.tensor([len(form)]), form, *values):
                memory = value.contiguous().view(-1).view(torch.uint8)
                sending.append(self.send(memory, peer, Tag.READ))
        for peer in wanted:
            receive = partial(self._receive_like, peer, name)
            form = receive(torch.empty(int(receive(torch.empty(1, dtype=torch.int64))), dtype=torch.uint8))
            like = torch.load(io.BytesIO(form.numpy().tobytes()), weights_only=True)
            for group, entries in tree_map_only(Tensor, receive, like).items():
                gathered[group].update(entries)
        self.wait(sending, name)
        return gathered

    def _receive_like(self, peer: int, what: str, like: Tensor) -> Tensor:
        """Return a tensor that a peer sends, with the shape, strides and dtype of another one."""
        value = torch.empty(like.shape, dtype=like.dtype)
        if value.numel():
            self.wait([self.receive(value.view(-1).view(torch.uint8), peer, Tag.READ)], what)
        is_dense = value.stride() == like.stride()
        return value if is_dense else torch.empty_like(like, device="cpu").copy_(value)

    def all_gather_bytes(self, local: bytes, tag: int, what: str) -> list[bytes]:
        """Return the bytes `local` of all instances, by rank. To be called in the work of `barrier`."""
        size = torch.tensor([len(local)]).view(torch.uint8)
        sizes = self._all_gather_vectors(size, [size.numel()] * self.size, tag, what)
        padded = torch.frombuffer(bytearray(local + b"\0"), dtype=torch.uint8)  # a buffer must not be empty
        lengths = [int(size.view(torch.int64)) for size in sizes]
        values = self._all_gather_vectors(padded[:-1], lengths, tag, what)
        return [value.numpy().tobytes() for value in values]

    def _all_gather_vectors(self, local: Tensor, sizes: Sequence[int], tag: int, what: str) -> list[Tensor]:
        """Return the tensors `local` (uint8, 1-d) of all instances, by rank; `sizes` are their lengths."""
        self.connect(what)
        values = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        values[self.rank] = local
        self.all_gather(dict(enumerate(values)), tag, what)
        return values


# ---- the group of this process -------------------------------------------------------------------------------

_current: ProcessGroup | None = None


def set_current(group: ProcessGroup) -> ProcessGroup:
    """Set the process group that `current` returns, and return this group."""
    global _current
    _current = group
    return group


def current() -> ProcessGroup | None:
    """Return the process group of this process: by default one over torch.distributed's default group, if the program
    has initialized that for several processes. None if the process trains alone."""
    if _current is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        store = default_store()
        atexit.register(join_torch_threads, _EXIT_TIMEOUT)
        store = dist.PrefixStore("pando", store)
        return set_current(ProcessGroup(store, dist.get_rank(), dist.get_world_size()))
    return _current


def group_of_size(instances: int) -> ProcessGroup:
    """Return `current()`. Raises Error if that is None, or if its size is not `instances`."""
    group = current()
    if group is None:
        raise Error(
            f"the model trains in {instances} processes, but they have not met\n"
            "  fix: call popdist.init() before the model; or options.Distributed.disable() to train alone"
        )
    if group.size != instances:
        raise Error(
            f"the options say that the model trains in {instances} processes, but {group.size} have met\n"
            "  fix: take popdist.poptorch.Options(), which asks the launcher"
        )
    return group


def announce_end() -> None:
    """Write to the store that this process ends, unless it trains alone. First, if it has a shard of an optimizer state
    and has not failed, wait until all peers end or one fails: they may read the shard."""
    if _current is not None:
        if _current._states and not hasattr(sys, "last_value"):  # the program has not failed
            with suppress(Error):
                _current.barrier("the end of the program")
        publishing = TorchThread(_current.publish, f"left/{_current.rank}", "1")
        publishing.start()
        publishing.join(1.0)  # the store may be in a process that is stopped


def await_other_ends(seconds: float) -> None:
    """Close the connections of this process, and wait up to `seconds` until all other instances announce their ends."""
    if _current is not None:
        _current.close()
        until = time.monotonic() + seconds
        keys = [f"left/{rank}" for rank in _current.ranks]
        with suppress(RuntimeError):
            while not _current._store.check(keys) and time.monotonic() < until:
                time.sleep(0.01)
