"""The files of examples/ipujob: each runs here as it stands, and two workers give the bits of one process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from ipujob.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "ipujob"
HERE = ("--env", f"EXAMPLES={EXAMPLES}")


def run(*words):
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(text):
    return re.search(r"weights (\w{16})$", text, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def alone():
    """What one process with all four replicas trains."""
    return run(FOLDER / "train.py", "--epochs", "3", "--replicas", "4")


def test_all_files_are_right_and_can_be_rendered(capsys):
    files = sorted(str(path) for path in FOLDER.glob("*.yaml") if path.name != "service.yaml")
    assert len(files) == 6 and main(["check", *files]) == 0
    for file in files:
        assert main(["render", file, "--as", "pod"]) == 0
    assert capsys.readouterr().out.count("kind: IPUJob") == 0


def test_a_pipeline_over_four_ipus_trains_here():
    text = run("-m", "ipujob", "run", FOLDER / "four_ipus.yaml", "--local", *HERE)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
    assert len(losses) == 10 and losses[-1] < losses[0]


def test_two_workers_give_the_bits_of_one_process(alone):
    text = run("-m", "ipujob", "run", FOLDER / "two_workers.yaml", "--local", *HERE)
    assert "[two-workers-worker-0] epoch 3: loss" in text
    assert weights(text) == weights(alone)


def namespaces_can_be_made():
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        return False
    return subprocess.run(["unshare", "-num", "true"], capture_output=True).returncode == 0


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with an address and a name each, as pods have: what runs a command in the k-th of them."""
    if not namespaces_can_be_made():
        pytest.skip("network namespaces can't be made here: not root, or no unshare, nsenter, ip")
    holders = [subprocess.Popen(["unshare", "-num", "sleep", "600"]) for _ in range(2)]
    pids = [str(holder.pid) for holder in holders]
    table = tmp_path / "hosts"
    lines = [
        f"10.213.7.{k + 1} two-workers-worker-{k}.two-workers two-workers-worker-{k}\n" for k in range(2)
    ]
    table.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def inside(k, *words):
        return ["nsenter", "-t", pids[k], "-n", "-u", "-m", *map(str, words)]

    try:
        own = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{pid}/ns/net") == own for pid in pids):
            time.sleep(0.02)
        link = [
            "ip",
            "link",
            "add",
            "v0",
            "netns",
            pids[0],
            "type",
            "veth",
            "peer",
            "name",
            "v1",
            "netns",
            pids[1],
        ]
        subprocess.run(link, check=True)
        for k in range(2):
            for words in (
                ("ip", "addr", "add", f"10.213.7.{k + 1}/24", "dev", f"v{k}"),
                ("ip", "link", "set", f"v{k}", "up"),
                ("ip", "link", "set", "lo", "up"),
                ("hostname", f"two-workers-worker-{k}"),
                ("mount", "--bind", table, "/etc/hosts"),
            ):
                subprocess.run(inside(k, *words), check=True)
        yield inside
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_two_hosts_find_each_other_by_the_names_of_their_service(hosts, alone, capsys):
    """Two network namespaces run what the pods of the file say, with nothing changed but the folder of the examples."""
    assert main(["render", str(FOLDER / "two_workers.yaml"), "--as", "pod"]) == 0
    pods = [each for each in yaml.safe_load_all(capsys.readouterr().out) if each["kind"] == "Pod"]
    running = []
    for k, pod in enumerate(pods):
        worker = pod["spec"]["containers"][0]
        told = {each["name"]: each["value"] for each in worker["env"]} | {"EXAMPLES": str(EXAMPLES)}
        assert told["MASTER_ADDR"] == "two-workers-worker-0.two-workers"
        command = [word.replace("$(EXAMPLES)", str(EXAMPLES)) for word in worker["command"] + worker["args"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command[0] = f"{Path(sys.executable).parent}/{command[0]}"
        words = hosts(
            k, "env", f"PATH={path}", *(f"{name}={value}" for name, value in told.items()), *command
        )
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert weights(said[0]) == weights(alone) and "weights" not in said[1]


def test_servers_answer_here_and_end_with_ctrl_c(tmp_path):
    server = yaml.safe_load((FOLDER / "servers.yaml").read_text())
    server["spec"]["jobInstances"] = 1
    (tmp_path / "servers.yaml").write_text(yaml.safe_dump(server))
    words = [
        sys.executable,
        "-m",
        "ipujob",
        "run",
        tmp_path / "servers.yaml",
        "--local",
        *HERE,
        "--env",
        "PORT=0",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        port = next(
            found[1] for line in process.stdout if (found := re.search(r"serving on port (\d+)", line))
        )

        def ask(body):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}", data=body.encode(), timeout=240
            ) as answer:
                return json.load(answer)

        assert all(side in (0, 1) for side in ask("[[0.5, 0.1], [-1, 2]]"))
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask("[[1, 2, 3]]")
        assert refused.value.code == 400
        assert "points must be of shape [count, 2], and are [1, 3]" in refused.value.read().decode()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert process.returncode == 130


SMALL = (
    "--micro-batch-size 2 --gradient-accumulation 16 --hidden-size 32 --num-attention-heads 2 --num-hidden-layers 4 "
    "--layers-per-ipu 0 1 1 2 --vocab-size 128 --sequence-length 16 --mask-tokens 4"
)


def test_the_tutorials_command_trains_bert(tmp_path):
    """Its file and text as they stand, over four ipus; only sizes are added to the end of the last line."""
    pytest.importorskip("transformers")
    file = Path(__file__).parent / "files/bert.yaml"
    text = yaml.safe_load(file.read_text())["spec"]["workers"]["template"]["spec"]["containers"][0]["args"][0]
    clone = f"https://github.com/graphcore/examples.git={FOLDER / 'graphcore_examples'}"
    command = f"{text.rstrip()} {SMALL}"
    said = run("-m", "ipujob", "run", file, "--local", "--clone", clone, "--command", command)
    assert "Encoder 3  --> IPU 3" in said
    assert re.search(r"total loss: [45]\.\d{3} - mlm_loss: 4\.\d{3}", said)  # ln 128 is 4.85
    assert "Training Metrics" in said
