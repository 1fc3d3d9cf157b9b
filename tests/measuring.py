"""Measure the CPU seconds of tests: a plugin of pytest, which `make durations` uses to write the table of budget.py.

The seconds of a test have those of all its processes, as on a quiet core: on a busy machine a core computes up to twice
as long, which a fixed computation before each test shows. Of a function up to six items are measured. Fixtures of a
module or session have rows of their own, and what tests load once is loaded before, since which test is the first
depends on what else runs. Each result is written at once, and the table at the end:

    python -m pytest -p measuring tests/parity     # with PYTHONPATH=tests; only the rows of these files change
    python tests/measuring.py                      # writes the table from the results of an interrupted run
"""

import contextlib
import importlib
import os
import resource
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import budget

RESULTS = Path(__file__).parents[1] / "build" / "durations"
MOST = 6  # items of a function that are measured
LOADED_ONCE = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "lightning",
    "pytorch_lightning",
)
TICK = os.sysconf("SC_CLK_TCK")
QUIET = 0.0055  # seconds of `_fixed_computation` on a quiet core of an AMD EPYC with AVX-512
_of_fixtures = [0.0]  # seconds of shared fixtures in the test that runs


def _fixed_computation() -> float:
    """Return the seconds of Python's loop and of small products, of which tests consist."""
    import torch

    begun, x, total = time.thread_time(), torch.ones(64, 64), 0
    for number in range(40_000):
        total += number * number % 7
    for _ in range(100):
        torch.nn.functional.gelu(x @ x)
    return time.thread_time() - begun


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children, those that run included."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + _of_children(os.getpid())


def _of_children(pid: int) -> float:
    found = 0.0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one that ends meanwhile
            for child in children.read_text().split():
                times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
                found += sum(map(int, times)) / TICK + _of_children(int(child))
    return found


def _write(name: str, seconds: float, items: int) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.txt", "a") as file:
        file.write(f"{name}\t{seconds:.3f}\t{items}\n")


def _load_once() -> None:
    import processes

    import quick_python

    for name in LOADED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    quick_python.words()
    processes.run(os.getpid, 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    functions = defaultdict(list)
    for item in items:
        functions[budget.function_of(item.nodeid)].append(item.nodeid)
    config.items_of = {function: len(nodes) for function, nodes in functions.items()}
    chosen = set().union(*(budget.by_kind(nodes, MOST) for nodes in functions.values()))
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(RESULTS, ignore_errors=True)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        _load_once()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    before = cpu_seconds()
    result = yield
    seconds = cpu_seconds() - before
    _of_fixtures[0] += seconds
    _write(f"{fixturedef.baseid}::fixture {fixturedef.argname}", seconds, 1)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    slowness = [_fixed_computation()]
    _of_fixtures[0], before = 0.0, cpu_seconds()
    result = yield
    seconds = max(cpu_seconds() - before - _of_fixtures[0], 0.0)
    slowness.append(_fixed_computation())
    seconds *= QUIET / max(statistics.mean(slowness), QUIET)
    _write(item.nodeid, seconds, item.config.items_of[budget.function_of(item.nodeid)])
    return result


def write_table() -> None:
    """Replace the rows of the files that were measured."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for path in RESULTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            name, seconds, items = line.split("\t")
            found[budget.function_of(name)].append((float(seconds), int(items)))
    files = {name.partition("::")[0] for name in found}
    table = {name: row for name, row in budget.load().items() if name.partition("::")[0] not in files}
    for name, rows in found.items():
        table[name] = round(statistics.mean(seconds for seconds, _ in rows), 3), rows[0][1]
    budget.save(table)


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        write_table()


if __name__ == "__main__":
    write_table()
    sys.exit(0)
