"""No hang and no process left behind: whatever ends first, the worker, the loader or the program."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rows import FORK, Faulty, Rows, forked

from popengine.errors import DataError
from poptorch.data import DataLoader
from poptorch.enums import DataLoaderMode
from poptorch.options import Options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> bool:
    deadline = time.monotonic() + 240
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def async_loader(dataset, **kwargs) -> DataLoader:
    return DataLoader(Options(), dataset, mode=DataLoaderMode.Async, async_options=dict(FORK), **kwargs)


@pytest.mark.parametrize("ending", ["raise", "kill"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_that_fails_or_is_killed_is_an_error(ending, num_workers):
    loader = async_loader(Faulty(ending), num_workers=num_workers)
    with pytest.raises(DataError, match="An error occurred in the data fetcher") as caught:
        list(loader)
    if (ending, num_workers) != ("kill", 1):  # there, torch has several ways to notice and to say it
        assert {"raise": "row five is broken", "kill": "killed by SIGKILL"}[ending] in str(caught.value)
        assert ("out of memory" in str(caught.value)) == (ending == "kill")


def test_deleting_a_loader_ends_its_worker_and_the_workers_of_that():
    loader = async_loader(Rows(100), num_workers=2)
    worker = loader._accessor._process.pid  # type: ignore[union-attr]
    assert worker
    family = [worker, *children(worker)]
    assert len(family) == 3
    next(iter(loader))
    del loader
    assert wait_until_gone(*family)


def test_terminating_does_not_wait_for_a_dataset_that_sleeps():
    accessor = forked(Faulty("sleep"))
    iterator = iter(accessor)
    for _ in range(5):
        next(iterator)
    accessor.terminate()  # the dataset sleeps for 1000 s: longer than a test may take
    assert not is_running(accessor._process.pid)  # type: ignore[arg-type]


def test_batches_in_hand_outlive_the_worker():
    accessor = forked(Rows(4))
    batch = next(iter(accessor))
    accessor.terminate()
    assert batch[0].tolist() == [0, 0]


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {here!r})
from rows import FORK, Rows
from test_accessor_lifetime import async_loader, children
for ending in {endings}:
    if os.fork() == 0:  # a program that has imported torch already
        break
else:
    for _ in {endings}:
        print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    sys.exit()
loader = async_loader(Rows(1000), num_workers=1)
worker = loader._accessor._process.pid
print("processes", worker, *children(worker), flush=True)
exec(f"for batch in loader:\\n    {{ending}}")
"""
ENDINGS = ["break", "raise KeyboardInterrupt", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"]


def test_a_program_that_ends_leaves_no_process_behind():
    program = PROGRAM.format(here=str(Path(__file__).parent), endings=ENDINGS)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert sorted(words[1] for words in lines if words[0] == "ended") == ["-2", "-9", "0", "3"], ended.stderr
    families = [list(map(int, words[1:])) for words in lines if words[0] == "processes"]
    assert [len(family) for family in families] == [2] * 4, ended.stderr
    assert wait_until_gone(*(pid for family in families for pid in family))


WITHOUT_A_GUARD = """
import poptorch, torch
data = torch.utils.data.TensorDataset(torch.zeros({rows}, 1000))
how = {{"sharing_strategy": "{strategy}"}}
poptorch.DataLoader(poptorch.Options(), data, mode="Async", async_options=how)
"""


@pytest.mark.parametrize("strategy", ["SharedMemory", "ForkServer"])
@pytest.mark.parametrize("rows", [4000, 4])  # 4000: more than a pipe holds: writing it to the worker fails
def test_the_error_for_a_script_without_a_main_guard_has_a_fix(tmp_path, strategy, rows):
    (tmp_path / "train.py").write_text(WITHOUT_A_GUARD.format(strategy=strategy, rows=rows))
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    fix = 'fix: put the main part of the script under `if __name__ == "__main__":`'
    assert fix in done.stderr.rsplit("DataError", 1)[1]
    assert "freeze_support" not in done.stderr


FORK_SERVER_IS_KILLED = """
import multiprocessing, os, signal
import poptorch, torch

if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.zeros(4000, 1000))
    how = {"sharing_strategy": "ForkServer"}
    loader = poptorch.DataLoader(poptorch.Options(), data, mode="Async", async_options=how)
    rows = iter(loader)
    next(rows)
    (worker,) = multiprocessing.active_children()
    with open(f"/proc/{worker.pid}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    list(rows)
"""


def test_a_fork_server_that_was_killed_is_named_and_the_script_is_not_blamed(tmp_path):
    (tmp_path / "train.py").write_text(FORK_SERVER_IS_KILLED)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "the fork server, the process that had started the worker, has ended" in done.stderr
    assert "if __name__" not in done.stderr
