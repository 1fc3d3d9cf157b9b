"""The labs run as a student runs them, and print what their pages show, but for cells tagged `varies`."""

import importlib.util
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

LABS = sorted((Path(__file__).parents[2] / "docs" / "labs").glob("*.ipynb"))


def printed(notebook) -> list[str]:
    """Return what each cell wrote to its standard output."""
    return [
        "".join(output["text"] for output in cell.get("outputs", ()) if output.get("name") == "stdout")
        for cell in notebook.cells
    ]


def test_students_get_each_lab_without_answers_and_outputs():
    spec = importlib.util.spec_from_file_location("labs", Path(__file__).parents[2] / "scripts" / "labs.py")
    scripts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scripts)
    for path in LABS:
        found = nbformat.read(path.parent / "questions" / path.name, as_version=4)
        assert found == scripts.questions(nbformat.read(path, as_version=4)), "run python scripts/labs.py"
        assert "## Answers" not in str(found) and not any(cell.get("outputs") for cell in found.cells)


def test_there_are_four_labs():
    assert [path.stem for path in LABS] == ["bubble", "same_gradients", "scaling", "schedules"]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_runs_and_prints_what_its_page_shows(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    shown, varies = printed(notebook), ["varies" in cell.metadata.get("tags", ()) for cell in notebook.cells]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=place).execute()
    found = printed(notebook)
    assert [text for text, loose in zip(found, varies, strict=True) if not loose] == [
        text for text, loose in zip(shown, varies, strict=True) if not loose
    ]
