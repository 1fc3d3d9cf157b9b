"""Numbers on the other tabs of a real training's page, against the same reader of profile.pop: the file's JSON."""

import re
from collections import defaultdict
from itertools import pairwise

import pytest
import test_runs
from test_page import cells
from test_page_numbers import number, tiles


def spans(track):
    """Of each instruction of a track when it began and ended."""
    at = track["start"]
    for gap, duration in zip(track["gaps"], track["durations"], strict=True):
        at += gap
        yield at, at + duration
        at += duration


def events(raw):
    """Of all that was recorded: track, part, micro-batch, start, end."""
    for track in raw["tracks"]:
        program = raw["programs"][str(track["ipu"])]
        for index, (start, end) in enumerate(spans(track)):
            yield track, raw["parts"][program[2 * index]], program[2 * index + 1], start, end


def warm(raw):
    """The same without the first two steps, which are looked at closer."""
    return [event for event in events(raw) if event[0]["step"] >= 2]


def texts(chromium, place):
    return chromium.value(f"[...document.querySelectorAll('{place}')].map(element => element.textContent)")


def test_the_compilation_is_the_sum_of_its_passes(chromium, folder, raw):
    seconds = {row["name"]: row["seconds"] for row in raw["passes"]}
    shown = tiles(chromium, folder)
    assert number(shown["Compilation"][0]) == pytest.approx(1e9 * sum(seconds.values()), rel=0.01)
    legend = [text.split(" ", 1) for text in texts(chromium, "main > div > .card:last-child .legend span")]
    said = {name: number(time) for name, time in legend}
    assert said == {name: pytest.approx(1e9 * value, rel=0.01, abs=1) for name, value in seconds.items()}


def test_each_ipu_is_busy_for_what_it_does_not_wait(chromium, folder, raw):
    steps, busy = defaultdict(lambda: [float("inf"), 0]), defaultdict(float)
    for track, part, _, start, end in warm(raw):
        if part["kind"] == "receive":
            continue
        first, last = steps[track["step"]]
        steps[track["step"]] = [min(first, start) if part["kind"] == "compute" else first, max(last, end)]
    for track, part, _, start, end in warm(raw):
        if part["kind"] != "receive":
            busy[track["ipu"]] += max(0, end - max(start, steps[track["step"]][0]))
    length = sum(last - first for first, last in steps.values())
    shown = tiles(chromium, folder)
    assert "ideal 28.6%" in shown["Bubble"][1]  # 3 ipus, 5 micro-batches: 2 / 7
    said = [float(text.split("%")[0]) for text in texts(chromium, ".number") if text.endswith("busy")]
    assert said == [pytest.approx(100 * busy[ipu] / length, abs=0.5) for ipu in range(3)]


def test_the_host_tab_says_how_long_calls_took_and_what_was_copied(chromium, folder, raw):
    chromium.open(folder / "report.html", "host")
    calls = raw["calls"]
    inside = sum(call["end"] - call["start"] for call in calls)
    shown = dict(
        zip(texts(chromium, ".bars .name"), map(number, texts(chromium, ".bars .number")), strict=True)
    )
    assert shown["in calls"] == pytest.approx(inside, rel=0.01)
    between = calls[-1]["end"] - calls[0]["start"] - inside
    assert shown["between calls"] == pytest.approx(between, rel=0.01)
    rows = zip(*(cells(chromium, name, "calls") for name in ("call", "lasted", "time")), strict=True)
    said = {int(call): (number(lasted), number(gap)) for call, lasted, gap in rows}
    assert said == {
        call["call"]: (
            pytest.approx(call["end"] - call["start"], rel=0.01),
            pytest.approx(call["start"] - before["end"], rel=0.01),
        )
        for before, call in pairwise(calls)
    }
    steps = len({track["step"] for track, *_ in warm(raw)})
    (sentence,) = [text for text in texts(chromium, ".hint") if text.startswith("In a step")]
    for kind, words in {"load": "inputs in", "send": "between ipus", "store": "outputs out"}.items():
        moved = [(part["bytes"], end - start) for _, part, _, start, end in warm(raw) if part["kind"] == kind]
        size, time = re.search(rf"{words} (\S+ \S+) in (\S+ [a-zµ]+)", sentence).groups()
        assert number(size) == pytest.approx(sum(size for size, _ in moved) / steps, rel=0.05)
        assert number(time) == pytest.approx(sum(ns for _, ns in moved) / steps, rel=0.01)


def test_the_memory_cursor_lists_the_tensors_that_are_held_then(chromium, folder, raw):
    chromium.open(folder / "report.html", "memory")
    call, step = raw["facts"]["detailed_step"]
    (track,) = [t for t in raw["tracks"] if (t["call"], t["step"], t["ipu"]) == (call, step, 0)]
    box = chromium.value("document.querySelector('main canvas').getBoundingClientRect().toJSON()")
    for share in (0.3, 0.55, 0.8):
        x = 84 + share * (box["width"] - 92)
        chromium.mouse("mouseMoved", box["left"] + x, box["top"] + 60)
        time = chromium.value(f"document.querySelector('main canvas').timeAt({x})")
        ended = sum(end - track["start"] <= time for _, end in spans(track)) - 1
        held = [
            (row["name"], str(row["micro_batch"]), row["bytes"])
            for row in raw["tensors"]
            if row["ipu"] == 0 and row["born"] <= ended and not 0 <= row["died"] <= ended
        ]
        rows = chromium.value(
            "[...document.querySelectorAll('.alive tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
        )
        shown = [(name, batch, size) for name, kind, batch, size, *_ in rows if kind != "always live"]
        assert sorted((name, batch) for name, batch, _ in shown) == sorted(row[:2] for row in held)
        made = {row["name"]: (row["module"], row["where"].split("/")[-1]) for row in raw["operations"]}
        told = {row[0]: (row[4], row[5].split("/")[-1]) for row in rows if row[0] in made}
        assert told and all(
            told[name] == (made[name][0] or "the model itself", made[name][1]) for name in told
        )
        assert sum(number(size) for *_, size in shown) == pytest.approx(sum(row[2] for row in held), rel=0.05)


def test_totals_of_memory_are_the_sums_of_what_is_listed_and_hold_the_peak(chromium, folder, raw):
    total = number(tiles(chromium, folder)["Memory"][0])
    chromium.open(folder / "report.html", "memory")
    head = texts(chromium, ".card:first-child thead th")
    rows = chromium.value(
        "[...document.querySelectorAll('.card:first-child tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
    )
    sums = 0
    for kept, row in zip(raw["memory"], rows, strict=True):
        shown = dict(zip(head, map(number, row), strict=True))
        parts = {name: size for name, size in shown.items() if name not in ("ipu", "total")}
        assert shown["total"] == pytest.approx(sum(parts.values()), rel=0.05)
        assert shown["buffers"] == kept["buffers"]
        own = [t for t in raw["tensors"] if t["ipu"] == kept["ipu"]]
        peak = max(
            sum(t["bytes"] for t in own if t["born"] <= i and not 0 <= t["died"] <= i)
            for i in range(len(raw["programs"][str(kept["ipu"])]) // 2)
        )
        assert shown["activations"] >= 0.99 * peak > 0  # inside a computation there is more
        sums += shown["total"]
    assert total == pytest.approx(sums, rel=0.02)


def test_an_operation_has_its_calls_its_flops_and_its_bytes(chromium, folder, raw):
    chromium.open(folder / "report.html", "operations?search=addmm+forward")
    found = {row["block"]: row for row in raw["operations"] if row["kind"] == "addmm"}
    columns = ("block", "calls", "a", "FLOPs", "FLOP/s", "bytes")
    for block, calls, each, flops, rate, size in zip(*(cells(chromium, c) for c in columns), strict=True):
        row = found.pop(block)
        assert int(calls) == row["calls"] == 5
        assert number(each) == pytest.approx(row["ns"] / 5, rel=0.01)
        assert flops == "18.4 k" and row["flops"] == 2 * test_runs.ROWS * test_runs.WIDTH**2 == 18_432
        prefix = {"k": 1e3, "M": 1e6, "G": 1e9}
        value, unit = rate.split()
        assert float(value) * prefix[unit] == pytest.approx(1e9 * 5 * row["flops"] / row["ns"], rel=0.01)
        assert number(size) == pytest.approx(row["bytes"], rel=0.01)
    assert found == {}


def test_the_picture_of_the_model_has_its_parameters_and_what_flows(chromium, folder, raw):
    bars = tiles(chromium, folder) and dict(
        zip(texts(chromium, ".bars .name"), texts(chromium, ".bars .number"), strict=True)
    )
    chromium.open(folder / "report.html", "model")
    shown = texts(chromium, ".diagram text")
    assert (
        shown.count("2.35 k parameters") == 3 == [row["parameters"] for row in raw["blocks"]].count(48 * 49)
    )
    sent = [p for p in raw["parts"] if (p["kind"], p["phase"]) == ("send", "F")]
    assert [text for text in shown if text.endswith(" B")] == [f"{part['bytes']} B" for part in sent]
    for stage in range(3):  # the same as in the overview
        assert f"{bars[f'{stage} · block{stage}']} a micro-batch" in shown
    options = zip(*(cells(chromium, name, "options") for name in ("option", "value", "default")), strict=True)
    assert [list(row) for row in options] == raw["options"]["rows"]


def test_a_pinned_event_says_what_it_was_sent_and_how_long_that_took(chromium, folder, raw):
    chromium.open(folder / "report.html", "trace")
    assert chromium.value("popvision.trace.find('F', 1)")
    first, *lines = chromium.value("document.querySelector('#pinned').innerText").split("\n")
    batch = int(first.removeprefix("Forward of stage 1, micro-batch "))
    step = next(int(line.split(",")[0].removeprefix("step ")) for line in lines if line.startswith("step "))
    moved = {}
    for track, part, micro_batch, _, end in events(raw):
        if (track["step"], micro_batch) == (step, batch) and part["kind"] in ("send", "receive"):
            moved[part["kind"], part["ipu"], part["peer"], part["phase"]] = (part["bytes"], end)
    began = min(start for t, part, _, start, _ in events(raw) if part["kind"] == "compute" and t["step"] == 0)
    (times,) = [line.removeprefix("from ").split(" to ") for line in lines if re.match(r"from \d", line)]
    own = [
        (start - began, end - began)
        for t, part, micro_batch, start, end in events(raw)
        if (t["step"], part["kind"], part["phase"], part["stage"], micro_batch)
        == (step, "compute", "F", 1, batch)
    ]
    assert [tuple(map(number, times))] == [
        pytest.approx(pair, rel=1e-4) for pair in own
    ]  # on the axis's clock
    for source, target in ((0, 1), (1, 2)):
        size, sent = moved["send", source, target, "F"]
        received = moved["receive", target, source, "F"][1]
        (line,) = [line for line in lines if line.startswith(f"from ipu {source} to ipu {target}")]
        said = line.removeprefix(f"from ipu {source} to ipu {target}: ").removesuffix(" after it was sent")
        assert number(said.split(", there ")[0]) == size
        assert number(said.split(", there ")[1]) == pytest.approx(received - sent, rel=0.01)
