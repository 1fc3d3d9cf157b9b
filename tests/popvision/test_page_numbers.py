"""Numbers on the page of a real training, against a reader of profile.pop of its own: the file's JSON, and no more."""

import statistics
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
    calls, overall = shown["Throughput"][1].split("; ")
    assert calls == f"samples per second in 4 calls of {SAMPLES}"
    assert number(overall.removesuffix(" with the time between calls")) == pytest.approx(
        SAMPLES * 3 / period * 1e9, rel=0.01
    )


def test_these_cores_waited_for_the_share_of_time_in_which_they_ran_nothing(chromium, folder, raw):
    steps, length, busy = defaultdict(list), 0, 0
    for run in raw["runs"]:
        steps[run["call"], run["step"]].append(run)
    cores = {run["core"] for run in raw["runs"]}
    for key in sorted(steps)[2:]:  # the first two are looked at closer
        computing = [
            run for run in steps[key] if raw["tasks"][run["task"]]["kind"] in ("forward", "backward")
        ]
        began = min(run["start"] for run in computing)
        length += len(cores) * (max(run["end"] for run in steps[key]) - began)
        busy += sum(run["end"] - max(run["start"], began) for run in steps[key] if run["end"] > began)
    words = tiles(chromium, folder)["A step on these cores"][1]
    assert float(words.split()[-1].rstrip("%")) == pytest.approx(100 * (1 - busy / length), abs=1)


def test_the_bubble_is_that_of_separate_devices_with_the_costs_of_the_stages(chromium, folder, raw):
    ran = defaultdict(int)
    for run in raw["devices"]:
        ran[raw["tasks"][run["task"]]["ipu"]] += run["end"] - run["start"]
    length = max(run["end"] for run in raw["devices"])
    shown = tiles(chromium, folder)
    assert float(shown["Bubble"][0].rstrip("%")) == pytest.approx(
        100 * (1 - sum(ran.values()) / length / 3), abs=0.5
    )
    assert number(shown["A step on separate devices"][0]) == pytest.approx(length, rel=0.01)


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


def test_memory_is_what_lives_on_each_ipu(chromium, folder, raw):
    chromium.open(folder / "report.html", "memory")
    rows = chromium.value(
        "[...document.querySelectorAll('table')].find(table => table.tHead?.innerText.includes('weights'))"
        ".innerText.trim().split('\\n').map(line => line.split('\\t'))"
    )
    head, *lines = rows
    for line, kept in zip(lines, raw["memory"], strict=True):
        shown = dict(zip(head, line, strict=True))
        assert line[0] == f"ipu {kept['ipu']}"
        for name in ("weights", "gradients", "optimizer"):
            assert number(shown[name]) == pytest.approx(kept[name], rel=0.02)


def test_a_stage_costs_no_less_than_its_sleep_and_no_more_than_its_median_run(chromium, folder, raw):
    runs = [
        run["end"] - run["start"]
        for run in raw["runs"]
        if (task := raw["tasks"][run["task"]])["kind"] == "forward" and task["stage"] == 1
    ]
    bars = chromium.value
    chromium.open(folder / "report.html")
    (title,) = bars(
        "[...document.querySelectorAll('.bars .name')].filter(name => name.innerText.startsWith('1 ·'))"
        ".map(name => name.nextSibling.firstChild.title)"
    )
    assert title.startswith("forward: ")
    assert test_runs.SLOW * 1e9 <= number(title.removeprefix("forward: ")) <= 1.01 * statistics.median(runs)
