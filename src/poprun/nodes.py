"""Rendezvous of the popruns of one training, one on each node, and the rounds in which they start instances.

One poprun, the leader, serves a store (`popdist.signed_store`), which instances use, too. Each poprun holds a record in
the store, which vanishes with its connection: a missing record is a lost node. The leader is node 0, at a known
address; in an elastic training `election.py` chooses it, so that any node may be lost.

A round is one start of all instances. The leader ends a round if a node is lost, if an instance has failed, or if a new
node can be added. When all nodes have stopped, the leader begins the next round with the nodes that are there. torch's
own rendezvous is not used: its store serves every caller on all interfaces, and its nodes unpickle what they read.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from popdist.signed_store import Server, SignedStore, StoreError
from popengine.environment import SECRET

from . import Log, election
from .command_line import CommandLine
from .topology import Node, deal, local_instances

_LOOK = 0.05  # seconds between two reads of the other nodes' records, while a round forms
_AGAIN = 60.0  # seconds between two warnings about missing nodes
_NOTICED = 30.0  # seconds until the connection of a host without power is closed, with a margin
_FAREWELL = 5.0  # seconds that the leader serves the store for others to read the end
_GATHER = 10.0  # seconds that a new leader of an elastic training waits for nodes that it expects

_Record = dict[str, Any]


class Lost(Exception):
    """The training can't go on with the nodes that are there."""


@dataclass(frozen=True)
class Round:
    """One start of all instances."""

    number: int
    counts: dict[str, int]  # instances by node, in the order of the instances
    ids: dict[str, str]  # of the popruns

    @property
    def instances(self) -> int:
        return sum(self.counts.values())

    def rank(self, node: str) -> int:
        return list(self.counts).index(node)

    def first_instance(self, node: str) -> int:
        return sum(list(self.counts.values())[: self.rank(node)])


class Nodes(RendezvousHandler):
    """The rendezvous of this node, as torch.distributed.elastic calls it."""

    def __init__(self, request: CommandLine, node: Node, log: Log) -> None:
        self.round = Round(-1, {}, {})
        self.name = election.node_name() if request.is_elastic else str(node.rank)
        self._request, self._node, self._log = request, node, log
        self._patience = int(os.environ.get("POPRUN_NODE_TIMEOUT", "600"))
        self._id = secrets.token_hex(8)
        self._server: Server | None = None
        self.store: SignedStore | None = None
        self.secret = os.environ.get(SECRET) or (secrets.token_hex(32) if node.count == 1 else "")
        self._election: election.Election | None = None
        if request.is_elastic:
            self._election = election.Election(request)
            self.secret = self._election.secret
        self.address = f"{node.address}:{node.port}"  # of the store
        self._leads_since = 0.0
        self._warned = 0.0
        self._why_ended = ""  # why the present round ends: "lost", "failed" or "grown"
        self._failures, self._newest_call = 0, -1  # failures since the newest checkpoint, and its calls
        self._grow_after: int | None = None  # the newest checkpoint when a node came that can be added

    # ---- connection --------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round in which this node has instances.

        Raises:
            Lost: nodes are missing after the time limit, which the error names; or two have the same number
            RendezvousGracefulExitError: the training has ended without this node
        """
        until = time.monotonic() + self._patience
        while True:
            try:
                store = self._connected(until)
                self._hold("stopped")
                self._warned = 0.0 if self.round.number >= 0 else time.monotonic()
                while (begun := self._published(store)) is None or self.name not in begun.counts:
                    self._lead(until)
                    time.sleep(_LOOK)
                self.round = begun
                self._hold("running")
                rank, world = begun.rank(self.name), len(begun.counts)
                return RendezvousInfo(store, rank, world, RendezvousStoreInfo(*self._torch_address(store)))
            except StoreError:
                self._disconnect()
                if self._election is None:
                    if self._node.rank == 0 or time.monotonic() > until:
                        raise Lost(_lost("0")) from None
                    self._log.warning(f"{_lost('0')}; {self._waiting(until)}")

    def _connected(self, until: float) -> SignedStore:
        """Return the connection to the store, which the leader begins to serve."""
        if self.store is not None:
            return self.store
        node, was_leader = self._node, self._server is not None
        if self._election is not None:
            self._server, self.store, self.address = self._election.join()
        else:
            if node.rank == 0 and self._server is None:
                self._server = self._serve(until)
                self.address = f"{node.address}:{self._server.port}"
            if node.count > 1:
                self._log.info(f"node {node.rank} of {node.count} waits for the others at {self.address}")
            port = self._server.port if self._server else node.port
            try:
                patience = max(until - time.monotonic(), 0.0)
                self.store = SignedStore(node.address, port, self.secret, patience)
            except StoreError as error:
                raise Lost(
                    f"node 0 is not to be reached at {self.address}: {error}\n"
                    "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there;"
                    f" {SECRET} is equal on all nodes, if it is set"
                ) from None
        if self._server is not None and not was_leader:
            self._leads_since = time.monotonic()
            self._log.info(f"{self.name} leads the training at {self.address}")
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

    def _hold(self, state: str) -> None:
        """Write this node's record: "stopped" after a round, "running" in it, "done" if its instances ended well."""
        assert self.store is not None
        slots = local_instances(self._request, self._node.count)
        record = {"id": self._id, "slots": slots, "round": self.round.number, "state": state}
        until = time.monotonic() + _NOTICED
        while not self.store.hold(f"node/{self.name}", json.dumps(record)):
            if time.monotonic() > until:
                raise Lost(
                    f"two nodes have the number {self.name}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_LOOK)

    def _torch_address(self, store: SignedStore) -> tuple[str, int]:
        """Return an address on the first node for programs that call torch.distributed; nothing listens there."""
        key = f"torch/{self.round.number}"
        if self.round.rank(self.name) == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                host = self._election.host if self._election else self._node.address
                store.set(key, f"{host} {free.getsockname()[1]}")
        store.wait([key], timedelta(seconds=_NOTICED))
        host, port = store.get(key).decode().split()
        return host, int(port)

    def _disconnect(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None
        if self._server is not None and self._election is not None:
            self._server.close()
            self._server = None

    # ---- reading -----------------------------------------------------------------------------------------

    def _published(self, store: SignedStore) -> Round | None:
        """Return the round that this node has not been in yet, if the leader has begun one."""
        (text,) = store.read(["round"])
        newest = Round(**json.loads(text)) if text else None
        return newest if newest is not None and newest.number > self.round.number else None

    def _records(self) -> dict[str, _Record]:
        assert self.store is not None
        texts = self.store.find("node/")
        keys = list(texts) if self._election else sorted(texts, key=lambda key: int(key[5:]))
        return {key[5:]: json.loads(texts[key]) for key in keys}

    def _check_end(self) -> None:
        """Raise Lost, if a node has given up, or RendezvousGracefulExitError, if the training has ended well."""
        assert self.store is not None
        failed, finished = self.store.read(["failed", "finished"])
        if failed is not None:
            raise Lost(f"another node has given up: the poprun of node {failed} says why")
        if finished is not None:
            raise RendezvousGracefulExitError("the training has ended")

    def lost(self) -> str:
        """Return which nodes of this round are lost, as a sentence; empty: none."""
        try:
            gone = _missing(self.round, self._records())
        except StoreError:
            gone = ["0" if self._election is None else self._election.leader]
        return _lost(", ".join(gone)) if gone else ""

    def _waiting(self, until: float) -> str:
        return (
            f"this one waits for {max(until - time.monotonic(), 0):.0f} s (POPRUN_NODE_TIMEOUT)\n"
            "  fix: start the same command there again"
        )

    # ---- leading -----------------------------------------------------------------------------------------

    def _lead(self, until: float = float("inf")) -> None:
        """Check for the end of the training; as the leader, end this round or begin the next one if that is due."""
        self._check_end()
        if self._server is None or self.store is None:
            return
        if self._election is not None:
            self._election.check_leads()
        records = self._records()
        (text,) = self.store.read(["round"])
        current = Round(**json.loads(text)) if text else None
        if current is not None and not self._why_ended:
            self._why_ended = self._reason_to_end(current, records)
            if not self._why_ended:
                return
            self.store.set("stop", str(current.number))
        if any(record["state"] != "stopped" for record in records.values()):
            return
        if current is not None and self._why_ended == "failed" and not _missing(current, records):
            self._why_ended = "counted"
            self._count_failure()
        counts = self._counts(records, until)
        if counts:
            self._why_ended, self._grow_after = "", None
            number = max(record["round"] for record in records.values()) + 1
            begun = Round(number, counts, {name: records[name]["id"] for name in counts})
            self.store.set("round", json.dumps(vars(begun)))

    def _reason_to_end(self, current: Round, records: Mapping[str, _Record]) -> str:
        """Return "lost", "failed" or "grown" for a round that has to end, "" for one that goes on."""
        assert self.store is not None
        states = [record["state"] for record in records.values() if record["round"] == current.number]
        missing = _missing(current, records)
        if states == ["done"] * len(current.counts):
            self.store.set("finished", "1")
            return ""
        if missing:
            text = _lost(", ".join(missing))
            if not self._is_restart_left():
                self.store.set("failed", self.name)
                raise Lost(text)
            self._log.warning(text)
            return "lost"
        if "stopped" in states:
            return "failed"
        return "grown" if "done" not in states and self._can_grow(current, records) else ""

    def _is_restart_left(self) -> bool:
        return self._election is not None or self.round.number < self._request.max_restarts

    def _count_failure(self) -> None:
        """Raise Lost, if an elastic training has failed too often since its newest checkpoint."""
        if self._election is None:
            return
        assert self.store is not None
        newest, limit = self._election.newest_call(), self._request.max_restarts
        self._failures = self._failures + 1 if newest == self._newest_call else 1
        self._newest_call = newest
        if self._failures > limit:
            self.store.set("failed", self.name)
            raise Lost(
                f"instances have failed {self._failures} times without a new checkpoint (--max-restarts)"
            )

    def _can_grow(self, current: Round, records: Mapping[str, _Record]) -> bool:
        """Return whether new nodes would run instances, and a checkpoint was completed since they came."""
        if self._election is None or not records.keys() - current.counts.keys():
            return False
        if sorted(self._dealt(records).values()) == sorted(current.counts.values()):
            return False
        newest = self._election.newest_call()
        if self._grow_after is None:
            self._grow_after = newest
            self._log.info("a node has come, which is added after the next checkpoint")
        return newest > self._grow_after

    def _dealt(self, records: Mapping[str, _Record]) -> dict[str, int]:
        request = self._request
        slots = [record["slots"] for record in records.values()]
        counts = deal(request.replicas, request.fewest_instances, request.instances, slots)
        return {name: count for name, count in zip(records, counts, strict=False) if count}

    def _counts(self, records: Mapping[str, _Record], until: float) -> dict[str, int]:
        """Return the instances of each node in the next round; empty: more nodes have to come before."""
        now = time.monotonic()
        if self._election is not None:
            counts = self._dealt(records)
            survivors = set(self.round.counts) - {self._election.previous_leader}
            is_expected = survivors - set(records) or self._node.count > max(len(records), len(survivors))
            if counts and (not is_expected or now > self._leads_since + _GATHER):
                return counts
            slots = sum(record["slots"] for record in records.values())
            missing = "" if counts else f"{self._request.fewest_instances - slots} instances"
            text = f"there is room for {slots} instances, and {self._request.fewest_instances} are the fewest"
        else:
            absent = [str(rank) for rank in range(self._node.count) if str(rank) not in records]
            if not absent:
                return dict.fromkeys(records, self._request.instances // self._node.count)
            missing = ", ".join(absent)
            text = f"of {self._node.count} nodes these {{}}: {missing}"
        if missing and now > until:
            assert self.store is not None
            self.store.set("failed", self.name)
            raise Lost(text.format(f"have not come in {self._patience} s"))
        if missing and now > self._warned + _AGAIN:
            self._warned = now
            self._log.warning(f"{text.format('are missing')}; {self._waiting(until)}")
        return {}

    # ---- during a round ----------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round has to end, else 0.

        Raises:
            Lost: a node is lost or has given up, and no restart is left
        """
        try:
            self._lead()
            assert self.store is not None
            (stop,) = self.store.read(["stop"])
            return int(stop is not None and int(stop) >= self.round.number)
        except StoreError:
            text = (
                _lost("0") if self._election is None else "the leader is lost: another node takes its place"
            )
            if not self._is_restart_left():
                raise Lost(text) from None
            self._log.warning(text)
            return 1

    def are_done(self) -> bool:
        """Return whether the instances of all nodes have ended well, as this node's have."""
        try:
            self._hold("done")
            self._lead()
        except RendezvousGracefulExitError:
            return True
        except StoreError:
            if self._election is None:
                raise Lost(_lost("0")) from None
        return False

    def first_failure(self) -> str:
        """Return which node was the first of this round to call this, after an instance of its own had failed."""
        if self.store is not None:
            with suppress(StoreError):
                key = f"failure/{self.round.number}"
                return self.store.compare_set(key, "", self.name).decode()
        return self.name

    def leave(self, has_failed: bool) -> None:
        """End this node's part; the leader serves the store until the others have read the end."""
        if self.store is None:
            return
        with suppress(StoreError):
            if has_failed:
                self.store.compare_set("failed", "", self.name)
            until = time.monotonic() + _FAREWELL
            while self._server is not None and time.monotonic() < until and len(self._records()) > 1:
                time.sleep(_LOOK)
        if self._election is not None and self._server is not None:
            self._election.resign()
        self._disconnect()

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


def _missing(current: Round, records: Mapping[str, _Record]) -> list[str]:
    """Return the nodes of a round that are gone, or that another poprun has replaced."""
    return [name for name, id in current.ids.items() if records.get(name, {}).get("id") != id]


def _lost(names: str) -> str:
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, or the host does not answer"
