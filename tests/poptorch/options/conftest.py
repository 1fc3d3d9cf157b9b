import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "POPLAR_ENGINE_OPTIONS",
        "POPTORCH_CACHE_DIR",
        "POPTORCH_DEFAULT_OPTIONS",
        "POPTORCH_IPU_MODEL",
    ):
        monkeypatch.delenv(name, raising=False)
