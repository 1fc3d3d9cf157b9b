"""What a user's editor sees: the wheel, built from the sdist, in its own environment, under both type checkers."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# mypy takes minutes over torch itself, which is not ours to check.
MYPY = "[mypy]\ncheck_untyped_defs = true\n[mypy-torch.*]\nfollow_imports = skip\n"


# A line each that an editor should underline, and what of it.
FAULTY = """\
import poptorch

opts = poptorch.Options()
opts.deviceIteration(4)
opts.deviceIterations("4")
opts.device_iterations = "4"
opts.replication_facto = 2
opts.Training.gradient_acumulation
words: str = opts.Training.gradient_accumulation
"""


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder with the README's program, and an environment with the wheel and with our torch."""
    # No find_spec("pip"): setuptools' hook takes it for a run of pip, and inductor can't import setuptools afterwards.
    if not {"pip", "setuptools"} <= {found.name for found in importlib.metadata.distributions()}:
        pytest.skip("pip and setuptools, which build the wheel, are not installed")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    sdist = "from setuptools import build_meta; build_meta.build_sdist('.')"
    run(sys.executable, "-c", sdist, cwd=folder)
    shutil.rmtree(folder / "src")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    source = next(folder.glob("*.tar.gz"))
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", ".", source, cwd=folder)
    shutil.rmtree(folder / "build", ignore_errors=True)
    (folder / "pyproject.toml").unlink()
    venv.create(folder / "env", with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "program.py").write_text(program[1])
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "faulty.py").write_text(FAULTY)
    return folder


@pytest.mark.kind("the wheel")
def test_the_program_of_the_readme_runs_from_the_wheel(environment):
    text = "import poptorch, program; print(poptorch.__file__); print(program.loss.shape)"
    shown = run("env/bin/python", "-E", "-c", text, cwd=environment).splitlines()[-2:]  # without PYTHONPATH
    assert shown[0].startswith(str(environment / "env")) and shown[1] == "torch.Size([])"


COMMANDS = [
    ["pyright", "--pythonpath", "env/bin/python"],
    ["mypy", "--python-executable", "env/bin/python"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_type_checker_finds_misspelt_options_and_no_fault_in_the_program_of_the_readme(
    environment, command
):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with pytest.raises(AssertionError) as caught:
        run(sys.executable, "-m", *command, "faulty.py", "program.py", cwd=environment)
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)*(?: -|:) error", str(caught.value))
    assert {(file, int(line)) for file, line in found} == {("faulty.py", line) for line in range(4, 10)}
