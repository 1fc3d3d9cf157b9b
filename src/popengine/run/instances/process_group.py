"""The process group of a training: barriers at which instances compare facts, and reads of sharded state.

`connections.py` sends the messages and handles failures.
"""

from __future__ import annotations

import atexit
import io
import json
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Error
from ..state import OptimizerState, State
from .connections import Connections, TorchThread, join_threads
from .consistency import HEADER, Facts, barrier_name, differences, header

_PATIENCE = 0.2  # seconds; an interrupt does not wake a thread that waits in torch
_PATIENCE_AT_EXIT = 2.0  # seconds
_BARRIER, _FACTS, _READ = 1, 2, 4  # tags; `connections.py` uses 3
FIRST_TAG = 16  # tags from here on are free for sums and gathers
_READING = "the reading of "

T = TypeVar("T")


def start_in_thread(work: Callable[[], T]) -> SimpleQueue[tuple[T, BaseException | None]]:
    """Call `work` in a thread, as an interrupt can't end a wait in torch; return a queue for `result_of`."""
    outcome: SimpleQueue = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # whatever it is, the caller raises it
            outcome.put((None, error))

    TorchThread(run).start()
    return outcome


def result_of(outcome: SimpleQueue[tuple[T, BaseException | None]]) -> T:
    """Return the value of `work`, or raise its exception, when it ends. An interrupt ends only the wait."""
    while True:
        with suppress(Empty):
            value, error = outcome.get(timeout=_PATIENCE)
            break
    if error is not None:
        raise error
    return value


OptimizerStates = dict[str, OptimizerState]  # by parameter


class ProcessGroup(Connections):
    """The group of all instances of a training, or of some of them. Arguments: see `Connections`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str = "all", ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(store, rank, size, name, ranks)
        self._one_at_a_time = threading.Lock()
        self._subgroups: dict[tuple[int, ...], ProcessGroup] = {}
        self._published = 0
        self._states: weakref.WeakValueDictionary[str, State] = weakref.WeakValueDictionary()
        # Shards of engines that were closed; dropped at the next barrier.
        self._kept: dict[str, OptimizerStates] = {}

    # ---- barriers ----------------------------------------------------------------------------------------

    def barrier(self, what: str, facts: Facts | None = None) -> None:
        """Wait until all instances are at this barrier, and check that their facts are equal.

        Args:
            what:  name of the barrier, such as "call 17"
            facts: texts that have to be equal, by section and name
        Raises:
            Error:      the instances differ; all of them raise it
            PeerFailed: another instance has failed
            PeerLost:   another instance has ended
        """
        self.after_barrier(what, facts or {}, lambda: None)

    def after_barrier(self, what: str, facts: Facts, work: Callable[[], T]) -> T:
        """Wait as `barrier`, then call `work` and return its result. An interrupt closes the connections."""
        is_abandoned = threading.Event()

        def barrier_and_work() -> T:
            self.connect(what)
            if is_abandoned.is_set():
                raise KeyboardInterrupt
            self._barrier(what, facts)
            return work()

        with self._one_at_a_time:
            try:
                return result_of(start_in_thread(barrier_and_work))
            except KeyboardInterrupt:
                is_abandoned.set()
                self.abort(f"was interrupted at {what}")
                raise

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup:
        """Return the group of the instances `ranks`, which is created at the first call and cached."""
        key = tuple(ranks)
        if key not in self._subgroups:
            name = "-".join(map(str, ranks))
            self._subgroups[key] = ProcessGroup(self._store, ranks.index(self.rank), len(ranks), name, ranks)
        return self._subgroups[key]

    def _barrier(self, what: str, facts: Facts) -> None:
        mine = header(what, facts)
        while True:
            headers = self._all_gather(mine, [HEADER] * self.size, _BARRIER, what)
            if all(torch.equal(other, mine) for other in headers):
                if not what.startswith(_READING):
                    self._kept.clear()
                return
            readings = [place for place in map(barrier_name, headers) if place.startswith(_READING)]
            if not readings:
                break
            if min(readings) == what:
                return  # peers at other barriers send their shards first
            self._gather_shards(min(readings))
        texts = self.all_gather_bytes(json.dumps([what, facts]).encode(), _FACTS, what)
        whats, others = zip(*map(json.loads, texts), strict=True)
        raise Error(differences(whats, others, self.ranks))

    # ---- sharded state -----------------------------------------------------------------------------------

    def publish(self, state: State) -> str:
        """Register this instance's shard of a state for peers to read. All must publish in the same order.

        The reference to the state is weak. Returns: the name of the shard, for `read_shards`
        """
        self._published += 1
        name = f"{_READING}the optimizer's state (number {self._published})"
        self._states[name] = state
        return name

    def keep_until_barrier(self, name: str) -> None:
        """Keep a copy of this instance's shard until the next barrier, because slower peers may read it."""
        state = self._states.pop(name, None)
        if state is not None and not self._has_ended:
            self._kept[name] = state.read_optimizer()

    def has_shards(self) -> bool:
        """Return whether this instance has a shard that peers may read."""
        return bool(self._states or self._kept)

    def read_shards(self, name: str) -> list[OptimizerStates]:
        """Return the shards of all instances, in the order of ranks, after all have sent their shards.

        An instance that does not read sends its shard when it reaches its next barrier.
        """
        return self.after_barrier(name, {}, lambda: self._gather_shards(name))

    def _gather_shards(self, name: str) -> list[OptimizerStates]:
        file = io.BytesIO()
        try:
            part = self._kept[name] if name in self._kept else self._states[name].read_optimizer()
            torch.save(part, file)
        except BaseException as error:
            why = "has let go of it" if isinstance(error, KeyError) else f"failed: {error}"
            self.abort(f"was asked for its part of {name.removeprefix(_READING)}, and {why}")
            raise self._error() from error
        parts = self.all_gather_bytes(file.getvalue(), _READ, name)
        return [torch.load(io.BytesIO(part), weights_only=True) for part in parts]

    def all_gather_bytes(self, mine: bytes, tag: int, what: str) -> list[bytes]:
        """Return the bytes `mine` of all instances, in the order of ranks. Call it in `after_barrier`."""
        size = torch.tensor([len(mine)]).view(torch.uint8)
        sizes = self._all_gather(size, [size.numel()] * self.size, tag, what)
        numbers = [int(one.view(torch.int64)) for one in sizes]
        value = torch.frombuffer(bytearray(mine + b"\0"), dtype=torch.uint8)[
            :-1
        ]  # a buffer must not be empty
        return [one.numpy().tobytes() for one in self._all_gather(value, numbers, tag, what)]

    def _all_gather(self, mine: Tensor, sizes: Sequence[int], tag: int, what: str) -> list[Tensor]:
        """Return the tensors `mine` (uint8) of all instances, whose lengths are `sizes`, after connecting."""
        self.connect(what)
        values = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        values[self.rank] = mine
        self.exchange(mine, {peer: values[peer] for peer in self.peers}, tag, what)
        return values


# ---- the group of this process -------------------------------------------------------------------------------

_current: ProcessGroup | None = None


def join(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """Create the group that `current` returns from now on, for instances that met through a store."""
    global _current
    _current = ProcessGroup(dist.PrefixStore("pando", store), rank, size)
    return _current


def current() -> ProcessGroup | None:
    """Return the group of this process, made from torch.distributed's if needed; None: no other processes."""
    if _current is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # The user's program has called torch.distributed itself.
        store = dist.distributed_c10d._get_default_store()
        atexit.register(join_threads, _PATIENCE_AT_EXIT)
        return join(store, dist.get_rank(), dist.get_world_size())
    return _current


def group_of(instances: int) -> ProcessGroup:
    """Return the group of this process, which must have `instances` instances.

    Raises:
        Error: there is no group, or it has another size
    """
    found = current()
    if found is None:
        raise Error(
            f"the model trains in {instances} processes, but they have not met\n"
            "  fix: call popdist.init() before the model; or options.Distributed.disable() to train alone"
        )
    if found.size != instances:
        raise Error(
            f"the options say that the model trains in {instances} processes, but {found.size} have met\n"
            "  fix: take popdist.poptorch.Options(), which asks the launcher"
        )
    return found


def leave() -> None:
    """Write to the store that this process ends; first wait for peers if they may read its shard."""
    if _current is not None:
        if _current.has_shards() and not hasattr(sys, "last_value"):  # the program has not failed
            with suppress(Error):
                _current.barrier("the end of the program")
        store, rank = _current._store, _current.rank
        with suppress(Empty):
            start_in_thread(lambda: store.set(f"left/{rank}", "1")).get(timeout=1.0)
