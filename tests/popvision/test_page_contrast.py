"""All that the page shows can be seen: nothing is cut, and contrasts are WCAG's 4.5 for texts and 3 for all else.

In light, dark and on paper; from the colours that are used and from the pixels of the pictures.
"""

import dataclasses
from pathlib import Path

import pytest
import test_runs
from simulated import MS, simulated
from test_page import SHOTS, VIEWS, write
from test_page_asked import emulate, wide

from popengine.profile import HostEvent
from popvision import html

SCRIPT = (Path(__file__).parent / "contrast.js").read_text()
MEDIA = [("", "light"), ("", "dark"), ("print", "dark")]


def asked(chromium, question: str):
    return chromium.value(f"(() => {{ {SCRIPT}; return {question}(); }})()")


@pytest.fixture(scope="module")
def profile():
    """Eight stages on as many ipus, so that all colours are there, with copies, updates and a host that does things."""
    found = simulated(8, 6, gap=2 * MS, cost=lambda phase, stage: MS // 3 * (1 + stage % 3))
    kinds = {"F": "send", "B": "update"}  # half of the waiting becomes something that is drawn
    parts = tuple(
        part._replace(kind=kinds[part.phase]) if part.kind == "receive" and part.ipu % 2 else part
        for part in found.parts
    )
    times = ((1, "loader"), (6, "weights to host"))
    host = tuple(HostEvent(kind, start * MS, (start + 4) * MS) for start, kind in times)
    return dataclasses.replace(found, host=host, parts=parts)


@pytest.fixture(scope="module")
def report(profile, tmp_path_factory):
    return write(tmp_path_factory.mktemp("report"), profile)


@pytest.fixture(scope="module")
def both(profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    profile.save(folder / "one" / "training" / "profile.pop")
    simulated(8, 6, cost=lambda phase, stage: MS).save(folder / "two" / "training" / "profile.pop")
    return html.write_comparison(folder / "one", folder / "two", folder / "both.html")


@pytest.fixture(params=MEDIA, ids=["light", "dark", "paper"])
def media(request, chromium):
    emulate(chromium, *request.param)
    yield request.param
    emulate(chromium)


def opened(chromium, page, view, media):
    """As it is on paper, too: a page is opened on the screen and then printed."""
    emulate(chromium, "", media[1])
    chromium.open(page, view)
    emulate(chromium, *media)
    chromium.value("new Promise(done => setTimeout(done, 150))")  # colours fade into one another
    chromium.settle()


@pytest.mark.parametrize("view", VIEWS)
def test_all_text_and_all_outlines_can_be_told_from_what_is_behind_them(chromium, report, media, view):
    opened(chromium, report, view, media)
    assert asked(chromium, "pale") == []
    assert asked(chromium, "faint") == []


def test_texts_in_pictures_can_be_read_on_every_pixel_below_them(chromium, report, both, media):
    for page, view, change in [
        (report, "headline", ""),
        (report, "trace", ""),
        (report, "trace", "popvision.trace.show([0, 8e6])"),
        (report, "trace", "popvision.trace.show([...popvision.trace.all])"),
        (report, "trace?search=stage2", "popvision.trace.find('B', 2)"),
        (report, "trace", "popvision.trace.find('F', 1); popvision.trace.select(popvision.trace.view)"),
        (report, "memory", ""),
        (report, "memory", "document.querySelector('[type=checkbox]').click()"),
        (both, "compare", ""),
    ]:
        opened(chromium, page, view, media)
        chromium.value(change)
        count, pale = asked(chromium, "written")
        assert count > 5 and pale == [], (view, change)


@pytest.mark.parametrize("selected", [False, True])
def test_bars_of_every_width_can_be_told_from_an_empty_lane(chromium, report, media, selected):
    opened(chromium, report, "trace", media)
    seen = set()
    for span in (4e6, 20e6, 200e6, 1200e6):
        chromium.value(f"popvision.trace.all[1] = 2e9; popvision.trace.show([12e6, 12e6 + {span}])")
        if selected:
            chromium.value("popvision.trace.select([-1e9, 3e9])")
        faint, widths = asked(chromium, "bars")
        assert faint == []
        seen |= set(widths)
    assert {1, 2, 3, 9} <= seen
    opened(chromium, report, "headline", media)
    assert asked(chromium, "bars")[0] == []


def test_arrows_selections_and_ranges_can_be_told_from_whatever_they_cross(chromium, media, tmp_path):
    test_runs.train(tmp_path)
    opened(chromium, tmp_path / "report.html", "trace", media)
    for phase in "FB":
        chromium.value(f"popvision.trace.find('{phase}', 1)")
        chromium.value("popvision.trace.select(popvision.trace.view.map((t, i) => t + (i ? -1 : 1) * 2e4))")
        chromium.settle()
        found = asked(chromium, "crossed")
        assert len(found["arrows"]) >= 4 and len(found["chosen"]) == 2 and len(found["range"]) == 6
        assert min(found["arrows"] + found["chosen"] + found["range"]) >= 3, found
        assert found["overview"] and min(found["overview"]) >= 3, found


def test_the_curve_the_grid_and_the_cursor_of_memory_can_be_told_from_the_card(chromium, report, media):
    opened(chromium, report, "memory", media)
    chromium.value("document.querySelector('[type=checkbox]').click()")
    found = dict(asked(chromium, "stroked"))
    seams = [colour for colour, contrast in found.items() if contrast == 1]
    assert (
        len(seams) == 1 and len(found) == 5
    )  # the seam; the grid, the curve, what is always live, the cursor
    assert all(contrast >= 3 for colour, contrast in found.items() if colour not in seams), found


def test_paper_is_white_whatever_the_screen_was(chromium, report):
    opened(chromium, report, "trace", ("print", "dark"))
    lane = chromium.value(
        """(() => { const t = popvision.trace; return [...t.canvas.getContext('2d')
        .getImageData(t.canvas.clientWidth - 2, t.top + 4 * t.rowHeight + 4, 1, 1).data]; })()"""
    )
    assert lane == [238, 238, 238, 255]
    assert chromium.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    emulate(chromium)


@pytest.mark.parametrize("width", [420, 1400])
def test_no_view_is_wider_than_its_window_and_nothing_is_cut(chromium, tmp_path, width):
    profile = simulated(4, 6, blocks=("A, B", "C", "D", "E"))
    blocks = tuple(block._replace(ipu=block.stage % 3) for block in profile.blocks)
    page = write(tmp_path, dataclasses.replace(profile, ipus=(0, 1, 2, 0), blocks=blocks))
    wide(chromium, width)
    try:
        for view in VIEWS:
            chromium.open(page, view)
            chromium.settle()
            chromium.screenshot(SHOTS / f"{view}-{width}.png")
            assert chromium.value("document.documentElement.scrollWidth") <= width
            assert asked(chromium, "cut") == [], view
            assert view != "model" or chromium.value("document.querySelectorAll('.diagram text').length") > 9
    finally:
        wide(chromium, 1400)
