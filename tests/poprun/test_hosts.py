"""One training over two hosts: two network namespaces of this machine, each with an address of its own."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from launching import ONE_EACH, elastic, until_changed

PROGRAM = Path(__file__).parents[1] / "popdist" / "checkpoint_program.py"
LIMIT = 300  # seconds, on a machine that does much else


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture
def hosts():
    """Names of two namespaces that are joined by a cable; their addresses are 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip, of Debian's package iproute2")
    names = [f"pando{number}-{uuid.uuid4().hex[:6]}" for number in range(2)]
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        cable = ["link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable"]
        if (made := ip(*cable, "netns", names[1])).returncode:
            pytest.skip(f"there are no cables between namespaces here: {made.stderr.strip()}")
        for number, name in enumerate(names):
            assert ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable").returncode == 0
            for device in ("lo", "cable"):
                assert ip("-n", name, "link", "set", device, "up").returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def started(hosts, *words, before=((), ()), **variables):
    """A poprun on each host, with words before it on the command line."""
    common = {
        "POPRUN_NUM_NODES": "2",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "POPRUN_NODE_TIMEOUT": str(LIMIT),
        **variables,
    }
    poprun = [sys.executable, "-m", "poprun", "--num-replicas=2", "--num-instances=2", sys.executable]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *before[rank], *poprun, *words],
            env={**os.environ, **common, "POPRUN_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]


def ended(runs):
    """What each poprun has said, at its end."""
    try:
        return [run.communicate(timeout=LIMIT)[0] for run in runs]
    finally:
        for run in runs:
            run.terminate()
            run.wait(LIMIT)


def listening(host):
    """The addresses at which anything listens on a host."""
    found = subprocess.run(
        ["ip", "netns", "exec", host, sys.executable, "-S", "-c", LISTENS],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return set(found.stdout.split())


LISTENS = "import listening; print(*(address for address, _ in listening.addresses()))"
WAITS = """
import popdist, sys, time, os
popdist.init()
popdist.synchronize()
open(f"{sys.argv[1]}/met-{popdist.getInstanceIndex()}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/seen"):
    time.sleep(0.05)
"""


def listening_during(runs, hosts, folder):
    """Where hosts listen while instances have met, and what the popruns have said at their ends."""
    until = time.monotonic() + LIMIT
    while len(list(folder.glob("met-*"))) < 2 and time.monotonic() < until:
        assert all(run.poll() is None for run in runs), ended(runs)
        time.sleep(0.05)
    found = [listening(host) for host in hosts]
    (folder / "seen").touch()
    return found, ended(runs)


def test_hosts_listen_at_the_addresses_by_which_they_reach_each_other_only(hosts, tmp_path):
    runs = started(hosts, "-c", WAITS, tmp_path)
    found, said = listening_during(runs, hosts, tmp_path)
    assert found == [{"10.77.0.1"}, {"10.77.0.2"}], said
    assert [run.returncode for run in runs] == [0, 0] and said == ["", ""]


def test_a_host_whose_own_name_means_loopback_is_reached_by_the_address_of_its_default_route(hosts, tmp_path):
    """As Debian writes it to /etc/hosts; elsewhere the name means the address."""
    names = []
    for number, host in enumerate(hosts):
        assert ip("-n", host, "route", "add", "default", "via", f"10.77.0.{2 - number}").returncode == 0
        names.append(tmp_path / f"hosts-{number}")
    names[0].write_text("127.0.0.1 localhost\n127.0.1.1 first\n")
    names[1].write_text("127.0.0.1 localhost\n10.77.0.1 first\n")
    mounts = [f'mount --bind {name} /etc/hosts && exec "$@"' for name in names]
    wrapped = [("unshare", "--mount", "sh", "-c", mount, "sh") for mount in mounts]
    runs = started(hosts, "-c", WAITS, tmp_path, before=wrapped, MASTER_ADDR="first")
    found, said = listening_during(runs, hosts, tmp_path)
    assert found == [{"10.77.0.1"}, {"10.77.0.2"}], said
    assert [run.returncode for run in runs] == [0, 0]


def test_a_training_over_two_hosts_has_equal_weights(hosts, tmp_path):
    runs = started(hosts, PROGRAM, tmp_path, "3", GLOO_SOCKET_IFNAME="cable")
    said = ended(runs)
    assert [run.returncode for run in runs] == [0, 0], said
    first, second = (torch.load(tmp_path / f"result-{instance}.pt") for instance in range(2))
    assert [n for n, w in first["weights"].items() if not torch.equal(w, second["weights"][n])] == []
    assert not torch.equal(
        first["buffers"][0]["norm.running_mean"], second["buffers"][0]["norm.running_mean"]
    )


ROUNDS = """
import os, sys, time
print("round", os.environ["PANDO_RESTARTS"], "of", os.environ["WORLD_SIZE"] + ".", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def test_of_two_hosts_that_lose_each_other_one_goes_on_and_the_other_joins_it_later(poprun, hosts, tmp_path):
    """Before, each made itself the leader, and neither updated anything for two minutes."""
    words = elastic(tmp_path, ONE_EACH)
    variables = {"POPRUN_NUM_NODES": "2", "MASTER_ADDR": "10.77.0.9"}  # the first round waits for both
    program = (sys.executable, "-S", "-c", ROUNDS, tmp_path / "end")
    runs = [
        poprun("-v", *words, *program, **variables, TEST_NETWORK=host, POPRUN_NODE_RANK=str(rank))
        for rank, host in enumerate(hosts)
    ]
    for run in runs:
        run.until("round 0 of 2.")
    blackhole = ("-n", hosts[0], "route", "add", "blackhole", "10.77.0.2/32")
    assert ip(*blackhole).returncode == 0
    until = time.monotonic() + LIMIT
    while not (found := [run for run in runs if "round 1 of 1." in run.said()]):
        assert time.monotonic() < until, [run.said() for run in runs]
        time.sleep(0.05)
    (left,) = [run for run in runs if run is not found[0]]
    left.until("this node is left out until it can reach node")
    assert "can't reach node" in runs[0].said() + runs[1].said()
    assert ip(*blackhole[:3], "del", *blackhole[4:]).returncode == 0
    found[0].until("a node has come")
    (tmp_path / "call-2").mkdir()  # a checkpoint, at which the other node is added
    for run in runs:
        run.until("round 2 of 2.")
    (tmp_path / "end").touch()
    assert [run.wait() for run in runs] == [0, 0]
    assert "round 1 of" not in left.said()


def test_a_host_that_can_not_reach_the_others_is_left_out_and_disturbs_nobody(poprun, hosts, tmp_path):
    """It made itself the leader, whom the healthy run obeyed: 19 calls in 75 s in place of about 250."""
    words = elastic(tmp_path, ONE_EACH)
    program = (sys.executable, "-S", "-c", ROUNDS, tmp_path / "end")
    assert ip("-n", hosts[0], "route", "add", "blackhole", "10.77.0.2/32").returncode == 0
    first = poprun(*words, *program, TEST_NETWORK=hosts[0], MASTER_ADDR="10.77.0.9")
    first.until("round 0 of 1.")
    second = poprun(*words, *program, TEST_NETWORK=hosts[1], MASTER_ADDR="10.77.0.9")
    second.until("this node is left out until it can reach node")
    for call in range(2, 8, 2):
        (tmp_path / f"call-{call}").mkdir()  # at a checkpoint a node that has come is added
        for record in (tmp_path / ".poprun").glob("node-*"):
            for _ in range(2):
                until_changed(record)
    (tmp_path / "end").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert first.said().count("begins") == 1 and "begins" not in second.said()
