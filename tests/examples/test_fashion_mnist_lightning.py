"""The programs for Lightning run as their README says, and learn."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import printed, run, write_fashion

EXAMPLE = Path(__file__).parents[2] / "examples" / "fashion_mnist_lightning"
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("fashion"), 1024, 256)


def accuracy(output: str) -> float:
    found = re.search(r"^Accuracy on test set: ([\d.]+)%$", output, re.MULTILINE)
    assert found, output
    return float(found[1])


@pytest.mark.kind("an example: Lightning")
def test_the_simple_program_learns_as_on_the_cpu(data_dir):
    flags = ["--data-dir", data_dir, "--epochs", "1"]
    program = ("fashion_mnist_lightning", "simple_lightning_ipu")
    learned = accuracy(printed(*program, *flags))
    assert learned > 90
    assert learned == accuracy(printed(*program, *flags, "--accelerator", "cpu"))


def test_a_program_with_options_and_loaders_of_its_own_runs(data_dir):
    output = run(
        EXAMPLE / "ipu_options_and_dataloading.py", "--data-dir", data_dir, "--device-iterations", "4"
    ).stdout
    assert "A call of training took 512 images, and there were 2" in output
    assert "256 images fill 16 device iterations of 16, not 250" in output
    assert accuracy(output) > 0


def test_the_pipeline_runs_and_leaves_a_profile(data_dir, tmp_path):
    output = run(
        EXAMPLE / "pipelined_ipu.py", "--data-dir", data_dir, "--epochs", "20", "--report-dir", tmp_path
    ).stdout
    assert accuracy(output) > 50
    assert any(tmp_path.iterdir())


def test_a_loss_written_by_hand_finds_the_sigmoid():
    differences = re.findall(
        r"^pred .*, actual .*, difference ([\d.]+)$", run(EXAMPLE / "custom_losses.py").stdout, re.MULTILINE
    )
    assert len(differences) == 100
    assert max(map(float, differences)) < 0.02
