"""The files of examples/ipujob: each runs here as it stands, and two workers give the bits of one process."""

import json
import re
import signal
import subprocess
import sys
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


def test_servers_answer_here_and_end_with_ctrl_c(tmp_path):
    server = yaml.safe_load((FOLDER / "servers.yaml").read_text())
    server["spec"]["jobInstances"] = 1
    (tmp_path / "servers.yaml").write_text(yaml.safe_dump(server))
    words = [
        sys.executable,
        *["-m", "ipujob", "run", "--local", "--env", "PORT=0"],
        *HERE,
        tmp_path / "servers.yaml",
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
