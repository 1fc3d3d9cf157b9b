"""The fuzz itself: it finds what is wrong, and shows it by a program. `python -m tests.fuzz` looks for more."""

import random

import torch

import poptorch

from . import interrupts, runs, trials
from .layouts import UNSPLIT, Layout, Load
from .models import KINDS, Step

LOAD = Load(rows=2, accumulation=3, iterations=1, replicas=1, optimizer="sgd")


def test_a_model_of_every_construct_gives_the_same_bits_in_stages():
    kinds = [Step("linear"), *(Step(kind, 0) for kind in KINDS)]
    layout = Layout("pipelined", [0, 9], [0, 1])
    assert trials.against_unsplit(tuple(kinds), layout, LOAD) is None


def test_a_model_of_every_construct_gives_the_same_bits_at_two_places():
    kinds = [Step("linear"), *(Step(kind, 0) for kind in KINDS)]
    layout = Layout("pipelined", [0, 9], [0, 1])
    assert trials.at_places(tuple(kinds), layout, LOAD, 0, 1) is None


def test_a_model_of_every_construct_but_dropout_gives_the_bits_of_plain_pytorch():
    kinds = [Step("linear"), *(Step(kind, 0) for kind in KINDS if kind != "dropout")]
    assert trials.against_plain(tuple(kinds), UNSPLIT, LOAD) is None


def test_a_difference_becomes_a_program_of_fewer_steps(monkeypatch, capsys):
    def spoilt(steps, layout, load):
        run = runs.trained(steps, layout, load)
        if any(step.kind == "tanh" for step in steps):
            run.state["layers.0.bias"] += 1
        return run

    monkeypatch.setattr(trials, "trained", spoilt)
    monkeypatch.setattr(
        trials, "random_steps", lambda numbers: tuple(map(Step, ("linear", "norm", "tanh", "norm")))
    )
    report = trials.trial("0")
    assert report is not None
    assert "layers.0.bias" in report
    assert "steps = (Step(kind='linear', other=-1), Step(kind='tanh', other=-1))" in report
    program = report[report.index("from tests.fuzz") :].replace("from tests.fuzz.", f"from {__package__}.")
    exec(program, {})
    assert "layers.0.bias" in capsys.readouterr().out


def test_a_state_that_is_not_after_whole_updates_is_reported(monkeypatch):
    call = poptorch.PoplarExecutor.__call__

    def half_done(self, *batch):
        try:
            return call(self, *batch)
        except KeyboardInterrupt:
            with torch.no_grad():
                self.model.layers[0].bias += 1
            self.copyWeightsToDevice()
            raise

    steps = (Step("linear"), Step("tanh"))
    unbroken = runs.unsplit(steps, LOAD)
    assert interrupts.problem(steps, UNSPLIT, LOAD, unbroken, 0.3) is None
    monkeypatch.setattr(poptorch.PoplarExecutor, "__call__", half_done)
    assert "does not leave the state after" in str(interrupts.problem(steps, UNSPLIT, LOAD, unbroken, 0.3))


def test_the_same_seed_gives_the_same_trial():
    from .layouts import random_load
    from .models import random_steps

    first, second = (random.Random("3.1") for _ in range(2))
    assert (random_steps(first), random_load(first)) == (random_steps(second), random_load(second))
