"""A notebook that is run by a kernel, as a user runs it: plans and reports display themselves."""

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = (
    """
import poptorch, torch
options = poptorch.Options().deviceIterations(3).enableProfiling("report")
model = poptorch.inferenceModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), options)
batch = torch.randn(6, 4)
""",
    "overview = poptorch.describe(model, batch=batch)\nprint(overview.code['F0'])\noverview",
    "model(batch)\nmodel.detachFromDevice()",
    'report = poptorch.Report("report")\nreport',
    "[(row['profile'], row['calls'], row['steps']) for row in report.figures()]",
    "sum(row['kind'] == 'forward' for row in report.trace())",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell displays: mime type -> text."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    return [
        {mime: text for output in cell.outputs for mime, text in output.get("data", {}).items()}
        for cell in notebook.cells
    ]


def test_a_plan_displays_its_stages_and_code(outputs):
    assert "stage 0 on ipu 0" in outputs[1]["text/plain"]
    assert outputs[1]["image/svg+xml"].startswith("<svg ")
    assert "aten_tanh_default" not in outputs[1]["text/plain"]  # the code is in `.code`


def test_a_report_displays_its_page_and_prints_its_headline(outputs):
    assert outputs[3]["text/html"].startswith("<iframe srcdoc=")
    assert "inference: " in outputs[3]["text/plain"]


def test_figures_and_trace_are_rows_in_a_notebook(outputs):
    assert outputs[4]["text/plain"] == "[('inference', 1, 1)]"
    assert outputs[5]["text/plain"] == "3"  # a piece on each of three micro-batches
