"""The page in a real browser: every view opens, and zooms, tells, sorts, searches and compares.

Screenshots lie in `build/screenshots`.
"""

import dataclasses
from pathlib import Path

import pytest
import test_runs
from simulated import MS, simulated

from popengine.profile import Profile
from popvision.report import write_comparison, write_report

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
VIEWS = ["headline", "trace", "memory", "operations", "host", "model", "compare"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    costs = {0: 3 * MS, 1: MS, 2: 2 * MS, 3: MS}
    profile = simulated(
        4, 8, cost=lambda phase, stage: costs[stage], blocks=("A, B", "C", "D", "E"), gap=2 * MS
    )
    profile.save(folder / "training" / "profile.pop")
    simulated(4, 12, training=False).save(folder / "inference" / "profile.pop")
    return write_report(folder)


# The middle of the first backward that the trace shows on its first row.
FIRST_BACKWARD = """(() => {
  const trace = popvision.trace, lane = trace.lanes[0], box = trace.canvas.getBoundingClientRect();
  for (let i = 0; i < lane.size; i++) {
    if (trace.tasks[lane.task[i]].phase !== "B" || lane.start[i] < trace.view[0]) continue;
    const middle = trace.x((lane.start[i] + lane.end[i]) / 2, box.width);
    return [box.left + middle, box.top + trace.top + 10];
  }
})()"""


def write(folder: Path, profile: Profile) -> Path:
    profile.save(folder / "training" / "profile.pop")
    return write_report(folder)


def wide(chromium, width: int) -> None:
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    chromium.send("Emulation.setDeviceMetricsOverride", **size)
    chromium.settle()


def canvas_of(chromium) -> dict:
    return chromium.value("document.querySelector('main canvas.pan').getBoundingClientRect().toJSON()")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_in_light_and_dark_and_fits_a_narrow_window(chromium, report, view):
    chromium.faults.clear()
    for theme, width in (("light", 1400), ("dark", 420)):
        media = [{"name": "prefers-color-scheme", "value": theme}]
        chromium.send("Emulation.setEmulatedMedia", features=media)
        wide(chromium, width)
        chromium.open(report, view)
        chromium.screenshot(SHOTS / f"{view}-{theme}.png")
        assert chromium.value("document.documentElement.dataset.theme") == theme
        assert chromium.value("document.querySelector('[aria-selected=true]').id") == f"tab-{view}"
        assert len(chromium.value("document.getElementById('main').innerText")) > 50
        assert chromium.value("document.querySelector('.fault')") is None
        assert chromium.value("document.documentElement.scrollWidth") <= width
    wide(chromium, 1400)
    assert chromium.faults == []


def test_the_headline_shows_the_figures(chromium, report):
    chromium.open(report)
    text = chromium.value("document.getElementById('main').innerText")
    slowest = "A, B, 6 ms a micro-batch. Stage 0 takes 1.71 times as long as the average stage."
    assert f"Slowest stage\nstage 0\n{slowest}\n" in text
    bubble = "With 4 equal stages and 8 micro-batches the bubble is 3\xa0/\xa011\xa0=\xa027.3%;"
    bubble += " 19 micro-batches instead of 8 make it 13.6% and the batch of an update larger."
    assert f"Bubble of separate devices, simulated\n41.7%\n{bubble}\n" in text
    assert "Fits into 1 GiB. ipu 0 needs the most memory, 4.89 KiB.\n" in text
    assert "A step on separate devices, simulated\n48 ms" in text
    waits = "A step without waits: 112 ms. Time without a ready task: 0.0%. 1 of 64 cores ran all ipus."
    assert f"A step on these cores, recorded\n112 ms\n{waits}\n" in text


def test_one_switch_shows_these_cores_or_separate_devices(chromium, report):
    def lanes(trace):
        return chromium.value(f"{trace}.lanes.map(lane => lane.name)")

    def press(name):
        buttons = "[...document.querySelectorAll('.choice button')]"
        chromium.value(f"{buttons}.find(button => button.innerText === '{name}').click()")

    ipus = [f"ipu {ipu}" for ipu in range(4)]
    chromium.open(report)
    assert lanes("popvision.miniature") == ipus
    press("these cores")
    assert lanes("popvision.miniature") == ["core 0"]
    assert "What these cores did" in chromium.value("document.getElementById('main').innerText")
    assert chromium.value("location.hash") == "#headline?on=cores"
    chromium.value("document.getElementById('tab-trace').click()")  # the switch stays where it is
    assert lanes("popvision.trace") == ["core 0"]
    assert chromium.value("popvision.trace.steps.length") == 3
    press("separate devices")
    assert lanes("popvision.trace") == ipus
    # The simulated step, in which each ipu runs its part of the schedule.
    assert chromium.value("popvision.trace.lanes.map(lane => lane.size)") == [16] * 4
    assert chromium.value("popvision.trace.steps.length") == 1


@pytest.mark.kind("a report in the browser")
def test_a_slowed_block_of_a_real_training_is_found_on_the_page(chromium, tmp_path):
    test_runs.train(tmp_path, slow_block=1)
    chromium.open(tmp_path / "report.html")
    tiles = chromium.value("[...document.querySelectorAll('.tile')].map(tile => tile.innerText)")
    assert any(tile.startswith("Slowest stage\nstage 1\nblock1, ") for tile in tiles)
    chromium.open(tmp_path / "report.html", "operations?rows=operation")
    assert (cells(chromium, "operation")[0], cells(chromium, "block")[0]) == ("popvision_test.slow", "block1")
    chromium.screenshot(SHOTS / "slowed.png")


def test_the_trace_zooms_with_the_wheel_pans_with_a_drag_and_comes_back(chromium, report):
    chromium.open(report, "trace")
    before = chromium.value("popvision.trace.view")
    box = canvas_of(chromium)
    x, y = box["left"] + box["width"] / 2, box["top"] + 100
    chromium.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    assert chromium.value("popvision.trace.view") == before  # the page scrolls
    chromium.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)  # Ctrl
    zoomed = chromium.value("popvision.trace.view")
    assert zoomed[1] - zoomed[0] < 0.7 * (before[1] - before[0])
    chromium.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    chromium.mouse("mouseMoved", x - 200, y, button="left", buttons=1)
    chromium.mouse("mouseReleased", x - 200, y, button="left", clickCount=1)
    panned = chromium.value("popvision.trace.view")
    assert panned[0] > zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    chromium.value("document.querySelector('main canvas.pan').focus()")
    chromium.press("Home")
    assert chromium.value("popvision.trace.view") == before


def test_hovering_names_the_block_the_line_and_the_time(chromium, report):
    chromium.open(report, "trace")
    place = chromium.value(FIRST_BACKWARD)
    chromium.mouse("mouseMoved", *place)
    text = chromium.value("document.getElementById('tip').innerText")
    assert text.splitlines()[:4] == [
        "Backward of stage 0, micro-batch 0",
        "blocks A, B",
        "model.py:0",
        "3 ms on ipu 0, replica 0",
    ]


def test_the_keyboard_walks_through_events_and_leads_to_their_operations(chromium, report):
    chromium.open(report, "trace")
    chromium.value("document.querySelector('main canvas.pan').focus()")
    for key in ("ArrowDown", "ArrowDown", "."):
        chromium.press(key)
    assert "stage 1" in chromium.value("document.getElementById('tip').innerText")
    chromium.press("Enter")
    assert chromium.value("document.querySelector('[aria-selected=true]').id") == "tab-operations"
    assert "stage1" in chromium.value("document.querySelector('input[type=search]').value")


def test_tabs_are_walked_with_arrow_keys(chromium, report):
    chromium.open(report)
    chromium.value("document.getElementById('tab-headline').focus()")
    chromium.press("ArrowRight")
    assert chromium.value("document.activeElement.id") == "tab-trace"


def cells(chromium, column: str, table: str = "by-operation") -> list[str]:
    return chromium.value(
        f"""(() => {{
        const heads = [...document.querySelectorAll('#{table} th')].map(head => head.innerText.split(' ')[0]);
        const rows = [...document.querySelectorAll('#{table} tbody tr')];
        return rows.map(row => row.cells[heads.indexOf('{column}')].innerText);
        }})()"""
    )


def test_operations_sort_by_a_click_on_a_header_and_lead_to_the_trace(chromium, report):
    chromium.open(report, "operations?rows=operation")
    assert cells(chromium, "time")[0] == "16 ms"  # the most expensive first: block D, 8 micro-batches of 2 ms
    chromium.value(
        "[...document.querySelectorAll('#by-operation th button')].find(b => b.innerText === 'block').click()"
    )
    assert cells(chromium, "block")[:2] == ["A", "A"]
    assert chromium.value("document.querySelector('#by-operation th[aria-sort]').innerText").startswith(
        "block"
    )
    chromium.value("document.querySelector('#by-operation tbody tr').click()")
    assert chromium.value("document.querySelector('[aria-selected=true]').id") == "tab-trace"
    assert chromium.value("popvision.trace.chosen !== null")


def test_operations_are_searched_by_words(chromium, report):
    chromium.open(report, "operations")
    chromium.value("document.querySelector('input[type=search]').focus()")
    chromium.type("backward stage2")
    assert cells(chromium, "block") == ["D"]
    assert cells(chromium, "phase") == ["backward"]


def test_the_memory_cursor_tells_what_is_alive(chromium, report):
    chromium.open(report, "memory")
    box = chromium.value("document.querySelector('main canvas').getBoundingClientRect().toJSON()")
    chromium.mouse("mouseMoved", box["left"] + 400, box["top"] + 60)
    text = chromium.value("document.querySelector('.alive').innerText")
    assert "1 KiB" in text and "always live" in text


def test_two_runs_are_compared_in_numbers_and_on_the_trace(chromium, tmp_path):
    simulated(2, 4).save(tmp_path / "one" / "training" / "profile.pop")
    simulated(2, 4, cost=lambda phase, stage: 2 * MS).save(tmp_path / "two" / "training" / "profile.pop")
    write_comparison(tmp_path / "one", tmp_path / "two", tmp_path / "both.html")
    chromium.open(tmp_path / "both.html")
    chromium.screenshot(SHOTS / "compare-two.png")
    rows = chromium.value(
        "[...document.querySelectorAll('table.figures tbody tr')].map(row => row.innerText)"
    )
    assert any(
        row.split() == ["a", "step", "on", "these", "cores,", "per", "row", "2", "ms", "✓", "4", "ms", "2.00"]
        for row in rows
    )
    spans = chromium.value("popvision.traces.map(trace => trace.view[1] - trace.view[0])")
    assert spans[0] == spans[1]
    starts = chromium.value(
        "popvision.traces.map(trace => trace.steps[0].start - trace.view[0])"
    )  # both begin at the left
    assert starts[0] == pytest.approx(starts[1]) and starts[0] < 0.1 * spans[0]
    assert chromium.value("popvision.traces[0].mark.text") == "the other ends here, 10 ms later"


# Frames while somebody zooms from the whole run into a step and out again: what each draws, and took, in ms.
ZOOM = """(async () => {
  const trace = popvision.trace, frames = [], next = () => new Promise(done => requestAnimationFrame(done));
  trace.show([...trace.all]);
  for (let i = 0; i < 40; i++) {
    const start = performance.now();
    trace.zoom(i < 20 ? 0.8 : 1 / 0.8);
    trace.canvas.drawNow();
    trace.canvas.getContext("2d").getImageData(0, 0, 1, 1); // until it is there
    frames.push([trace.drawn, performance.now() - start]);
    await next();
  }
  return frames;
})()"""


def test_of_a_hundred_thousand_events_a_frame_draws_what_a_window_can_show(chromium, tmp_path):
    profile = simulated(64, 66, steps=12, gap=2 * MS, cores=64)
    assert len(profile.runs) == 101_376
    chromium.open(write(tmp_path, profile), "trace?on=cores")
    shown = chromium.value("popvision.trace.lanes.length * popvision.trace.canvas.clientWidth")
    in_sight = 1000 / chromium.value("popvision.trace.rowHeight") + 2
    frames = sorted(chromium.value(ZOOM), key=lambda frame: frame[1])
    took = [round(ms, 1) for _, ms in (frames[len(frames) // 2], frames[-1])]
    print(
        f"\na frame of 64 cores and 101,376 events takes {took[0]} ms at the median, {took[1]} ms at the most"
    )
    assert max(drawn for drawn, _ in frames) < in_sight * shown / 64  # at most an event a pixel and lane
    chromium.screenshot(SHOTS / "many.png")


def test_names_in_a_profile_can_not_inject_script(chromium, tmp_path):
    evil = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>"
    profile = simulated(2, 2, blocks=(evil, "B"))
    options = tuple(option._replace(value=evil) for option in profile.options)
    page = write(tmp_path, dataclasses.replace(profile, options=options, name=evil))
    for view in VIEWS:
        chromium.open(page, view)
        assert chromium.value("window.hurt") is None
        assert chromium.value("document.querySelector('main img')") is None
    chromium.open(page, "model")
    assert evil in chromium.value("document.getElementById('options').innerText")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[: len(text) // 2], "is damaged or cut short"),
        (
            lambda text: text.replace('"version":3', '"version":9'),
            "has version 9, and this program reads up to 3",
        ),
        (lambda text: "junk", "is not a profile"),
        (lambda text: text.replace('"schedule_length":', '"schedule_length":"x",  "y":'), "is damaged"),
    ],
)
def test_a_profile_that_cannot_be_read_is_said_to_be(chromium, tmp_path, change, message):
    write(tmp_path, simulated(2, 2))
    path = tmp_path / "training" / "profile.pop"
    path.write_text(change(path.read_text()))
    page = write_report(tmp_path)
    for view in VIEWS[:6]:
        chromium.open(page, view)
        assert message in chromium.value("document.querySelector('.fault').innerText")


def test_an_empty_profile_has_a_state_of_its_own(chromium, tmp_path):
    profile = simulated(2, 2)
    facts = {**profile.facts, "calls": 0, "steps": 0, "ns_in_calls": 0, "detailed_step": None}
    empty = dataclasses.replace(profile, runs=(), calls=(), facts=facts, memory=(), tensors=())
    page = write(tmp_path, empty)
    chromium.faults.clear()
    for view, words in [
        ("headline", "Nothing was run"),
        ("trace", "Nothing was recorded"),
        ("host", "No call ended"),
    ]:
        chromium.open(page, view)
        assert words in chromium.value("document.getElementById('main').innerText")
    for view in VIEWS:
        chromium.open(page, view)
    assert chromium.faults == []


def test_the_page_asks_nobody_for_anything(report):
    text = report.read_text()
    assert "default-src 'none'" in text
    assert "http" + "s://" not in text and "import(" not in text
    assert "<link" not in text and "src=" not in text.split('id="data"')[0]


def test_the_page_never_stays_empty_when_its_script_fails(chromium, report, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace('"figures":{', '"figure":{'))
    chromium.open(broken)
    shown = """new Promise(done => (function look() {
        const fault = document.querySelector('.fault');
        fault ? done(fault.innerText) : setTimeout(look, 10);
    })())"""
    assert "This page can't show the profile" in chromium.value(shown)


def test_wasd_steer_the_trace_and_back_leads_back(chromium, report):
    chromium.open(report, "headline")
    chromium.value("document.getElementById('tab-trace').click()")
    chromium.value("popvision.trace.canvas.focus()")
    before = chromium.value("popvision.trace.view")
    chromium.press("w")
    closer = chromium.value("popvision.trace.view")
    assert closer[1] - closer[0] == pytest.approx(0.7 * (before[1] - before[0]))
    chromium.press("d")
    assert chromium.value("popvision.trace.view")[0] > closer[0]
    chromium.press("s")
    back = chromium.value("popvision.trace.view")
    assert back[1] - back[0] == pytest.approx(before[1] - before[0])
    chromium.value(
        "new Promise(done => { addEventListener('popstate', () => done(), {once: true}); history.back(); })"
    )
    assert chromium.value("document.querySelector('[aria-selected=true]').id") == "tab-headline"


def test_lanes_out_of_sight_are_not_drawn(chromium, tmp_path):
    page = write(tmp_path, simulated(64, 8))
    chromium.open(page, "trace")
    drawn = chromium.value(
        "(popvision.trace.show([...popvision.trace.all]), popvision.trace.canvas.drawNow(), popvision.trace.drawn)"
    )
    chromium.value("scrollTo(0, 700)")
    chromium.settle()
    assert chromium.value("popvision.trace.seen()[0]") > 0
    chromium.send("Emulation.setEmulatedMedia", media="print")
    whole = chromium.value("(popvision.trace.canvas.drawNow(), popvision.trace.drawn)")
    chromium.send("Emulation.setEmulatedMedia", media="")
    assert 0 < drawn < 0.8 * whole


def test_arrows_lead_from_sends_to_receives_of_what_is_chosen(chromium, tmp_path):
    test_runs.train(tmp_path)
    chromium.open(tmp_path / "report.html", "trace")
    assert chromium.value("popvision.trace.find('F', 1)")
    found = chromium.value(
        "popvision.trace.transfers().map(([from, i, to, j]) => [from.place, to.place, from.end[i] <= to.start[j]])"
    )
    assert found == [[0, 1, True], [1, 2, True]]
    chromium.screenshot(SHOTS / "arrows.png")
    chromium.press("Escape")
    chromium.value("popvision.trace.choose(null)")
    assert chromium.value("popvision.trace.transfers()") == []
