"""The page asked for more: ranges, searches, pinned events, addresses and groups.

What it says is held against the profile's own tables. Screenshots lie in `build/screenshots`.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from simulated import MS, simulated
from test_page import SHOTS, write
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import poptorch
from popengine.profile import Profile, load
from popvision.analysis import Figures

LONG = "/home/somebody/programs/language/models/transformers/attention_layers.py:1234"
LONG_KIND = "scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.fixture(scope="module")
def profile() -> Profile:
    costs = {0: 3 * MS, 1: MS, 2: 2 * MS, 3: MS}
    found = simulated(4, 12, cost=lambda phase, stage: costs[stage], blocks=("A, B", "C", "D", "E"))
    operations = tuple(
        operation._replace(where=LONG, kind=LONG_KIND, module="language.encoder.layers.1.attention.product")
        if operation.block == "D"
        else operation._replace(module="language.decoder")
        for operation in found.operations
    )
    facts = {**found.facts, "strategy": "PipelinedExecution", "optimizer": "adamw, 10 parameters in 2 groups"}
    return dataclasses.replace(found, operations=operations, facts=facts)


@pytest.fixture(scope="module")
def report(profile, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("report"), profile)


def text(chromium, place: str) -> str:
    return chromium.value(f"document.querySelector('{place}').innerText")


def drag(chromium, x: float, y: float, to: float, **more) -> None:
    chromium.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1, **more)
    chromium.mouse("mouseMoved", to, y, button="left", buttons=1, **more)
    chromium.mouse("mouseReleased", to, y, button="left", clickCount=1, **more)
    chromium.settle()


def test_a_range_says_what_each_ipu_did_within_it(chromium, report, profile):
    chromium.open(report, "trace")
    before = chromium.value("popvision.trace.view")
    box = chromium.value("document.querySelector('canvas.pan').getBoundingClientRect().toJSON()")
    drag(chromium, box["left"] + 300, box["top"] + 90, box["left"] + 700, modifiers=8)  # Shift
    assert chromium.value("popvision.trace.view") == before
    low, high = chromium.value("popvision.trace.range")
    assert before[0] < low < high < before[1]
    runs = Figures(profile).devices
    chromium.screenshot(SHOTS / "range.png")
    for ipu in range(4):
        inside = [
            (event.phase, min(high, event.end) - max(low, event.start))
            for event in runs.events()
            if event.ipu == ipu and event.start < high and event.end > low
        ]
        sums = chromium.value(f"sumsIn(popvision.trace, popvision.trace.range)[{ipu}]")
        assert sums["events"] == len(inside) > 0
        for name in "FB":
            assert sums[name] == pytest.approx(sum(ns for phase, ns in inside if phase == name))
        assert sums["idle"] == pytest.approx(high - low - sum(ns for _, ns in inside), abs=1)
    assert text(chromium, "#range").startswith("Range of ") and "ipu 3" in text(chromium, "#range")
    chromium.value("popvision.trace.canvas.focus()")
    chromium.press("Escape")
    assert text(chromium, "#range") == ""


def test_events_are_searched_by_whole_numbers_and_enter_walks_through_them(chromium, report):
    chromium.open(report, "trace")
    chromium.value("document.querySelector('input[type=search]').focus()")
    chromium.type("backward stage2 batch1")
    assert text(chromium, "#found") == "1 events, Enter leads to them"  # not those of 10 and 11
    chromium.press("Enter")
    assert text(chromium, "#found") == "1 of 1"
    assert text(chromium, "#pinned").startswith("Backward of stage 2, micro-batch 1\n")
    chromium.screenshot(SHOTS / "search.png")


def test_a_pinned_event_stays_while_the_trace_moves(chromium, report):
    chromium.open(report, "trace")
    assert chromium.value("popvision.trace.find('F', 1)")
    chromium.value("popvision.trace.pan(0.3)")
    chromium.settle()
    lines = text(chromium, "#pinned").splitlines()
    assert lines[0] == "Forward of stage 1, micro-batch 0"
    assert "1 ms on ipu 1, replica 0" in lines
    chromium.value(
        "[...document.querySelectorAll('#pinned button')].find(b => b.innerText === 'Unpin').click()"
    )
    assert text(chromium, "#pinned") == ""


def test_the_address_holds_tab_zoom_and_search_and_back_leads_to_them(chromium, report):
    chromium.open(report, "trace?from=10000000&to=20000000&search=stage1")
    assert chromium.value("popvision.trace.view") == [10 * MS, 20 * MS]
    assert chromium.value("document.querySelector('input[type=search]').value") == "stage1"
    chromium.value("popvision.trace.show([12e6, 18e6])")
    chromium.value("document.getElementById('tab-operations').click()")
    chromium.value("document.querySelector('input[type=search]').focus()")
    chromium.type("forward")
    assert chromium.value("location.hash") == "#operations?rows=operation&search=forward"
    chromium.value(
        "new Promise(done => { addEventListener('popstate', () => done(), {once: true}); history.back(); })"
    )
    assert chromium.value("location.hash") == "#trace?from=12000000&to=18000000&search=stage1"
    assert chromium.value("popvision.trace.view") == [12 * MS, 18 * MS]


def test_the_events_in_sight_are_also_a_table(chromium, report, profile):
    chromium.open(report, "trace?search=stage3")
    chromium.value("document.querySelector('#events summary').click()")
    chromium.value("new Promise(done => setTimeout(done, 50))")
    table = chromium.value(
        "[...document.querySelectorAll('#events tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    low, high = chromium.value("popvision.trace.view")
    events = [
        event
        for event in Figures(profile).devices.events()
        if event.stage == 3 and event.end > low and event.start < high
    ]
    words = {"F": "Forward", "B": "Backward"}
    assert [row[:2] for row in table] == [
        ["ipu 3", f"{words[event.phase]} of stage 3, micro-batch {event.micro_batch}"] for event in events
    ]
    assert {row[3] for row in table} == {"1 ms"}


def test_a_wrap_around_is_drawn_where_the_data_comes_back_to_an_ipu(chromium, profile, tmp_path):
    blocks = tuple(block._replace(ipu=block.stage % 2) for block in profile.blocks)
    folded = dataclasses.replace(profile, ipus=(0, 1, 0, 1), blocks=blocks)
    chromium.open(write(tmp_path, folded), "model")
    chromium.screenshot(SHOTS / "wrap-around.png")
    found = chromium.value(
        "[...document.querySelectorAll('path.wrap + text')].map(label => label.textContent)"
    )
    assert found == ["back on ipu 0", "back on ipu 1"]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1))

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x).square(), "mean")


def test_convolutions_count_their_flops_backward_too_and_the_page_names_the_optimizer(chromium, tmp_path):
    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counted:
        model.layers(x).square().mean().backward()
    options = poptorch.Options().enableProfiling(tmp_path).showCompilationProgressBar(False)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=2.0)
    trainer = poptorch.trainingModel(model, options, optimizer)
    trainer(x)
    trainer.detachFromDevice()
    profile = load(tmp_path / "training" / "profile.pop")
    flops = {kind: 0 for kind in ("convolution", "convolution_backward")}
    for operation in profile.operations:
        if operation.kind in flops:
            flops[operation.kind] += operation.flops
    plain = {str(name).removeprefix("aten."): n for name, n in counted.get_flop_counts()["Global"].items()}
    assert flops == plain and min(flops.values()) > 0
    chromium.open(tmp_path / "report.html", "model")
    shown = "strategy\nPipelinedExecution (1f1b)\noptimizer\nAdamW; max grad norm 2.0"
    assert text(chromium, "#runs") == shown
