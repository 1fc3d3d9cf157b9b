"""Parity: what an executor computes equals plain PyTorch, through the public API alone."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The plain twin runs as the ipus do: with one thread. More threads add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
