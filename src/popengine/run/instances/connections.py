"""Point-to-point connections between instances, and the handling of failures.

Each instance has one gloo group with all its peers, in which messages have tags. An instance that fails writes the
reason to the store through which the instances met, and closes its gloo group, which wakes every peer that waits for
it. Then all instances connect again. If the process of an instance has ended, the run ends.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...environment import LOST_PEER, WAIT_LIMIT, read_seconds
from ...errors import Error, UnrecoverableError

logger = logging.getLogger("popengine")

WARN_AFTER = 60.0  # seconds of a wait for a peer between warnings
_WAIT_LIMIT = 1800.0  # seconds of a wait for a peer, as in torch.distributed


class Tag(IntEnum):
    """The tags of all messages between instances. An `AllReduce` uses its tag and the next number."""

    BARRIER = 1
    FINGERPRINT = 2
    CUT = 3  # a receive that closes the gloo group
    PROBE = 4
    READ = 5  # of state that instances have shared out
    COMMIT = 6
    GATHER = 7  # values of the replicas of a group
    COSTS = 8  # of blocks, for AutoBalance
    PLACES = 9  # values between the ipus of a replica
    COLLECTIVE = 10  # of `popdist.collectives`
    BUFFERS = 12
    SUMS = 14  # of gradients
    NORMS = 16
    RESULTS = 18


_Gloo = Any  # dist.ProcessGroupGloo: its stub lacks send and recv
Message = tuple[dist.Work, int]  # a message that is being sent or received, and its peer
_process_ends = threading.Event()


class TorchThread(threading.Thread):
    """A daemon thread that calls a torch function that may block; `join_torch_threads` waits for its end."""

    def __init__(self, work: Callable[..., object], *arguments: Any) -> None:
        super().__init__(target=work, args=arguments, daemon=True)

    def start(self) -> None:
        """Start the thread. Python 3.12.0 and 3.12.1 start none while the program ends: there call the function."""
        try:
            super().start()
        except RuntimeError:
            self.run()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end, if it has been started."""
        if self.ident is not None:
            super().join(timeout)


def join_torch_threads(seconds: float) -> bool:
    """Wait up to `seconds` at the end of the process for all `TorchThread`s; return whether all have ended. A daemon
    thread that returns from torch's C++ code after Python was finalized would abort the process."""
    _process_ends.set()
    until = time.monotonic() + seconds
    while threads := [thread for thread in threading.enumerate() if isinstance(thread, TorchThread)]:
        threads[0].join(max(until - time.monotonic(), 0.0))
        if time.monotonic() > until:
            return False
    return True


class InstancesDiffer(Error):
    """The error in all instances after a barrier at which something differs that has to be equal."""


class PeerFailed(Error):
    """The error after a peer has failed. All instances have the weights of the last finished update."""


class PeerLost(UnrecoverableError):
    """The error after a peer has ended or can't be reached: the run can't continue."""


@dataclass
class _PeerWait:
    """A thread's wait for a peer."""

    peer: int  # global rank
    what: str  # the purpose of the wait, such as "call 3 of the run"
    since: float = field(default_factory=time.monotonic)
    warnings: int = 0


class Connections:
    """The connections of this instance to its peers: one gloo group, which is replaced after a failure.

    The instances met through `store`, where keys begin with `name`. `ranks`: the global rank of each of them; by
    default 0, 1, ..., size - 1.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str = "all", ranks: Sequence[int] = ()
    ) -> None:
        self.rank, self.size, self.ranks = rank, size, list(ranks or range(size))
        self.peers = [peer for peer in range(size) if peer != rank]
        self._store, self._name = store, name
        self._group: _Gloo | None = None
        self.number = 0  # of the gloo group; the next one after a failure
        self._failure = ""  # why the previous gloo group was closed
        self._has_ended = False  # a peer or this process has ended: there is no next gloo group
        self._lock = threading.RLock()
        self._connecting = threading.Lock()
        self._is_watched = False
        self._limit = read_seconds(WAIT_LIMIT, _WAIT_LIMIT)
        self._waits: dict[int, _PeerWait] = {}  # by thread id

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, value: Tensor, peer: int, tag: int) -> Message:
        """Start to send a tensor. It must not change until `wait` for the returned message has returned."""
        return self._begin_message("send", value, peer, tag)

    def receive(self, value: Tensor, peer: int, tag: int) -> Message:
        """Start to receive into the tensor `value`, which is complete when `wait` for the message returns."""
        return self._begin_message("recv", value, peer, tag)

    def _begin_message(self, operation: str, value: Tensor, peer: int, tag: int) -> Message:
        with self._lock:
            group, number = self._group, self.number
            if group is None:
                raise self._new_error()
        try:
            return getattr(group, operation)([value], peer, tag), peer
        except RuntimeError as error:
            raise self._close_after_error(error, peer, number) from error

    def wait(self, messages: Iterable[Message], what: str) -> None:
        """Wait until messages are sent or received; warnings name `what`. Raises PeerFailed or PeerLost."""
        thread, number = threading.get_ident(), self.number
        for work, peer in messages:
            self._waits[thread] = _PeerWait(self.ranks[peer], what)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._close_after_error(error, peer, number) from error
            finally:
                self._waits.pop(thread, None)

    def all_gather(self, values: Mapping[int, Tensor], tag: int, what: str) -> None:
        """Send `values[self.rank]` to the other ranks in `values`, receive theirs, and wait; warnings name `what`."""
        peers = [peer for peer in values if peer != self.rank]
        begun = [self.receive(values[peer], peer, tag) for peer in peers]
        self.wait(begun + [self.send(values[self.rank], peer, tag) for peer in peers], what)

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Wait for all instances, call `commit`, and wait for all again: an error in one is an error in all."""
        what, values = "the sum of gradients", {rank: torch.zeros(1) for rank in range(self.size)}
        self.all_gather(values, Tag.COMMIT, what)
        commit()
        self.all_gather(values, Tag.COMMIT, what)

    # ---- waits -------------------------------------------------------------------------------------------

    def _watch_waits(self) -> None:
        """Warn after each `WARN_AFTER` of a wait for a peer; at the limit close the gloo group, which ends the run."""
        while not _process_ends.wait(min(1.0, WARN_AFTER / 2)):
            for wait in list(self._waits.values()):
                waited = time.monotonic() - wait.since
                if waited > self._limit:
                    self._abort(_limit_text(wait.peer, wait.what, self._limit), True)
                elif waited > (seconds := WARN_AFTER * (wait.warnings + 1)):
                    logger.warning("%s", _wait_text(wait.peer, wait.what, seconds))
                    wait.warnings += 1

    def publish(self, key: str, text: str) -> None:
        """Set a key of the store, if the store can be reached; block while its process is stopped."""
        with suppress(RuntimeError):
            self._store.set(key, text)

    # ---- connecting --------------------------------------------------------------------------------------

    def connect(self, what: str) -> None:
        """Connect to all peers, unless connected; warnings name `what`. Raises PeerLost if a peer ends."""
        with self._connecting:
            if self._has_ended:
                raise self._new_error()
            if self._group is not None:
                return
            try:
                if missing := self.await_peers(what, self._limit, "connecting"):
                    raise RuntimeError(_limit_text(missing[0], what, self._limit))
                self._waits[threading.get_ident()] = _PeerWait(self.ranks[self.peers[0]], what)
                store = dist.PrefixStore(f"{self._name}/{self.number}", self._store)
                # Gloo's limit comes later than this class's: it would say less.
                seconds = timedelta(seconds=self._limit + WARN_AFTER)
                group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=seconds)
            except RuntimeError as error:
                self._failure, self._has_ended = str(error), True
                _mark_lost_peer(True)
                raise self._new_error() from error
            finally:
                self._waits.pop(threading.get_ident(), None)
            with self._lock:
                self._group, self._failure = group, ""
            _mark_lost_peer(False)

    def await_peers(
        self, what: str, seconds: float, key: str = "here", meanwhile: Callable[[], None] | None = None
    ) -> list[int]:
        """Write to the store, at `key`, that this instance has come, wait at most `seconds` for all peers to do so, and
        return the global ranks of missing peers. Raises RuntimeError if a peer or this process ends, PeerFailed if one
        fails."""
        if not self._is_watched:
            self._is_watched = True
            TorchThread(self._watch_waits).start()
        prefix, until, pause = f"{self._name}/{self.number}/{key}/", time.monotonic() + seconds, 0.001
        broken = f"{self._name}/{self.number}/broken"
        self._store.set(f"{prefix}{self.rank}", "1")
        wait = self._waits[threading.get_ident()] = _PeerWait(self.ranks[self.peers[0]], what)
        missing = self.peers
        try:
            while missing := [peer for peer in missing if not self._store.check([f"{prefix}{peer}"])]:
                wait.peer = self.ranks[missing[0]]
                if meanwhile is not None:
                    meanwhile()
                if self._store.check([f"left/{wait.peer}"]):
                    raise RuntimeError(f"instance {wait.peer} has ended")
                if self._store.check([broken]):
                    with self._lock:
                        self._close_group(*json.loads(self._store.get(broken)))
                    raise self._new_error()
                if time.monotonic() > until:
                    break
                if _process_ends.wait(pause):
                    raise RuntimeError("this process ends")
                pause = min(1.5 * pause, 0.5)
                if pause == 0.5:
                    self._check_peer_is_alive(missing[0])
        finally:
            del self._waits[threading.get_ident()]
        return [self.ranks[peer] for peer in missing]

    def _check_peer_is_alive(self, peer: int) -> None:
        """Raise RuntimeError if a message to a peer, in torch's default gloo group, shows that it has ended."""
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "gloo":
            group.send([torch.zeros(1, dtype=torch.uint8)], self.ranks[peer], Tag.PROBE)

    # ---- failures ----------------------------------------------------------------------------------------

    def abort(self, why: str, number: int = -1) -> None:
        """Close the gloo group after a failure in this instance, if connected, or if its number is `number`. All
        threads that wait for it, also in peers, then raise PeerFailed with the text "instance N", then `why`."""
        self._abort(f"instance {self.ranks[self.rank]} {why}", False, number)

    def _abort(self, why: str, ends: bool, number: int = -1) -> None:
        """Close the gloo group here and in all peers, if connected or if its number is `number`, with this reason.
        `ends`: whether the run ends"""
        with self._lock:
            if self._group is not None or (number == self.number and not self._has_ended):
                publishing = TorchThread(self._publish_failure, why, ends)
                publishing.start()
                publishing.join(1.0)  # the store may be in a process that is stopped
                self._close_group(why, ends)

    def close(self) -> None:
        """Close the gloo group at the end of this process, if connected: peers that wait for it raise PeerLost."""
        with self._lock:
            if self._group is not None:
                self._close_group(f"instance {self.ranks[self.rank]} has ended", True)

    def _publish_failure(self, why: str, ends: bool) -> tuple[str, bool]:
        """Write (why, whether the run ends) to the store, or read a peer's pair; return that which counts."""
        key = f"{self._name}/{self.number}/broken"
        with suppress(RuntimeError):
            why, ends = json.loads(self._store.compare_set(key, "", json.dumps([why, ends])))
        return why, ends

    def _close_after_error(self, error: Exception, peer: int, number: int) -> Error:
        """Close gloo group `number`, if it is open, after a message to or from `peer` failed; return the error."""
        with self._lock:
            if self._group is not None and self.number == number:
                gone = f"instance {self.ranks[peer]} has left the run ({str(error).splitlines()[0]})"
                self._close_group(*self._publish_failure(gone, True))
                _mark_lost_peer(True)
            return self._new_error()

    def _close_group(self, why: str, ends: bool) -> None:
        """Close the gloo group by a receive that times out, which ends all waits; store why it was closed."""
        group: Any = self._group
        self._group, self._failure, self._has_ended = None, why, ends
        self.number += 1
        for peer in self.peers if group else ():  # a receive from a peer that has ended closes nothing
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, Tag.CUT).wait(timedelta(milliseconds=1))

    def _new_error(self) -> Error:
        """Return a PeerLost if the run ends, else a PeerFailed, with the reason of the closed gloo group."""
        if self._has_ended:
            return PeerLost(
                f"another instance has left the run: {self._failure}\n"
                "  why: all instances add up their gradients, and have to make the same number of calls\n"
                "  here the weights are those of the last finished update\n"
                "  fix: see what the other instance says, and start all of them again"
            )
        return PeerFailed(
            f"another instance failed: {self._failure}\n"
            "  in all instances the weights are those of the last finished update"
        )


def _wait_text(peer: int, what: str, seconds: float) -> str:
    return f"instance {peer} has not arrived at {what} for {seconds:.0f} s"


def _limit_text(peer: int, what: str, seconds: float) -> str:
    return f"{_wait_text(peer, what, seconds)}, the limit (poprun --wait-limit, {WAIT_LIMIT})"


def _mark_lost_peer(is_lost: bool) -> None:
    """Create or remove the file `LOST_PEER`, if poprun has set it."""
    if name := os.environ.get(LOST_PEER):
        with suppress(OSError):
            Path(name).touch() if is_lost else Path(name).unlink(missing_ok=True)
