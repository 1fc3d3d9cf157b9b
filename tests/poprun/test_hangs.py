"""An instance that stands still is named and ended; peers that only wait, and one that computes, are not."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import launching
import pytest

MEETS = """
import os, signal, sys, time
import popdist
from popengine.run.instances import connections

popdist.init()
popdist.synchronize()
connections.WARN_AFTER = 2.0  # only from here on, since instances start at different times on a busy machine
rank = popdist.getInstanceIndex()
"""


def test_a_stopped_instance_is_named_and_ended_and_its_waiting_peers_are_not(poprun):
    """Instance 1 waits for instance 0, which waits for instance 2."""
    program = MEETS + (
        # It goes on for a moment when it writes its stack, and must not reach the next line then.
        "if rank == 2: os.kill(os.getpid(), signal.SIGSTOP), time.sleep(100)\n"
        "popdist.execute_on_instances({0, 2}, popdist.synchronize)\n"
        "popdist.synchronize()\n"
    )
    words = ("--num-replicas=3", "--num-instances=3", "--hang-timeout=12", sys.executable, "-c", program)
    run = poprun(*words)
    assert run.wait() == 137, run.said()
    where = "instance 2 has made no progress for 12 s (it is stopped by a signal), at <string>:10 in <module>"
    assert f"{where}, and instance 0 waits for it at " in run.said()
    assert "instance 2 of 3 failed first, with signal SIGKILL" in run.said()
    assert set(re.findall(r"instance (\d) has not arrived", run.said())) == {"0", "2"}, run.said()
    assert run.nothing_left()


@pytest.mark.slow  # the last test of this file is of an instance that computes, too
def test_an_instance_that_computes_for_longer_than_the_limit_is_not_ended(poprun):
    program = MEETS + ("while rank == 1 and time.process_time() < 12: pass\npopdist.synchronize()\n")
    words = ("--num-replicas=2", "--num-instances=2", "--hang-timeout=5", sys.executable, "-c", program)
    run = poprun(*words)
    assert run.wait() == 0, run.said()


STUCK = """
import os, time
import popdist

def wait_for_ever():
    time.sleep(1e6)

print("attempt", os.environ["PANDO_RESTARTS"], flush=True)
if os.environ["PANDO_RESTARTS"] == "0":
    wait_for_ever()
"""


def test_an_instance_for_which_no_peer_waits_is_named_with_its_line_killed_and_replaced(poprun, tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    words = ("--num-instances=1:1", "--hang-timeout=5", "--checkpoint-dir", tmp_path, sys.executable, program)
    run = poprun(*words)
    assert run.wait() == 0, run.said()
    assert (
        f"instance 0 has made no progress for 5 s, at {program}:6 in wait_for_ever: it is killed"
        in run.said()
    )
    assert "attempt 1" in run.said()


@pytest.mark.slow
def test_without_a_limit_nothing_is_ended(poprun):
    program = MEETS + "time.sleep(6 if rank else 0)\npopdist.synchronize()\n"
    words = ("--num-replicas=2", "--num-instances=2", "--hang-timeout=0", sys.executable, "-c", program)
    run = poprun(*words)
    assert run.wait() == 0, run.said()
    assert "instance 1 has not arrived" in run.said()


STARVED = """
import os, sys

os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("here", flush=True)
while not os.path.exists(sys.argv[2]):
    pass
"""


def processor_time(pid):
    """In seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_instance_that_other_processes_keep_from_running_is_not_ended(poprun, tmp_path):
    """On a busy machine all instances with low priority were killed, again and again."""
    core = min(os.sched_getaffinity(0))
    burner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        os.sched_setaffinity(burner.pid, {core})
        words = ("--hang-timeout=2", sys.executable, "-S", "-c", STARVED, core, tmp_path / "end")
        run = poprun(*words)
        run.until("here")
        before, until = processor_time(burner.pid), time.monotonic() + launching.LIMIT
        while not run.has_ended() and processor_time(burner.pid) < before + 6:
            assert time.monotonic() < until
            time.sleep(0.1)
        (tmp_path / "end").touch()
    finally:
        burner.kill()
        burner.wait()
    assert run.wait() == 0, run.said()
