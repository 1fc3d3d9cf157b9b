"""A report as a lesson: a step event by event, and its picture."""

import xml.etree.ElementTree as ElementTree

import pytest
from simulated import MS, simulated

from popvision.report import write_report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lesson")
    simulated(3, 4, gap=MS).save(folder / "training" / "profile.pop")
    return write_report(folder)


def press(chromium, name):
    chromium.value(f"[...document.querySelectorAll('button')].find(b => b.innerText === '{name}').click()")


def test_a_step_is_shown_event_by_event(chromium, report):
    chromium.open(report)
    drawn = "popvision.miniature.canvas.drawNow(), popvision.miniature.drawn"
    assert chromium.value(drawn) == 24  # 3 stages, 4 micro-batches, forward and backward
    said = "document.getElementById('said').innerText"
    press(chromium, "Step ▸")
    assert chromium.value(drawn) == 1
    words = "1 of 12, after 0 ns: ipu 0: forward of stage 0, micro-batch 0; ipu 1 waits; ipu 2 waits"
    assert chromium.value(said) == words
    for _ in range(3):
        press(chromium, "Step ▸")
    words = "4 of 12, after 3 ms: ipu 0 waits; ipu 1 waits; ipu 2: backward of stage 2, micro-batch 0"
    assert chromium.value(said) == words
    assert chromium.value(drawn) == 7
    for _ in range(4):  # before the first event is the whole step
        press(chromium, "◂")
    assert (chromium.value(drawn), chromium.value(said)) == (24, "")


def test_one_step_is_saved_as_a_picture_of_what_the_page_draws(chromium, report):
    chromium.open(report)
    chromium.value("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }")
    press(chromium, "Save SVG")
    svg = ElementTree.fromstring(chromium.value("window.saved.text()"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in svg.iter(f"{name}text")]
    assert [text for text in texts if text.startswith("ipu")] == ["ipu 0", "ipu 1", "ipu 2"]
    assert sorted(text for text in texts if text[0] in "FB") == sorted(
        [*(f"F{m}" for m in range(4)), *(f"B{m}" for m in range(4))] * 3
    )
    # A forward lasts a twelfth of the step.
    ticks = {text.text: float(text.get("x")) for text in svg.iter(f"{name}text") if text.text.endswith("ms")}
    widths = [float(rect.get("width")) for rect in svg.iter(f"{name}rect") if rect.get("fill") == "#1565c0"]
    each = (ticks["4 ms"] - ticks["2 ms"]) / 2
    assert chromium.faults == [] and each > 50
    assert all(width == pytest.approx(each, abs=4) for width in widths)


def test_the_compare_tab_says_the_command_with_this_folder(chromium, report):
    chromium.open(report, "compare")
    shown = chromium.value("document.getElementById('command').innerText")
    assert shown == f"popvision compare {report.parent} OTHER"


def test_modules_come_first_and_a_search_leads_to_operations(chromium, report):
    chromium.open(report, "operations")
    chosen = "document.querySelector('[aria-label=Rows] [aria-pressed=true]').innerText"
    assert chromium.value(chosen) == "by module"
    chromium.value("document.querySelector('input[type=search]').focus()")
    chromium.type("backward")
    assert chromium.value(chosen) == "by operation"
    shown = chromium.value(
        "[...document.querySelectorAll('#by-operation tbody tr')].map(row => row.innerText)"
    )
    assert shown and all("matrix product mm" in row and "backward" in row for row in shown)


@pytest.mark.parametrize("on", ["devices", "cores"])
def test_the_buttons_of_the_trace_stand_in_one_row(chromium, report, on):
    chromium.open(report, f"trace?on={on}")
    tops = chromium.value(
        "[...document.querySelectorAll('button')].filter(b => ['One step', 'All', '−', '+'].includes(b.innerText))"
        ".map(b => b.getBoundingClientRect().top)"
    )
    assert len(tops) == 4 and len(set(tops)) == 1
