"""A file on this machine: the tutorials' text as it stands, several workers, restarts, interrupts."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from jobs import FILES, job

from ipujob.cli import main

SH = ["/bin/sh", "-c"]
URL = "https://github.com/graphcore/examples.git"


@pytest.fixture
def run(tmp_path, capfd):
    """`ipujob run --local`: the exit code, what workers said, what ipujob said."""

    def run(content, *words):
        path = tmp_path / "job.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        code = main(["run", str(path), "--local", *words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def repository(tmp_path):
    """What the tutorials clone, with a program that says how it was called."""
    folder = tmp_path / "examples"
    place = folder / "nlp/bert/pytorch"
    place.mkdir(parents=True)
    (place / "required_apt_packages.txt").write_text("libnuma1\n")
    (place / "run_pretraining.py").write_text(
        "import os, sys\nprint('trained', *sys.argv[1:])\nprint(os.getcwd())\n"
    )
    return folder


def test_the_tutorials_text_runs_as_it_stands(run, repository):
    code, out, err = run(
        (FILES / "bert.yaml").read_text(), "--clone", f"{URL}={repository}", "--name", "bert"
    )
    assert code == 0
    assert out.splitlines()[:-1] == [
        f"copied {repository} in place of https://github.com/graphcore/examples.git",
        "skipped: apt update",
        "skipped: apt upgrade -y",
        "skipped: apt install libnuma1 -y",
        "skipped: pip3 install -r requirements.txt",
        "trained --dataset generated --config pretrain_base_128_pod4 --training-steps 1",
    ]
    assert out.splitlines()[-1].endswith("/bert-worker-0/build/examples/nlp/bert/pytorch")
    assert "ipujob: bert: not looked at here: image, resources, securityContext, hostIPC\n" in err


def test_a_text_of_ones_own_takes_the_commands_place(run):
    text = (FILES / "poprun.yaml").read_text()
    code, out, err = run(text, "--command", "echo $HOME; python3 /opt/absent.py", "--name", "b")
    assert code == 2 and "/b-worker-0\n" in out
    assert "1 of 1 instances failed: b-worker-0 exited with 2\n  fix: if a file is missing here: " in err


def test_what_would_be_fetched_says_how_to_give_it(run, repository):
    given = job(container={"command": [*SH, f"git clone {URL} mine && ls mine"]})
    code, _, err = run(given)
    assert code == 128 and f"fix: --clone {URL}=FOLDER" in err + _
    code, out, _ = run(given, "--clone", f"{URL}={repository}")
    assert code == 0 and out.endswith("\nnlp\n")


def test_stand_ins_can_be_taken_away_and_git_does_the_rest(run):
    text = "sudo true; python3 -m pip install x; python3 -c 'print(6 * 7)'; git --version"
    text += "; command -v apt; command -v pip3"
    code, out, _ = run(job(container={"command": [*SH, text]}), "--real", "pip3")
    lines = out.splitlines()
    assert code == 0
    assert lines[:3] == ["skipped: sudo true", "skipped: python3 -m pip install x", "42"]
    assert lines[3].startswith("git version") and "/bin/apt" in lines[4] and "ipujob-" not in lines[5]


def test_a_program_finds_horovods_names_where_horovod_is_absent(run):
    program = "import importlib.util; print(importlib.util.find_spec('horovod').origin)"
    code, out, _ = run(job(container={"command": ["python3", "-c", program]}))
    assert code == 0 and out.rstrip().endswith("aliases/horovod/__init__.py")


@pytest.mark.kind("a local IPUJob")
def test_several_workers_are_told_of_each_other(run):
    env = [
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "PLACE", "value": "$(ME) of $(OTHER) $$(ME)"},
    ]
    text = "echo $POPRUN_NODE_RANK of $POPRUN_NUM_NODES $MASTER_ADDR $POPDIST_NUM_TOTAL_REPLICAS; echo $PLACE"
    launcher = {"command": [*SH, text]}
    code, out, _ = run(job(workers={"replicas": 2}, launcher=launcher, container={"env": env}))
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[train-worker-0] 0 of 2 127.0.0.1",
        "[train-worker-0] train-worker-0 of $(OTHER) $(ME)",
        "[train-worker-1] 1 of 2 127.0.0.1",
        "[train-worker-1] train-worker-1 of $(OTHER) $(ME)",
    ]


def test_an_instance_restarts_until_its_limit(run, tmp_path):
    text = f"echo attempt $PANDO_RESTARTS >> {tmp_path}/log; exit $((7 - PANDO_RESTARTS))"
    policy = {"type": "ExitCode", "exitCodes": "6-7", "backOffLimit": 3}
    code, _, err = run(job(container={"command": [*SH, text]}, restartPolicy=policy))
    assert code == 5
    assert (tmp_path / "log").read_text().splitlines() == ["attempt 0", "attempt 1", "attempt 2"]
    assert "train-worker-0 exited with 5" in err


def test_a_worker_that_fails_ends_the_others(run):
    text = '[ $POPRUN_NODE_RANK = 1 ] && exit 4; trap "echo saved; exit 0" TERM; sleep 60 & wait'
    code, out, err = run(
        job(ipusPerJobInstance=3, workers={"replicas": 3}, launcher={"command": [*SH, text]})
    )
    assert code == 4 and "train-worker-1 exited with 4" in err
    assert out.count("saved") <= 2


def test_the_time_limit_ends_all_workers_of_an_interactive_job_at_once(run, tmp_path):
    """Each was ended when the one before it had saved its work, or after that one's grace period."""
    trap = f"touch {tmp_path}/$POPRUN_NODE_RANK; until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ]; do sleep 0.01; done"
    text = f'trap "{trap}; echo saved; exit 5" TERM; sleep 60 & wait'
    code, out, _ = run(
        job(interactive={"ttl": 1}, workers={"replicas": 2}, launcher={"command": [*SH, text]})
    )
    assert code == 0 and out.count("saved") == 2


def test_logs_and_homes_can_be_kept(run):
    code, _, err = run(job(container={"command": [*SH, "echo hello; touch mine"]}), "--keep")
    folder = err.rpartition("homes and logs are in ")[2].strip()
    assert code == 0
    assert (Path(folder) / "train-worker-0.log").read_text() == "hello\n"
    assert (Path(folder) / "train-worker-0/mine").exists()
    shutil.rmtree(folder)


REFUSED = {
    "the value of KEY comes from secretKeyRef and can't be had here\n  fix: --env KEY=VALUE": {
        "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
    },
    "volume data is mounted at /nowhere/data, which doesn't exist here": {
        "volumeMounts": [{"name": "data", "mountPath": "/nowhere/data"}]
    },
    "variables of a ConfigMap or Secret can't be had here": {"envFrom": [{"configMapRef": {"name": "c"}}]},
    "an image's own command can't be run here\n  fix: --command TEXT": {"command": []},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_not_be_had_here_is_refused(run, message):
    code, _, err = run(job(container=REFUSED[message]))
    assert code == 2 and message in err and "job.yaml:" in err


def test_a_variable_of_a_secret_can_be_given(run):
    env = REFUSED["the value of KEY comes from secretKeyRef and can't be had here\n  fix: --env KEY=VALUE"]
    code, out, _ = run(job(container={**env, "command": [*SH, "echo $KEY"]}), "--env", "KEY=a=b")
    assert (code, out) == (0, "a=b\n")


def test_a_reader_that_goes_away_holds_no_worker_up(tmp_path):
    """`ipujob run ... | head -1`: the thread that read the worker ended, and the worker waited for ever."""
    text = f"echo first; head -c 1000000 /dev/zero; echo done > {tmp_path}/done"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(container={"command": [*SH, text]})))
    words = (sys.executable, "-m", "ipujob", "run", "job.yaml", "--local")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.read(5) == b"first"
    process.stdout.close()
    process.wait(240)
    assert (tmp_path / "done").exists()


def test_other_kinds_and_other_places_are_refused(run, tmp_path, capfd):
    code, _, err = run({"apiVersion": "v1", "kind": "ConfigMap"})
    assert code == 2 and "kind ConfigMap isn't an IPUJob" in err
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job()))
    assert main(["run", str(tmp_path / "job.yaml")]) == 2
    assert f"fix: ipujob run --local {tmp_path}/job.yaml; or" in capfd.readouterr().err


def test_a_program_that_is_not_there_fails(run, tmp_path, monkeypatch):
    code, out, _ = run(job(container={"command": ["no-such-program"]}))
    assert code == 127 and "no-such-program" in out and "No such file or directory" in out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    code, _, said = run(job(container={"command": ["python3", "train.py"]}))
    assert code == 2 and "train.py is in this folder" in said and f"fix: workingDir: {tmp_path}," in said


def test_an_interrupt_ends_all_that_workers_started(tmp_path):
    text = f'trap "echo saved; exit 0" TERM; sleep 1234 & echo $! >> {tmp_path}/pids; wait'
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(job(jobInstances=2, container={"command": [*SH, text]}))
    )
    words = (sys.executable, "-m", "ipujob", "run", "job.yaml", "--local")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 240
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130 and "interrupted" in err
    assert sorted(out.splitlines()) == ["[train-worker-0] saved", "[train-worker-1] saved"]
    for pid in pids.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_two_workers_meet_through_popdist_and_poprun(run, tmp_path):
    """The joined mode: the same command in both, each worker's poprun starts its own share."""
    program = tmp_path / "meet.py"
    program.write_text(
        "import popdist\n"
        "popdist.init()\n"
        "from popdist import collectives\n"
        "place = popdist.getInstanceIndex()\n"
        "print(place, 'of', popdist.getNumInstances(), collectives.all_reduce(place + 1.0))\n"
    )
    value = job(ipusPerJobInstance="4", modelReplicasPerWorker="2", workers={"replicas": 2})
    value["spec"]["workers"]["template"]["spec"]["containers"][0]["command"] = ["python3", str(program)]
    code, out, err = run(value)
    assert code == 0, out + err
    assert {line.split("] ", 1)[1] for line in out.splitlines()} >= {"0 of 2 3.0", "1 of 2 3.0"}, out
