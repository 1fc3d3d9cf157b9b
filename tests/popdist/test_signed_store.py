"""The store by which processes meet: keys and values, and what callers without the secret get."""

import os
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest

from popdist.signed_store import Server, SignedStore, StoreError

SECRET = "of this test"
REFUSED = bytes(4)  # by which clients tell another secret from a connection that is lost


@pytest.fixture
def server():
    return Server("localhost", 0, SECRET)


def connected(server):
    return SignedStore("localhost", server.port, SECRET, 20)


def test_connections_read_what_others_have_set(server):
    first, second = connected(server), connected(server)
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff" and not second.check(["a", "b"])
    assert [second.add("n", 2), first.add("n", 1)] == [2, 3]
    assert second.compare_set("c", "", "mine") == b"mine" and first.compare_set("c", "", "yours") == b"mine"
    assert first.delete_key("a") and not second.delete_key("a")


def test_get_waits_for_a_key_and_names_it_when_it_does_not_come(server):
    store, other = connected(server), connected(server)
    threading.Timer(0.2, other.set, ("late", "1")).start()
    assert store.get("late") == b"1"
    with pytest.raises(StoreError, match="never not set after"):
        SignedStore("localhost", server.port, SECRET, 0.1).get("never")


def test_a_key_that_is_held_is_its_holders_alone_and_vanishes_with_its_connection(server):
    holder, other = connected(server), connected(server)
    assert (
        holder.set_while_connected("node", "1")
        and holder.set_while_connected("node", "2")
        and not other.set_while_connected("node", "3")
    )
    assert other.read(["node"]) == ["2"]
    holder.close()
    until = time.monotonic() + 240
    while not other.set_while_connected("node", "3"):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", ["", "guessed", SECRET + " "])
def test_another_secret_is_refused(server, wrong):
    with pytest.raises(StoreError, match="does not take this process's secret"):
        SignedStore("localhost", server.port, wrong, 5)


def spoken(server, *messages):
    """What the server answers to bytes after its greeting."""
    with socket.create_connection(("localhost", server.port), 20) as caller:
        found = b""
        with suppress(ConnectionError):
            for message in (b"n" * 16, *messages):
                caller.sendall(message)
            while part := caller.recv(4096):
                found += part
        return found[16:]


def test_messages_that_are_forged_or_too_large_are_not_answered(server):
    body = b'["set", "a", "b"]'
    assert spoken(server, len(body).to_bytes(4, "big"), bytes(32), body) == REFUSED
    assert spoken(server, (1 << 31).to_bytes(4, "big"), bytes(32), bytes(4096)) == b""
    assert connected(server).read(["a"]) == [None]


def test_a_recorded_connection_can_not_be_played_again(server):
    recorded = []
    with socket.create_server(("localhost", 0)) as between:

        def pass_on():
            inner, _ = between.accept()
            outer = socket.create_connection(("localhost", server.port), 20)
            threading.Thread(target=copied, args=(outer, inner, []), daemon=True).start()
            copied(inner, outer, recorded)

        threading.Thread(target=pass_on, daemon=True).start()
        store = SignedStore("localhost", between.getsockname()[1], SECRET, 20)
        store.add("n", 1)
    nonce, *messages = recorded[0][:16], recorded[0][16:], *recorded[1:]
    assert len(nonce) == 16 and messages
    assert spoken(server, *messages) == REFUSED
    assert connected(server).read(["n"]) == ["1"]


def copied(source, target, recorded):
    with suppress(OSError):
        while part := source.recv(4096):
            recorded.append(part)
            target.sendall(part)


def test_a_server_listens_at_the_address_that_was_named_only(server):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)
    with pytest.raises(OSError, match="assign"):
        Server("192.0.2.77", 0, SECRET)


def stranger(server, data=b""):
    caller = socket.create_connection(("localhost", server.port), 20)
    with suppress(ConnectionError):
        caller.sendall(data)
    return caller


def is_disconnected(caller):
    """Whether the server has closed a connection on which it sends its greeting only."""
    try:
        caller.setblocking(False)
        while caller.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_strangers_take_few_places_and_processes_of_the_training_connect_at_once(server):
    callers = []
    for number in range(600):
        callers.append(stranger(server, b"n" * (number % 40)))
        if number % 100 == 99:
            connected(server).set(str(number), "here")
    until = time.monotonic() + 60
    while sum(map(is_disconnected, callers)) < 600 - 64:
        assert time.monotonic() < until, sum(map(is_disconnected, callers))
        time.sleep(0.01)
    assert connected(server).check([str(number) for number in range(99, 600, 100)])
    for caller in callers:
        caller.close()


def test_a_slow_stranger_has_some_seconds_for_all_of_its_first_message(server):
    caller, sent = stranger(server, b"n" * 16 + (4000).to_bytes(4, "big")), 0
    while not is_disconnected(caller):
        assert sent < 1000
        with suppress(ConnectionError):
            caller.setblocking(True)
            caller.sendall(b"n")
        sent += 1
        time.sleep(0.05)


def test_the_first_message_is_short(server):
    caller = stranger(server, b"n" * 16 + (1 << 13).to_bytes(4, "big"))
    until = time.monotonic() + 5  # the limit of time is longer
    while not is_disconnected(caller) and time.monotonic() < until:
        time.sleep(0.01)
    assert is_disconnected(caller)


def test_a_server_goes_on_when_no_more_files_could_be_opened(server):
    before, callers = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                callers.append(stranger(server))
        time.sleep(0.3)  # the server meets the error, too; if it does later, the test proves less
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for caller in callers:
            caller.close()
    assert SignedStore("localhost", server.port, SECRET, 60, timeout=60).read(["a"]) == [None]


def test_nested_json_ends_its_connection_only(server, monkeypatch):
    errors, before = [], set(threading.enumerate())
    caller = connected(server)
    (serving,) = set(threading.enumerate()) - before
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr("popdist.signed_store.json.dumps", lambda message: "[" * 200_000)
        caller.set("a", "b")
    serving.join(60)
    assert connected(server).read(["a"]) == [None] and errors == []
