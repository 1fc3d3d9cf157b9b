import pytest
from programs import imported, write_fashion


@pytest.fixture(scope="session")
def program():
    """`with program(folder, name) as module`."""
    return imported


@pytest.fixture(scope="module")
def bert(program):
    pytest.importorskip("transformers")
    with program("bert_pretraining", "run_pretraining") as module:
        yield module


@pytest.fixture(scope="module")
def small_fashion(tmp_path_factory):
    """A folder with 64 images of Fashion-MNIST's size to train on and 27 to test with."""
    return write_fashion(tmp_path_factory.mktemp("fashion"), 64, 27)
