"""What holds for all tests: signals, threads, and the budget of `make test` (budget.py)."""

import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import budget

sys.path.append(str(Path(__file__).with_name("popdist")))  # `processes` and `ports` serve other folders, too

# A shell lets programs in its background ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of an OpenMP team that has nothing to do sleep. They would spin, and keep a loaded machine's cores from
# other tests. OpenMP reads this when torch is loaded, here and in the programs that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Unbuffered, Python writes a line in several parts, and those of several instances mix.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture
def one_thread():
    """Let plain PyTorch compute with one thread, as the ipus do. More threads add in another order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Leave modules that are imported out of collections of garbage: they took a quarter of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the items beyond the budget of `make test` as slow."""
    functions, table = defaultdict(list), budget.load()
    for item in items:
        functions[budget.function_of(item.nodeid)].append(item)
    for function, its in functions.items():
        first = its[0]
        always = first.get_closest_marker("kind") is not None
        nodes = [item.nodeid for item in its]
        chosen = budget.chosen(function, nodes, first.fixturenames, always, table)
        for item in its:
            if item.nodeid not in chosen:
                item.add_marker(pytest.mark.slow)
