"""The nodes of a training (one poprun each), and the rounds in which they start instances.

A round is one start of all instances. All nodes share a board: the state of the newest round, which each node may
replace if no other node has done so, and a record of each node, which counts. No node leads. The board is

    of one node             in this process (`OneNode`)
    of several hosts        in the store of node 0 (`NodeZeroStore`)
    of an elastic training  in the checkpoint folder (`shared_folder.SharedFolder`)

A node is lost if its record is missing, or if the record stood still: for 25 s of the reader's clock in an elastic
training, else for POPRUN_NODE_TIMEOUT, since the others could not go on without this node. A running round ends if an
instance fails, a node is lost or can't reach another one, or a new node can be added. When the instances of all nodes
have stopped, the next round begins with nodes that reach each other. torch's own rendezvous is not used: its store
serves every caller on all interfaces, and its nodes unpickle what they read.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from popdist.checkpoint_files import call_number, complete_checkpoints
from popdist.signed_store import Server, SignedStore, StoreError, own_address
from popengine.environment import SECRET

from .command_line import CommandLine
from .shared_folder import SharedFolder, TrainingLost
from .topology import Node, instances_by_node, local_instance_count

_POLL = 0.05  # seconds between two reads, while a round forms
_WARNING_INTERVAL = 60.0  # seconds between two warnings about missing nodes
_STANDSTILL = 25.0  # seconds after which a node whose record stood still is lost; also of TCP's keepalive
_LONGEST_STEP = 5.0  # seconds by which the reader's clock advances at most between two polls
_UNREACHED = 15.0  # seconds in which tests fail to reach a node, after which the round ends
_RENEWAL = 1.0  # seconds between two writes of a record, and between two tests of other nodes
_RECORD_PATIENCE = 30.0  # seconds for the record of a lost node of the same number to vanish
_LEAVE_PATIENCE = 120.0  # seconds that node 0 serves its store after the end, for slow nodes
_FIRST_ROUND_PATIENCE = 10.0  # seconds that the first round of an elastic training waits for expected nodes

# A node's record, with the keys that `Nodes._write_record` writes.
Record = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """The state of one start of all instances; `Round()` stands for the time before the first one.

    state:
        runs        nodes start and run their instances
        failed      nodes stop their instances, since an instance has failed
        stopped     nodes stop their instances, since a node is lost or can be added
        finished    all instances have succeeded
        given up    there is no next round
        lost        this node can't reach node 0
    """

    number: int = -1
    state: str = "stopped"
    command: str = ""  # a digest of the training's program and number of replicas
    node: str = ""  # on which the first instance failed, or which has given up
    why: str = ""  # of "given up"
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
    """The board of a training with one node. Its instances connect by files in poprun's private folder."""

    _state = _record = ""

    def read_state(self) -> str:
        return self._state

    def replace_state(self, old: str, new: str) -> None:
        self._state = new

    def read_records(self) -> dict[str, str]:
        return {"0": self._record}

    def write_record(self, text: str) -> None:
        self._record = text

    def close(self, is_end: bool) -> None:
        """Do nothing."""


class NodeZeroStore:
    """The board of several hosts, in the store of node 0; node 0 starts the store's server. Raises: TrainingLost"""

    def __init__(self, request: CommandLine, node: Node, secret: str) -> None:
        self._rank, until = str(node.rank), time.monotonic() + node.patience
        self._ranks = [str(rank) for rank in range(node.count)]
        self._server = _start_server(request, node, secret, until) if node.rank == 0 else None
        port = self._server.port if self._server else node.port
        self.address = f"{node.address}:{port}"
        request.log.info(f"node {node.rank} of {node.count} waits for the others at {self.address}")
        patience = max(until - time.monotonic(), 0.0)
        try:
            self._store = SignedStore(node.address, port, secret, patience, max(node.patience, _STANDSTILL))
        except StoreError as error:
            raise TrainingLost(
                f"node 0 is not to be reached at {self.address}: {error}\n"
                "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there;"
                f" {SECRET} is equal on all nodes, if it is set"
            ) from None

    def read_state(self) -> str:
        return self._store.read(["state"])[0] or ""

    def replace_state(self, old: str, new: str) -> None:
        self._store.compare_set("state", old, new)

    def read_records(self) -> dict[str, str]:
        found = zip(self._ranks, self._store.read(self._ranks), strict=True)
        return {rank: text for rank, text in found if text is not None}

    def write_record(self, text: str) -> None:
        until = time.monotonic() + _RECORD_PATIENCE
        while not self._store.set_while_connected(self._rank, text):
            if time.monotonic() > until:
                raise TrainingLost(
                    f"two nodes have the number {self._rank}\n  fix: POPRUN_NODE_RANK differs on every node"
                )
            time.sleep(_POLL)

    def close(self, is_end: bool) -> None:
        """Disconnect. At the end node 0 first waits until the other nodes have read the last state, and left."""
        until = time.monotonic() + _LEAVE_PATIENCE
        with suppress(StoreError):
            while is_end and self._server and time.monotonic() < until and len(self.read_records()) > 1:
                time.sleep(_POLL)
        self._store.close()


def _start_server(request: CommandLine, node: Node, secret: str, until: float) -> Server:
    """Start the store of node 0. Until the time `until`, the node's name may have no address."""
    while True:
        try:
            return Server(node.address, node.port, secret, is_open=True, warn=request.log.warning)
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                raise TrainingLost(
                    f"node 0 can't listen at {node.address}:{node.port}: {error}\n"
                    "  fix: MASTER_ADDR and MASTER_PORT are an address of this host and a free port"
                ) from None
            time.sleep(0.5)  # the name of a pod may not resolve yet


class Reach(threading.Thread):
    """Serves the store of a node of an elastic training, and tests each second which other nodes' stores it reaches."""

    def __init__(self, id: str, secret: str) -> None:
        super().__init__(daemon=True)
        self._secret = secret
        try:
            host = own_address(os.environ.get("MASTER_ADDR", "localhost"))
        except OSError:  # the name of a pod that has ended
            host = own_address()
        server = Server(host, 0, secret)
        SignedStore(host, server.port, secret, 10.0).set("id", id)
        self.store = f"{host}:{server.port}"
        self.addresses: dict[str, str] = {}  # to test, by the random ids of the nodes
        self.errors: dict[str, str] = {}  # of the last test, by id; "" after success
        self.start()

    def run(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            while True:
                list(pool.map(self._test, self.addresses.items()))
                time.sleep(_RENEWAL)

    def _test(self, item: tuple[str, str]) -> None:
        id, address = item
        host, _, port = address.rpartition(":")
        try:
            store = SignedStore(host, int(port), self._secret, 0.0, timeout=10.0)
            is_other = store.read(["id"]) != [id]
            store.close()
            self.errors[id] = f" at {address}: another process listens there" if is_other else ""
        except StoreError as error:
            self.errors[id] = f" at {address}: {error}"


class Nodes:
    """This node among all nodes of the training; `folder` is a temporary folder. Methods may raise TrainingLost."""

    def __init__(self, request: CommandLine, node: Node, folder: str) -> None:
        self.round = Round()  # the newest round in which this node has instances
        self.waits: dict[int, Any] = {}  # by instance of this node: the peer that it waits for (`hangs.py`)
        self.name, self.secret = str(node.rank), os.environ.get(SECRET, "") if node.count > 1 else ""
        self.request, self.folder, self._node, self._log = request, folder, node, request.log
        self._id, self._state, self._count = secrets.token_hex(8), "stopped", 0
        self._command = hashlib.sha256(json.dumps([request.replicas, request.program]).encode()).hexdigest()
        self._clock = 0.0  # seconds in which this node could read the board
        # By node: its record, and `_clock` at the record's last change.
        self._seen: dict[str, tuple[Record, float]] = {}
        self._reached: dict[str, float] = {}  # by the id of a node: `_clock` when it could be reached
        self._text = ""  # of the state that was read last
        self._left_over: str | None = None  # the state in which an earlier training has ended
        self._polled = self._changed = time.monotonic()  # the last poll, and the last change of `_text`
        self._next_write = self._next_warning = 0.0
        self._grow_after: int | None = None  # calls before the checkpoint that was newest when a node came
        self._store, self._reach = "", None
        self._board: OneNode | NodeZeroStore | SharedFolder = OneNode()
        if request.is_elastic:
            self._board = shared = SharedFolder(request.checkpoint_dir, folder)
            self.name, self.secret = shared.name, shared.secret
            self._reach = Reach(self._id, self.secret)
            self._store = self._reach.store
        elif node.count > 1:
            self._connect_to_node_zero()

    def _connect_to_node_zero(self) -> None:
        self._board = board = NodeZeroStore(self.request, self._node, self.secret)
        self._store = board.address

    def wait_for_round(self) -> bool:
        """Wait for the next `round` with instances on this node; return False if the training has succeeded. If the
        connection to node 0 is lost, connect again."""
        self._set_state("stopped")
        while True:
            newest = self._poll()
            if newest.state == "lost":
                self.close(is_end=False)
                if self._node.rank == 0 or self._is_last(self.round):
                    raise TrainingLost(_lost_message("0"))
                self._log.warning(f"{_lost_message('0')}; {_wait_message(self._node.patience)}")
                self._connect_to_node_zero()
            elif newest.state == "finished":
                return False
            elif newest.state == "given up":
                other = f"another node has given up: the poprun of node {newest.node} says why"
                raise TrainingLost(newest.why or ("" if newest.node == self.name else other))
            elif newest.state == "runs" and self._is_in(newest) and newest.number > self.round.number:
                self.round = newest
                self._set_state("running")
                return True
            elif newest.state == "runs" and not self._is_in(newest):
                self._warn_if_left_out(newest)
            time.sleep(_POLL)

    def round_state(self, is_done: bool) -> str:
        """Return the state of `round`; "lost", if another one follows or if node 0 is lost. `is_done`: whether all
        instances of this node have succeeded"""
        if is_done and self._state != "done":
            self._set_state("done")
        newest = self._poll()
        return newest.state if newest.number == self.round.number else "lost"

    def record_failure(self) -> str:
        """Record that an instance of this node has failed; return the name of the first node in this round
        that did so (if node 0 is lost: this node's name)."""
        with suppress(StoreError, OSError):
            newest = self._read_state()
            if newest.number == self.round.number and newest.state == "runs":
                state = "given up" if self._is_last(newest) else "failed"
                newest = self._replace_state(replace(newest, state=state, node=self.name))
            return newest.node or self.name
        return self.name

    def stack_path(self, instance: int) -> str:
        """Return the path of the file to which an instance of `round` writes the stacks of its threads."""
        return f"{self.folder}/stack-{self.round.number}-{instance}"

    def peer_waits(self) -> dict[int, Any]:
        """Return for each waiting instance the wait for a peer (`hangs.py`), of all nodes of this round."""
        records = [self._seen[name][0] for name in self.round.counts if name in self._seen]
        waits = [item for record in records for item in record.get("waits", {}).items()]
        return {int(instance): wait for instance, wait in waits} | self.waits

    def close(self, is_end: bool) -> None:
        """Disconnect this node, at the end of the training or because it may come back."""
        self._board.close(is_end)

    # ---- state and records ---------------------------------------------------------------------------------

    def _set_state(self, state: str) -> None:
        """Set the state in this node's record: "stopped" between rounds, "running", "done" after success."""
        self._state, self._next_write = state, 0.0

    def _is_in(self, newest: Round) -> bool:
        return newest.ids.get(self.name) == self._id

    def _is_last(self, newest: Round) -> bool:
        return not self.request.is_elastic and newest.number >= self.request.max_restarts

    def _poll(self) -> Round:
        """Renew this node's record; return the newest round, and first end it or begin the next one if that is
        due. Without a connection to node 0 the round's state is "lost"."""
        now = time.monotonic()
        step, self._polled = min(now - self._polled, _LONGEST_STEP), now
        try:
            if now >= self._next_write:
                self._write_record()
                self._next_write = now + _RENEWAL
            newest = self._read_state()
            records = self._read_records(newest)  # newer than the state, so that no node is lost that is new
            self._clock += step
            changed = self._advance(newest, records)
            return newest if changed == newest else self._replace_state(changed)
        except StoreError:
            return Round(state="lost")
        except OSError as error:
            self._warn(f"can't use {self.request.checkpoint_dir}: {error}; this node tries again")
            return Round() if self._state == "stopped" else self.round

    def _warn(self, text: str) -> None:
        """Log a warning, unless one was logged less than a minute ago."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_INTERVAL
            self._log.warning(text)

    def _read_state(self) -> Round:
        """Return the newest state; `Round()` if there is none or it is damaged. Of a state in which another
        training has ended before this node came, only the number and the command count."""
        if (text := self._board.read_state()) != self._text:
            self._text, self._changed = text, time.monotonic()
        try:
            newest = Round(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            newest = Round()
        if self._left_over is None:
            self._left_over = text if newest.state in ("finished", "given up") else ""
        is_left_over = text and text == self._left_over
        return Round(newest.number, command=newest.command) if is_left_over else newest

    def _replace_state(self, new: Round) -> Round:
        """Replace the state that was read last, unless another node has done so; return the newest state."""
        self._board.replace_state(self._text, json.dumps(vars(new)))
        return self._read_state()

    def _write_record(self) -> None:
        """Write this node's record. Raises: TrainingLost, if another node has its number"""
        self._count += 1
        with socket.socket() as free:
            free.bind(("", 0))
            host = self._store.rpartition(":")[0] or self._node.address
            address = f"{host}:{free.getsockname()[1]}"
        record = {
            "id": self._id,
            "count": self._count,
            "command": self._command,
            "rank": self._node.rank,
            "slots": local_instance_count(self.request, self._node.count),
            "address": address,
            "store": self._store,
            "round": self.round.number,
            "state": self._state,
            "reached": self._reach and [id for id, error in self._reach.errors.copy().items() if not error],
            "waits": self.waits,
        }
        self._board.write_record(json.dumps(record))

    def _read_records(self, newest: Round) -> dict[str, Record]:
        """Return the records of the nodes that are not lost, in the order in which they get instances; {} while nodes
        of another training, to which the round `newest` belongs, may be alive. Raises: TrainingLost, if one is"""
        texts = self._board.read_records()
        for name, text in texts.items():
            before, _ = self._seen.get(name, ({}, 0.0))
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # torn by its writer, or damaged
                record = json.loads(text)
                if (record["id"], record["count"]) != (before.get("id"), before.get("count")):
                    self._seen[name] = record, self._clock
        self._seen = {name: seen for name, seen in self._seen.items() if name in texts}
        standstill = _STANDSTILL if self.request.is_elastic else max(self._node.patience, _STANDSTILL)
        live = [
            (name, record, since)
            for name, (record, since) in self._seen.items()
            if self._clock - since < standstill
        ]
        if newest.command not in ("", self._command):
            rivals = [since for _, record, since in live if record["command"] == newest.command]
            if any(rivals):  # later than this node's first poll
                raise TrainingLost(
                    f"{self.request.checkpoint_dir} is in use by a training with another command\n"
                    "  fix: the same --num-replicas and program on all nodes, or another --checkpoint-dir",
                    code=2,
                )
            if rivals:
                return {}
        own = {name: record for name, record, _ in live if record["command"] == self._command}
        if self._reach is not None:
            self._reach.addresses = {r["id"]: r["store"] for name, r in own.items() if name != self.name}
        order = list(newest.counts)  # nodes keep their places
        place = {name: order.index(name) if name in order else len(order) for name in own}
        return dict(sorted(own.items(), key=lambda item: (place[item[0]], item[1]["rank"], item[0])))

    # ---- decisions ------------------------------------------------------------------------------------------

    def _advance(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return `newest`, or the state that has to follow it."""
        if newest.state in ("finished", "given up") or self.name not in records:
            return newest
        if newest.state == "runs":
            all_are_lost = not any(records.get(name, {}).get("id") == id for name, id in newest.ids.items())
            return self._end_round(newest, records) if self._is_in(newest) or all_are_lost else newest
        if any(record["state"] != "stopped" for record in records.values()):
            return newest
        return self._begin_round(newest, records)

    def _end_round(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return the running round `newest`, or its end, which is logged, if a node is lost, can't be reached or
        can be added, or if all instances have succeeded."""
        members = {name: records[name] for name in newest.counts if name in records}
        states = {name: r["state"] for name, r in members.items() if r["round"] == newest.number}
        if lost := newest.lost_nodes(records):
            why = _lost_message(lost)
        elif list(states.values()) == ["done"] * len(newest.counts):
            return replace(newest, state="finished")
        elif stopped := [name for name, state in states.items() if state == "stopped"]:
            why = f"node {', '.join(stopped)} has stopped its instances"
        elif late := self._unreached_node(members):
            why = f"node {self.name} can't reach node {late}"
        elif "done" not in states.values() and self._can_grow(newest, records):
            return replace(newest, state="stopped")
        else:
            return newest
        if self._is_last(newest):
            return replace(newest, state="given up", why=why)
        self._log.warning(why)
        return replace(newest, state="stopped")

    def _unreached_node(self, members: Mapping[str, Record]) -> str:
        """Return the name and the error of a node that this one could not reach for a while; "", if it could
        reach all."""
        for name, record in members.items():
            error = self._reach and self._reach.errors.get(record["id"])
            since = self._reached.setdefault(record["id"], self._clock)
            if not error:
                self._reached[record["id"]] = self._clock
            elif self._clock - since > _UNREACHED:
                return f"{name}{error}"
        return ""

    def _can_grow(self, newest: Round, records: Mapping[str, Record]) -> bool:
        """Return whether a round with new nodes can begin: they would change the numbers of instances, and a
        checkpoint has been written since the first of them came, which is logged. Its first node decides."""
        if self.name != next(iter(newest.counts)) or not records.keys() - newest.counts.keys():
            return False
        counts = self._counts(self._best_group(records), records)
        is_same = sorted(counts.values()) == sorted(newest.counts.values())
        if is_same or sum(counts.values()) < newest.instances:
            return False
        call = self._newest_checkpoint()
        if self._grow_after is None:
            self._grow_after = call
            self._log.info("a node has come, which is added after the next checkpoint")
        return call > self._grow_after

    def _begin_round(self, newest: Round, records: Mapping[str, Record]) -> Round:
        """Return the round that follows the ended round `newest`; `newest`, if no round can begin (yet)."""
        group = self._best_group(records)
        counts = self._counts(group, records)
        if not counts:
            return self._report_missing(newest, records, sum(records[name]["slots"] for name in group))
        is_early = not newest.counts and time.monotonic() < self._changed + _FIRST_ROUND_PATIENCE
        if is_early and len(group) < self._node.count:
            return newest
        failures, call = newest.failures, newest.newest_call
        lost = newest.lost_nodes(records)
        if newest.state == "failed" and lost:
            self._log.warning(_lost_message(lost))
        elif newest.state == "failed" and self.request.is_elastic:
            call = self._newest_checkpoint()
            failures = failures + 1 if call == newest.newest_call else 1
            if failures > self.request.max_restarts:
                times = f"{failures} times without a new checkpoint (--max-restarts)"
                self._log.error(f"instances have failed {times}")
                return replace(newest, state="given up", node=self.name)
        self._grow_after = None
        first = records[next(iter(counts))]
        number = max(newest.number, *(record["round"] for record in records.values())) + 1
        return Round(
            number,
            "runs",
            self._command,
            address=first["address"],
            store=first["store"] or f"file:{self.folder}/store-{number}",
            counts=counts,
            ids={name: records[name]["id"] for name in counts},
            failures=failures,
            newest_call=call,
        )

    def _best_group(self, records: Mapping[str, Record]) -> list[str]:
        """Return the names of nodes that all reach each other and have room for the most instances."""

        def reaches(one: str, other: str) -> bool:
            reached = records[one]["reached"]
            return reached is None or records[other]["id"] in reached

        groups: list[list[str]] = []
        for start in records:
            group = [start]
            for name in records:
                if name != start and all(reaches(name, one) and reaches(one, name) for one in group):
                    group.append(name)
            groups.append([name for name in records if name in group])
        return max(groups, key=lambda group: sum(self._counts(group, records).values()))

    def _counts(self, group: Iterable[str], records: Mapping[str, Record]) -> dict[str, int]:
        """Return the number of instances by node, if these nodes run a round."""
        return instances_by_node(self.request, {name: records[name]["slots"] for name in group})

    def _newest_checkpoint(self) -> int:
        """Return the number of the call after which the newest checkpoint was written; -1: no checkpoint."""
        return max(map(call_number, complete_checkpoints(Path(self.request.checkpoint_dir))), default=-1)

    def _report_missing(self, newest: Round, records: Mapping[str, Record], room: int) -> Round:
        """Warn each minute that the nodes have room for `room` instances only, and which nodes are missing.
        Return `newest`; after `Node.patience` seconds "given up"."""
        waited = min(time.monotonic() - self._changed, self._node.patience)
        if self.request.is_elastic:
            why = f"there is room for {room} instances, and {self.request.fewest_instances} are the fewest"
        else:
            missing = ", ".join(str(rank) for rank in range(self._node.count) if str(rank) not in records)
            why = f"of {self._node.count} nodes these have not come in {waited:.0f} s: {missing}"
        if waited == self._node.patience:
            self._log.error(why)
            return replace(newest, state="given up", node=self.name)
        if newest.counts or waited > _WARNING_INTERVAL:
            self._warn(f"{why}; {_wait_message(self._node.patience - waited)}")
        return newest

    def _warn_if_left_out(self, newest: Round) -> None:
        """Warn each minute that this node can't take part since it can't reach a node of the running round."""
        errors = self._reach.errors if self._reach else {}
        for name in [name for name, id in newest.ids.items() if errors.get(id)]:
            self._warn(
                f"this node is left out until it can reach node {name}{errors[newest.ids[name]]}\n"
                "  fix: set MASTER_ADDR for all popruns, to an address in the network that the hosts share;"
                f" {SECRET} is equal on all, if set"
            )


def _lost_message(names: str) -> str:
    """Return a message about the lost nodes with these names, which are joined by commas."""
    several = "s" if "," in names else ""
    return f"node{several} {names} lost: poprun has ended there, it is stopped, or the host does not answer"


def _wait_message(seconds: float) -> str:
    """Return a message that this node waits up to `seconds` for lost or missing nodes, with a fix."""
    text = f"this one waits for {seconds:.0f} s (POPRUN_NODE_TIMEOUT)"
    return f"{text}\n  fix: start the same command there again"
