import pytest
from programs import imported


@pytest.fixture(scope="session")
def program():
    """`with program(folder, name) as module`."""
    return imported
