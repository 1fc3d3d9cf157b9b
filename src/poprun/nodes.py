"""This node (a poprun) among the nodes of a run: which rounds it starts instances in, and when a round ends.

fixed number of instances    `NodeOfRun` starts this node's share, and nodes share nothing: the process that started
                             all popruns (`hosts.py`, a scheduler) sees their exit codes, ends and restarts them
elastic                      `ElasticNode` reads and writes the shared folder, and applies `rounds.decide`
"""

import hashlib
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from popdist.checkpoint_files import call_number, complete_checkpoints
from popengine.environment import AGENT_STORE, RUN_ID, STORE

from .command_line import CommandLine
from .presence import Presence, Reach
from .rounds import Me, Record, Round, decide, missing_text, new_nodes
from .shared_folder import RunLost, SharedFolder
from .topology import Node, local_instance_count

_POLL = 0.05  # seconds between two reads, while a round forms
_RENEWAL = 1.0  # seconds between two writes of a record
_WARNING_INTERVAL = 60.0  # seconds between two warnings


class NodeOfRun:
    """A node, which starts its share of a fixed number of instances. If it is the only one, it also restarts them.
    `folder` is a temporary folder of this poprun."""

    def __init__(self, request: CommandLine, node: Node, folder: str) -> None:
        self.request, self.node, self.folder = request, node, folder
        self.name = str(node.rank)
        self.round = Round()  # the newest round in which this node has instances

    def lost_peer_path(self, instance: int) -> Path:
        """Return the path of the file that exists while an instance of `round` has lost a peer."""
        return Path(f"{self.folder}/lost-peer-{self.round.number}-{instance}")

    def store_variables(self) -> dict[str, str]:
        """Return variables for instances: their store, unless instance 0 serves it, and a run's id that is equal on
        all nodes, and new for each restart by `hosts.py`."""
        run_id = os.environ.get(RUN_ID, f"poprun-{os.environ.get('PANDO_RESTARTS', '0')}")
        file = {STORE: f"{self.folder}/store-{self.round.number}"} if self.node.count == 1 else {}
        return {RUN_ID: run_id, **file}

    def wait_for_round(self) -> bool:
        """Set the next `round`, and return True; return False if the run has succeeded. Raises: RunLost, if no restart
        is left"""
        number, count = self.round.number + 1, self.node.count
        if number > (self.request.max_restarts if count == 1 else 0):
            raise RunLost("")  # poprun has said which instance failed
        address = f"{self.node.address}:{self.node.port}"
        if count == 1:  # for programs that use torch's own store
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
        counts = {str(rank): local_instance_count(self.request, count) for rank in range(count)}
        self.round = Round(number, "runs", address=address, counts=counts)
        return True

    def round_state(self, is_done: bool) -> str:
        """Return the state of `round`. `is_done`: whether all instances of this node have succeeded"""
        return "finished" if is_done else "runs"

    def end_round(self, has_lost_peer: bool) -> str:
        """End the round after an instance has failed. Return where the failure was that caused this one, if it was not
        on this node; else "". `has_lost_peer`: whether the instance had lost a peer"""
        return "another host" if has_lost_peer and self.node.count > 1 else ""

    def close(self, is_end: bool) -> None:
        """Leave the run. `is_end`: whether it has ended, and this node won't come back"""


class ElasticNode(NodeOfRun):
    """A node of an elastic run. Methods may raise RunLost."""

    def __init__(self, request: CommandLine, node: Node, folder: str) -> None:
        super().__init__(request, node, folder)
        self._shared = SharedFolder(request.checkpoint_dir, folder)
        self.name = self._shared.name
        self._me = Me(self.name, request, node)
        self._presence, self._reach = Presence(), Reach()
        self._log = request.log
        self._id, self._state, self._count = secrets.token_hex(8), "stopped", 0
        command = json.dumps([request.replicas, request.ipus_per_replica, request.program])
        self._command = hashlib.sha256(command.encode()).hexdigest()
        self._text = ""  # of the state that was read last
        self._left_over: str | None = None  # the state in which an earlier run has ended
        self._changed = time.monotonic()  # the last change of `_text`
        self._next_write = self._next_warning = 0.0
        self._since: int | None = None  # `since` of this node's record
        self._announced: set[str] = set()  # new nodes that the log has named

    def store_variables(self) -> dict[str, str]:
        """Return variables for instances: the round's first node serves their store, and its random id is the run's."""
        return {AGENT_STORE: "True", RUN_ID: next(iter(self.round.ids.values()))}

    def wait_for_round(self) -> bool:
        self._since = None
        self._set_state("stopped")
        while True:
            newest = self._poll()
            if newest.state == "finished":
                return False
            if newest.state == "given up":
                raise RunLost(newest.why)
            if newest.state == "runs" and self._is_in_round(newest) and newest.number > self.round.number:
                self.round = newest
                self._set_state("running")
                if newest.why:
                    self._log.warning(newest.why)
                return True
            if newest.state == "runs" and not self._is_in_round(newest):
                self._warn_if_left_out(newest)
            time.sleep(_POLL)

    def round_state(self, is_done: bool) -> str:
        if is_done and self._state != "done":
            self._set_state("done")
        newest = self._poll()
        if newest.state == "stopped" and newest.why:
            self._log.warning(newest.why)
        return newest.state if newest.number == self.round.number else "stopped"

    def end_round(self, has_lost_peer: bool) -> str:
        with suppress(OSError):
            newest = self._read_state()
            if newest.number == self.round.number and newest.state == "runs":
                newest = self._replace_state(replace(newest, state="failed", node=self.name))
            if newest.node not in ("", self.name):
                return f"node {newest.node}"
        return ""

    def close(self, is_end: bool) -> None:
        self._shared.close(is_end)

    def _is_in_round(self, newest: Round) -> bool:
        return newest.ids.get(self.name) == self._id

    def _set_state(self, state: str) -> None:
        """Set the state in this node's record, which is written at once."""
        self._state, self._next_write = state, 0.0

    def _poll(self) -> Round:
        """Renew this node's record; return the newest round, and first change its state or begin the next round, if
        that is due."""
        try:
            if time.monotonic() >= self._next_write:
                self._write_record()
                self._next_write = time.monotonic() + _RENEWAL
            newest = self._read_state()
            self._presence.update(self._shared.read_records())  # newer than the state: no new node is lost
            records = self._records_of_run(newest)
            self._shared.remove_records(self._presence.records.keys() - self._presence.alive())
            if self.name not in records:
                return newest
            if newest.state == "runs":
                names = set(new_nodes(newest, records, self._me) if self._is_in_round(newest) else [])
                if names - self._announced:
                    self._log.info("a node has come, which is added after the next checkpoint")
                self._announced = names
            elif not newest.is_over and (newest.counts or self._seconds_unchanged() > _WARNING_INTERVAL):
                self._warn_of_missing(records)
            changed = decide(newest, records, self._seconds_unchanged(), self._me)
            return newest if changed == newest else self._replace_state(changed)
        except OSError as error:
            self._warn(f"can't use {self.request.checkpoint_dir}: {error}; this node tries again")
            return Round() if self._state == "stopped" else self.round

    def _seconds_unchanged(self) -> float:
        return time.monotonic() - self._changed

    def _read_state(self) -> Round:
        """Return the newest state; `Round()` if there is none or it is damaged. Of a state in which another run has
        ended before this node came, only the number and the command count."""
        if (text := self._shared.read_state()) != self._text:
            self._text, self._changed = text, time.monotonic()
        try:
            newest = Round(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            newest = Round()
        if self._left_over is None:
            self._left_over = text if newest.is_over else ""
        is_left_over = text and text == self._left_over
        return Round(newest.number, command=newest.command) if is_left_over else newest

    def _replace_state(self, new: Round) -> Round:
        """Replace the state that was read last, unless another node has done so; return the newest state."""
        self._shared.replace_state(json.dumps(vars(new)))
        return self._read_state()

    def _write_record(self) -> None:
        self._count += 1
        checkpoints = complete_checkpoints(Path(self.request.checkpoint_dir))
        checkpoint = max(map(call_number, checkpoints), default=-1)
        if self._since is None:
            self._since = checkpoint
        record: Record = {
            "id": self._id,
            "count": self._count,
            "command": self._command,
            "rank": self.node.rank,
            "slots": local_instance_count(self.request, self.node.count),
            "address": self._reach.address,
            "round": self.round.number,
            "state": self._state,
            "reached": self._reach.reached(),
            "unreached": self._reach.lasting_errors(self._presence.clock),
            "checkpoint": checkpoint,
            "since": self._since,
        }
        self._shared.write_record(json.dumps(record))

    def _records_of_run(self, newest: Round) -> dict[str, Record]:
        """Return the records of this run's nodes that are alive; {} while nodes of another run, to which the round
        `newest` belongs, may be alive. Raises: RunLost, if one is"""
        alive = self._presence.alive()
        if newest.command not in ("", self._command):
            rivals = [name for name, record in alive.items() if record["command"] == newest.command]
            if any(self._presence.changed[name] for name in rivals):  # later than this node's first poll
                raise RunLost(
                    f"{self.request.checkpoint_dir} is in use by a run with another command\n"
                    "  fix: the same program, replicas and ipus per replica on all nodes, or another --checkpoint-dir",
                    code=2,
                )
            if rivals:
                return {}
        records = {name: record for name, record in alive.items() if record["command"] == self._command}
        self._reach.addresses = {r["id"]: r["address"] for name, r in records.items() if name != self.name}
        return records

    # ---- messages ------------------------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        """Log a warning, unless one was logged less than a minute ago."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_INTERVAL
            self._log.warning(text)

    def _warn_of_missing(self, records: dict[str, Record]) -> None:
        """Warn each minute that no round can begin."""
        if text := missing_text(records, self._me):
            seconds = max(self.node.patience - self._seconds_unchanged(), 0.0)
            limit = f"this one waits for {seconds:.0f} s (POPRUN_NODE_TIMEOUT)"
            self._warn(f"{text}; {limit}\n  fix: start the same command on another node")

    def _warn_if_left_out(self, newest: Round) -> None:
        """Warn each minute that this node can't take part since it can't reach a node of the running round. It then
        counts as new when it reaches all."""
        errors = self._reach.errors
        for name in [name for name, id in newest.ids.items() if errors.get(id)]:
            self._since = None
            self._warn(
                f"this node is left out until it can reach node {name}{errors[newest.ids[name]]}\n"
                "  fix: set MASTER_ADDR for all popruns, to an address in the network that the hosts share"
            )
