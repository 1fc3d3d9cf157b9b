"""Write the labs' notebooks for students: docs/labs/questions, without answers and outputs.

`python scripts/labs.py` copies the notebooks of docs/labs up to their heading "Answers"; with names of labs it first
runs these, and stores what their cells print; those tagged `varies` keep their outputs without `--varying`.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import nbformat

LABS = Path(__file__).parents[1] / "docs" / "labs"


def questions(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook's cells before the heading "Answers", without outputs."""
    made = copy.deepcopy(notebook)
    end = next(i for i, cell in enumerate(made.cells) if "## Answers" in cell.source)
    text = made.cells[end].source.partition("## Answers")[0].rstrip()
    made.cells = made.cells[:end]
    if text:
        made.cells.append(nbformat.v4.new_markdown_cell(text, id="last-question"))
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return made


def run(notebook: nbformat.NotebookNode, is_varying_stored: bool) -> None:
    """Run a notebook in a temporary folder, and store what its cells print and draw; that of cells tagged `varies` only
    if `is_varying_stored`."""
    import nbclient

    done = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        nbclient.NotebookClient(done, timeout=1200, kernel_name="python3", resources=place).execute()
    for cell, new in zip(notebook.cells, done.cells, strict=True):
        if cell.cell_type == "code" and (is_varying_stored or "varies" not in cell.metadata.get("tags", ())):
            text = "".join(output["text"] for output in new.outputs if output.get("name") == "stdout")
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
            cell.outputs += [output for output in new.outputs if output.output_type != "stream"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="*", help="labs to run first, such as schedules")
    parser.add_argument("--varying", action="store_true", help="also store what cells tagged `varies` print")
    arguments = parser.parse_args()
    (LABS / "questions").mkdir(exist_ok=True)
    for path in sorted(LABS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if path.stem in arguments.run:
            run(notebook, arguments.varying)
            nbformat.write(notebook, path)
        nbformat.write(questions(notebook), LABS / "questions" / path.name)


if __name__ == "__main__":
    main()
