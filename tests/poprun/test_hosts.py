"""One training over two hosts: two network namespaces of this machine, each with an address of its own."""

import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from launching import ONE_EACH, elastic, nodes, until_changed

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


def started(poprun, hosts, *programs, **variables):
    """A poprun on each host, with a program of its own."""
    words, place = ("--num-replicas=2", "--num-instances=2"), {"MASTER_ADDR": "10.77.0.1", **variables}
    place |= {"MASTER_PORT": "29500", "POPRUN_NODE_TIMEOUT": str(LIMIT)}
    return [
        *nodes(poprun, *words, *programs[0], ranks=[0], TEST_NETWORK=hosts[0], **place),
        *nodes(poprun, *words, *programs[1], ranks=[1], TEST_NETWORK=hosts[1], **place),
    ]


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
os.write(1, b"met\\n")
while not os.path.exists(f"{sys.argv[1]}/seen"):
    time.sleep(0.05)
"""


def assert_listens_at_own_addresses(runs, hosts, folder):
    """Look where hosts listen while instances have met; then all end."""
    for run in runs:
        run.until("met")
    assert [listening(host) for host in hosts] == [{"10.77.0.1"}, {"10.77.0.2"}]
    (folder / "seen").touch()
    assert [run.wait() for run in runs] == [0, 0]
    assert [run.said() for run in runs] == ["met\n", "met\n"]


def test_hosts_listen_at_the_addresses_by_which_they_reach_each_other_only(poprun, hosts, tmp_path):
    program = (sys.executable, "-c", WAITS, tmp_path)
    assert_listens_at_own_addresses(started(poprun, hosts, program, program), hosts, tmp_path)


def test_a_host_whose_own_name_means_loopback_is_reached_by_the_address_of_its_default_route(
    poprun, hosts, tmp_path
):
    """As Debian writes it to /etc/hosts; elsewhere the name means the address."""
    programs = []
    for number, (host, own) in enumerate(zip(hosts, ("127.0.1.1", "10.77.0.1"), strict=True)):
        assert ip("-n", host, "route", "add", "default", "via", f"10.77.0.{2 - number}").returncode == 0
        (names := tmp_path / f"hosts-{number}").write_text(f"127.0.0.1 localhost\n{own} first\n")
        mount = ("unshare", "--mount", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh")
        programs.append((*mount, sys.executable, "-c", WAITS, tmp_path))
    runs = started(poprun, hosts, *programs, MASTER_ADDR="first")
    assert_listens_at_own_addresses(runs, hosts, tmp_path)


def test_a_training_over_two_hosts_has_equal_weights(poprun, hosts, tmp_path):
    program = (sys.executable, PROGRAM, tmp_path, "3")
    runs = started(poprun, hosts, program, program, GLOO_SOCKET_IFNAME="cable")
    assert [run.wait() for run in runs] == [0, 0], [run.said() for run in runs]
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
