"""Each program of `examples/by_feature` is the base plus its marked lines, runs, and learns."""

import re
from pathlib import Path

import processes
import pytest
from programs import printed

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
FEATURES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")
SAME_BITS = {"phases": "base", "profiling": "base", "recomputation": "base", "resume": "base"}
SAME_BITS |= {"known_operations": "base", "sharding": "base", "pipelining": "accumulation"}


def without_marked_lines(text: str) -> str:
    """Return a program without what is marked as new, without its docstring, and with two empty lines at most."""
    text = re.sub(r"^ *# New: .*?^ *# End\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^.*  # New\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n\n", text.partition("\n")[2])


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^epoch \d+: loss ([\d.]+), right", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[str, ...], str]:
    return {}


@pytest.fixture
def run(monkeypatch, tmp_path, outputs):
    """What a program prints, with the flags of a command line, in a folder of its own."""

    def run(name: str, *flags: str) -> str:
        monkeypatch.chdir(tmp_path)
        if (name, *flags) not in outputs or name == "resume":
            outputs[name, *flags] = printed("by_feature", name, *flags)
        return outputs[name, *flags]

    return run


@pytest.mark.parametrize("name", FEATURES)
def test_a_program_differs_from_the_base_in_its_marked_lines_only(name):
    text, base = (FOLDER / f"{name}.py").read_text(), (FOLDER / "base.py").read_text()
    assert without_marked_lines(text) == base.partition("\n")[2]
    assert "# New" in text


@pytest.mark.kind("an example: by feature")
@pytest.mark.parametrize("name", ["base", *FEATURES])
def test_a_program_learns(run, name):
    found = losses(run(name, "--epochs", "3"))
    assert len(found) == 3 and found[2] < 0.6 * found[0]


@pytest.mark.parametrize("name", SAME_BITS)
def test_a_layout_prints_what_the_program_without_it_prints(run, name):
    flags = ("--epochs", "3")
    assert losses(run(name, *flags)) == losses(run(SAME_BITS[name], *flags))


@pytest.mark.parametrize("name", sorted({"custom_op", "half_precision", "replicas", "tied_weights"}))
def test_what_changes_the_numbers_prints_others(run, name):
    assert losses(run(name, "--epochs", "3")) != losses(run("base", "--epochs", "3"))


def test_a_profile_is_written_and_read(run, tmp_path):
    printed = run("profiling", "--epochs", "3", "--report", str(tmp_path / "here"))
    assert re.search(r"^18 calls, [\d.]+ ms a step$", printed, re.MULTILINE)
    assert list((tmp_path / "here").rglob("profile.pop"))


def test_a_training_that_is_started_again_goes_on_as_if_it_had_not_ended(run):
    whole = losses(run("base", "--epochs", "3"))
    first, rest = run("resume", "--epochs", "2"), run("resume", "--epochs", "3")
    assert "epoch 0" in first and "epoch 2" not in first and "epoch 1" not in rest
    assert losses(first) + losses(rest) == whole


def test_two_processes_print_what_one_prints():
    words = ("by_feature", "several_processes", "--epochs", "2")
    (one,) = processes.run(printed, 1, *words, replicas=2)
    two = processes.run(printed, 2, *words)
    assert [each.error for each in (one, *two)] == [""] * 3
    assert losses(one.value) == losses(two[0].value) and len(losses(one.value)) == 2
    assert two[1].value == ""
