"""Change one place of `src` at a time, and run the tests that call the changed function: a survivor is a missing test.

    python scripts/mutants.py record [tests/poprun ...]     # which test calls what: twice as long as make test
    python scripts/mutants.py run --count 60 --seed 1       # prints each change, and whether a test fails

Only the tests of `make test` count. A change that leaves the meaning as it is (an equivalent mutant) also survives, so
read the list. `src` itself is never changed: the tests import a copy.
"""

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
CALLS = BUILD / "calls.json"  # by function ("popengine/order.py:12"): the tests that call it
SWAPPED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a function, which begins at line `function` (its first decorator, if there is one)."""

    file: str  # in src
    function: int
    node: ast.AST
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno}: {ast.unparse(self.node)!s:.70} -> {self.text:.70}"

    def applied(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        before, after = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        lines[first : last + 1] = [before + self.text.encode() + after]
        return b"".join(lines).decode()


def changes(node: ast.AST) -> Iterator[str]:
    """Yield source that can take the place of a node and means something else."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) | ast.BoolOp(op=operator) | ast.BinOp(op=operator):
            if type(operator) in SWAPPED:
                swapped = SWAPPED[type(operator)]()
                if isinstance(new, ast.Compare):
                    new.ops = [swapped]
                else:
                    new.op = swapped
                yield f"({ast.unparse(new)})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(new.operand)})"
        case ast.IfExp():
            yield f"({ast.unparse(new.body)})"
            yield f"({ast.unparse(new.orelse)})"
        case ast.Constant(value=bool()):
            yield str(not new.value)
        case ast.Constant(value=int()):
            yield str(new.value + 1)
        case ast.Return(value=ast.expr()) if not isinstance(new.value, ast.Constant):
            yield "return None"
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Continue():
            yield "break"


def mutants_of(path: Path) -> list[Mutant]:
    """Return all changes of the functions in a file; not of annotations, texts of errors and `assert`."""
    found = []

    def visit(node: ast.AST, function: int) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            children: list[ast.AST] = list(node.body)
        elif isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
            return
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        else:
            children = list(ast.iter_child_nodes(node))
        if function:
            file = path.relative_to(ROOT / "src").as_posix()
            found.extend(Mutant(file, function, node, text) for text in changes(node))
        for child in children:
            visit(child, function)

    visit(ast.parse(path.read_text()), 0)
    return found


def record(words: list[str]) -> None:
    """Run the tests of `make test`, and write which of them call which functions."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    scripts = Path(__file__).parent
    paths = os.pathsep.join([str(scripts / "recording"), str(ROOT / "src"), str(scripts)])
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "mutants", *words]
    tested = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "PANDO_RECORD": str(BUILD / "main")}
    )
    if tested.returncode not in (0, 1):  # 1: a test fails, which then kills no change
        raise SystemExit(tested.returncode)
    calls = defaultdict(set)
    for path in BUILD.glob("*.txt"):
        for line in path.read_text().splitlines():
            function, test = line.split("\t")
            calls[function.partition("/src/")[2]].add(test)
    CALLS.write_text(
        json.dumps({function: sorted(tests) for function, tests in sorted(calls.items())}, indent=1)
    )
    print(f"{len(calls)} functions are called by tests")


def pytest_configure(config):
    """As a plugin of pytest: each process of pytest-xdist has files of its own."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        import sitecustomize

        os.environ["PANDO_RECORD"] = sitecustomize.RECORD = str(BUILD / worker)


def pytest_runtest_logstart(nodeid, location):
    import sitecustomize

    sitecustomize.begin(nodeid)


def cheapest(tests: list[str], seconds: float) -> list[str]:
    """Return the tests that cost least, at most `seconds` CPU seconds of them together and at least one."""
    sys.path.insert(0, str(ROOT / "tests"))
    import budget

    table, chosen = budget.load(), []
    costs = {test: table.get(budget.function_of(test), (budget.UNMEASURED, 1))[0] for test in tests}
    for test in sorted(tests, key=costs.__getitem__):
        if chosen and costs[test] > seconds:
            break
        seconds -= costs[test]
        chosen.append(test)
    return chosen


def killer(mutant: Mutant | None, tests: list[str], limit: float) -> str:
    """Return the first test that fails, or "too slow", on a copy of `src` with the change; "" if all pass."""
    changed = BUILD / "src" / (mutant.file if mutant else "popengine/__init__.py")
    source = changed.read_text()
    (BUILD / "tests.txt").write_text("\n".join(tests))
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"@{BUILD / 'tests.txt'}"]
    try:
        changed.write_text(mutant.applied(source) if mutant else source)
        environment = {**os.environ, "PYTHONPATH": str(BUILD / "src")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **pipes) as tested:
            try:
                text, _ = tested.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return "too slow"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tested.pid, signal.SIGKILL)  # also what a test has left
        if tested.returncode not in (0, 1, 2):  # 2: the change breaks an import
            raise SystemExit(f"pytest ended with {tested.returncode} for {mutant}:\n{text[-2000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return "" if tested.returncode == 0 else (*failed, "pytest")[0]
    finally:
        changed.write_text(source)


def run(files: list[str], count: int, seed: int, seconds: float, limit: float) -> None:
    calls = json.loads(CALLS.read_text())
    shutil.rmtree(BUILD / "src", ignore_errors=True)
    shutil.copytree(ROOT / "src", BUILD / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    paths = [path.absolute() for name in files for path in sorted([Path(name), *Path(name).rglob("*.py")])]
    every = [mutant for path in paths if path.suffix == ".py" for mutant in mutants_of(path)]
    first = next(iter(calls.values()))[:1]
    if failed := killer(None, first, limit):
        raise SystemExit(f"{failed} fails without a change")
    outcomes = defaultdict(int)
    for mutant in random.Random(seed).sample(every, min(count, len(every))):
        begun, tests = time.monotonic(), calls.get(f"{mutant.file}:{mutant.function}", [])
        failed = killer(mutant, cheapest(tests, seconds), limit) if tests else ""
        outcome = "killed" if failed else "SURVIVED" if tests else "no test calls it"
        outcomes[outcome] += 1
        print(
            f"{outcome}, {len(tests)} tests, {time.monotonic() - begun:.0f} s: {mutant}\n    {failed}",
            flush=True,
        )
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="further words are pytest's: files, -n 3")
    running = commands.add_parser("run")
    running.add_argument(
        "files", nargs="*", default=[ROOT / "src"], help="files and folders to change: all of src"
    )
    running.add_argument("--count", type=int, default=60)
    running.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="by default one a day")
    running.add_argument("--seconds", type=float, default=60, help="CPU seconds of tests for each change")
    running.add_argument("--limit", type=float, default=600, help="seconds, after which tests that hang end")
    given, words = parser.parse_known_args()
    if given.command == "record":
        record(words)
    elif words:
        parser.error(f"unknown arguments: {' '.join(words)}")
    else:
        run(given.files, given.count, given.seed, given.seconds, given.limit)


if __name__ == "__main__":
    main()
