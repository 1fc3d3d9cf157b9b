"""The package and its environment: pins of constraints.txt, the programs of pyproject.toml, advice to install."""

import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from poptorch.logs import NEWEST_TORCH, log_untested_torch

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(TORCH,) = (Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
PINS = [Requirement(line) for line in LINES if line and not line.startswith("#")]


@functools.cache
def installed() -> dict[str, metadata.Distribution]:
    return {canonicalize_name(found.name): found for found in metadata.distributions()}


def asked_for() -> set[str]:
    """The packages that pyproject.toml and the Makefile name, and those that these depend on."""
    named = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    named += re.findall(r'pip install [^\n]*"([\w-]+==[\w.]+)"', (ROOT / "Makefile").read_text())
    left, found, here = [canonicalize_name(Requirement(text).name) for text in named], set(), installed()
    while left:
        name = left.pop()
        if name not in found and name in here:
            left += [canonicalize_name(Requirement(text).name) for text in here[name].requires or ()]
        found.add(name)
    return found


def test_no_package_is_pinned_twice():
    counts = Counter(canonicalize_name(pin.name) for pin in PINS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_pin_is_of_a_package_that_the_project_or_a_dependency_asks_for():
    wanted = asked_for()
    assert [pin.name for pin in PINS if canonicalize_name(pin.name) not in wanted] == []


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.skipif(
    not (Path(sys.prefix) / ".ready").exists(),
    reason="`make` did not install these packages by constraints.txt",
)
def test_a_pin_is_the_version_that_is_installed(pin):
    found = installed().get(canonicalize_name(pin.name))
    if found is None:
        pytest.skip(f"{pin.name} is not installed here")
    # `make test-torch` runs this test with each version of torch in the range.
    allowed = TORCH.specifier if pin.name == "torch" else pin.specifier
    assert allowed.contains(Version(found.version).public), found.version


def test_the_range_of_torch_ends_with_the_newest_tested_version_and_holds_the_pin(caplog):
    minor = re.compile(r"(\d+)\.(\d+)")
    (end,) = (bound.version for bound in TORCH.specifier if bound.operator == "<")
    (major, newest), (end_major, end_minor) = (minor.match(text).groups() for text in (NEWEST_TORCH, end))
    assert (major, int(newest) + 1) == (end_major, int(end_minor))
    assert all(TORCH.specifier.contains(found) for found in re.findall(r"torch==([\d.]+)", "\n".join(LINES)))
    log_untested_torch(f"{NEWEST_TORCH}.9+cpu")
    assert caplog.text == ""
    log_untested_torch(f"{end}.0.dev20270101+cpu")
    assert len(caplog.messages) == 1 and f"is newer than {NEWEST_TORCH}" in caplog.text


def test_installed_packages_have_the_dependencies_that_they_name():
    # The Makefile installs two packages without their dependencies, on purpose.
    lines = re.findall(r"--no-deps (.*)", (ROOT / "Makefile").read_text())
    alone = re.findall(r'"([\w-]+)==', " ".join(lines))
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed")
    faults = [line for line in done.stdout.splitlines() if line.split()[0] not in alone]
    assert done.stdout and faults in ([], ["No broken requirements found."]), done.stderr


@pytest.mark.parametrize("program", PROJECT["scripts"])
def test_a_program_prints_its_version(program):
    module = PROJECT["scripts"][program].partition(".")[0]
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{program} of Pando {metadata.version('pando-torch')}\n"


def test_no_text_advises_to_install_the_package_from_an_index():
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    texts += [path for top in ("docs", "examples") for path in (ROOT / top).rglob("*.md")]
    texts += (ROOT / "src").rglob("*.py")
    # The package is on no index: a checkout's folder is what can be installed.
    assert [
        str(path) for path in texts if re.search(r"(install|upgrade) pando-torch", path.read_text())
    ] == []


def test_the_citation_names_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_workflows_run_commands_of_the_makefile():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").iterdir():
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        runs = [step.get("run", "") for job in jobs for step in job["steps"]]
        called |= {name for text in runs for name in re.findall(r"\bmake ([\w-]+)", text)}
    assert {"check", "test-fast", "test", "test-all", "fuzz"} <= called <= targets


def test_the_makefile_and_the_workflow_take_a_claimed_and_pinned_torch():
    (pin,) = [str(pin.specifier) for pin in PINS if pin.name == "torch"]
    (claim,) = [Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch")]
    default = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    assert pin == f"=={default}"
    assert all(
        claim.specifier.contains(one) for one in workflow["jobs"]["fast"]["strategy"]["matrix"]["torch"]
    )
