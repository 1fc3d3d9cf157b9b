"""The zoo runs with one thread, as the ipus do, and without the warnings of the libraries of its models."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    yield
    torch.set_num_threads(threads)
