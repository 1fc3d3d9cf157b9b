"""How instances end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import processes

PROGRAM = Path(__file__).with_name("leaving.py")


def test_an_instance_ends_without_a_crash_where_the_store_does_not_answer_it(tmp_path):
    os.mkfifo(tmp_path / "pid")
    first, second = (
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path / "pid"],
            env={**os.environ, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in processes.launches(2)
    )
    try:
        _, text = second.communicate(timeout=processes.LIMIT)
        assert (second.returncode, text) == (0, "")
        assert first.wait(timeout=processes.LIMIT) == -signal.SIGKILL  # by the second, at its end
    finally:
        first.kill()
        second.kill()
