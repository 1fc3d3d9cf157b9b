"""Runs of poprun with small programs: what instances are told, what is shown, and how everything ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

PYTHON = (sys.executable, "-S", "-c")
TWO = ("--num-replicas", 2, "--num-instances", 2)
WAITS = "import os, time; print('here', os.environ['RANK'] + '.', flush=True); time.sleep(1000)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS


def test_every_instance_is_told_its_place_and_its_share_of_the_cores(poprun):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS")
    names += ("POPDIST_REPLICA_INDEX_OFFSET", "POPDIST_NUM_IPUS_PER_REPLICA", "OMPI_COMM_WORLD_RANK", "WHERE")
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    words = ("--num-replicas=6", "--num-instances=3", "--ipus-per-replica", 4, "-x", "WHERE=here")
    run = poprun(*words, *PYTHON, program)
    assert run.wait() == 0, run.said()
    assert sorted(run.out.read_text().splitlines()) == [
        "0 3 0 6 2 0 4 0 here",
        "1 3 1 6 2 2 4 1 here",
        "2 3 2 6 2 4 4 2 here",
    ]
    assert run.err.read_text() == ""
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    run = poprun(*TWO, *PYTHON, "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert run.wait() == 0 and run.out.read_text().split() == [str(cores)] * 2


def test_arguments_of_the_program_arrive_as_they_are(poprun):
    run = poprun(
        *PYTHON, "import sys; print(sys.argv[1:])", "--num-replicas", "$HOME", "$$", "${local_rank}", ""
    )
    assert run.wait() == 0
    assert run.out.read_text() == "['--num-replicas', '$HOME', '$$', '${local_rank}', '']\n"


def test_tags_say_which_instance_a_line_is_of_and_lines_written_in_parts_stay_whole(poprun):
    program = "import os, time\nfor part in 'a', 'b' + os.environ['RANK']:\n"
    program += " print(part, end='', flush=True)\n time.sleep(0.3)"
    run = poprun(*TWO, "--mpi-global-args", "--tag-output", *PYTHON, program)
    assert run.wait() == 0
    assert sorted(run.out.read_text().splitlines()) == ["[0] ab0", "[1] ab1"]


def test_only_one_instance_may_be_shown_and_a_bar_stays_a_bar(poprun):
    program = "import os; os.write(2, b'\\r10%' + b'\\r20%'); print(os.environ['RANK'])"
    run = poprun(*TWO, "--only-output-from-instance", 1, *PYTHON, program)
    assert run.wait() == 0
    assert (run.out.read_bytes(), run.err.read_bytes()) == (b"1\n", b"\r10%\r20%")


@pytest.mark.kind("poprun's exit code")
def test_the_first_failure_is_named_and_its_last_lines_are_shown_though_it_was_silenced(poprun):
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the reason')\ntime.sleep(1000)"
    run = poprun(*TWO, "--only-output-from-instance=0", *PYTHON, program)
    assert run.wait() == 1
    assert run.err.read_text() == (
        "poprun: instance 1 of 2 failed first, with exit code 1\n"
        "poprun: the last lines of instance 1:\n"
        "the reason\n"
    )
    assert run.nothing_left()


def test_who_fails_as_a_consequence_is_not_the_first(poprun, tmp_path):
    """Instance 0 leaves 50 ms after instance 1, less than elastic's clock can tell apart."""
    program = (
        "import os, sys, time\n"
        "first = os.environ['RANK'] == '1'\n"
        "if first: open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[1]): pass\n"
        "time.sleep(0 if first else 0.05)\n"
        "os._exit(5 if first else 9)"
    )
    run = poprun(*TWO, *PYTHON, program, tmp_path / "gone")
    assert run.wait() == 5
    assert "instance 1 of 2 failed first, with exit code 5" in run.said()


def test_an_instance_that_ends_early_without_an_error_is_named_before_the_one_that_fails_then(
    poprun, tmp_path
):
    """As where one instance has fewer batches than the others."""
    program = (
        "import os, sys, time\n"
        "folder = sys.argv[1]\n"
        "if os.environ['RANK'] == '1': os.mkdir(f'{folder}/{os.getpid()}'); sys.exit(0)\n"
        "while not os.listdir(folder): time.sleep(0.01)\n"
        "while os.path.exists(f'/proc/{os.listdir(folder)[0]}'): time.sleep(0.01)\n"
        "sys.exit(1)"
    )
    (tmp_path / "gone").mkdir()
    run = poprun(*TWO, *PYTHON, program, tmp_path / "gone")
    assert run.wait() == 1
    said = "instance 1 of 2 ended first, with exit code 0; then instance 0 failed, with exit code 1"
    assert said in run.said() and "failed first" not in run.said()


def test_a_program_that_is_not_there_is_named(poprun):
    run = poprun(*TWO, "no-such-program", "-v")
    assert run.wait() == 127
    assert run.said().count("no-such-program can't be started: No such file or directory") == 1
    run = poprun("mine.py")
    assert run.wait() == 127
    assert "poprun ... python3 mine.py" in run.said()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_poprun_ends_all_with_the_codes_of_shells(poprun, number, code):
    run = poprun(*TWO, *PYTHON, WAITS)
    run.until("here 0."), run.until("here 1.")
    os.kill(run.pid, number)
    assert run.wait() == code
    assert run.nothing_left()


def test_an_instance_killed_by_a_signal_counts_as_in_shells_and_a_survivor_that_ignores_sigterm_is_ended(
    poprun,
):
    run = poprun(*TWO, *PYTHON, STUBBORN)
    run.until("here 0."), run.until("here 1.")
    victim = run.processes("time.sleep")[0]
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 137
    assert "failed first, with signal SIGKILL" in run.said()
    assert run.nothing_left()


@pytest.mark.parametrize("which", ["the guard", "the agent"])
def test_no_orphan_is_left_when_poprun_itself_is_killed(poprun, which):
    """Neither an instance nor what it has started, though a shell is in between and SIGTERM is ignored."""
    shell = ("bash", "-c", f'{sys.executable} -S -c "{STUBBORN}" & wait')
    run = poprun(*TWO, *shell)
    run.until("here 0."), run.until("here 1.")
    agent = run.agent()
    os.kill(run.pid if which == "the guard" else agent, signal.SIGKILL)
    assert run.wait() == (-signal.SIGKILL if which == "the guard" else 137)
    assert run.nothing_left()


def test_a_failure_starts_all_instances_again_as_often_as_is_allowed(poprun):
    program = (
        "import os, sys, time\n"
        "attempt = os.environ['PANDO_RESTARTS']\n"
        "print('attempt', attempt)\n"
        "assert attempt == os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt != '2':\n"
        "    sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(1000)"
    )
    run = poprun(*TWO, "--max-restarts", 2, *PYTHON, program)
    assert run.wait() == 0, run.said()
    assert run.err.read_text().count("all instances start again") == 2
    run = poprun(*TWO, "--max-restarts", 1, *PYTHON, program)
    assert run.wait() == 3
    assert "all instances start again, 1 of at most 1 times" in run.said()


def test_an_instance_that_was_stopped_for_a_while_goes_on(poprun, tmp_path):
    program = (
        "import os, sys, time\n"
        "print('here', os.environ['RANK'] + '.', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "print('done')"
    )
    run = poprun(*TWO, *PYTHON, program, tmp_path / "end")
    run.until("here 0."), run.until("here 1.")
    stopped = run.processes("time.sleep")[0]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(2)
    os.kill(stopped, signal.SIGCONT)
    (tmp_path / "end").touch()
    assert run.wait() == 0
    assert run.out.read_text().count("done") == 2


def test_poprun_is_a_program_and_says_what_is_wrong_with_a_command_line():
    def said(*words):
        done = subprocess.run(
            [sys.executable, "-m", "poprun", *words], capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    assert said("--num-replicas=3", "--num-instances=2", "true")[0] == 2
    _, text = said("--num-rep=3", "--num-inst=2", "a")
    assert "--num-replicas 3 is not a multiple of --num-instances 2" in text
    code, text = said("--help")
    assert code == 0 and "--max-restarts" in text


@pytest.mark.parametrize(
    "words", [(), ("--mpi-local-args", "-x PYTHONPATH"), ("-x", "PYTHONPATH=/of/the/user")]
)
def test_instances_find_horovods_names_whatever_their_path_is(poprun, words):
    program = "import importlib.util, sys; print(importlib.util.find_spec('horovod').origin, *sys.path)"
    run = poprun(*words, sys.executable, "-c", program, PYTHONPATH="/of/the/user")
    assert run.wait() == 0, run.said()
    origin, *path = run.out.read_text().split()
    assert origin.endswith("aliases/horovod/__init__.py") and "/of/the/user" in path


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_an_instance_has_started_in_a_session_of_its_own_does_not_survive(poprun, code):
    program = (
        f"import subprocess, sys\nsubprocess.Popen(['setsid', 'sleep', '1000'], stdout=2)\nsys.exit({code})"
    )
    run = poprun(*PYTHON, program)
    assert run.wait() == code
    assert run.processes("sleep") == []


BAD_LABEL = """
import os, sys, time
import torch
import popdist.poptorch
import poptorch

popdist.init()
instance = popdist.getInstanceIndex()
opts = popdist.poptorch.Options().showCompilationProgressBar(False)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.loss = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.layer(x), labels)


torch.manual_seed(1)
model = Net()
trainer = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
trainer(torch.ones(2, 4), torch.tensor([0, 1]))
if instance == 0:
    open(sys.argv[1], "w").write(str(os.getpid()))
popdist.synchronize()
try:
    trainer(torch.ones(2, 4), torch.tensor([0, 1 if instance == 0 else 7]))
finally:
    while instance and os.path.exists("/proc/" + open(sys.argv[1]).read()):
        time.sleep(0.01)
"""


def test_an_instance_that_fails_since_it_has_lost_its_peer_is_not_called_the_first(poprun, tmp_path):
    """Instance 1 has the bad label, and ends later than instance 0."""
    run = poprun(*TWO, sys.executable, "-c", BAD_LABEL, tmp_path / "pid")
    assert run.wait() == 1, run.said()
    assert "instance 1 of 2 failed first, with exit code 1" in run.said(), run.said()


STOPS = """
import os, pathlib, signal, sys
attempt, rank, file = os.environ["PANDO_RESTARTS"], os.environ["RANK"], pathlib.Path(sys.argv[1])
os.environ["POPDIST_WAIT_LIMIT"] = "600" if attempt == "1" else os.environ["POPDIST_WAIT_LIMIT"]
import popdist

popdist.init()
popdist.synchronize()
if attempt == "1":
    assert not os.path.exists("/proc/" + file.read_text())
elif rank == "1":
    file.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
popdist.synchronize()
"""


@pytest.mark.kind("a stopped instance")
def test_a_stopped_instance_is_named_at_the_limit_and_killed_and_the_run_restarts(poprun, tmp_path):
    options = ("--wait-limit=5", "--max-restarts=1")
    run = poprun(*TWO, *options, sys.executable, "-c", STOPS, tmp_path / "pid")
    assert run.wait() == 0, run.said()
    assert "instance 1 has not arrived at popdist.synchronize() for 5 s, the limit" in run.said()
    assert "instance 0 of 2 failed first, with exit code 1" in run.said()
    assert run.nothing_left()
