"""A weight update is done or not done, wherever Ctrl-C comes, and however often."""

import contextlib
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from interrupts import Interrupts
from parity_models import OnTwoIpus
from torch import nn
from what_a_call_changes import same, state

import poptorch
from small_models import module

# Python can't raise what comes while it closes a generator: it writes a line, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EVERYWHERE = ("/popengine/", "/poptorch/")
DEVICES = ("/poptorch/executor/loaded_plans.py", "/run/engine.py", "/run/state.py")


def trainer(iterations=2, plans=0):
    torch.manual_seed(0)
    model = OnTwoIpus()
    options = poptorch.Options().deviceIterations(iterations).randomSeed(5).showCompilationProgressBar(False)
    if plans:
        options.allowNewShapes(plans)
    options.Training.gradientAccumulation(3)
    return poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.1))


HALF = torch.randn(3 * 2, 3, generator=torch.Generator().manual_seed(1))
X = torch.cat([HALF, HALF])  # so the state follows from the number of updates


def states_of(twin):
    """The function that returns the state after so many weight updates of an executor, one a call."""
    states = []

    def wanted(updates):
        while len(states) < updates:
            twin(HALF)
            states.append(state(twin))
        return states[updates - 1]

    return wanted


@pytest.fixture
def after():
    return states_of(trainer(1))


def interrupted(files, work, first, second=None):
    """Whether the interrupt came, in `work`."""
    interrupts = Interrupts(files, first, second)
    with interrupts.coming(), contextlib.suppress(KeyboardInterrupt):
        work()
    return interrupts.came


def check_calls(executor, after, files, seconds, rows=X):
    """Interrupt calls at each place, and say how many there were. What is left is the state after whole updates."""
    executor(rows)
    most = done = len(rows) // len(HALF)
    threads, seen = torch.get_num_threads(), set()
    for first in count():
        for second in seconds:
            came = interrupted(files, lambda: executor(rows), first, second)
            before, done = done, executor.rng_state[1]
            seen.add(done - before)
            assert 0 <= done - before <= most
            assert same(state(executor), after(done)), (
                f"not the state after {done} updates, interrupted at {came}"
            )
            assert torch.get_num_threads() == threads, came
            if len(came) < 1 + (second is not None):
                break
        if not came:
            break
    assert {0, most} <= seen
    executor(rows)
    assert same(state(executor), after(done + most))
    return first


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_call_that_is_interrupted_anywhere_leaves_whole_updates(after, iterations):
    assert check_calls(trainer(iterations), after, EVERYWHERE, (None,), X[: iterations * len(HALF)]) > 200


def drifting():
    """A trainer of a model whose loss depends on a buffer, of which each replica has its own."""

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return poptorch.identity_loss(self.layer(x + self.mean).square(), "mean")

    torch.manual_seed(0)
    model = module(forward, layer=nn.Linear(3, 1), mean=torch.zeros(3))
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(3)
    return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.01))


def test_replicas_keep_the_buffers_of_their_own():
    # After an interrupt at the end of a call the replicas went on with the buffers of the first one.
    files = ("/run/engine.py", "/run/state.py")
    assert check_calls(drifting(), states_of(drifting()), files, (None,), HALF) > 40


class InTwoShapes:
    """An executor whose calls are two: of one update, and of all others."""

    def __init__(self, executor):
        self._executor = executor

    def __call__(self, rows):
        self._executor(rows[: len(HALF)])
        self._executor(rows[len(HALF) :])

    def __getattr__(self, name):
        return getattr(self._executor, name)


def test_an_interrupt_between_two_plans_loses_nothing(after):
    executor = trainer(plans=4)
    executor.compile(X)
    files = ("/poptorch/executor/", "/run/engine.py", "/run/state.py")
    assert check_calls(InTwoShapes(executor), after, files, (None,), torch.cat([HALF, X])) > 100


def test_a_second_interrupt_loses_nothing_either(after):
    assert check_calls(trainer(), after, ("/run/engine.py", "/run/call.py"), range(99)) > 10


def test_leaving_the_devices_and_coming_back_loses_no_state_wherever_it_is_interrupted(after):
    executor = trainer()
    executor(X)
    leave, come_back = executor.detachFromDevice, executor.attachToDevice
    for work, undo in ((leave, come_back), (come_back, leave)):
        if work == come_back:
            leave()
        for first in count():
            attached = executor.isAttachedToDevice()
            came = interrupted(DEVICES, work, first)
            assert same(state(executor), after(2)), came
            if executor.isAttachedToDevice() != attached:
                undo()
            if not came:
                break
        assert first > 10
    come_back()
    executor(X)
    assert same(state(executor), after(4))


def test_an_interrupt_that_keeps_no_grad_from_its_end_leaves_gradients_on(monkeypatch):
    class Interrupted(torch.no_grad):
        def __exit__(self, *error):
            raise KeyboardInterrupt

    one = trainer()
    one(X)
    monkeypatch.setattr(torch, "no_grad", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        one(X)
    assert torch.is_grad_enabled()


def test_a_compilation_is_interrupted_at_its_end_and_leaves_nothing_behind():
    """Raised under the modes of capture, KeyboardInterrupt ended the process ("terminate called") or left a mode on."""
    program = [sys.executable, str(Path(__file__).with_name("interrupted_compilations.py")), "40"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.stdout == "40 interrupts\n", done.stderr[-4000:]


def test_the_handler_of_the_program_is_called_after_the_capture():
    came = []

    def forward(self, x):
        signal.raise_signal(signal.SIGINT)
        came.append("forward goes on")
        return x * 2

    before = signal.signal(signal.SIGINT, lambda *details: came.append("handler"))
    try:
        assert torch.equal(poptorch.inferenceModel(module(forward))(X), X * 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == ["forward goes on", "handler"]


@pytest.mark.parametrize(
    "kind", [torch.overrides.TorchFunctionMode, torch.utils._python_dispatch.TorchDispatchMode]
)
def test_a_mode_that_a_failing_forward_leaves_on_is_taken_off(kind):
    class LeftOn(kind):
        pass

    def forward(self, x):
        LeftOn().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        poptorch.inferenceModel(module(forward))(X)
    assert (X + 1).sum() != X.sum()
