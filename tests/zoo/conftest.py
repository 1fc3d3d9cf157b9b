"""The zoo runs with one thread, as the ipus do, and without the warnings of the libraries of its models."""

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet(one_thread, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
