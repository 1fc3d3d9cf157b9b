"""The leader of a training: node 0, or in an elastic training a node named by files in the checkpoint folder.

    .poprun/secret     the secret that the leader's store requires; only the file's owner can read it
    .poprun/leader-3   the third leader: node, host, address, and a digest of the command

A node that can't connect to the newest leader starts a store's server and creates the next file. If several nodes
do this, one succeeds, since a hard link to a name that exists fails; the others connect to this one.
"""

import hmac
import json
import os
import secrets
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from popdist.signed_store import SecretError, Server, SignedStore, StoreError, is_loopback, own_address
from popengine.environment import SECRET

from .command_line import CommandLine
from .topology import Node

_HOST = socket.gethostname()
_PATIENCE = 3.0  # seconds to try to connect to a leader on another host
_SHORTEST_TIMEOUT = 30.0  # seconds for a leader to answer, also if --hang-timeout is shorter


class JoinError(Exception):
    """Raised if this poprun can't take part in the training of its checkpoint folder."""


class TrainingLost(Exception):
    """Raised if the training can't go on. Its text is empty if the cause has been printed."""


class FirstNode:
    """Connects this node to the leader of a training that is not elastic: node 0."""

    leader = "0"

    def __init__(self, request: CommandLine, node: Node) -> None:
        self._node, self._log = node, request.log
        self.name, self.host = str(node.rank), node.address
        self.secret = os.environ.get(SECRET) or (secrets.token_hex(32) if node.count == 1 else "")

    def connect(self) -> tuple[Server | None, SignedStore]:
        """Connect to the store of node 0; on node 0 start the store's server first.

        Returns: the store's server (None: not on this node), the connection to the store
        Raises: TrainingLost, if node 0 can't be reached in time, or can't listen at its address
        """
        node, until = self._node, time.monotonic() + self._node.patience
        server = self._start_server(until) if node.rank == 0 else None
        port = server.port if server else node.port
        address = f"{node.address}:{port}"
        if node.count > 1:
            self._log.info(f"node {node.rank} of {node.count} waits for the others at {address}")
        try:
            return server, SignedStore(node.address, port, self.secret, max(until - time.monotonic(), 0.0))
        except StoreError as error:
            raise TrainingLost(
                f"node 0 is not to be reached at {address}: {error}\n"
                "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there;"
                f" {SECRET} is equal on all nodes, if it is set"
            ) from None

    def _start_server(self, until: float) -> Server:
        """Start the store's server and return it; retry until `until` while the node's name has no address.
        Raises: TrainingLost, if the server can't listen there"""
        node, server = self._node, None
        while server is None:
            try:
                server = Server(node.address, node.port, self.secret, is_open=node.count > 1)
            except OSError as error:
                if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                    raise TrainingLost(
                        f"node 0 can't listen at {node.address}:{node.port}: {error}\n"
                        "  fix: MASTER_ADDR and MASTER_PORT are an address of this host and a free port"
                    ) from None
                time.sleep(0.5)  # the name of a pod may not resolve yet
        if server.warning:
            self._log.warning(server.warning)
        return server

    def check_is_leader(self) -> None:
        """Do nothing: node 0 is the leader as long as its store exists."""

    def remove_leader_files(self) -> None:
        """Do nothing: node 0 needs no file."""


class Election:
    """Connects this node to the leader of an elastic training: another node, or this node itself."""

    def __init__(self, request: CommandLine) -> None:
        self.name = f"{_HOST}-{os.getpid()}"
        self.leader = ""  # the name of the newest leader
        self._checkpoints = Path(request.checkpoint_dir)
        self._folder = self._checkpoints / ".poprun"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JoinError(f"--checkpoint-dir {self._checkpoints}: {error.strerror}") from None
        self._timeout = max(request.hang_timeout, _SHORTEST_TIMEOUT) if request.hang_timeout else None
        if SECRET not in os.environ:
            self._create_file("secret", secrets.token_hex(32))
        self.secret = os.environ.get(SECRET) or (self._folder / "secret").read_text()
        named = os.environ.get("MASTER_ADDR")
        try:
            self.host = own_address(named) if named else "127.0.0.1"
        except OSError:  # the name of a pod that has ended
            self.host = own_address()
        command = json.dumps([request.replicas, request.program])
        self._digest = hmac.digest(self.secret.encode(), command.encode(), "sha256").hex()
        self._number = 0  # of the newest leader's file

    def connect(self) -> tuple[Server | None, SignedStore]:
        """Connect to the leader's store; if no leader can be reached, become the leader, with a new store.

        Returns: the store's server (None: not on this node), the connection to the store
        Raises: JoinError, if the leader runs another command, has another secret, or serves its own host only
        """
        while True:
            number, newest = self._newest_leader()
            store = self._connect_to(newest) if newest else None
            if store is not None:
                self._number, self.leader = number, newest["node"]
                return None, store
            server = Server(self.host, 0, self.secret)
            address = f"{self.host}:{server.port}"
            own = {"node": self.name, "host": _HOST, "address": address, "digest": self._digest}
            if self._create_file(f"leader-{number + 1}", json.dumps(own)):
                self._number, self.leader = number + 1, self.name
                return server, SignedStore(self.host, server.port, self.secret, _PATIENCE)
            server.close()

    def check_is_leader(self) -> None:
        """Raise a StoreError if another node, which could not connect to this one, has become the leader."""
        if self._newest_leader()[0] != self._number:
            raise StoreError("another node leads")

    def remove_leader_files(self) -> None:
        """Remove the files `leader-N` of this leader and of all earlier leaders, after the training."""
        with suppress(OSError):
            for number in range(self._number + 1):
                (self._folder / f"leader-{number}").unlink(missing_ok=True)

    def _connect_to(self, leader: dict[str, str]) -> SignedStore | None:
        """Return a connection to the store of the leader that a file describes; None, if it does not answer.

        Raises: JoinError, if the leader runs another command, has another secret, or serves its own host only
        """
        host, _, port = leader["address"].rpartition(":")
        is_here = leader["host"] == _HOST
        if is_loopback(host) and not is_here:
            raise JoinError(
                f"the training of {self._checkpoints} runs on {leader['host']}, and can't be reached from other hosts\n"
                "  fix: set MASTER_ADDR for all popruns, to an address in the network that the hosts share;"
                f" if that training is gone, remove {self._folder}"
            )
        store = None
        try:
            store = SignedStore(host, int(port), self.secret, 0.0 if is_here else _PATIENCE, self._timeout)
        except StoreError as error:
            if not isinstance(error, SecretError):
                return None
        if leader["digest"] != self._digest:
            raise JoinError(
                f"{self._checkpoints} is in use by a training with another command\n"
                f"  fix: the same --num-replicas, program and {SECRET} on all nodes, or another --checkpoint-dir"
            )
        return store

    def _newest_leader(self) -> tuple[int, dict[str, str]]:
        """Return the number of the newest leader (0: none), and the contents of its file ({}: no file)."""
        number = max((int(path.name[7:]) for path in self._folder.glob("leader-*")), default=0)
        with suppress(OSError):
            return number, json.loads((self._folder / f"leader-{number}").read_text())
        return number, {}

    def _create_file(self, name: str, text: str) -> bool:
        """Create a file that only its owner can read, atomically; return False if the file exists already."""
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, self._folder / name)
            except FileExistsError:
                return False
        return True
