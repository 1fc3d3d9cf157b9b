"""What listens during a run, and what strangers can do there."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

import listening
import pytest
from launching import LIMIT, elastic

from popdist import store
from poprun import presence

TWO = ("--num-replicas", 2, "--num-instances", 2)
MEETS = (
    "import os, time, popdist\n"
    "popdist.init()\n"
    "popdist.synchronize()\n"
    "os.write(1, f'met {popdist.getInstanceIndex()}\\n'.encode())\n"
    "time.sleep(1000)"
)


def met(poprun, *words):
    """A poprun with two instances that have met, and the addresses at which its processes listen."""
    run = poprun(*words, sys.executable, "-c", MEETS)
    run.until("met 0"), run.until("met 1")
    return run, listening.addresses({*run.processes(), run.pid, run.agent()})


def test_a_run_on_one_host_has_no_store_that_listens(poprun):
    """Its instances connect by a file in poprun's private folder."""
    run, addresses = met(poprun, *TWO)
    assert listening.addresses([run.pid, run.agent()]) == []
    assert len(addresses) >= 2  # gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []


def test_on_one_host_everything_listens_on_loopback_only(poprun, tmp_path):
    _, addresses = met(poprun, *elastic(tmp_path / "c"))
    assert len(addresses) >= 3  # the store, and gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []


STRANGERS_COME = """
import os, sys, time
import popdist, torch

popdist.init()
popdist.synchronize()
where = f"{popdist.getInstanceIndex()} in round {os.environ['PANDO_RESTARTS']}"
os.write(1, f"met {where} as {os.getpid()}.\\n".encode())
for step in ("crowded", "alone", "never"):
    while not os.path.exists(f"{sys.argv[1]}/{step}"):
        time.sleep(0.05)
    popdist.synchronize()
    if step == "alone":
        torch.distributed.barrier(torch.distributed.new_group())  # connects again, through the store
    os.write(1, f"{step} {where}\\n".encode())
"""
HELLO = b"\0" + struct.pack("I", 0x3C85F7CE)  # with it a client of torch's store begins


@pytest.fixture
def stranger():
    """A function that connects to a port of this host, and sends bytes; returns the connection, closed at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2,048 descriptors, and has {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    connections = []

    def connect(port, message=b""):
        connections.append(socket.create_connection(("127.0.0.1", port), 60))
        with suppress(OSError):  # the store has closed it
            connections[-1].sendall(message)
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_at_the_store_neither_freeze_a_run_nor_end_it(poprun, tmp_path, stranger):
    """One byte of a stranger froze the store; more strangers than descriptors aborted poprun."""
    run = poprun(*elastic(tmp_path / "c"), sys.executable, "-c", STRANGERS_COME, tmp_path)
    run.until("met 0 in round 0"), run.until("met 1 in round 0")
    (record,) = (tmp_path / "c" / ".poprun").glob("node-*")
    port = int(json.loads(record.read_text())["address"].rpartition(":")[2])
    stranger(port, b"\0")
    stranger(port, HELLO + b"\1" + struct.pack("Q", 1000) + b"half a key")
    stranger(port, HELLO + b"\1" + struct.pack("Q", 8 << 30) + b"x" * (1 << 20))
    stranger(port, HELLO + b"\0" + struct.pack("Q", 1) + b"k" + struct.pack("Q", 8 << 30) + b"x" * (1 << 20))
    (line,) = [line for line in run.said().splitlines() if line.startswith("met 1 in round 0 as ")]
    os.kill(int(line.split()[-1][:-1]), signal.SIGKILL)
    run.until("met 0 in round 1"), run.until("met 1 in round 1")  # all meet again through the store
    resource.prlimit(run.agent(), resource.RLIMIT_NOFILE, (1024, 1024))
    crowd = [stranger(port) for _ in range(1100)]
    run.until("[Errno 24] Too many open files")
    (tmp_path / "crowded").touch()
    run.until("crowded 0 in round 1"), run.until("crowded 1 in round 1")
    for connection in crowd:
        connection.close()
    (tmp_path / "alone").touch()
    run.until("alone 0 in round 1"), run.until("alone 1 in round 1")
    for _ in range(1100):
        stranger(port)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.said()
    assert "round 2" not in run.said() and "Traceback" not in run.said()
    assert run.nothing_left()


def test_a_node_whose_store_does_not_answer_counts_as_unreached_until_it_does():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    serving = multiprocessing.get_context("fork").Process(target=serve_forever, args=(sender,))
    serving.start()
    reach = presence.Reach()
    reach.addresses = {"other": f"127.0.0.1:{receiver.recv()}"}
    try:
        for number, error in (
            (signal.SIGSTOP, "its store has not answered for 10 s"),
            (signal.SIGCONT, ""),
            (signal.SIGKILL, "Connection refused"),
        ):
            os.kill(serving.pid, number)
            until = time.monotonic() + LIMIT
            while error not in (said := reach.errors.get("other", "?")) or bool(error) != bool(said):
                assert time.monotonic() < until, said
                time.sleep(0.05)
            assert reach.reached() == ([] if error else ["other"])
    finally:
        serving.kill()


def serve_forever(sender):
    serving = store.serve("127.0.0.1", 0, LIMIT)
    sender.send(serving.port)
    time.sleep(LIMIT)
