"""Numbers on the page of a real training, against a reader of profile.pop of its own: the file's JSON, and no more."""

from collections import defaultdict

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
    overall, _, calls = shown["Throughput"][1].partition(" throughput with the time between calls. ")
    assert calls == f"4 calls of {SAMPLES}."
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
