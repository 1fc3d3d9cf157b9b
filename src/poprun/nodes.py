"""Rendezvous of the popruns of one training, one on each node, and the rounds in which they start instances.

One poprun, the leader (`election.py`), serves a store (`popdist.signed_store`), which instances use, too. Each poprun
holds a record in the store, which vanishes with its connection: a missing record is a lost node.

A round is one start of all instances. The leader ends a round if a node is lost, if an instance has failed,
or if a new node can be added. When all nodes have stopped, the leader begins the next round with the nodes
that have records. torch's own rendezvous is not used: its store serves every caller on all interfaces, and
its nodes unpickle what they read.
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
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from popdist.checkpoint_files import call_of, complete_checkpoints
from popdist.signed_store import Server, SignedStore, StoreError

from . import Log
from .command_line import CommandLine
from .election import Election, FirstNode, Lost
from .topology import Node, deal, local_instances

_LOOK = 0.05  # seconds between two reads of the other nodes' records, while a round forms
_AGAIN = 60.0  # seconds between two warnings about missing nodes
_NOTICED = 30.0  # seconds until the connection of a host without power is closed, with a margin
_FAREWELL = 5.0  # seconds that the leader still serves the store at the end, for the other nodes to read it
_GATHER = 10.0  # seconds that a new leader of an elastic training waits for nodes that it expects

_Record = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """One start of all instances."""

    number: int
    counts: dict[str, int]  # instances by node, in the order of the instances
    ids: dict[str, str]  # the random id of each node's poprun

    @property
    def instances(self) -> int:
        return sum(self.counts.values())

    def rank(self, node: str) -> int:
        """Return the index of a node among the nodes of the round."""
        return list(self.counts).index(node)

    def first_instance(self, node: str) -> int:
        """Return the number of a node's first instance."""
        return sum(list(self.counts.values())[: self.rank(node)])

    def missing(self, records: Mapping[str, _Record]) -> str:
        """Return the names of nodes that are gone, or have another poprun now, joined by commas; "": none."""
        return ", ".join(name for name, id in self.ids.items() if records.get(name, {}).get("id") != id)


class Nodes(RendezvousHandler):
    """The rendezvous of this node, with the interface that torch.distributed.elastic calls."""

    def __init__(self, request: CommandLine, node: Node, log: Log) -> None:
        self.round = Round(-1, {}, {})
        self.address = ""  # of the store
        self._request, self._node, self._log = request, node, log
        self._leader = Election(request) if request.is_elastic else FirstNode(node, log)
        self.name, self.secret = self._leader.name, self._leader.secret
        self._patience = int(os.environ.get("POPRUN_NODE_TIMEOUT", "600"))
        self._id = secrets.token_hex(8)
        self._server: Server | None = None
        self._store: SignedStore | None = None
        self._leads_since = 0.0
        self._warned = 0.0
        self._why_ended = ""  # why the current round ends: "lost", "failed" (then "counted") or "grown"
        self._failures, self._newest_call = 0, -1  # failures since the newest checkpoint, and its calls
        self._grow_after: int | None = None  # the newest checkpoint when a node arrived that can be added

    # ---- connection --------------------------------------------------------------------------------------

    @property
    def store(self) -> SignedStore:
        """Return the connection to the store. Raises: StoreError, if there is none."""
        if self._store is None:
            raise StoreError("this node is not connected")
        return self._store

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round in which this node has instances.

        Raises:
            Lost: nodes are missing after the time limit, or two nodes have the same number
            RendezvousGracefulExitError: the training has ended without this node
        """
        until = time.monotonic() + self._patience
        while True:
            try:
                self._connect(until)
                self._hold("stopped")
                self._warned = 0.0 if self.round.number >= 0 else time.monotonic()
                begun, _ = self._lead(until)
                while begun.number <= self.round.number or begun.ids.get(self.name) != self._id:
                    time.sleep(_LOOK)
                    begun, _ = self._lead(until)
                self.round = begun
                self._hold("running")
                address = RendezvousStoreInfo(*self._torch_address())
                return RendezvousInfo(self.store, begun.rank(self.name), len(begun.counts), address)
            except StoreError:
                self._disconnect()
                if not self._request.is_elastic:
                    if self._node.rank == 0 or time.monotonic() > until:
                        raise Lost(_lost("0")) from None
                    self._log.warning(f"{_lost('0')}; {self._waiting(until)}")

    def _connect(self, until: float) -> None:
        """Connect to the store, unless this node is connected; the leader begins to serve it."""
        if self._store is None:
            self._server, self._store, self.address = self._leader.join(until)
            if self._server is not None:
                self._leads_since = time.monotonic()
                self._log.info(f"{self.name} leads the training at {self.address}")

    def _hold(self, state: str) -> None:
        """Write this node's record: "stopped" after a round, "running" in it, "done" if its instances ended well."""
        slots = local_instances(self._request, self._node.count)
        record = {"id": self._id, "slots": slots, "round": self.round.number, "state": state}
        until = time.monotonic() + _NOTICED
        while not self.store.hold(f"node/{self.name}", json.dumps(record)):
            if time.monotonic() > until:
                raise Lost(
                    f"two nodes have the number {self.name}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_LOOK)

    def _torch_address(self) -> tuple[str, int]:
        """Return a host and free port of the first node, for programs that call torch.distributed."""
        key = f"torch/{self.round.number}"
        if self.round.rank(self.name) == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self.store.set(key, f"{self._leader.host} {free.getsockname()[1]}")
        self.store.wait([key], timedelta(seconds=_NOTICED))
        host, port = self.store.get(key).decode().split()
        return host, int(port)

    def _disconnect(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
        self._store = self._server = None

    def _waiting(self, until: float) -> str:
        return (
            f"this one waits for {max(until - time.monotonic(), 0):.0f} s (POPRUN_NODE_TIMEOUT)\n"
            "  fix: start the same command there again"
        )

    # ---- leading -----------------------------------------------------------------------------------------

    def _lead(self, until: float = float("inf")) -> tuple[Round, int]:
        """Return the newest round, and the number of the last round that has to end.

        The leader also ends this round, or begins the next one, if it is time.

        Raises:
            Lost: a node has given up, or the training can't go on
            RendezvousGracefulExitError: the training has ended well
        """
        keys = ["failed", "finished", "round", "stop"]
        failed, finished, text, stop = self.store.read(keys)
        if failed is not None:
            raise Lost(f"another node has given up: the poprun of node {failed} says why")
        if finished is not None:
            raise RendezvousGracefulExitError("the training has ended")
        newest = Round(**json.loads(text)) if text else Round(-1, {}, {})
        if self._server is not None:
            self._leader.check_leads()
            self._end_or_begin(newest, until)
        return newest, int(stop or -1)

    def _end_or_begin(self, current: Round, until: float) -> None:
        """End the current round if there is a reason, and begin the next one when all nodes have stopped."""
        records = self._records()
        if current.number >= 0 and not self._why_ended:
            self._why_ended = self._reason_to_end(current, records)
            if not self._why_ended:
                return
            self.store.set("stop", str(current.number))
        if any(record["state"] != "stopped" for record in records.values()):
            return
        if self._why_ended == "failed" and not current.missing(records):
            self._why_ended = "counted"
            self._count_failure()
        counts = self._counts(records, until)
        if counts:
            self._why_ended, self._grow_after = "", None
            number = max(record["round"] for record in records.values()) + 1
            begun = Round(number, counts, {name: records[name]["id"] for name in counts})
            self.store.set("round", json.dumps(vars(begun)))

    def _records(self) -> dict[str, _Record]:
        """Return the records of all nodes by name, in the order in which the nodes get instances."""
        texts = self.store.find("node/")
        keys = list(texts) if self._request.is_elastic else sorted(texts, key=lambda key: int(key[5:]))
        return {key[5:]: json.loads(texts[key]) for key in keys}

    def _reason_to_end(self, current: Round, records: Mapping[str, _Record]) -> str:
        """Return why a round has to end: "lost", "failed" or "grown"; "" if it goes on, or has succeeded.

        Raises:
            Lost: a node is lost, and no restart is left
        """
        states = [record["state"] for record in records.values() if record["round"] == current.number]
        if states == ["done"] * len(current.counts):
            self.store.set("finished", "1")
            return ""
        if missing := current.missing(records):
            if not self._is_restart_left():
                self._give_up(_lost(missing))
            self._log.warning(_lost(missing))
            return "lost"
        if "stopped" in states:
            return "failed"
        return "grown" if "done" not in states and self._can_grow(current, records) else ""

    def _give_up(self, why: str) -> None:
        """End the training on all nodes. Raises: Lost, always."""
        self.store.set("failed", self.name)
        raise Lost(why)

    def _is_restart_left(self) -> bool:
        return self._request.is_elastic or self.round.number < self._request.max_restarts

    def _count_failure(self) -> None:
        """Count a failure of an elastic training; give up after too many since its newest checkpoint."""
        if not self._request.is_elastic:
            return
        newest = self._newest_checkpoint()
        self._failures = self._failures + 1 if newest == self._newest_call else 1
        self._newest_call = newest
        if self._failures > self._request.max_restarts:
            times = f"{self._failures} times without a new checkpoint (--max-restarts)"
            self._give_up(f"instances have failed {times}")

    def _newest_checkpoint(self) -> int:
        """Return the number of calls before the newest checkpoint; -1 if there is no checkpoint."""
        found = complete_checkpoints(Path(self._request.checkpoint_dir))
        return max(map(call_of, found), default=-1)

    def _can_grow(self, current: Round, records: Mapping[str, _Record]) -> bool:
        """Return whether new nodes can run instances, and a checkpoint is complete since their arrival."""
        if not self._request.is_elastic or not records.keys() - current.counts.keys():
            return False
        if sorted(self._dealt(records).values()) == sorted(current.counts.values()):
            return False
        newest = self._newest_checkpoint()
        if self._grow_after is None:
            self._grow_after = newest
            self._log.info("a node has come, which is added after the next checkpoint")
        return newest > self._grow_after

    def _dealt(self, records: Mapping[str, _Record]) -> dict[str, int]:
        """Return the number of instances by node, without nodes that get none; empty if slots are too few."""
        request, slots = self._request, [record["slots"] for record in records.values()]
        counts = deal(
            request.replicas, request.fewest_instances or request.instances, request.instances, slots
        )
        return {name: count for name, count in zip(records, counts, strict=True) if count}

    def _counts(self, records: Mapping[str, _Record], until: float) -> dict[str, int]:
        """Return the number of instances by node in the next round; empty while more nodes are expected."""
        now, nodes, counts = time.monotonic(), self._node.count, self._dealt(records)
        if counts:
            survivors = set(self.round.counts) - {self._leader.previous_leader}
            is_expected = survivors - set(records) or nodes > max(len(records), len(survivors))
            return {} if is_expected and now < self._leads_since + _GATHER else counts
        text = (
            f"of {nodes} nodes these {{}}: {', '.join(str(r) for r in range(nodes) if str(r) not in records)}"
        )
        if self._request.is_elastic:
            slots = sum(record["slots"] for record in records.values())
            text = f"there is room for {slots} instances, and {self._request.fewest_instances} are the fewest"
        if now > until:
            self._give_up(text.format(f"have not come in {self._patience} s"))
        if now > self._warned + _AGAIN:
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
            return int(self._lead()[1] >= self.round.number)
        except StoreError:
            is_elastic = self._request.is_elastic
            text = "the leader is lost: another node takes its place" if is_elastic else _lost("0")
            if not self._is_restart_left():
                raise Lost(text) from None
            self._log.warning(text)
            return 1

    def are_done(self) -> bool:
        """Record that this node's instances have succeeded; return whether those of all nodes have."""
        try:
            self._hold("done")
            self._lead()
        except RendezvousGracefulExitError:
            return True
        except StoreError:
            if not self._request.is_elastic:
                raise Lost(_lost("0")) from None
        return False

    def lost(self) -> str:
        """Return a sentence that names the lost nodes of this round; "" if no node is lost."""
        try:
            missing = self.round.missing(self._records())
        except StoreError:
            missing = self._leader.leader
        return _lost(missing) if missing else ""

    def first_failure(self) -> str:
        """Record a failure on this node, and return the node that recorded this round's first failure."""
        with suppress(StoreError):
            return self.store.compare_set(f"failure/{self.round.number}", "", self.name).decode()
        return self.name

    def leave(self, has_failed: bool) -> None:
        """Disconnect this node, after recording its failure, if any; the leader waits for the other nodes."""
        with suppress(StoreError):
            if has_failed:
                self.store.compare_set("failed", "", self.name)
            until = time.monotonic() + _FAREWELL
            while self._server is not None and time.monotonic() < until and len(self._records()) > 1:
                time.sleep(_LOOK)
        if self._server is not None:
            self._leader.resign()
        self._disconnect()

    # ---- the rest of elastic's interface -----------------------------------------------------------------

    def get_backend(self) -> str:
        return "poprun"

    def get_run_id(self) -> str:
        return "poprun"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the leader ends the training, so a rendezvous is never closed by one node."""
        return

    def shutdown(self) -> bool:
        return True


def _lost(names: str) -> str:
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, or the host does not answer"
