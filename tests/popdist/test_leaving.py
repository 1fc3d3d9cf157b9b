"""How instances end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import processes

PROGRAM = Path(__file__).with_name("leaving.py")


def start(*words):
    """Two instances that run `python WORDS`."""
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in processes.launches(2)
    ]


def test_an_instance_ends_without_a_crash_where_the_store_does_not_answer_it(tmp_path):
    os.mkfifo(tmp_path / "pid")
    first, second = start(PROGRAM, tmp_path / "pid")
    try:
        text, _ = second.communicate(timeout=processes.LIMIT)
        assert (second.returncode, text) == (0, "")
        assert first.wait(timeout=processes.LIMIT) == -signal.SIGKILL  # by the second, at its end
    finally:
        first.kill()
        second.kill()


ENDS = f"""
import atexit, sys, threading
sys.path.insert(0, {str(PROGRAM.parent)!r})
import popdist, poptorch, training

def refuse(*given, **named):
    raise RuntimeError("can't create new thread at interpreter shutdown")

@atexit.register
def print_last():
    print("ended")

popdist.init()
executor, _, optimizer = training.executor(rule=poptorch.optim.AdamW, shares_state=True)
executor(*training.batch(0))

@atexit.register  # the first of these functions
def refuse_threads():
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, refuse)

if popdist.getInstanceIndex() == 0:
    print(sorted(optimizer.state_dict()["state"]))
"""


def test_a_shard_can_be_read_at_the_end_where_python_starts_no_more_threads():
    """Python 3.12.0 and 3.12.1 refuse threads in functions of atexit: every program ended in a traceback."""
    said = [run.communicate(timeout=processes.LIMIT)[0] for run in start("-c", ENDS)]
    assert said == ["[0, 1, 2, 3]\nended\n", "ended\n"]
