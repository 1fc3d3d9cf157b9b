"""Choice of the leader of an elastic training, by files in its checkpoint folder.

    .poprun/secret     which callers of the leader's store have to know; only its owner can read it
    .poprun/leader-3   the third leader: node, host, address, and a digest of the command

A node that can't connect to the newest leader serves a store of its own and creates the next file; of several nodes
that try, one succeeds, since a hard link to a name that exists fails. The others connect to that node.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from popdist.checkpoint_files import call_of, complete_checkpoints
from popdist.signed_store import Server, SignedStore, StoreError, is_loopback, own_address
from popengine.environment import SECRET

from .command_line import CommandLine

_HOST = socket.gethostname()
_PATIENCE = 3.0  # seconds to try to connect to a leader on another host
_ELSEWHERE = "192.0.2.1"  # an address that is reserved for documentation
_SLOWEST = 30.0  # seconds for a leader to answer, at least


def node_name() -> str:
    return f"{_HOST}-{os.getpid()}"


class Misfit(Exception):
    """This poprun can't take part in the training of its checkpoint folder."""


class Election:
    """This node's connection to the leader, or its own leadership."""

    def __init__(self, request: CommandLine) -> None:
        self._checkpoints = Path(request.checkpoint_dir)
        self._folder = self._checkpoints / ".poprun"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Misfit(f"--checkpoint-dir {self._checkpoints}: {error.strerror}") from None
        self._timeout = max(request.hang_timeout, _SLOWEST) if request.hang_timeout else None
        if SECRET not in os.environ:
            self._create("secret", secrets.token_hex(32))
        self.secret = os.environ.get(SECRET) or (self._folder / "secret").read_text()
        self.host = _address()
        command = json.dumps([request.replicas, request.program])
        self._digest = hmac.digest(self.secret.encode(), command.encode(), "sha256").hex()
        self._number = 0  # of the leader
        self.leader, self.previous_leader = "", ""

    def join(self) -> tuple[Server | None, SignedStore, str]:
        """Connect to the leader, or become it.

        Returns: the store's server, if this node leads; the connection to the store; the store's address
        Raises:
            Misfit: the leader runs another command, has another secret, or listens for its own host only
        """
        while True:
            number, text = self._newest()
            if text:
                leader = json.loads(text)
                host, _, port = leader["address"].rpartition(":")
                store = self._connected(host, int(port), leader)
                if store is not None:
                    self._number, self.leader = number, leader["node"]
                    return None, store, leader["address"]
            server = Server(self.host, 0, self.secret)
            address = f"{self.host}:{server.port}"
            me = {"node": node_name(), "host": _HOST, "address": address, "digest": self._digest}
            if self._create(f"leader-{number + 1}", json.dumps(me)):
                self._number, self.previous_leader, self.leader = number + 1, self.leader, me["node"]
                with suppress(OSError):
                    (self._folder / f"leader-{number}").unlink()
                return server, SignedStore(self.host, server.port, self.secret, _PATIENCE), address
            server.close()

    def check_leads(self) -> None:
        """Raise StoreError, if another node has become the leader, since it could not connect to this one."""
        if self._newest()[0] != self._number:
            raise StoreError("another node leads")

    def resign(self) -> None:
        """Remove this leader's file at the end of the training."""
        with suppress(OSError):
            (self._folder / f"leader-{self._number}").unlink()

    def newest_call(self) -> int:
        """Return the calls before the newest checkpoint; -1 without a checkpoint."""
        return max(map(call_of, complete_checkpoints(self._checkpoints)), default=-1)

    def _connected(self, host: str, port: int, leader: dict[str, str]) -> SignedStore | None:
        """Return a connection to a leader's store, None if the leader is gone."""
        is_here = leader["host"] == _HOST
        if is_loopback(host) and not is_here:
            raise Misfit(
                f"the training of {self._checkpoints} runs on {leader['host']}, and can't be reached from other hosts\n"
                "  fix: set MASTER_ADDR for all popruns, to an address in the network that the hosts share;"
                f" if that training is gone, remove {self._folder}"
            )
        try:
            store = SignedStore(host, port, self.secret, 0.0 if is_here else _PATIENCE, self._timeout)
        except StoreError as error:
            if leader["digest"] == self._digest or "secret" not in str(error):
                return None
            store = None
        if leader["digest"] != self._digest:
            if store is not None:
                store.close()
            raise Misfit(
                f"{self._checkpoints} is in use by a training with another command\n"
                f"  fix: the same --num-replicas, program and {SECRET} on all nodes, or another --checkpoint-dir"
            )
        return store

    def _newest(self) -> tuple[int, str]:
        """Return the number and the file of the newest leader; 0, if there is none."""
        number = max((int(path.name[7:]) for path in self._folder.glob("leader-*")), default=0)
        with suppress(OSError):
            return number, (self._folder / f"leader-{number}").read_text()
        return number, ""

    def _create(self, name: str, text: str) -> bool:
        """Create a file with its contents, readable by its owner only. Returns: False, if the file exists."""
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, self._folder / name)
            except FileExistsError:
                return False
        return True


def _address() -> str:
    """Return this host's address in the network of MASTER_ADDR; without that variable only this host reaches it."""
    named = os.environ.get("MASTER_ADDR")
    try:
        return own_address(named) if named else "127.0.0.1"
    except OSError:  # the name of a pod that is gone
        return own_address(_ELSEWHERE)
