"""Point-to-point connections between instances, and the handling of failures.

Each instance has one gloo group with all its peers, in which messages have tags. Sums and gathers are made of
these messages (`all_reduce.py`). An instance that fails writes the reason to the store through which the
instances met, and closes its connections, which wakes every peer that waits for it. Then all connect again;
a generation is one such connection. If the process of an instance has ended, the training ends.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Error, UnrecoverableError

logger = logging.getLogger("popengine")

WARN_AFTER = 60.0  # seconds of a wait for a peer between warnings
_FOREVER = timedelta(days=365)
_CUT, _PROBE, _COMMIT = 3, 3, 6  # tags
_Gloo = Any  # dist.ProcessGroupGloo: its stub lacks send and recv
Message = tuple[dist.Work, int]  # a message that is being sent or received, and its peer
_process_ends = threading.Event()


class TorchThread(threading.Thread):
    """A daemon thread that may be inside a torch function when the process ends; see `join_threads`."""

    def __init__(self, work: Callable[..., object], *arguments: Any) -> None:
        super().__init__(target=work, args=arguments, daemon=True)


def join_threads(seconds: float) -> bool:
    """Wait up to `seconds` at the process's end until all `TorchThread`s end; return whether they have.

    Python ends a thread that returns to it after its finalization, and C++ functions below the thread's
    Python functions (torch's bindings) then abort the process: "terminate called without an active exception".
    """
    _process_ends.set()
    until = time.monotonic() + seconds
    while threads := [one for one in threading.enumerate() if isinstance(one, TorchThread)]:
        threads[0].join(max(until - time.monotonic(), 0.0))
        if time.monotonic() > until:
            return False
    return True


class PeerFailed(Error):
    """Raised when another instance failed; all instances have the weights of the last finished update."""


class PeerLost(UnrecoverableError):
    """Raised when the connection to another instance is lost: the training can't continue."""


@dataclass
class _PeerWait:
    """A wait of a thread for a peer, for the purpose `what`."""

    peer: int  # its global rank
    what: str
    since: float = field(default_factory=time.monotonic)
    warnings: int = 0


class Connections:
    """The connections of this instance to its peers.

    Args:
        store: the store through which the instances met
        rank:  rank of this instance among the `size` connected instances
        name:  prefix of the keys in the store
        ranks: global rank of each connected instance; (): 0, 1, ..., size - 1
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str = "all", ranks: Sequence[int] = ()
    ) -> None:
        self.rank, self.size, self.ranks = rank, size, list(ranks or range(size))
        self.peers = [peer for peer in range(size) if peer != rank]
        self._store, self._name = store, name
        self._generation = 0
        self._group: _Gloo | None = None
        self._failure = ""  # why the connections of the previous generation were closed
        self._has_ended = False  # a peer or this process has ended: no further generation
        self._lock = threading.RLock()
        self._connecting = threading.Lock()
        self._is_watched = False
        self._waits: dict[int, _PeerWait] = {}  # by thread

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, value: Tensor, peer: int, tag: int) -> Message:
        """Start to send a value, which must not change before `wait` for the message has returned."""
        return self._begin("send", value, peer, tag)

    def receive(self, value: Tensor, peer: int, tag: int) -> Message:
        """Start to receive `value`, which is complete when `wait` for the message has returned."""
        return self._begin("recv", value, peer, tag)

    def _begin(self, operation: str, value: Tensor, peer: int, tag: int) -> Message:
        with self._lock:
            group, generation = self._group, self._generation
            if group is None:
                raise self._error()
        try:
            return getattr(group, operation)([value], peer, tag), peer
        except RuntimeError as error:
            raise self._close_after(error, peer, generation) from error

    def wait(self, messages: Iterable[Message], what: str) -> None:
        """Wait until messages are sent or received; `what` names the purpose. Raises PeerFailed, PeerLost."""
        thread, generation = threading.get_ident(), self._generation
        for work, peer in messages:
            self._waits[thread] = _PeerWait(self.ranks[peer], what)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._close_after(error, peer, generation) from error
            finally:
                self._waits.pop(thread, None)

    def exchange(self, mine: Tensor, received: Mapping[int, Tensor], tag: int, what: str) -> None:
        """Send `mine` to the peers in `received`, receive each peer's value into `received[peer]`; wait."""
        begun = [self.receive(value, peer, tag) for peer, value in received.items()]
        self.wait(begun + [self.send(mine, peer, tag) for peer in received], what)

    def commit_together(self, commit: Callable[[], None]) -> None:
        """Wait for all instances, call `commit`, and return when it has returned in all of them.

        If `commit` raises an exception in an instance, or the instance ends before, `commit_together` returns
        in no instance: each waits for a message that every other instance sends after its `commit`.
        """
        what, received = "the sum of gradients", {peer: torch.empty(1) for peer in self.peers}
        self.exchange(torch.zeros(1), received, _COMMIT, what)
        commit()
        self.exchange(torch.zeros(1), received, _COMMIT, what)

    # ---- waits -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Write to the store for which peer this instance waits, and warn of long waits, in a loop."""
        count = 0
        publisher = threading.Thread()  # apart: access to the store blocks if its process is stopped
        while not _process_ends.wait(pause := min(1.0, WARN_AFTER / 2)):
            now = time.monotonic()
            waits = [wait for wait in list(self._waits.values()) if now - wait.since > pause]
            if (waits or count) and not publisher.is_alive():
                count = count + 1 if waits else 0
                news = [{"for": wait.peer, "what": wait.what, "count": count} for wait in waits[:1]]
                publisher = TorchThread(self._publish_wait, json.dumps(news[0]) if news else "")
                publisher.start()
            for wait in waits:
                if now - wait.since > (limit := WARN_AFTER * (wait.warnings + 1)):
                    logger.warning(
                        "instance %d has not arrived at %s for %.0f s", wait.peer, wait.what, limit
                    )
                    wait.warnings += 1

    def _publish_wait(self, text: str) -> None:
        with suppress(RuntimeError):
            self._store.set(f"waits/{self.ranks[self.rank]}", text)

    # ---- generations -------------------------------------------------------------------------------------

    def connect(self, what: str) -> None:
        """Connect to all peers and wait for them, unless connected. Raises PeerLost if a peer has ended."""
        with self._connecting:
            if self._has_ended:
                raise self._error()
            if self._group is not None:
                return
            if not self._is_watched:
                self._is_watched = True
                TorchThread(self._watch).start()
            try:
                group = self._connect(f"{self._name}/{self._generation}", what)
            except RuntimeError as error:
                self._failure, self._has_ended = str(error), True
                raise self._error() from error
            finally:
                self._waits.pop(threading.get_ident(), None)
            with self._lock:
                self._group = group

    def _connect(self, generation: str, what: str) -> _Gloo:
        self._store.set(f"{generation}/here/{self.rank}", "1")
        for peer in self.peers:
            self._waits[threading.get_ident()] = _PeerWait(self.ranks[peer], what)
            pause = 0.001
            while not self._store.check([f"{generation}/here/{peer}"]):
                if self._store.check([f"left/{self.ranks[peer]}"]):
                    raise RuntimeError(f"instance {self.ranks[peer]} has ended")
                if _process_ends.wait(pause):
                    raise RuntimeError("this process ends")
                pause = min(1.5 * pause, 0.5)
                if pause == 0.5:
                    self._check_peer(peer)
        store = dist.PrefixStore(generation, self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=_FOREVER)

    def _check_peer(self, peer: int) -> None:
        """Raise RuntimeError if a peer has ended: a message in torch's own gloo group then fails."""
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "gloo":
            group.send([torch.zeros(1, dtype=torch.uint8)], self.ranks[peer], _PROBE)

    # ---- failures ----------------------------------------------------------------------------------------

    def abort(self, why: str) -> None:
        """Close all connections after a failure here, which wakes all waiting threads, here and in peers."""
        with self._lock:
            if self._group is not None:
                failure = f"instance {self.ranks[self.rank]} {why}", False
                publishing = TorchThread(self._publish_failure, *failure)
                publishing.start()
                publishing.join(1.0)  # the store may be in a process that is stopped
                self._close(*failure)

    def _publish_failure(self, why: str, ends: bool) -> tuple[str, bool]:
        """Return (reason, whether the training ends) as the first instance wrote it to the store; if none has
        written yet, write `why` and `ends`, and return them."""
        key = f"{self._name}/{self._generation}/broken"
        with suppress(RuntimeError):
            why, ends = json.loads(self._store.compare_set(key, "", json.dumps([why, ends])))
        return why, ends

    def _close_after(self, error: Exception, peer: int, generation: int) -> Error:
        """Close all connections after an error of a message to or from `peer`, and return the error to
        raise. If the message's `generation` was closed already, nothing is closed."""
        with self._lock:
            if self._group is not None and self._generation == generation:
                gone = f"instance {self.ranks[peer]} has left the training ({str(error).splitlines()[0]})"
                self._close(*self._publish_failure(gone, True))
            return self._error()

    def _close(self, why: str, ends: bool) -> None:
        """Close all connections, as Gloo does when a receive times out, and end all waits; store `why`."""
        group, self._group = self._group, None
        self._failure, self._has_ended = why, ends
        self._generation += 1
        if group is not None:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], self.peers[0], _CUT).wait(timedelta(milliseconds=1))

    def _error(self) -> Error:
        if self._has_ended:
            return PeerLost(
                f"another instance has left the training: {self._failure}\n"
                "  why: all instances add up their gradients, and have to make the same number of calls\n"
                "  here the weights are those of the last finished update\n"
                "  fix: see what the other instance says, and start all of them again"
            )
        return PeerFailed(
            f"another instance failed: {self._failure}\n"
            "  in all instances the weights are those of the last finished update"
        )
