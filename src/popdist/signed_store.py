"""A key-value store for rendezvous: one process serves it, the others connect.

torch's TCPStore serves every caller. This server serves only callers that know the secret: each message is signed with
HMAC-SHA256 over the secret, nonces of both ends and a counter, so that no message can be forged, replayed or reflected.
Messages are JSON and not encrypted; nothing is unpickled. A caller that has not shown the secret has 10 s, 4 KiB and
one of 64 places; if no place is free, the oldest of these callers is disconnected.
"""

import hashlib
import hmac
import ipaddress
import json
import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from popengine.environment import SECRET

_NONCE = 16  # bytes
_HANDSHAKE = 10.0  # seconds
_STRANGERS = 64  # callers that have not shown the secret
_FIRST, _LARGEST = 1 << 12, 1 << 22  # bytes of the first message and of later ones
_REFUSED = bytes(4)  # the size in place of an answer to a wrongly signed message
_OUTSIDE_ADDRESS = "192.0.2.1"  # reserved for documentation: reached by the default route
# A host that lost its power is noticed after 10 + 3 * 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


class StoreError(RuntimeError):
    """The error of a server that can't be reached or doesn't answer, or of a key that is not set in time."""


class _SignedConnection:
    """A connected socket that sends and receives signed JSON messages until `deadline` (None: no limit)."""

    def __init__(self, connected: socket.socket, secret: str, is_server: bool, deadline: float) -> None:
        self._socket = connected
        self.deadline: float | None = deadline
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connected.settimeout(max(deadline - time.monotonic(), 0.01))
        own = os.urandom(_NONCE)
        self._socket.sendall(own)
        peers = self._receive_bytes(_NONCE)
        nonces = peers + own if is_server else own + peers
        names = (b"server", b"client") if is_server else (b"client", b"server")
        self._keys = [hmac.digest(secret.encode(), name + nonces, "sha256") for name in names]
        self._counts = [0, 0]

    def send(self, message: Any) -> None:
        """Send a JSON-serializable message."""
        body = json.dumps(message).encode()
        self._socket.sendall(struct.pack("!I", len(body)) + self._next_signature(0, body) + body)

    def receive(self) -> Any:
        """Return the next message. Raises: OSError; StoreError, if it is too large or wrongly signed"""
        head = self._receive_bytes(4)
        (size,) = struct.unpack("!I", head)
        if head == _REFUSED or size > (_LARGEST if self._counts[1] else _FIRST):
            raise StoreError(
                "it refuses this process's secret" if head == _REFUSED else f"sends {size} bytes"
            )
        signature, body = self._receive_bytes(hashlib.sha256().digest_size), self._receive_bytes(size)
        if not hmac.compare_digest(signature, self._next_signature(1, body)):
            with suppress(OSError):
                self._socket.sendall(_REFUSED)
            raise StoreError("a message with another secret")
        return json.loads(body)

    def _next_signature(self, direction: int, body: bytes) -> bytes:
        """Return the signature of the next message to send (direction 0) or receive (1), and count it."""
        number = struct.pack("!Q", self._counts[direction])
        self._counts[direction] += 1
        return hmac.digest(self._keys[direction], number + body, "sha256")

    def _receive_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises: OSError, if the peer closes the connection, or at the deadline"""
        data = bytearray()
        while len(data) < size:
            left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.01)
            self._socket.settimeout(left)
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the other end has closed the connection")
            data += part
        return bytes(data)


class Server:
    """A store that threads of this process serve until it ends, at a name or address of this host (port 0: any free
    port). Callers must know `secret`; if it is "", every caller is served. With `is_open` other hosts connect: if
    `host` has a loopback address, the server also listens at `own_address(host)`. Raises: OSError"""

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        is_open: bool = False,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._secret = secret
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, bool] = {}  # oldest first: whether it has shown the secret
        family, address = _resolve_host(host)
        addresses = {address, own_address(host)} if is_open and is_loopback(address) else {address}
        for each in addresses:
            listening = socket.create_server((each, port), family=family, backlog=1024)
            self.port: int = listening.getsockname()[1]
            threading.Thread(target=self._accept_connections, args=(listening,), daemon=True).start()
        if not secret and not all(map(is_loopback, addresses)):
            warn(
                f"the store at {host} serves every caller: {SECRET} is not set\n"
                f"  fix: export {SECRET}=$(openssl rand -hex 32), with the same value in all processes"
            )

    def _accept_connections(self, listening: socket.socket) -> None:
        """Accept connections, each served by a thread of its own."""
        while True:
            try:
                connected, _ = listening.accept()
                with self._lock:
                    self._callers[connected] = False
                    strangers = [each for each, is_known in self._callers.items() if not is_known]
                    if len(strangers) > _STRANGERS:
                        del self._callers[strangers[0]]
                        _shut_down(strangers[0])
                threading.Thread(target=self._serve_connection, args=(connected,), daemon=True).start()
            except (OSError, RuntimeError):  # too many open files or threads in this process
                time.sleep(0.05)

    def _serve_connection(self, connected: socket.socket) -> None:
        """Answer a client's messages until the connection ends or a message is invalid; then delete its held keys."""
        held: set[str] = set()
        with connected, suppress(OSError, StoreError, ValueError, TypeError, RecursionError):
            deadline = time.monotonic() + _HANDSHAKE
            channel = _SignedConnection(connected, self._secret, is_server=True, deadline=deadline)
            while True:
                message = channel.receive()
                channel.deadline = None
                with self._lock:
                    self._callers[connected] = True
                    answer = _execute_message(self._values, held, message)
                channel.send(answer)
        with self._lock:
            self._callers.pop(connected, None)
            for key in held:
                self._values.pop(key, None)


def _execute_message(values: dict[str, str], held: set[str], message: Sequence[Any]) -> Any:
    """Return the answer to a client's message, which reads or changes the store's `values` in place. "hold" also adds
    the key to `held`, the keys that are deleted when the client's connection ends."""
    match message:
        case "get", keys:
            return [values.get(key) for key in keys]
        case "set", key, value:
            values[key] = value
        case "add", key, amount:
            values[key] = str(int(values.get(key, "0")) + amount)
            return int(values[key])
        case "compare_set", key, expected, desired:
            if values.get(key, "") == expected:
                values[key] = desired
            return values.get(key, expected)
        case "delete", key:
            return values.pop(key, None) is not None
        case "hold", key, value:
            if key in values and key not in held:
                return False
            values[key] = value
            held.add(key)
            return True
        case _:
            raise ValueError(f"no operation of a store: {message!r}")


def _shut_down(connected: socket.socket) -> None:
    """End the waits of threads that use a socket, which then close it."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


class SignedStore(dist.Store):
    """A connection to a `Server`, with the interface of a torch.distributed store.

    Args:
        patience: seconds to wait until the server listens, and in `get` and `wait` until keys are set
        timeout:  seconds to wait for each answer; None: no limit
    Raises: StoreError, if no server answers in time, or if it has another secret or is no store
    """

    def __init__(
        self, host: str, port: int, secret: str, patience: float, timeout: float | None = None
    ) -> None:
        super().__init__()
        self._patience, self._timeout, self._lock = patience, timeout, threading.Lock()
        until = time.monotonic() + patience
        while True:
            deadline = max(until, time.monotonic() + _HANDSHAKE)
            try:
                self._socket = socket.create_connection((host, port), timeout=deadline - time.monotonic())
                self._channel = _SignedConnection(self._socket, secret, is_server=False, deadline=deadline)
                self._channel.send(("get", []))
                self._channel.receive()
                return
            except OSError as error:  # also of a server that disconnects the oldest of too many strangers
                if time.monotonic() > until:
                    raise StoreError(str(error)) from None
            except StoreError as error:
                raise StoreError(
                    f"{host}:{port} does not take this process's secret, or serves something else ({error})"
                ) from None
            time.sleep(0.05)

    def close(self) -> None:
        """Close the connection; the server then deletes the keys that `set_while_connected` has set."""
        _shut_down(self._socket)
        self._socket.close()

    def set_while_connected(self, key: str, value: str) -> bool:
        """Set a key until this connection ends; return False, and change nothing, if `set` or another
        connection has set the key."""
        return self._request("hold", key, value)

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of `keys`, in the same order; None for a key that is not set."""
        return self._request("get", list(keys))

    # ---- methods of dist.Store -----------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, _to_latin1(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        (value,) = self.read([key])
        return (value or "").encode("latin-1")

    def add(self, key: str, value: int) -> int:
        return self._request("add", key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        values = _to_latin1(expected_value), _to_latin1(desired_value)
        return self._request("compare_set", key, *values).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return self._request("delete", key)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self.read(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._patience if timeout is None else timeout.total_seconds()
        until, pause = time.monotonic() + seconds, 0.001
        while not self.check(keys):
            if time.monotonic() > until:
                raise StoreError(f"{', '.join(keys)} not set after {seconds:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def _request(self, *message: Any) -> Any:
        """Send a message and return the server's answer. Raises: StoreError, if the connection is lost."""
        try:
            with self._lock:
                self._channel.deadline = self._timeout and time.monotonic() + self._timeout
                self._channel.send(message)
                return self._channel.receive()
        except OSError as error:
            raise StoreError(f"the connection to the process that keeps the store is lost: {error}") from None


def _to_latin1(value: str | bytes) -> str:
    """Return bytes, or a text's bytes in UTF-8, as a text of one latin-1 character per byte, for JSON."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _resolve_host(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the text of a host's address: IPv4, or IPv6 if it has no other."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


def own_address(host: str = _OUTSIDE_ADDRESS) -> str:
    """Return this host's IP address on the route to `host`, which need not answer. For a name with a loopback address
    other than "localhost", to which Debian maps a host's own name, return that on the default route."""
    family, address = _resolve_host(host)
    if is_loopback(address) and host not in ("localhost", address):
        with suppress(OSError):
            return own_address()
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address, which only this host reaches."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
