"""Parity: what an executor computes equals plain PyTorch, through the public API alone."""

import pytest


@pytest.fixture(autouse=True)
def as_the_ipus(one_thread):
    """Each test has one thread."""
