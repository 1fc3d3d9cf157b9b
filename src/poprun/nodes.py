"""How the popruns of one training, one on each node, meet and notice each other's ends.

The poprun of node 0 serves a store (`popdist.signed_store`), which instances use, too. Each poprun holds a record in
it, which vanishes with its connection: a missing record, or one of another process, is a node that was lost. torch's
own rendezvous is not used: its store serves every caller on all interfaces, and its nodes unpickle what they read.

A round is one start of all instances. A poprun that needs another round raises the number in its record; the others
follow, and the round begins when all records have one number.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from popdist.signed_store import Server, SignedStore, StoreError
from popengine.environment import SECRET

from . import Log
from .topology import Node

_LOOK = 0.05  # seconds between two looks at the other nodes' records, while a round forms
_AGAIN = 60.0  # seconds between two warnings about nodes that are missing
_NOTICED = 30.0  # seconds until the connection of a host without power is closed, and some
_FAREWELL = 5.0  # seconds that node 0 serves the store for others to see the end


class Lost(Exception):
    """The training can't go on with the nodes that are there."""


class Nodes(RendezvousHandler):
    """The rendezvous of this node, as torch.distributed.elastic calls it.

    Args:
        max_restarts: rounds after the first
    """

    def __init__(self, node: Node, max_restarts: int, log: Log) -> None:
        self.round = -1
        self._node, self._max_restarts, self._log = node, max_restarts, log
        self._patience = int(os.environ.get("POPRUN_NODE_TIMEOUT", "600"))
        self._id = secrets.token_hex(8)
        self._ids: list[str] = []  # of the popruns of this round
        self._server: Server | None = None
        self.store: SignedStore | None = None
        self.secret = os.environ.get(SECRET) or (secrets.token_hex(32) if node.count == 1 else "")
        self.address = f"{node.address}:{node.port}"

    # ---- meeting -----------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are here for a next round.

        Raises:
            Lost: some are missing after the time, which the error names; or two have one number
        """
        until = time.monotonic() + self._patience
        wish = self.round + 1
        while True:
            try:
                store = self._connected(until)
                self.round = self._formed(store, wish, until)
                host, port = self._address_for_torch(store)
                return RendezvousInfo(
                    store, self._node.rank, self._node.count, RendezvousStoreInfo(host, port)
                )
            except StoreError:
                self._disconnect()
                if self._node.rank == 0 or time.monotonic() > until:
                    raise Lost(self._is_lost("0")) from None
                self._log.warning(f"{self._is_lost('0')}; {self._waiting(until)}")

    def _connected(self, until: float) -> SignedStore:
        """Return the connection to the store; node 0 begins to serve it."""
        node = self._node
        if self.store is not None:
            return self.store
        if node.rank == 0 and self._server is None:
            self._server = self._serve(until)
            self.address = f"{node.address}:{self._server.port}"
        if node.count > 1:
            self._log.info(f"node {node.rank} of {node.count} waits for the others at {self.address}")
        port = self._server.port if self._server else node.port
        try:
            self.store = SignedStore(node.address, port, self.secret, max(until - time.monotonic(), 0.0))
        except StoreError as error:
            raise Lost(
                f"node 0 is not to be reached at {self.address}: {error}\n"
                "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there;"
                f" {SECRET} is equal on all nodes, if it is set"
            ) from None
        return self.store

    def _serve(self, until: float) -> Server:
        node = self._node
        while True:
            try:
                server = Server(node.address, node.port, self.secret, is_open=node.count > 1)
                break
            except socket.gaierror as error:  # names of pods come late
                if time.monotonic() > until:
                    raise Lost(f"MASTER_ADDR {node.address} is no name of a host: {error}") from None
                time.sleep(0.5)
            except OSError as error:
                raise Lost(
                    f"node 0 can't listen at {self.address}: {error}\n"
                    "  fix: MASTER_ADDR and MASTER_PORT are an address of this host and a free port"
                ) from None
        if server.is_reachable and not self.secret:
            self._log.warning(
                f"the nodes meet at {self.address}, which serves every caller: {SECRET} is not set\n"
                f"  fix: export {SECRET}=$(openssl rand -hex 32), with the same value on all nodes"
            )
        return server

    def _formed(self, store: SignedStore, wish: int, until: float) -> int:
        """Return the number of the round in which all nodes are."""
        warned, began = time.monotonic(), time.monotonic()
        known = self.round >= 0
        while not self._hold(store, wish):
            if time.monotonic() > min(until, began + _NOTICED):
                raise Lost(
                    f"two nodes have the number {self._node.rank}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_LOOK)
        while True:
            records = self._records(store)
            highest = max(record["round"] for record in records if record)
            if highest > wish:
                wish = highest
                self._hold(store, wish)
            elif all(record and record["round"] == wish for record in records):
                self._ids = [record["id"] for record in records if record]
                return wish
            else:
                missing = [rank for rank, record in enumerate(records) if not record]
                names = ", ".join(map(str, missing))
                if time.monotonic() > until:
                    raise Lost(
                        f"of {self._node.count} nodes these have not come in {self._patience} s: {names}"
                    )
                if missing and (known or time.monotonic() > warned + _AGAIN):
                    known, warned = False, time.monotonic()
                    self._log.warning(
                        f"of {self._node.count} nodes these are missing: {names}; {self._waiting(until)}"
                    )
                time.sleep(_LOOK)

    def _hold(self, store: SignedStore, number: int) -> bool:
        return store.hold(_key(self._node.rank), json.dumps({"id": self._id, "round": number}))

    def _records(self, store: SignedStore) -> list[Any]:
        """Return each node's record, None for one that is missing.

        Raises:
            Lost: a node has ended with a failure
        """
        *records, failed = store.read([*map(_key, range(self._node.count)), "failed"])
        if failed is not None:
            raise Lost(f"another node has given up: the poprun of node {failed} says why")
        return [record and json.loads(record) for record in records]

    def _address_for_torch(self, store: SignedStore) -> tuple[str, int]:
        """Return an address on node 0 for programs that call torch.distributed themselves; nothing listens there."""
        key = f"torch/{self.round}"
        if self._node.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                store.set(key, str(free.getsockname()[1]))
        return self._node.address, int(store.get(key))

    def _waiting(self, until: float) -> str:
        return (
            f"this one waits for {max(until - time.monotonic(), 0):.0f} s (POPRUN_NODE_TIMEOUT)\n"
            "  fix: start the same command there again"
        )

    def _is_lost(self, ranks: str) -> str:
        several = "s" if "," in ranks else ""
        return f"node{several} {ranks} lost: poprun has ended there, or the host does not answer"

    # ---- during a round ----------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return whether another round is needed, as 0 or 1.

        Raises:
            Lost: a node is lost or has given up, and no restart is left
        """
        lost = self.lost()
        if lost:
            if self.round >= self._max_restarts:
                raise Lost(lost)
            self._log.warning(lost)
            return 1
        assert self.store is not None
        with suppress(StoreError):  # the next look tells
            return int(any(record and record["round"] > self.round for record in self._records(self.store)))
        return 0

    def lost(self) -> str:
        """Return which nodes of this round are lost, as a sentence; empty: none."""
        if self._node.count == 1:
            return ""
        assert self.store is not None
        try:
            records = self._records(self.store)
            done = self.store.read(self._done())  # these may leave
        except StoreError:
            return self._is_lost("0")
        gone = [
            str(rank)
            for rank, record in enumerate(records)
            if not done[rank] and (not record or record["id"] != self._ids[rank])
        ]
        return self._is_lost(", ".join(gone)) if gone else ""

    def are_done(self) -> bool:
        """Return whether the instances of all nodes have ended well, as this node's have."""
        if self._node.count == 1:
            return True
        assert self.store is not None
        try:
            self.store.set(self._done()[self._node.rank], "1")
            return self.store.check(self._done())
        except StoreError:
            raise Lost(self._is_lost("0")) from None

    def _done(self) -> list[str]:
        return [f"done/{self.round}/{rank}" for rank in range(self._node.count)]

    def first_failure(self) -> int:
        """Return which node was the first of this round to call this, after an instance of its own had failed."""
        rank = str(self._node.rank)
        if self.store is not None and self._node.count > 1:
            with suppress(StoreError):
                return int(self.store.compare_set(f"failure/{self.round}", "", rank))
        return self._node.rank

    def leave(self, has_failed: bool) -> None:
        """End this node's part; node 0 serves the store until the others have seen the end."""
        if self.store is None or self._node.count == 1:
            return
        with suppress(StoreError, Lost):
            if has_failed:
                self.store.compare_set("failed", "", str(self._node.rank))
            until = time.monotonic() + _FAREWELL
            while self._node.rank == 0 and time.monotonic() < until:
                if not any(self.store.read([*map(_key, range(1, self._node.count))])):
                    break
                time.sleep(_LOOK)
        self._disconnect()

    def _disconnect(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    # ---- the rest of elastic's interface -----------------------------------------------------------------

    def get_backend(self) -> str:
        return "poprun"

    def get_run_id(self) -> str:
        return "poprun"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def shutdown(self) -> bool:
        return True


def _key(rank: int) -> str:
    return f"node/{rank}"
