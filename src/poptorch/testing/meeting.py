"""Where the ranks of a comparison meet: each returns a value or an error to all, through torch.distributed's store.

The loop under test may leave process groups in any state, so ranks meet through the store, which needs no answer of a
peer. A rank that fails closes its gloo connections, and so wakes the peers that wait for it inside the loop.
"""

import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from popengine.errors import Error
from popengine.torch_private import default_store, process_groups

T = TypeVar("T")

_PATIENCE = timedelta(seconds=60)  # of a rank that has failed, before it raises without its peers
_TAG = 0x7FFF  # of a message that no rank sends


class Ranks:
    """The ranks that call `compare` together: those of the default process group, else this process alone."""

    def __init__(self) -> None:
        self.rank, self.size, self._meetings = 0, 1, 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size, store = dist.get_rank(), dist.get_world_size(), default_store()
            calls = store.add(f"compare/calls of {self.rank}", 1)  # each call has keys of its own
            self._timeout, self._store = store.timeout, dist.PrefixStore(f"compare/{calls}", store)

    def run(self, what: str, function: Callable[[], T]) -> list[T]:
        """Call a function on each rank, and return the results by rank. A single rank only calls it.

        Args: what: what the ranks do, for an error
        Raises: Error on all ranks, if the function raises on one, or one does not come within the group's timeout
        """
        if self.size == 1:
            return [function()]
        self._meetings += 1
        error, limit = None, self._timeout
        try:
            answer: tuple[bool, Any] = True, function()
        except BaseException as caught:
            error, limit = caught, min(self._timeout, _PATIENCE)
            answer = False, (self._store.add("failures", 1), _error_text(caught))
        self._store.set(f"{self._meetings}/{self.rank}", pickle.dumps(answer).hex())
        if error is not None:
            _close_connections()
            if not isinstance(error, Exception):  # the program ends
                raise error
        answers = self._await_answers(limit)
        failures = sorted((*value, rank) for rank, (is_right, value) in answers.items() if not is_right)
        missing = [rank for rank in range(self.size) if rank not in answers]
        if failures or missing:
            # In the order of the failures, because the first one is mostly the cause.
            texts: dict[str, list[int]] = {}
            for _, text, rank in failures:
                texts.setdefault(text, []).append(rank)
            seconds = f"{self._timeout.total_seconds():g} s, the timeout of the process group"
            texts |= {f"did not {what} within {seconds}": missing} if missing else {}
            raise Error(
                "compare: " + "\n".join(f"{ranks_text(r)}: {text}" for text, r in texts.items())
            ) from error
        return [value for _, (_, value) in sorted(answers.items())]

    def _await_answers(self, limit: timedelta) -> dict[int, Any]:
        """Return the answers of the ranks that have come within a time limit."""
        keys = [f"{self._meetings}/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):  # the limit
            self._store.wait(keys, limit)
        come = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        return {rank: pickle.loads(bytes.fromhex(self._store.get(keys[rank]).decode())) for rank in come}

    def connect(self) -> Any:
        """Return a new gloo group of all ranks, which the loop under test does not know; None for a single rank."""
        if self.size == 1:
            return None
        store = dist.PrefixStore("gloo", self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=self._timeout)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _error_text(error: BaseException) -> str:
    """Return what an error says, and the user's line that raised it."""
    from popengine.compile.recording.user_code import user_line  # loads the compiler

    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if isinstance(error, Error):
        text = error.message.removeprefix("compare: ")[:300]
    return f"{text}\n  at {user_line(error)}"


def _close_connections() -> None:
    """Close all gloo connections of this process by receives that time out. Peers that wait for it raise errors."""
    for group in process_groups():
        if group.size() > 1:
            with suppress(RuntimeError, ValueError):
                message = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _TAG)
                message.wait(timedelta(milliseconds=1))
