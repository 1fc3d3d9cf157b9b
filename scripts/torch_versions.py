"""Test Pando on this environment's torch, and write the results into docs/torch_versions.md.

`make test-torch VERSION=2.15.0` builds an environment and runs this script in it. Each lane adds its result to the
row of torch's version; the script exits with 1 if a lane fails.
"""

import argparse
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "torch_versions.md"
PYTEST = ["-m", "pytest", "-m", "not slow", "--dist", "worksteal"]
_ELSEWHERE = ("test_wheel.py", "test_torch_private.py")
UNITS = [
    f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py")) if path.name not in _ELSEWHERE
]
LANES = {
    "compile": ["tests/test_torch_private.py", "tests/popengine/compile", "tests/poptorch/ops"],
    "engine": [*UNITS, "tests/popengine", "--ignore", "tests/popengine/compile"],
    "poptorch": ["tests/poptorch", "--ignore", "tests/poptorch/ops", "--ignore", "tests/poptorch/data"],
    "parity": ["tests/parity"],
    "random models": ["-m", "tests.fuzz", "--trials", "200"],
    "zoo": ["tests/zoo"],
}
LANES["poptorch"] += ["--ignore", "tests/poptorch/test_guide.py"]
COLUMNS = ["torch", "Python", *LANES]
_TABLE = re.compile(r"^\| torch \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)


def run_lane(name: str, workers: int) -> str:
    """Return what a lane reports: the numbers of tests that passed and failed, or of random models."""
    words = LANES[name]
    if words[0] != "-m":
        words = [*PYTEST, "--numprocesses", str(workers), *words]
    print(f"---- {name}", flush=True)
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT) as lane:
        lines = []
        for line in lane.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    text = "".join(lines[-5:])
    if models := re.search(r"(\d+) random models, no difference", text):
        return f"{models[1]} equal"
    counts = re.findall(r"(\d+) (passed|failed|errors?)\b", text)
    return ", ".join(" ".join(count) for count in counts) or f"stopped ({lane.returncode})"


def write(results: dict[str, str]) -> None:
    """Write the results by column into the row of this torch and Python; make the row if there is none."""
    page = PAGE.read_text("utf-8")
    found = _TABLE.search(page)
    assert found is not None, f"{PAGE} has no table"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]
    rows = {(row[0], row[1]): dict(zip(COLUMNS, row, strict=True)) for row in cells}
    key = torch.__version__.partition("+")[0], platform.python_version().rpartition(".")[0]
    rows.setdefault(key, {name: "" for name in COLUMNS} | {"torch": key[0], "Python": key[1]}).update(results)
    ordered = sorted(rows, key=lambda row: [[int(part) for part in text.split(".")] for text in row])
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([*rows[key].values()] for key in reversed(ordered))]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(_TABLE.sub(lambda _: table, page), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests at the same time")
    given = parser.parse_args()
    results = {}
    for name in given.lanes:
        results[name] = run_lane(name, given.workers)
        write(results)
    return any(re.search("failed|error|stopped", result) is not None for result in results.values())


sys.exit(main())
