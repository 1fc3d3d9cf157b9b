"""One run over several nodes: popruns that a scheduler starts, hosts that ssh reaches, and what is missing or fails."""

import os
import re
import socket
import sys
import time
from contextlib import suppress

import launching
import pytest
from launching import nodes
from ports import free_port

PYTHON = (sys.executable, "-S", "-c")
PLACE = "import os; print(*(os.environ[n] for n in ('GROUP_RANK', 'RANK', 'LOCAL_RANK', 'POPDIST_NUM_TOTAL_REPLICAS')))"


def test_popruns_on_two_nodes_start_a_half_each(poprun):
    words = ("--num-replicas=8", "--num-instances=4", "--print-topology=yes", *PYTHON, PLACE)
    first, second = nodes(poprun, *words, MASTER_PORT=str(free_port()))
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert {line[2:] for line in first.out.read_text().splitlines()[-2:]} == {"0 0 8", "1 1 8"}
    assert {line[2:] for line in second.out.read_text().splitlines()} == {"2 0 8", "3 1 8"}
    assert re.search(r"1 +node 0 +replicas 2 to 3, ipu 0\n2 +node 1 +replicas 4 to 5", first.out.read_text())


def test_instances_that_two_nodes_can_not_share_are_refused(poprun):
    words = ("--num-replicas=3", "--num-instances=3", "true")
    (run,) = nodes(poprun, *words, ranks=[1], MASTER_PORT=str(free_port()))
    assert run.wait() == 2
    assert "3 instances can't be shared out over 2 nodes" in run.said()


MEETS = (sys.executable, "-c", "import popdist; popdist.init()")


def test_instances_of_a_node_that_does_not_come_are_named(poprun):
    words = ("--num-replicas=3", "--num-instances=3", *MEETS)
    place = {"MASTER_PORT": str(free_port()), "POPRUN_NODE_TIMEOUT": "9"}
    first, last = nodes(poprun, *words, ranks=(0, 2), count=3, **place)
    assert (first.wait(), last.wait()) == (1, 1)
    assert re.search(r"after 9 s instances? 1(, 2)? of 3 had not come to 127\.0\.0\.1:", first.said())


def test_a_missing_first_node_is_named_by_its_address(poprun):
    words = ("--num-replicas=2", "--num-inst=2", *MEETS)
    (run,) = nodes(poprun, *words, ranks=[1], MASTER_PORT=str(free_port()), POPRUN_NODE_TIMEOUT="1")
    assert run.wait() == 1
    assert "instance 1 found no store at 127.0.0.1:" in run.said()


def test_two_nodes_of_one_number_are_refused(poprun):
    port = free_port()
    words = ("--num-replicas=2", "--num-instances=2", *MEETS)
    nodes(poprun, *words, ranks=[0], MASTER_PORT=str(port))
    until = time.monotonic() + launching.LIMIT
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
        assert time.monotonic() < until
        time.sleep(0.05)
    (second,) = nodes(poprun, *words, ranks=[0], MASTER_PORT=str(port))
    assert second.wait() == 1
    assert f"instance 0 can't use 127.0.0.1:{port}" in second.said()


def test_restarts_of_popruns_that_a_scheduler_has_started_are_left_to_the_scheduler(poprun):
    words = ("--num-replicas=2", "--num-instances=2", "--max-restarts=2", *PYTHON, "raise SystemExit(4)")
    first, second = nodes(poprun, *words, MASTER_PORT=str(free_port()))
    assert (first.wait(), second.wait()) == (4, 4)
    assert "--max-restarts has no effect if a scheduler starts a poprun on each node" in first.said()
    assert "--num-instances 2:2 --checkpoint-dir" in first.said()
    assert second.said().count("failed first") == 1


@pytest.fixture
def ssh(tmp_path):
    """A function that makes a stand-in for ssh, which runs here what it is told to run there ($5; $4 is the host).
    Returns: variables for poprun"""

    def stand_in(script='exec sh -c "$5"'):
        path = tmp_path / "ssh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }

    return stand_in


HOSTS = ("-H", "one,two", "--num-replicas=2", "--num-instances=2")


@pytest.mark.parametrize(
    "how", ["sys.exit(4)", "os.kill(os.getppid(), signal.SIGKILL)"], ids=["exits", "kills poprun"]
)
def test_a_failure_on_one_host_ends_the_other_and_restarts_both(poprun, tmp_path, ssh, how):
    """Instance 0 does not fail, and does not speak to the other one."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        "attempt, rank = os.environ['PANDO_RESTARTS'], os.environ['RANK']\n"
        "started = pathlib.Path(sys.argv[1], 'attempt-' + attempt)\n"
        "os.write(1, f'attempt {attempt} of {rank} in {os.environ[\"TORCHELASTIC_RUN_ID\"]}\\n'.encode())\n"
        "if rank == '0':\n"
        "    started.touch()\n"
        "    while attempt == '0': time.sleep(1)\n"
        "while not started.exists(): time.sleep(0.01)\n"
        f"if rank + attempt == '10': {how}"
    )
    run = poprun(*HOSTS, "--max-restarts=1", *PYTHON, program, tmp_path, **ssh())
    assert run.wait() == 0, run.said()
    assert "all instances start again, 1 of at most 1 times" in run.said()
    attempts = re.findall(r"attempt (\d) of (\d) in (\w+)", run.said())
    assert sorted(each[:2] for each in attempts) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({each[2] for each in attempts}) == 2  # a run id for each start of all
    assert run.nothing_left()


def test_a_failure_without_a_restart_left_has_the_exit_code_of_its_host(poprun, ssh):
    run = poprun(
        *HOSTS, "--max-restarts=1", *PYTHON, "import os; os._exit(3 + int(os.environ['RANK']))", **ssh()
    )
    assert run.wait() in (3, 4)
    assert run.said().count("start again") == 1


def test_an_instance_that_has_lost_its_peer_on_another_host_is_not_called_the_first(poprun, ssh):
    """From the host where the cause is, news comes after the end of the other one."""
    program = (
        "import os, popdist\n"
        "popdist.init()\n"
        "popdist.synchronize()\n"
        "if popdist.getInstanceIndex() == 1: os._exit(6)\n"
        "popdist.synchronize()"
    )
    late = 'sh -c "$5"\ncode=$?\n[ $4 = one ] && touch "$LOG"\nwhile [ ! -e "$LOG" ]; do sleep 0.1; done\nexit $code'
    run = poprun(*HOSTS, sys.executable, "-c", program, **ssh(late))
    assert run.wait() == 6, run.said()
    assert "instance 0 failed with exit code 1, after an instance of another host" in run.said()
    assert "host two failed first, with exit code 6" in run.said()


def test_hosts_are_reached_by_ssh_and_end_together(poprun, tmp_path, ssh):
    """From the host that failed, news comes late."""
    program = (
        "import os, sys, time\n"
        'os.write(1, f\'instance {os.environ["RANK"]} {os.environ["A"]}\\n\'.encode())\n'  # whole lines
        "is_first = os.environ['RANK'] == '0'\n"
        "if is_first: open(sys.argv[1] + '/here', 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '/here'): time.sleep(0.01)\n"
        "time.sleep(1000) if is_first else sys.exit(6)"
    )
    late = 'echo "$4" >> "$LOG"\nsh -c "$5"\ncode=$?\n[ $4 = one ] || sleep 3\nexit $code'
    run = poprun(*HOSTS, "-x", "A=b", *PYTHON, program, tmp_path, **ssh(late))
    assert run.wait() == 6, run.said()
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]
    assert "instance 0 b" in run.said() and "instance 1 b" in run.said()
    assert "instance 1 of 2 failed first, with exit code 6" in run.said()
    assert run.said().count("failed first") == 2 and "host two failed first, with exit code 6" in run.said()
    assert run.nothing_left()


def test_hosts_are_told_variables_by_standard_input_and_a_host_is_never_an_option(poprun, tmp_path, ssh):
    """A command line can be read by every user of a host."""
    variables = ssh('for word; do echo "$word" >> "$LOG"; done\nexec sh -c "$5"')
    words = ("-H", "-oProxyCommand=false,two", "--num-replicas=2", "--num-instances=2", "-x", "A")
    run = poprun(*words, *PYTHON, "import os; print(os.environ['A'])", A="a b\n$c", **variables)
    assert run.wait() == 0, run.said()
    assert run.out.read_text() == "a b\n$c\n" * 2
    log = (tmp_path / "log").read_text().splitlines()
    for host in ("-oProxyCommand=false", "two"):
        assert log[log.index(host) - 1] == "--"
    assert not [line for line in log if "a b" in line]


def test_one_other_host_is_reached_by_ssh_too(poprun, tmp_path, ssh):
    """It was ignored, and the program ran on this machine."""
    variables = ssh('echo "$4" >> "$LOG"\n[ $4 = nohost ] && exit 255\nexec sh -c "$5"')
    words = ("--num-replicas=2", "--num-instances=2", *PYTHON, PLACE)
    run = poprun("--host", "nohost", *words, **variables)
    assert run.wait() == 255
    assert "ssh could not connect" in run.said() and run.out.read_text() == ""
    run = poprun("--host", "there", *words, **variables)
    assert run.wait() == 0, run.said()
    assert sorted(run.out.read_text().splitlines()) == ["0 0 0 2", "0 1 1 2"]
    for here in ("localhost", "127.0.0.1"):
        run = poprun("--host", here, *words, **variables)
        assert run.wait() == 0, run.said()
    assert (tmp_path / "log").read_text().split() == ["nohost", "there"]
