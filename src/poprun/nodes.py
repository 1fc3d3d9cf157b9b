"""The nodes of a training, and the rounds in which they start instances.

Each poprun holds a record in a store (`popdist.signed_store`), which is deleted when its connection ends: a missing
record is a lost node. One poprun, the leader (`election.py`), serves the store; instances use it, too.

A round is one start of all instances. The leader ends a round if a node is lost, if an instance has failed, or if a
new node can be added. When all nodes have stopped their instances, the leader begins the next round with the nodes
that have records. torch's own rendezvous is not used: its store serves every caller on all interfaces, and its nodes
unpickle what they read.
"""

import json
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from popdist.checkpoint_files import call_number, complete_checkpoints
from popdist.signed_store import Server, SignedStore, StoreError

from .command_line import CommandLine
from .election import Election, FirstNode, TrainingLost
from .topology import Node, instances_by_node, local_instance_count

_POLL = 0.05  # seconds between two reads of the other nodes' records, while a round forms
_WARNING_INTERVAL = 60.0  # seconds between two warnings about missing nodes
_RECORD_PATIENCE = 30.0  # seconds; the connection of a host without power is closed after 25
_LEAVE_PATIENCE = 5.0  # seconds that the leader serves the store after the end, for the other nodes
_FIRST_ROUND_PATIENCE = 10.0  # seconds that a new leader of an elastic training waits for expected nodes

# A node's record in the store, with the keys that `NodeConnection._write_record` writes.
Record = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """One start of all instances; `Round()` stands for the time before the first one.

    The leader sets the state:
        runs        nodes start and run their instances
        failed      nodes stop their instances, since an instance has failed
        stopped     nodes stop their instances, since a node is lost or can be added
        finished    all instances have succeeded
    """

    number: int = -1
    state: str = "stopped"
    address: str = ""  # HOST:PORT on the first node: MASTER_ADDR and MASTER_PORT of the instances
    counts: dict[str, int] = field(default_factory=dict)  # instances by node, in the order of the instances
    ids: dict[str, str] = field(default_factory=dict)  # the random id of each node's poprun

    @property
    def instances(self) -> int:
        return sum(self.counts.values())

    def first_instance(self, node: str) -> int:
        """Return the index of a node's first instance."""
        names = list(self.counts)
        return sum(self.counts[name] for name in names[: names.index(node)])

    def lost_nodes(self, records: Mapping[str, Record]) -> str:
        """Return the names of this round's lost nodes, joined by commas; "" if none is lost. A lost node's
        record is missing, or belongs to a poprun that started after the round began."""
        return ", ".join(name for name, id in self.ids.items() if records.get(name, {}).get("id") != id)


class NodeConnection:
    """This node's connection to the other nodes; on the leader its reads call `Leader.advance_round`.

    `wait_for_round`, `must_stop_instances` and `record_success` raise `TrainingLost` if the training is lost.
    """

    def __init__(self, request: CommandLine, node: Node) -> None:
        self.round = Round()  # the newest round in which this node has instances
        self._request, self._node, self._log = request, node, request.log
        self._election = Election(request) if request.is_elastic else FirstNode(request, node)
        self.name, self.secret = self._election.name, self._election.secret
        self._id = secrets.token_hex(8)
        self._server: Server | None = None
        self._store: SignedStore | None = None
        self._leader: Leader | None = None  # set if this node leads

    @property
    def store(self) -> SignedStore:
        """Return the connection to the store. Raises: StoreError, if this node is not connected."""
        if self._store is None:
            raise StoreError("this node is not connected")
        return self._store

    def wait_for_round(self) -> Round | None:
        """Wait for the next round with instances on this node, and return it; return None if the training has
        succeeded. If the connection to the store is lost, connect again."""
        while True:
            try:
                if self._store is None:
                    self._connect()
                self._write_record("stopped")
                while (newest := self._read_round()).state != "finished":
                    if newest.number > self.round.number and newest.ids.get(self.name) == self._id:
                        self.round = newest
                        self._write_record("running")
                        return newest
                    time.sleep(_POLL)
                return None
            except StoreError:
                self._disconnect()
                if self._request.is_elastic:
                    self._log.warning("the leader is lost: another node takes its place")
                elif self._node.rank == 0 or self.round.number >= self._request.max_restarts:
                    raise TrainingLost(_lost_message("0")) from None
                else:
                    self._log.warning(f"{_lost_message('0')}; {_wait_message(self._node.patience)}")

    def must_stop_instances(self) -> bool:
        """Return whether this node's instances have to stop: the round has ended, or the store is lost."""
        with suppress(StoreError):
            newest = self._read_round()
            return newest.number > self.round.number or newest.state not in ("runs", "finished")
        return True

    def record_success(self) -> bool:
        """Record that this node's instances have succeeded; return whether those of all nodes have. (False,
        if the store is lost.)"""
        with suppress(StoreError):
            self._write_record("done")
            return self._read_round().state == "finished"
        return False

    def record_failure(self) -> str:
        """Record that an instance of this node has failed; return the name of the first node in this round
        that did so (if the store is lost: this node's name)."""
        with suppress(StoreError):
            return self.store.compare_set(f"failure/{self.round.number}", "", self.name).decode()
        return self.name

    def leave(self) -> None:
        """Disconnect this node. The leader first waits some seconds until the other nodes have left, and
        removes the leaders' files of an elastic training."""
        with suppress(StoreError):
            until = time.monotonic() + _LEAVE_PATIENCE
            while self._leader is not None and time.monotonic() < until and len(self.store.find("node/")) > 1:
                time.sleep(_POLL)
        if self._leader is not None:
            self._election.remove_leader_files()
        self._disconnect()

    # ---- the store ---------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the store; if this node leads, start the store's server and create the `Leader`, too."""
        survivors = set(self.round.counts) - {self._election.leader}
        self._server, self._store = self._election.connect()
        if self._server is not None:
            expected = len(survivors) or self._node.count
            self._leader = Leader(self._store, self.name, self._request, self._node, expected)
            self._log.info(f"{self.name} leads the training at {self._store.address}")

    def _disconnect(self) -> None:
        """Close the connection to the store, and the server if this node leads."""
        for connection in (self._store, self._server):
            if connection is not None:
                connection.close()
        self._store = self._server = self._leader = None

    def _write_record(self, state: str) -> None:
        """Write this node's record into the store. Raises: TrainingLost, if another node has its name.

        Args: state: "stopped" between rounds, "running" in a round, "done" after success
        """
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{self._election.host}:{free.getsockname()[1]}"
        record = {
            "id": self._id,
            "rank": self._node.rank,
            "slots": local_instance_count(self._request, self._node.count),
            "address": address,
            "round": self.round.number,
            "state": state,
        }
        until = time.monotonic() + _RECORD_PATIENCE
        while not self.store.set_while_connected(f"node/{self.name}", json.dumps(record)):
            if time.monotonic() > until:
                raise TrainingLost(
                    f"two nodes have the number {self.name}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_POLL)

    def _read_round(self) -> Round:
        """Return the newest round; on the leader, let `Leader.advance_round` end or begin a round first.

        Raises: TrainingLost, if the leader has ended the training; StoreError, if the store is lost
        """
        failed, text = self.store.read(["failed", "round"])
        if failed is not None:
            is_own = failed == self.name
            raise TrainingLost(
                "" if is_own else f"another node has given up: the poprun of node {failed} says why"
            )
        newest = Round(**json.loads(text)) if text else Round()
        if self._leader is None:
            return newest
        self._election.check_is_leader()
        return self._leader.advance_round(newest)


class Leader:
    """Begins and ends rounds, on the leading node only. Each call of `advance_round` makes one decision.

    Args: expected: number of nodes for which the first round waits, `_FIRST_ROUND_PATIENCE` seconds at most
    """

    def __init__(
        self, store: SignedStore, name: str, request: CommandLine, node: Node, expected: int
    ) -> None:
        self._store, self._name, self._request = store, name, request
        self._node, self._expected, self._log = node, expected, request.log
        self._leads_since = self._waits_since = time.monotonic()
        self._next_warning = self._waits_since + _WARNING_INTERVAL
        # Failures since the newest checkpoint, and the number of calls before that checkpoint.
        self._failures, self._newest_call = 0, -1
        self._grow_after: int | None = None  # calls before the checkpoint that was newest when a node came

    def advance_round(self, current: Round) -> Round:
        """End a running round if all nodes have succeeded, an instance has failed, or a node is lost or can
        be added; begin the next round if all nodes have stopped their instances.

        Returns: `current`, or the changed or new round, which has been written into the store
        """
        found = [(key[5:], json.loads(text)) for key, text in self._store.find("node/").items()]
        records = dict(sorted(found, key=lambda item: item[1]["rank"]))  # in this order nodes get instances
        if current.state == "runs":
            newest = replace(current, state=self._decide_state(current, records))
        elif current.state == "finished" or any(record["state"] != "stopped" for record in records.values()):
            return current
        else:
            newest = self._begin_round(current, records)
        if newest != current:
            self._waits_since = self._next_warning = time.monotonic()
            self._store.set("round", json.dumps(vars(newest)))
        return newest

    def _begin_round(self, current: Round, records: Mapping[str, Record]) -> Round:
        """Return the round that follows the ended round `current`; `current`, if no round can begin (yet)."""
        slots = {name: record["slots"] for name, record in records.items()}
        counts = instances_by_node(self._request, slots)
        if not counts:
            self._report_missing(records, sum(slots.values()))
            return current
        if len(records) < self._expected and time.monotonic() < self._leads_since + _FIRST_ROUND_PATIENCE:
            return current
        is_failure = current.state == "failed" and not current.lost_nodes(records)
        if is_failure and self._request.is_elastic and not self._can_restart():
            return current
        self._grow_after = None
        number = max(record["round"] for record in records.values()) + 1
        address = records[next(iter(counts))]["address"]
        ids = {name: records[name]["id"] for name in counts}
        return Round(number, "runs", address, counts, ids)

    def _end_training(self, node: str, why: str = "") -> None:
        """End the training on all nodes, which name `node` as the cause; log `why`, unless it is empty."""
        if why:
            self._log.error(why)
        self._store.set("failed", node)

    def _decide_state(self, current: Round, records: Mapping[str, Record]) -> str:
        """Return the next state of a running round ("runs": no change), and log lost nodes. End the training
        after a loss or failure in the last round that `max_restarts` allows."""
        states = {
            name: record["state"] for name, record in records.items() if record["round"] == current.number
        }
        failed = [name for name, state in states.items() if state == "stopped"]
        missing = current.lost_nodes(records)
        is_last = not self._request.is_elastic and current.number >= self._request.max_restarts
        if missing and is_last:
            self._end_training(self._name, _lost_message(missing))
        elif missing:
            self._log.warning(_lost_message(missing))
        elif failed and is_last:
            (first,) = self._store.read([f"failure/{current.number}"])
            self._end_training(first or failed[0])
        elif list(states.values()) == ["done"] * len(current.counts):
            return "finished"
        elif not failed and ("done" in states.values() or not self._can_grow(current, records)):
            return "runs"
        return "failed" if failed and not missing else "stopped"

    def _can_restart(self) -> bool:
        """Count a failure of an elastic training. After more than `max_restarts` without a new checkpoint end
        the training, and return False."""
        newest = self._newest_checkpoint()
        self._failures = self._failures + 1 if newest == self._newest_call else 1
        self._newest_call = newest
        if self._failures <= self._request.max_restarts:
            return True
        times = f"{self._failures} times without a new checkpoint (--max-restarts)"
        self._end_training(self._name, f"instances have failed {times}")
        return False

    def _newest_checkpoint(self) -> int:
        """Return the number of the call after which the newest checkpoint was written; -1: no checkpoint."""
        return max(map(call_number, complete_checkpoints(Path(self._request.checkpoint_dir))), default=-1)

    def _can_grow(self, current: Round, records: Mapping[str, Record]) -> bool:
        """Return whether a round with new nodes can begin: they would change the numbers of instances, and a
        checkpoint has been written since the first of them came, which is logged."""
        if not self._request.is_elastic or not records.keys() - current.counts.keys():
            return False
        counts = instances_by_node(self._request, {name: record["slots"] for name, record in records.items()})
        if sorted(counts.values()) == sorted(current.counts.values()):
            return False
        newest = self._newest_checkpoint()
        if self._grow_after is None:
            self._grow_after = newest
            self._log.info("a node has come, which is added after the next checkpoint")
        return newest > self._grow_after

    def _report_missing(self, records: Mapping[str, Record], room: int) -> None:
        """Warn each minute that the nodes have room for `room` instances only, and which nodes are missing;
        after `Node.patience` seconds end the training."""
        now = time.monotonic()
        waited = min(now - self._waits_since, self._node.patience)
        if self._request.is_elastic:
            why = f"there is room for {room} instances, and {self._request.fewest_instances} are the fewest"
        else:
            missing = ", ".join(str(rank) for rank in range(self._node.count) if str(rank) not in records)
            why = f"of {self._node.count} nodes these have not come in {waited:.0f} s: {missing}"
        if waited == self._node.patience:
            self._end_training(self._name, why)
        elif now >= self._next_warning:
            self._next_warning = now + _WARNING_INTERVAL
            self._log.warning(f"{why}; {_wait_message(self._node.patience - waited)}")


def _lost_message(names: str) -> str:
    """Return a message about lost nodes, whose names are joined by commas."""
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, or the host does not answer"


def _wait_message(seconds: float) -> str:
    """Return a message that this node waits up to `seconds` for lost or missing nodes, with a fix."""
    text = f"this one waits for {seconds:.0f} s (POPRUN_NODE_TIMEOUT)"
    return f"{text}\n  fix: start the same command there again"
