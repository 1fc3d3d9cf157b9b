"""Numbers on the page of a real training, against a reader of profile.pop of its own: the file's JSON."""

import re
from collections import defaultdict
from itertools import pairwise

import pytest
import test_runs
from test_page import cells

UNITS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SAMPLES = 2 * 5 * test_runs.ROWS  # of a call


def number(text):
    """`1.5 ms` in ns, `2 KiB` in bytes, `4,000 samples/s` as it is."""
    value, *unit = text.replace(",", "").split()
    return float(value) * (UNITS.get(unit[0], 1) if unit else 1)


def tiles(chromium, folder):
    chromium.open(folder / "report.html")
    found = chromium.value("[...document.querySelectorAll('.tile')].map(tile => tile.innerText)")
    return {tile.split("\n")[0]: tile.split("\n")[1:] for tile in found}


def test_throughput_is_that_of_the_calls_after_the_first(chromium, folder, raw):
    shown = tiles(chromium, folder)
    later = [call["end"] - call["start"] for call in raw["calls"][1:]]
    assert number(shown["Throughput"][0]) == pytest.approx(SAMPLES * 3 / sum(later) * 1e9, rel=0.01)
    period = raw["calls"][-1]["end"] - raw["calls"][0]["end"]
    overall, _, calls = shown["Throughput"][1].partition(". 4 calls")
    overall = overall.removeprefix("Throughput with the time between calls: ")
    assert calls == f" of {SAMPLES} samples."
    assert number(overall) == pytest.approx(SAMPLES * 3 / period * 1e9, rel=0.01)


GROUPS = {  # by what the page groups: the heading and the words of a row
    "kind": ("operation", lambda row: row["kind"]),
    "line": ("line", lambda row: "/".join(row["where"].split("/")[-2:])),
}


@pytest.mark.parametrize("by", GROUPS)
def test_operations_are_summed_over_what_was_timed(chromium, folder, raw, by):
    chromium.open(folder / "report.html", f"operations?rows={by}")
    heading, name = GROUPS[by]
    sums = defaultdict(float)
    for row in raw["operations"]:
        sums[name(row), raw["tasks"][row["task"]]["phase"]] += row["ns"]
    names = [
        cell.split()[-1] for cell in cells(chromium, heading, f"by-{by}")
    ]  # "transpose t": words come first
    phases = [word[0].upper() for word in cells(chromium, "phase", f"by-{by}")]
    times = [number(cell) for cell in cells(chromium, "time", f"by-{by}")]
    shown = dict(zip(zip(names, phases, strict=True), times, strict=True))
    assert shown == {key: pytest.approx(ns, rel=0.01, abs=1) for key, ns in sums.items()}
    assert times == sorted(times, reverse=True)


def test_what_a_search_finds_is_summed(chromium, folder, raw):
    chromium.open(folder / "report.html", "operations?search=layers.1+forward")
    forward = [i for i, row in enumerate(raw["tasks"]) if row["phase"] == "F"]
    operations = [row for row in raw["operations"] if row["module"] == "layers.1"]
    found = [row["ns"] for row in operations if row["task"] in forward]
    (said,) = chromium.value("[...document.querySelectorAll('.tools [aria-live]')].map(e => e.innerText)")
    count, _, time = said.partition(": ")
    whole = sum(row["ns"] for row in raw["operations"])
    assert count == f"{len(found)} of {len(raw['operations'])}"
    assert number(time.split(", ")[0]) == pytest.approx(sum(found), rel=0.01)
    assert time.split(", ")[1] == f"{100 * sum(found) / whole:.1f}%"


def texts(chromium, place):
    return chromium.value(f"[...document.querySelectorAll('{place}')].map(element => element.textContent)")


def test_the_host_tab_says_how_long_calls_took(chromium, folder, raw):
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
    said = {int(call): (number(lasted), None if gap == "–" else number(gap)) for call, lasted, gap in rows}
    assert said == {
        call["call"]: (
            pytest.approx(call["end"] - call["start"], rel=0.01),
            pytest.approx(call["start"] - before["end"], rel=0.01) if before else None,
        )
        for before, call in pairwise([None, *calls])
    }


def test_the_model_tab_lists_what_is_moved(chromium, folder, raw):
    chromium.open(folder / "report.html", "model")
    rows = chromium.value(
        "[...document.querySelectorAll('details tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    moved = [row for row in raw["moves"] if row["kind"] in ("load", "send", "store")]
    assert [number(row[3]) for row in rows] == [pytest.approx(row["bytes"], rel=0.01) for row in moved]
    assert ["host", "ipu 0", "each micro-batch, before F0"] in [row[:3] for row in rows]
    assert ["ipu 0", "ipu 1", "each micro-batch, after F0"] in [row[:3] for row in rows]


def test_the_memory_cursor_lists_the_tensors_that_are_held_then(chromium, folder, raw):
    chromium.open(folder / "report.html", "memory")
    runs = {(run["task"], run["micro_batch"]): run for run in raw["devices"]}
    box = chromium.value("document.querySelector('main canvas').getBoundingClientRect().toJSON()")
    for share in (0.3, 0.55, 0.8):
        x = 84 + share * (box["width"] - 92)
        chromium.mouse("mouseMoved", box["left"] + x, box["top"] + 60)
        time = chromium.value(f"document.querySelector('main canvas').timeAt({x})")
        held = [
            (row["name"], str(batch))
            for row in raw["tensors"]
            for batch in range(5)
            if row["ipu"] == 0
            and runs[row["born"], batch]["end" if row["kind"] == "activation" else "start"] <= time
            and (row["died"] < 0 or time < runs[row["died"], batch]["end"])
        ]
        rows = chromium.value(
            "[...document.querySelectorAll('.alive tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
        )
        shown = [(name, batch, size) for name, kind, batch, size, *_ in rows if kind != "always live"]
        assert sorted((name, batch) for name, batch, _ in shown) == sorted(held)
        made = {row["name"]: (row["module"], row["where"].split("/")[-1]) for row in raw["operations"]}
        told = {row[0]: (row[4], row[5].split("/")[-1]) for row in rows if row[0] in made}
        assert told and all(
            told[name] == (made[name][0] or "the model itself", made[name][1]) for name in told
        )
        size = {row["name"]: row["bytes"] for row in raw["tensors"] if row["ipu"] == 0}
        assert sum(number(text) for *_, text in shown) == pytest.approx(
            sum(size[n] for n, _ in held), rel=0.05
        )


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
    assert shown.count("2.35 k parameters") == 3
    assert [row["parameters"] for row in raw["blocks"]].count(48 * 49) == 3
    sent = [p for p in raw["moves"] if (p["kind"], p["phase"]) == ("send", "F")]
    assert [text for text in shown if text.endswith(" B")] == [f"{part['bytes']} B" for part in sent]
    for stage in range(3):  # the same as in the overview
        assert f"{bars[f'{stage} · block{stage}']} a micro-batch" in shown
    options = zip(*(cells(chromium, name, "options") for name in ("option", "value", "default")), strict=True)
    words = {"engineOptions": ["enableProfiling", str(folder), "not set"]}  # as a program writes it
    assert [list(row) for row in options] == [words.get(row[0], row) for row in raw["options"]["rows"]]


def test_a_pinned_event_says_what_it_was_sent_and_how_long_that_took(chromium, folder, raw):
    chromium.open(folder / "report.html", "trace")
    assert chromium.value("popvision.trace.find('F', 1)")
    first, *lines = chromium.value("document.querySelector('#pinned').innerText").split("\n")
    batch = int(first.removeprefix("Forward of stage 1, micro-batch "))
    (times,) = [line.removeprefix("from ").split(" to ") for line in lines if re.match(r"from \d", line)]
    runs = {
        (task["phase"], task["stage"]): run
        for run in raw["devices"]
        if (task := raw["tasks"][run["task"]])["kind"] in ("forward", "backward")
        and run["micro_batch"] == batch
    }
    own = runs["F", 1]["start"], runs["F", 1]["end"]
    assert tuple(map(number, times)) == pytest.approx(own, rel=1e-4)
    for source, target in ((0, 1), (1, 2)):
        size = next(
            row["bytes"]
            for row in raw["moves"]
            if (row["kind"], row["ipu"], row["peer"], row["phase"]) == ("send", source, target, "F")
        )
        (line,) = [line for line in lines if line.startswith(f"from ipu {source} to ipu {target}")]
        said = line.removeprefix(f"from ipu {source} to ipu {target}: ").removesuffix(
            " after it was computed"
        )
        assert number(said.split(", read ")[0]) == size
        waited = runs["F", target]["start"] - runs["F", source]["end"]
        assert number(said.split(", read ")[1]) == pytest.approx(waited, rel=0.01)


def test_the_tree_of_modules_has_the_time_and_memory_of_all_that_a_module_contains(chromium, folder, raw):
    chromium.open(folder / "report.html", "operations?rows=module")
    held = {row["name"]: row["bytes"] for row in raw["tensors"] if row["kind"] == "activation"}

    def shown():
        return {
            name.lstrip("▾▸ "): (number(time), number(size) if size != "–" else 0)
            for name, time, size in zip(
                *(cells(chromium, column, "tree") for column in ("module", "time", "held,")), strict=True
            )
        }

    def sums(within):
        rows = [row for row in raw["operations"] if within(row["module"])]
        return sum(row["ns"] for row in rows), sum(held.get(row["name"], 0) for row in rows)

    # The model has one part, so it is open; a layer has no parts.
    assert list(shown()) == ["the model", "layers", "0", "1", "2", "directly in forward"]
    assert shown()["the model"] == pytest.approx(sums(lambda path: True), rel=0.05)
    for name, path in (("layers", "layers."), ("1", "layers.1")):
        assert shown()[name] == pytest.approx(
            sums(lambda module, path=path: module.startswith(path)), rel=0.05
        )
    chromium.value("document.querySelector('[data-path=layers]').click()")
    assert list(shown()) == ["the model", "layers", "directly in forward"]
