"""One training over several nodes: popruns that meet, hosts that ssh reaches, and nodes that fail or don't come."""

import os
import signal
import sys
import time
from pathlib import Path

import launching
import pytest
from ports import free_port

PYTHON = (sys.executable, "-S", "-c")
PLACE = "import os; print(*(os.environ[n] for n in ('GROUP_RANK', 'RANK', 'LOCAL_RANK', 'POPDIST_NUM_TOTAL_REPLICAS')))"


def nodes(poprun, count, words, ranks=None, **variables):
    common = {
        "POPRUN_NUM_NODES": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **variables,
    }
    return [poprun(*words, POPRUN_NODE_RANK=str(rank), **common) for rank in ranks or range(count)]


def test_popruns_on_two_nodes_start_a_half_each(poprun):
    words = ("--num-replicas=8", "--num-instances=4", "--print-topology=yes", *PYTHON, PLACE)
    first, second = nodes(poprun, 2, words)
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert {line[2:] for line in first.out.read_text().splitlines()[-2:]} == {"0 0 8", "1 1 8"}
    assert {line[2:] for line in second.out.read_text().splitlines()} == {"2 0 8", "3 1 8"}
    assert "| hosts     |     node 0    |     node 1    |" in first.out.read_text()


def test_instances_that_two_nodes_can_not_share_are_refused(poprun):
    words = ("--num-replicas=3", "--num-instances=3", "true")
    (run,) = nodes(poprun, 2, words, ranks=[1])
    assert run.wait() == 2
    assert "3 instances can't be shared out over 2 nodes" in run.said()


def test_nodes_that_do_not_come_are_named(poprun):
    words = ("-v", "--num-replicas=3", "--num-instances=3", "true")
    place = {"POPRUN_NUM_NODES": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    last = poprun(*words, POPRUN_NODE_RANK="2", **place)
    last.until("node 2 of 3 waits for the others")
    first = poprun(*words, POPRUN_NODE_RANK="0", POPRUN_NODE_TIMEOUT="3", **place)
    assert (first.wait(), last.wait()) == (1, 1)
    assert "of 3 nodes these have not come in 3 s: 1" in first.said()
    assert "another node has given up: the poprun of node 0 says why" in last.said()


def test_a_missing_first_node_is_named_by_its_address(poprun):
    (run,) = nodes(
        poprun, 2, ("--num-replicas=2", "--num-inst=2", "true"), ranks=[1], POPRUN_NODE_TIMEOUT="1"
    )
    assert run.wait() == 1
    assert "node 0 is not to be reached at 127.0.0.1:" in run.said()


def test_a_failure_on_one_node_ends_the_other_and_restarts_count_for_both(poprun, tmp_path):
    """Nobody on node 0 fails; it is told, though its instance never speaks to the other."""
    program = (
        "import os, pathlib, time\n"
        f"started = pathlib.Path({str(tmp_path)!r}, 'attempt-' + os.environ['PANDO_RESTARTS'])\n"
        "print('attempt', os.environ['PANDO_RESTARTS'], 'of', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    started.touch()\n"
        "    time.sleep(1000)\n"
        "while not started.exists():\n"
        "    time.sleep(0.01)\n"
        "raise SystemExit(4)"
    )
    words = ("--num-replicas=2", "--num-instances=2", "--max-restarts=1", *PYTHON, program)
    first, second = nodes(poprun, 2, words)
    assert second.wait() == 4
    assert "instance 1 of 2 failed first, with exit code 4" in second.said()
    assert first.wait() == 1
    assert "another node has given up" in first.said()
    assert "attempt 1 of 0" in first.said() and "attempt 1 of 1" in second.said()
    assert first.nothing_left() and second.nothing_left()


STAYS = (
    "import os, sys, time\n"
    "print('attempt', os.environ['PANDO_RESTARTS'], 'of', os.environ['RANK'] + '.', flush=True)\n"
    "while not os.path.exists(sys.argv[1]): time.sleep(0.02)"
)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_was_killed_comes_back_and_all_start_again(poprun, tmp_path, lost):
    words = ("--num-replicas=2", "--num-instances=2", "--max-restarts=2", *PYTHON, STAYS, tmp_path / "end")
    place = {"MASTER_PORT": str(free_port())}
    runs = nodes(poprun, 2, words, **place)
    for rank, run in enumerate(runs):
        run.until(f"attempt 0 of {rank}.")
    left = runs[1 - lost]
    os.kill(runs[lost].pid, signal.SIGKILL)
    left.until(f"node {lost} lost: poprun has ended there")
    left.until("this one waits for")
    (back,) = nodes(poprun, 2, words, ranks=[lost], **place)
    for rank, run in ((lost, back), (1 - lost, left)):
        run.until(f"attempt 1 of {rank}.")
    (tmp_path / "end").touch()
    assert (left.wait(), back.wait()) == (0, 0), left.said() + back.said()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_without_a_restart_left_is_named_at_once(poprun, tmp_path, lost):
    runs = nodes(poprun, 2, ("--num-replicas=2", "--num-instances=2", *PYTHON, STAYS, tmp_path / "end"))
    for rank, run in enumerate(runs):
        run.until(f"attempt 0 of {rank}.")
    os.kill(runs[lost].pid, signal.SIGKILL)
    assert runs[1 - lost].wait() == 1
    assert f"poprun: node {lost} lost: poprun has ended there" in runs[1 - lost].said()
    assert runs[1 - lost].nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_fixed_number_of_instances_outlives_a_node_that_is_stopped_for_half_a_minute(
    poprun, tmp_path, stopped
):
    """The other node gave up after 25 s, though no instance had failed."""
    runs = nodes(poprun, 2, ("--num-replicas=2", "--num-instances=2", *PYTHON, STAYS, tmp_path / "end"))
    for rank, run in enumerate(runs):
        run.until(f"attempt 0 of {rank}.")
    agent = runs[stopped].agent()
    os.kill(agent, signal.SIGSTOP)
    time.sleep(35)
    os.kill(agent, signal.SIGCONT)
    (tmp_path / "end").touch()
    assert [run.wait() for run in runs] == [0, 0], runs[0].said() + runs[1].said()


def test_two_nodes_of_one_number_are_refused(poprun):
    words = ("-v", "--num-replicas=2", "--num-instances=2", "true")
    place = {"POPRUN_NUM_NODES": "2", "POPRUN_NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    port = str(free_port())
    first = poprun(*words, MASTER_PORT=port, **place)
    first.until("node 0 of 2 waits")
    second = poprun(*words, MASTER_PORT=port, **place)
    assert second.wait() == 1
    assert "node 0 can't listen at 127.0.0.1" in second.said()


def test_hosts_are_reached_by_ssh_and_end_together(poprun, tmp_path):
    """A stand-in for ssh runs here what it is told to run there; from the host that failed, news comes late."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\necho "$4" >> "$LOG"\nsh -c "$5"\ncode=$?\n[ $4 = one ] || sleep 3\nexit $code\n'
    )
    ssh.chmod(0o755)
    program = (
        "import os, sys, time\n"
        'os.write(1, f\'instance {os.environ["RANK"]} {os.environ["A"]}\\n\'.encode())\n'  # whole lines
        "is_first = os.environ['RANK'] == '0'\n"
        "if is_first: open(sys.argv[1] + '/here', 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '/here'): time.sleep(0.01)\n"
        "time.sleep(1000) if is_first else sys.exit(6)"
    )
    words = (
        "-H",
        "one,two",
        "--num-replicas=2",
        "--num-instances=2",
        "-x",
        "A=b",
        *PYTHON,
        program,
        tmp_path,
    )
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    run = poprun(*words, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **variables)
    assert run.wait() == 6, run.said()
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]
    assert "instance 0 b" in run.said() and "instance 1 b" in run.said()
    assert "instance 1 of 2 failed first, with exit code 6" in run.said()
    assert run.said().count("failed first") == 2 and "host two failed first, with exit code 6" in run.said()
    assert run.nothing_left()


def test_an_instance_that_fails_after_another_nodes_is_not_called_the_first(poprun, tmp_path):
    """Instance 2 fails later than instance 0, as one does that has lost its peer; its agent comes to it later."""
    program = (
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "print('here', rank + '.', os.getpid(), flush=True)\n"
        "if rank in '13': time.sleep(1000)\n"
        "while not os.path.exists(sys.argv[1] + rank): time.sleep(0.01)\n"
        "sys.exit(6 if rank == '0' else 9)"
    )
    words = ("--num-replicas=4", "--num-instances=4", *PYTHON, program, tmp_path / "end")
    first, second = nodes(poprun, 2, words)
    first.until("here 0."), second.until("here 2.")
    (line,) = [line for line in second.said().splitlines() if line.startswith("here 2.")]
    agent, instance = second.agent(), Path("/proc") / line.split()[-1]
    os.kill(agent, signal.SIGSTOP)
    (tmp_path / "end0").touch()
    first.until("failed first")
    (tmp_path / "end2").touch()
    until = time.monotonic() + launching.LIMIT
    while not launching.is_zombie(instance):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(agent, signal.SIGCONT)
    assert (first.wait(), second.wait()) == (6, 9)
    assert "instance 0 of 4 failed first, with exit code 6" in first.said()
    assert "instance 2 failed with exit code 9, after an instance of node 0" in second.said()


def test_hosts_are_told_variables_and_the_secret_by_standard_input_and_a_host_is_never_an_option(
    poprun, tmp_path
):
    """A command line can be read by every user of a host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor word; do echo "$word" >> "$LOG"; done\nexec sh -c "$5"\n')
    ssh.chmod(0o755)
    program = "import os; print(os.environ['POPDIST_SECRET'], os.environ['A'])"
    words = (
        "-H",
        "-oProxyCommand=false,two",
        "--num-replicas=2",
        "--num-instances=2",
        "-x",
        "A",
        *PYTHON,
        program,
    )
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "A": "a b\n$c"}
    run = poprun(*words, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **variables)
    assert run.wait() == 0, run.said()
    secret = run.out.read_text().partition(" ")[0]
    assert len(secret) == 64 and run.out.read_text() == f"{secret} a b\n$c\n" * 2
    log = (tmp_path / "log").read_text().splitlines()
    for host in ("-oProxyCommand=false", "two"):
        assert log[log.index(host) - 1] == "--"
    assert not [line for line in log if secret in line or "a b" in line]


def test_one_other_host_is_reached_by_ssh_too(poprun, tmp_path):
    """It was ignored, and the program ran on this machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$4" >> "$LOG"\n[ $4 = nohost ] && exit 255\nexec sh -c "$5"\n')
    ssh.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    words = ("--num-replicas=2", "--num-instances=2", *PYTHON, PLACE)
    run = poprun("--host", "nohost", *words, **variables)
    assert run.wait() == 255
    assert "ssh could not connect" in run.said() and run.out.read_text() == ""
    run = poprun("--host", "there", *words, **variables, MASTER_ADDR="127.0.0.1")
    assert run.wait() == 0, run.said()
    assert sorted(run.out.read_text().splitlines()) == ["0 0 0 2", "0 1 1 2"]
    for here in ("localhost", "127.0.0.1"):
        run = poprun("--host", here, *words, **variables)
        assert run.wait() == 0, run.said()
    assert (tmp_path / "log").read_text().split() == ["nohost", "there"]
