"""What recomputation and offloading cost, and what they save: on simulated devices, and against real runs."""

import dataclasses

import pytest
import torch
from simulated import MS, simulated
from torch import nn

import poptorch
from popengine.profile import Memory, load
from popvision import memory
from popvision.advice import sentences
from popvision.analysis import figures
from popvision.gains import at_most

KIB = 1024
WIDTH, ROWS = 32, 512


def stage(forward, backward, *, recomputes, capacity, kept=64 * KIB, **facts):
    """One stage, each piece of it two operations that take as long as each other; the first of them is recomputed."""
    profile = simulated(
        1, 4, cost=lambda phase, _: (forward if phase == "F" else backward) * MS, blocks=("A, B",)
    )
    known = {"on": recomputes, "kept": [kept], "left": [KIB], "again": [["mm_0_0"]]}
    limit = {"bytes": capacity, "of": "the capacity of an ipu", "shared": False}
    backward = [operation for operation in profile.operations if operation.piece]
    if recomputes:
        backward[0] = backward[0]._replace(name="mm_0_0")
    return dataclasses.replace(
        profile,
        operations=(*profile.operations[:2], *backward),
        facts={**profile.facts, "recomputation": known, "capacity": limit, **facts},
    )


def of_kind(found, kind):
    return next((change for change in found if change.kind == kind), None)


def test_recomputation_that_memory_does_not_need_is_advised_against_with_its_gain():
    profile = stage(4, 4, recomputes=True, capacity=1 << 20)
    found = figures(profile)
    change = of_kind(found.changes, "recomputation")
    # Half of the backward is computed again: 4 + 4 a micro-batch become 4 + 2.
    assert change.apart == pytest.approx(8 / 6)
    assert change.setting == {"recompute": False}
    before = found.needs[0].total
    assert (
        memory.with_recomputation(profile, False)[0].total == before
    )  # kept for one micro-batch, or made there
    (text,) = [text for text in sentences(profile, found) if "autoRecomputation" in text]
    assert 'options._Popart.set("autoRecomputation", 0) would make it at least 1.25 times as fast' in text
    # Where it seems to take longer there than half of the forward, that is not believed: 2 + 10 become 2 + 9.
    slow = stage(2, 10, recomputes=True, capacity=1 << 20)
    assert of_kind(figures(slow).changes, "recomputation").apart == pytest.approx(12 / 11)


def test_recomputation_stays_where_memory_would_not_be_enough():
    profile = stage(1, 4, recomputes=True, capacity=100 * KIB)
    two = dataclasses.replace(
        profile,
        ipus=(0, 0),
        facts={
            **profile.facts,
            "recomputation": {
                "on": True,
                "kept": [64 * KIB] * 2,
                "left": [KIB] * 2,
                "again": [["mm_0_0"], []],
            },
        },
    )
    # Two stages of an ipu, with two micro-batches and one: 2 * 64 + 64 KiB instead of 2 + 1 and 63 that are made anew.
    more = memory.with_recomputation(two, False)[0].total - memory.needs(two)[0].total
    assert more == (192 - 66) * KIB
    assert memory.fits(profile, memory.with_recomputation(profile, False))
    assert memory.fits(two, memory.with_recomputation(two, False)) is False


def test_where_memory_is_not_enough_recomputation_is_said_with_its_price():
    profile = stage(2, 4, recomputes=False, capacity=1000)
    found = figures(profile)
    (saving,) = found.savings
    # Half of the forward is computed again: 2 + 4 a micro-batch become 2 + 5.
    assert saving.change.apart == pytest.approx(6 / 7)
    assert at_most(saving.change.apart, 0.0) == pytest.approx(1 + (1 / 6) / 0.75)
    assert not saving.fits
    text = sentences(profile, found)[0]
    assert text.startswith("Does not fit: ")
    assert 'options._Popart.set("autoRecomputation", 3) would need ' in text
    assert (
        "which is still too much, and a step would take at most 1.22 times as long on separate devices"
        in text
    )


def offloading(capacity, **facts):
    """An ipu whose update moves 2 ms of state, a fifth of the step of 4 + 4 ms."""
    profile = stage(1, 1, recomputes=False, capacity=capacity, copying=1e9, **facts)
    return dataclasses.replace(profile, memory=(Memory(0, 0, 100, 0, 100, 1_000_000),))


def test_offloaded_state_that_an_ipu_has_room_for_is_advised_to_stay_there():
    profile = offloading(1 << 30, off_device=["optimizer"])
    found = figures(profile)
    assert found.step_apart == pytest.approx(10 * MS / 1e9)
    change = of_kind(found.changes, "offload")
    assert change.apart == pytest.approx(10 / 8)
    assert change.setting == {"offloaded": False}
    assert change.also == "ipu 0 holds 976.6 KiB more"
    assert of_kind(figures(offloading(500_000, off_device=["optimizer"])).changes, "offload") is None


def test_offloading_is_said_with_its_price_where_an_ipu_has_memory_of_its_own():
    profile = offloading(500_000)
    found = figures(profile)
    assert found.fits is False
    saving = next(saving for saving in found.savings if saving.change.kind == "offload")
    assert saving.fits and saving.wanted == found.wanted - 1_000_000
    assert saving.change.apart == pytest.approx(8 / 10)
    text = sentences(profile, found)[0]
    assert "useOnChipStorage(False)) would need " in text and "if their link were as fast as" in text
    machine = {"bytes": 500_000, "of": "this machine's memory", "shared": True}
    shared = dataclasses.replace(profile, facts={**profile.facts, "capacity": machine})
    found = figures(shared)
    assert of_kind([saving.change for saving in found.savings], "offload") is None
    assert "Offloading the optimizer's state frees nothing of it." in sentences(shared, found)[0]


def test_what_is_not_known_of_operations_is_not_promised():
    for facts in ({"device": "cuda"}, {"recomputation": None}):
        profile = stage(1, 4, recomputes=True, capacity=1 << 20)
        profile = dataclasses.replace(profile, facts={**profile.facts, **facts})
        assert of_kind(figures(profile).changes, "recomputation") is None


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            with poptorch.Block(f"b{place}", ipu_id=place // 3):
                x = layer(x)
                if place == 5:
                    return poptorch.identity_loss(x.square(), "mean")


def trained(folder, recompute, strategy=poptorch.PipelinedExecution):
    options = poptorch.Options().enableProfiling(folder).showCompilationProgressBar(False)
    options.setExecutionStrategy(strategy(poptorch.AutoStage.SameAsIpu))
    options._Popart.set("autoRecomputation", 3 * recompute)
    options.Training.gradientAccumulation(6)
    model = Network()
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        trainer(torch.randn(6 * ROWS, WIDTH))
    trainer.detachFromDevice()
    return load(folder / "training" / "profile.pop")


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_memory_with_the_other_choice_is_what_a_run_with_it_needs(tmp_path, strategy):
    runs = {on: trained(tmp_path / str(on), on, strategy) for on in (False, True)}
    for now, then in ((False, True), (True, False)):
        said = [need.activations for need in memory.with_recomputation(runs[now], then)]
        assert said == pytest.approx([need.activations for need in memory.needs(runs[then])], rel=0.1)
    assert runs[True].facts["recomputation"]["again"] == runs[False].facts["recomputation"]["again"]
    names = {
        operation.name
        for operation in runs[True].operations
        if runs[True].pieces[operation.piece].phase == "B"
    }
    assert all(set(again) <= names for again in runs[True].facts["recomputation"]["again"])


def test_a_capacity_that_auto_balance_was_told_is_what_an_ipu_is_held_against(tmp_path):
    options = poptorch.Options().enableProfiling(tmp_path).showCompilationProgressBar(False)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoBalance(2, capacity=1e9)))
    options.Training.gradientAccumulation(4)
    model = Network()
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    trainer(torch.randn(4 * ROWS, WIDTH))
    trainer.detachFromDevice()
    found = figures(load(tmp_path / "training" / "profile.pop"))
    assert (found.capacity, found.capacity_of, found.fits) == (10**9, "the capacity of an ipu", True)
