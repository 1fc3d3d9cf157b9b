"""The nodes of a training (one poprun each), and the rounds in which they start instances.

A round is one start of all instances. All nodes share two things: the state of the newest round, which each node may
replace if no other node has done so, and a record of each node with a counter. No node leads. Where they are kept:

    one node            in this process
    several hosts       in the store of node 0 (`NodeZeroStore`)
    elastic training    in the checkpoint folder (`shared_folder.SharedFolder`)

A node is lost if its record is missing, or if its counter stood still: for 25 s of the reader's clock in an elastic
training, else for POPRUN_NODE_TIMEOUT, since the others could not go on without this node. A running round
ends if an instance fails, a node is lost or can't reach another one, or a new node can be added. When the instances of
all nodes have stopped, the next round begins with nodes that reach each other. torch's own rendezvous is not used: its
store serves every caller on all interfaces, and its nodes unpickle what they read.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from popdist.checkpoint_files import call_number, complete_checkpoints
from popdist.signed_store import Server, SignedStore, StoreError, own_address
from popengine.environment import SECRET

from .command_line import CommandLine
from .shared_folder import JoinError, SharedFolder
from .topology import Node, instances_by_node, local_instance_count

_POLL = 0.05  # seconds between two reads, while a round forms
_WARNING_INTERVAL = 60.0  # seconds between two warnings about missing nodes
_STANDSTILL = 25.0  # seconds after which a node whose counter stood still is lost; also of TCP's keepalive
_LONGEST_PAUSE = 5.0  # seconds between two polls; if this process was stopped for longer, clocks stop, too
_RENEWAL = 1.0  # seconds between two writes of a record
_TEST_INTERVAL = 5.0  # seconds between two tests whether other nodes can be reached
_RECORD_PATIENCE = 30.0  # seconds for the record of a lost node of the same number to vanish
_LEAVE_PATIENCE = 20.0  # seconds that node 0 serves its store after the end, for the other nodes
_FIRST_ROUND_PATIENCE = 10.0  # seconds that the first round of an elastic training waits for expected nodes

# A node's record, with the keys that `Nodes._write_record` writes.
Record = dict[str, Any]


class TrainingLost(Exception):
    """Raised if the training can't go on. Its text is empty if the cause has been printed."""


@dataclass(frozen=True)
class Round:
    """The state of one start of all instances; `Round()` stands for the time before the first one.

    state:
        runs        nodes start and run their instances
        failed      nodes stop their instances, since an instance has failed
        stopped     nodes stop their instances, since a node is lost or can be added
        finished    all instances have succeeded
        given up    there is no next round
    """

    number: int = -1
    state: str = "stopped"
    node: str = ""  # on which the first instance failed, or which has given up
    why: str = ""  # of "stopped"
    address: str = ""  # HOST:PORT on the first node: MASTER_ADDR and MASTER_PORT of the instances
    store: str = ""  # by which the instances connect: "file:PATH", or HOST:PORT of the first node
    counts: dict[str, int] = field(default_factory=dict)  # instances by node, in the order of the instances
    ids: dict[str, str] = field(default_factory=dict)  # the random id of each node's poprun
    failures: int = 0  # rounds that ended with "failed" since checkpoint `newest_call`
    newest_call: int = -1  # the number of calls before the checkpoint that was newest at the last failure

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


class OneNode:
    """The state and the record of the only node."""

    _state = _record = ""

    def read_state(self) -> str:
        return self._state

    def replace_state(self, old: str, new: str) -> None:
        self._state = new

    def read_records(self) -> dict[str, str]:
        return {"0": self._record}

    def write_record(self, text: str) -> None:
        self._record = text

    def close(self, is_end: bool = False) -> None:
        """Do nothing."""


class NodeZeroStore:
    """The state and the records in the store of node 0. Node 0 starts the store's server.

    Raises: TrainingLost, if node 0 can't be reached in time, or can't listen at its address
    """

    def __init__(self, request: CommandLine, node: Node) -> None:
        self._node, self.name, self._secret = node, str(node.rank), os.environ.get(SECRET, "")
        until = time.monotonic() + node.patience
        self.server = self._start_server(request, until) if node.rank == 0 else None
        self.address = f"{node.address}:{self.server.port if self.server else node.port}"
        request.log.info(f"node {node.rank} of {node.count} waits for the others at {self.address}")
        host, _, port = self.address.rpartition(":")
        try:
            patience = max(until - time.monotonic(), 0.0)
            self._store = SignedStore(
                host, int(port), self._secret, patience, max(node.patience, _STANDSTILL)
            )
        except StoreError as error:
            raise TrainingLost(
                f"node 0 is not to be reached at {self.address}: {error}\n"
                "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there;"
                f" {SECRET} is equal on all nodes, if it is set"
            ) from None

    def _start_server(self, request: CommandLine, until: float) -> Server:
        """Start the store's server and return it; retry until `until` while the node's name has no address."""
        node = self._node
        while True:
            try:
                server = Server(node.address, node.port, self._secret, is_open=True)
                break
            except OSError as error:
                if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                    raise TrainingLost(
                        f"node 0 can't listen at {node.address}:{node.port}: {error}\n"
                        "  fix: MASTER_ADDR and MASTER_PORT are an address of this host and a free port"
                    ) from None
                time.sleep(0.5)  # the name of a pod may not resolve yet
        if server.warning:
            request.log.warning(server.warning)
        return server

    def read_state(self) -> str:
        return self._store.read(["state"])[0] or ""

    def replace_state(self, old: str, new: str) -> None:
        self._store.compare_set("state", old, new)

    def read_records(self) -> dict[str, str]:
        return {key[5:]: text for key, text in self._store.find("node/").items()}

    def write_record(self, text: str) -> None:
        until = time.monotonic() + _RECORD_PATIENCE
        while not self._store.set_while_connected(f"node/{self.name}", text):
            if time.monotonic() > until:
                raise TrainingLost(
                    f"two nodes have the number {self.name}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_POLL)

    def close(self, is_end: bool = False) -> None:
        """Disconnect. At the end node 0 first waits some seconds until the other nodes have left."""
        until = time.monotonic() + _LEAVE_PATIENCE
        with suppress(StoreError):
            while is_end and self.server and time.monotonic() < until and len(self.read_records()) > 1:
                time.sleep(_POLL)
        self._store.close()
        if self.server is not None:
            self.server.close()


# Where the nodes keep the newest state and their records. Methods raise OSError or StoreError.
Board = OneNode | NodeZeroStore | SharedFolder


class Reach(threading.Thread):
    """Tests in the background which nodes of an elastic training this node can reach, at their stores."""

    def __init__(self, secret: str) -> None:
        super().__init__(daemon=True)
        self._secret = secret
        self._addresses: dict[str, str] = {}  # by the random ids of the nodes
        self._errors: dict[str, str] = {}  # by id, of nodes that could not be reached in the last test
        self.times: dict[str, float] = {}  # by id: the time of the last test that has succeeded
        self._is_due = threading.Event()
        self.start()

    def set_addresses(self, addresses: dict[str, str]) -> None:
        """Set the addresses to test, by the random ids of the nodes."""
        is_new, self._addresses = not addresses.keys() <= self._addresses.keys(), addresses
        if is_new:
            self._is_due.set()

    def run(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            while True:
                list(pool.map(self._test, self._addresses.items()))
                self._is_due.wait(_TEST_INTERVAL)
                self._is_due.clear()

    def _test(self, item: tuple[str, str]) -> None:
        id, address = item
        host, _, port = address.rpartition(":")
        try:
            store = SignedStore(host, int(port), self._secret, 0.0, timeout=10.0)
            is_other = store.read(["id"]) != [id]
            store.close()
            if is_other:
                raise StoreError("another process listens there")
            self.times = {**self.times, id: time.monotonic()}
            self._errors.pop(id, None)
        except StoreError as error:
            self._errors[id] = f" at {address}: {error}"

    def error(self, id: str) -> str:
        """Return why a node could not be reached in the last test; "" if it could, or was not tested."""
        return self._errors.get(id, "")

    def reached(self) -> list[str]:
        """Return the ids of the nodes that the last tests have reached."""
        return [id for id in self.times if id not in self._errors]


class Nodes:
    """This node among all nodes of the training.

    Args:
        private: this poprun's own temporary folder
    Raises: JoinError, if this poprun can't take part; `wait_for_round` also TrainingLost
    """

    def __init__(self, request: CommandLine, node: Node, private: str) -> None:
        self.round = Round()  # the newest round in which this node has instances
        self.waits: dict[int, Any] = {}  # by instance of this node: the peer that it waits for (`hangs.py`)
        self._request, self._node, self._log, self._private = request, node, request.log, private
        self._id, self._state, self._count = secrets.token_hex(8), "stopped", 0
        self._digest = hashlib.sha256(json.dumps([request.replicas, request.program]).encode()).hexdigest()
        self._seen: dict[str, tuple[Record, float]] = {}  # each node's record, and when its counter changed
        self._is_contested = False  # a training with another command may use the folder
        self._left_over: str | None = None  # the state that was there before this node
        self._polled = self._begun = self._waits_since = self._round_since = time.monotonic()
        self._standstill = _STANDSTILL if request.is_elastic else max(node.patience, _STANDSTILL)
        self._written = -_RENEWAL  # time of the last write of the record
        self._next_warning = 0.0
        self._grow_after: int | None = None  # calls before the checkpoint that was newest when a node came
        self._host, self._server, self._reach = node.address, None, None
        self.name, self.secret = str(node.rank), os.environ.get(SECRET, "") if node.count > 1 else ""
        self._connected: Board | None = None
        if request.is_elastic:
            self._join_elastic()

    def _join_elastic(self) -> None:
        """Start this node's store, and the tests which other nodes can be reached."""
        folder = self._connected = SharedFolder(self._request.checkpoint_dir, self._private)
        self.name, self.secret = folder.name, folder.secret
        named = os.environ.get("MASTER_ADDR")
        try:
            self._host = own_address(named) if named else "127.0.0.1"
        except OSError:  # the name of a pod that has ended
            self._host = own_address()
        self._server = Server(self._host, 0, self.secret)
        SignedStore(self._host, self._server.port, self.secret, 10.0).set("id", self._id)
        self._reach = Reach(self.secret)

    def wait_for_round(self) -> Round | None:
        """Wait for the next round with instances on this node, and return it; return None if the training has
        succeeded. If the connection to node 0 is lost, connect again. Raises: TrainingLost, JoinError"""
        self._set_state("stopped")
        while True:
            newest = self._poll()
            if newest is None:
                self.close()
                if self._node.rank == 0 or self.round.number >= self._request.max_restarts:
                    raise TrainingLost(_lost_message("0"))
                self._log.warning(f"{_lost_message('0')}; {_wait_message(self._node.patience)}")
            elif newest.state == "finished":
                return None
            elif newest.state == "given up":
                other = f"another node has given up: the poprun of node {newest.node} says why"
                raise TrainingLost(newest.why or ("" if newest.node == self.name else other))
            elif newest.state == "runs" and self._is_in(newest) and newest.number > self.round.number:
                self.round, self._round_since = newest, time.monotonic()
                self._set_state("running")
                return newest
            elif newest.state == "runs" and not self._is_in(newest):
                self._warn_if_left_out(newest)
            time.sleep(_POLL)

    def must_stop_instances(self) -> bool:
        """Return whether this node's instances have to stop: the round has ended, or node 0 is lost."""
        newest = self._poll()
        return (
            newest is None or newest.number != self.round.number or newest.state not in ("runs", "finished")
        )

    def record_success(self) -> bool:
        """Record that this node's instances have succeeded; return whether those of all nodes have."""
        if self._state != "done":
            self._set_state("done")
        newest = self._poll()
        return newest is not None and newest.state == "finished"

    def record_failure(self) -> str:
        """Record that an instance of this node has failed; return the name of the first node in this round
        that did so (if node 0 is lost: this node's name)."""
        with suppress(StoreError, OSError):
            text, newest = self._read_state()
            if newest.number == self.round.number and newest.state == "runs":
                ended = replace(
                    newest, state="given up" if self._is_last(newest) else "failed", node=self.name
                )
                self._board.replace_state(text, json.dumps(vars(ended)))
                _, newest = self._read_state()
            return newest.node or self.name
        return self.name

    def peer_waits(self) -> dict[int, Any]:
        """Return for each waiting instance the wait for a peer (`hangs.py`), of all nodes of this round."""
        found: dict[int, Any] = {}
        for name in self.round.counts:
            record = self._seen.get(name, ({}, 0.0))[0]
            found |= {int(instance): wait for instance, wait in record.get("waits", {}).items()}
        return found | self.waits

    def close(self, is_end: bool = False) -> None:
        """Disconnect this node, at the end of the training or because it may come back."""
        board, self._connected = self._connected, None
        if board is not None:
            board.close(is_end)

    # ---- state and records ---------------------------------------------------------------------------------

    @property
    def _board(self) -> Board:
        """Return where the states are; connect to node 0 if this node is not connected. Raises: TrainingLost"""
        if self._connected is None:
            several = self._node.count > 1
            self._connected = NodeZeroStore(self._request, self._node) if several else OneNode()
        return self._connected

    def _set_state(self, state: str) -> None:
        """Set the state in this node's record: "stopped" between rounds, "running", "done" after success."""
        self._state, self._written = state, -_RENEWAL

    def _is_in(self, newest: Round) -> bool:
        return newest.ids.get(self.name) == self._id

    def _is_last(self, newest: Round) -> bool:
        return not self._request.is_elastic and newest.number >= self._request.max_restarts

    def _poll(self) -> Round | None:
        """Renew this node's record; read the newest round, and end it or begin the next one if that is due.

        Returns: the newest round; None, if node 0 is lost. Raises: TrainingLost, JoinError
        """
        now = time.monotonic()
        pause, self._polled = now - self._polled, now
        try:
            if now - self._written >= _RENEWAL:
                self._write_record()
                self._written = now
            if pause > _LONGEST_PAUSE:  # this process was stopped, or the folder did not answer
                self._stop_clocks(pause)
            records = self._read_records(now)
            text, newest = self._read_state()
            changed = self._advance(newest, records)
            if changed != newest:
                self._waits_since = now
                self._board.replace_state(text, json.dumps(vars(changed)))
                _, newest = self._read_state()
            return newest
        except StoreError:
            return None
        except OSError as error:
            self._stop_clocks(pause)
            self._warn(f"can't use {self._request.checkpoint_dir}: {error}; this node tries again")
            return Round() if self._state == "stopped" else self.round

    def _stop_clocks(self, seconds: float) -> None:
        """Subtract a time in which this node could not read or write from the standstill of the others."""
        self._seen = {name: (record, since + seconds) for name, (record, since) in self._seen.items()}

    def _warn(self, text: str) -> None:
        """Log a warning, unless one was logged less than a minute ago."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_INTERVAL
            self._log.warning(text)

    def _read_state(self) -> tuple[str, Round]:
        """Return the text of the newest state, and the state; `Round()` if there is none or it is damaged. A
        state in which another training has ended before this node came counts as "stopped"."""
        text = self._board.read_state()
        try:
            newest = Round(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            newest = Round()
        if self._left_over is None:
            self._left_over = text if newest.state in ("finished", "given up") else ""
        return text, replace(newest, state="stopped") if text and text == self._left_over else newest

    def _write_record(self) -> None:
        """Write this node's record. Raises: TrainingLost, if another node has its number"""
        self._count += 1
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{self._host}:{free.getsockname()[1]}"
        store = f"{self._host}:{self._server.port}" if self._server else getattr(self._board, "address", "")
        record = {
            "id": self._id,
            "count": self._count,
            "digest": self._digest,
            "rank": self._node.rank,
            "slots": local_instance_count(self._request, self._node.count),
            "address": address,
            "store": store,
            "round": self.round.number,
            "state": self._state,
            "reached": self._reach.reached() if self._reach else None,
            "waits": self.waits,
        }
        self._board.write_record(json.dumps(record))

    def _read_records(self, now: float) -> dict[str, Record]:
        """Return the records of the nodes that are not lost, in the order in which they get instances.

        Raises: JoinError, if a training with another command uses the folder
        """
        texts = self._board.read_records()
        moving: set[str] = set()
        for name, text in texts.items():
            before, since = self._seen.get(name, ({}, now))
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # torn by its writer, or damaged
                record = json.loads(text)
                has_moved = (record["id"], record["count"]) != (before.get("id"), before.get("count"))
                self._seen[name] = record, now if has_moved else since
                if has_moved and record["id"] == before.get("id"):
                    moving.add(name)
        self._seen = {name: seen for name, seen in self._seen.items() if name in texts}
        live = {
            name: record for name, (record, since) in self._seen.items() if now - since < self._standstill
        }
        own = {name: record for name, record in live.items() if record["digest"] == self._digest}
        self._is_contested = self.round.number < 0 and len(own) < len(live)
        for name in moving & (live.keys() - own.keys()):
            has_begun = live[name]["round"] >= 0 or live[name]["state"] != "stopped"
            if self._is_contested and (has_begun or name < self.name):
                raise JoinError(
                    f"{self._request.checkpoint_dir} is in use by a training with another command\n"
                    "  fix: the same --num-replicas and program on all nodes, or another --checkpoint-dir"
                )
        if self._reach is not None:
            self._reach.set_addresses({r["id"]: r["store"] for name, r in own.items() if name != self.name})
        order = list(self.round.counts)  # nodes keep their places
        place = {name: order.index(name) if name in order else len(order) for name in own}
        return {
            name: own[name] for name in sorted(own, key=lambda name: (place[name], own[name]["rank"], name))
        }

    # ---- decisions ------------------------------------------------------------------------------------------

    def _advance(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return `newest`, or the state that has to follow it."""
        if newest.state in ("finished", "given up") or self._is_contested or self.name not in records:
            return newest
        if newest.state == "runs":
            lost = newest.lost_nodes(records)
            return (
                self._end_round(newest, records)
                if self._is_in(newest) or lost == ", ".join(newest.ids)
                else newest
            )
        if any(record["state"] != "stopped" for record in records.values()):
            return newest
        return self._begin_round(newest, records)

    def _end_round(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return the running round `newest`, or its end, which is logged, if a node is lost, can't be reached or
        can be added, or if all instances have succeeded."""
        members = {name: records[name] for name in newest.counts if name in records}
        states = {name: r["state"] for name, r in members.items() if r["round"] == newest.number}
        why = ""
        if lost := newest.lost_nodes(records):
            why = _lost_message(lost)
        elif list(states.values()) == ["done"] * len(newest.counts):
            return replace(newest, state="finished")
        elif stopped := [name for name, state in states.items() if state == "stopped"]:
            why = f"node {', '.join(stopped)} has stopped its instances"
        elif self._reach is not None:
            since = {r["id"]: self._round_since for r in members.values()} | self._reach.times
            late = [
                n
                for n, r in members.items()
                if n != self.name and self._polled - since[r["id"]] > _STANDSTILL
            ]
            if late:
                why = (
                    f"node {self.name} can't reach node {late[0]}{self._reach.error(members[late[0]]['id'])}"
                )
            elif "done" not in states.values() and self._can_grow(newest, records):
                return replace(newest, state="stopped")
        if not why:
            return newest
        if self._is_last(newest):
            return replace(newest, state="given up", why=why)
        self._log.warning(why)
        return replace(newest, state="stopped")

    def _can_grow(self, newest: Round, records: Mapping[str, Record]) -> bool:
        """Return whether a round with new nodes can begin: they would change the numbers of instances, and a
        checkpoint has been written since the first of them came, which is logged. Its first node decides."""
        if self.name != next(iter(newest.counts)) or not records.keys() - newest.counts.keys():
            return False
        counts = instances_by_node(self._request, self._slots(self._best_group(records), records))
        if (
            sorted(counts.values()) == sorted(newest.counts.values())
            or sum(counts.values()) < newest.instances
        ):
            return False
        call = self._newest_checkpoint()
        if self._grow_after is None:
            self._grow_after = call
            self._log.info("a node has come, which is added after the next checkpoint")
        return call > self._grow_after

    def _begin_round(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return the round that follows the ended round `newest`; `newest`, if no round can begin (yet)."""
        group = self._best_group(records)
        counts = instances_by_node(self._request, self._slots(group, records))
        if not counts:
            return self._report_missing(newest, records, sum(self._slots(group, records).values()))
        is_early = newest.number < 0 and time.monotonic() < self._begun + _FIRST_ROUND_PATIENCE
        if is_early and len(group) < self._node.count:
            return newest
        failures, call = newest.failures, newest.newest_call
        lost = newest.lost_nodes(records)
        if newest.state == "failed" and self._request.is_elastic and not lost:
            call = self._newest_checkpoint()
            failures = failures + 1 if call == newest.newest_call else 1
            if failures > self._request.max_restarts:
                times = f"{failures} times without a new checkpoint (--max-restarts)"
                self._log.error(f"instances have failed {times}")
                return replace(newest, state="given up", node=self.name)
        if newest.state == "failed" and lost:
            self._log.warning(_lost_message(lost))
        self._grow_after = None
        first = records[next(iter(counts))]
        number = max(newest.number, *(record["round"] for record in records.values())) + 1
        store = first["store"] or f"file:{self._private}/store-{number}"
        ids = {name: records[name]["id"] for name in counts}
        round = Round(number, "runs", address=first["address"], store=store, counts=counts, ids=ids)
        return replace(round, failures=failures, newest_call=call)

    def _best_group(self, records: Mapping[str, Record]) -> list[str]:
        """Return the names of nodes that all reach each other and have room for the most instances."""

        def meet(one: str, other: str) -> bool:
            pairs = ((one, other), (other, one))
            return all(
                records[a]["reached"] is None or records[b]["id"] in records[a]["reached"] for a, b in pairs
            )

        groups: list[list[str]] = []
        for start in records:
            group = [start]
            group += [n for n in records if n != start and all(meet(n, each) for each in group)]
            groups.append([name for name in records if name in group])
        return max(
            groups, key=lambda g: sum(instances_by_node(self._request, self._slots(g, records)).values())
        )

    def _slots(self, group: list[str], records: Mapping[str, Record]) -> dict[str, int]:
        return {name: records[name]["slots"] for name in group}

    def _newest_checkpoint(self) -> int:
        """Return the number of the call after which the newest checkpoint was written; -1: no checkpoint."""
        return max(map(call_number, complete_checkpoints(Path(self._request.checkpoint_dir))), default=-1)

    def _report_missing(self, newest: Round, records: Mapping[str, Record], room: int) -> Round:
        """Warn each minute that the nodes have room for `room` instances only, and which nodes are missing.
        Return `newest`; after `Node.patience` seconds "given up"."""
        waited = min(time.monotonic() - self._waits_since, self._node.patience)
        if self._request.is_elastic:
            why = f"there is room for {room} instances, and {self._request.fewest_instances} are the fewest"
        else:
            missing = ", ".join(str(rank) for rank in range(self._node.count) if str(rank) not in records)
            why = f"of {self._node.count} nodes these have not come in {waited:.0f} s: {missing}"
        if waited == self._node.patience:
            self._log.error(why)
            return replace(newest, state="given up", node=self.name)
        if newest.number >= 0 or waited > _WARNING_INTERVAL:
            self._warn(f"{why}; {_wait_message(self._node.patience - waited)}")
        return newest

    def _warn_if_left_out(self, newest: Round) -> None:
        """Warn each minute that this node can't take part since it can't reach a node of the running round."""
        for name, id in newest.ids.items():
            if self._reach is not None and (error := self._reach.error(id)):
                self._warn(
                    f"this node is left out until it can reach node {name}{error}\n  fix: set MASTER_ADDR for all"
                    f" popruns, to an address in the network that the hosts share; {SECRET} is equal on all, if set"
                )


def _lost_message(names: str) -> str:
    """Return a message about lost nodes, whose names are joined by commas."""
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, it is stopped, or the host does not answer"


def _wait_message(seconds: float) -> str:
    """Return a message that this node waits up to `seconds` for lost or missing nodes, with a fix."""
    text = f"this one waits for {seconds:.0f} s (POPRUN_NODE_TIMEOUT)"
    return f"{text}\n  fix: start the same command there again"
