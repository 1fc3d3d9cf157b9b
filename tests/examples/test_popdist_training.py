"""The example of several instances: their checkpoints are equal, and it runs without poprun too."""

import re
import sys
from pathlib import Path

import pytest
import torch
from programs import printed

import quick_python

sys.path.insert(0, str(Path(__file__).parents[1] / "poprun"))

from launching import Poprun

EXAMPLE = Path(__file__).parents[2] / "examples" / "popdist_training" / "popdist_training.py"
SMALL = ["--epochs=1", "--batch-size=4", "--width=4", "--blocks=1", "--dataloader-workers=0"]
SMALL += ["--learning-rate=0.05"]


def test_weights_of_all_instances_are_equal_to_the_last_bit(small_fashion, tmp_path):
    """The command of the tutorial's own test."""
    words = ("--mpi-global-args", "--tag-output", "--num-replicas", 4, "--num-instances", 2)
    flags = (*SMALL, "--data-dir", small_fashion, "--output-dir", tmp_path)
    poprun = Poprun(tmp_path, (*words, *quick_python.words(), EXAMPLE, *flags))
    assert poprun.wait() == 0, poprun.said()
    said = poprun.said()
    first, second = (torch.load(tmp_path / f"checkpoint-instance-{i}.pt") for i in range(2))
    trained = [name for name in first if name.endswith((".weight", ".bias"))]
    assert [name for name in trained if not torch.equal(first[name], second[name])] == []
    assert re.search(r"^\[0\] \[INFO\] Epoch 1: Loss: \d+\.\d{4}$", said, re.MULTILINE)
    assert len(re.findall(r"Validation accuracy: [01]\.\d{4}$", said, re.MULTILINE)) == 1


@pytest.mark.kind("an example: popdist")
def test_it_runs_without_poprun(small_fashion, tmp_path, caplog):
    caplog.set_level("INFO")
    flags = (*SMALL, "--num-replicas=2", "--data-dir", small_fashion, "--output-dir", tmp_path)
    printed("popdist_training", "popdist_training", *flags)
    assert re.fullmatch(r"Validation accuracy: [01]\.\d{4}", caplog.messages[-1])
    assert (tmp_path / "checkpoint-instance-0.pt").exists()


def test_missing_images_are_named_with_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist"):
        printed("popdist_training", "popdist_training", *SMALL, "--data-dir", tmp_path)
