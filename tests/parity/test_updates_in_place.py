"""Updates write to the weights themselves, once nothing else of their step can fail: each is done or not done."""

import contextlib
import copy
import signal
import threading
import time

import pytest
import torch
from parity_models import OnTwoIpus
from what_a_call_changes import same, state

import poptorch
from popengine.errors import UnrecoverableError
from popengine.run.row_functions import RowFunctions
from poptorch.executor.executable_file import training_state

PATIENCE = 240.0  # seconds until a test has failed


VARIANTS = {
    "two ipus": {},
    "replicas": {"replicas": 2},
    "a tied weight": {"tied": True},
    "clipping": {"max_grad_norm": 0.01},
    "automatic loss scaling": {"scaling": True},
    "state shared over replicas": {"replicas": 2, "sharded": True},
}


class Adam(poptorch.optim.Adam):
    """Updates one parameter after another, and calls `at` before each."""

    at = staticmethod(lambda kind: None)

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        for number, gradient in enumerate(gradients):
            self.at("update")
            for index, parameter in enumerate(parameters):
                parameter.grad = gradient if index == number else None
            super().step()


def trainer(tied=False, replicas=1, scaling=False, sharded=False, **optimizer):
    torch.manual_seed(0)
    model = OnTwoIpus(tied)
    options = poptorch.Options().replicationFactor(replicas).randomSeed(5).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(3).setAutomaticLossScaling(scaling)
    if sharded:
        tensors = poptorch.TensorLocationSettings()
        tensors.useReplicatedTensorSharding(True).minElementsForReplicatedTensorSharding(2)
        options.TensorLocations.setOptimizerLocation(tensors)
    return poptorch.trainingModel(model, options, Adam(model.parameters(), lr=0.1, **optimizer))


def rows(executor):
    count = 3 * 2 * executor.options.replication_factor
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def moments(monkeypatch):
    """What runs of a call: pieces, then the update of each weight. `at(kind)` is called before each."""
    seen = Moments()
    computing = RowFunctions._compute_function

    def computes(rows, row, replica):
        compute = computing(rows, row, replica)

        def run(call, micro_batch):
            seen.at("piece")
            compute(call, micro_batch)

        return run

    monkeypatch.setattr(Adam, "at", staticmethod(seen.at))
    monkeypatch.setattr(RowFunctions, "_compute_function", computes)
    return seen


class Moments:
    """Counts the moments of calls, and does something at one of them."""

    def __init__(self):
        self.act, self.left, self.kind = None, -1, ""
        self.kinds = []
        self._lock = threading.Lock()

    def at(self, kind):
        with self._lock:
            self.kinds.append(kind)
            self.left -= 1
            is_now = self.left == -1 and self.act is not None
        if is_now:
            self.kind = kind
            self.act()

    def then(self, act, moment):
        """Let this be done at the moment with this number, counted from 0."""
        self.act, self.left, self.kind = act, moment, ""


def interrupts(executor):
    """Ctrl-C, of which the caller's thread has heard when the call goes on."""

    def interrupt():
        run = executor._plans.state.commit
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        end = time.monotonic() + PATIENCE
        while not run.is_stopping and time.monotonic() < end:
            time.sleep(0.001)

    return interrupt


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_an_interrupt_before_the_update_gives_it_up_and_one_within_lets_it_end(variant, cores, moments):
    executor, twin = trainer(**variant), trainer(**variant)
    batch = rows(executor)
    for one in (executor, twin):
        one(batch)
    before, kinds = state(twin), []
    for moment in range(200):
        moments.then(interrupts(executor), moment)
        with contextlib.suppress(KeyboardInterrupt):
            executor(batch)
            moments.act = None
        interrupted, kind = moments.act is not None, moments.kind
        moments.act = None
        assert interrupted == bool(kind)
        if kind == "piece":
            assert same(state(executor), before)
        else:  # the update has begun, or nothing has happened
            twin(batch)
            before = state(twin)
            assert same(state(executor), before), moment
        if not kind:
            break
        kinds.append(kind)
    assert kinds.count("piece") >= 3 * 3  # of each micro-batch
    assert kinds.count("update") == len([*executor.model.parameters()])
    executor(batch), twin(batch)
    assert same(state(executor), state(twin))


def test_another_thread_reads_weights_as_they_were_before_or_after_an_update(cores, moments):
    executor, twin, found = trainer(), trainer(), []
    executor(rows(executor))
    pieces = moments.kinds.count("piece")
    twin(rows(twin))
    readers = []

    def read():
        training = training_state(executor)
        found.append((training["weights"], training["optimizer"]))

    def begin_to_read():
        readers.append(threading.Thread(target=read))
        readers[0].start()

    moments.then(begin_to_read, pieces + 2)
    executor(rows(executor))
    assert moments.kind == "update"
    readers[0].join(PATIENCE)
    twin(rows(twin))
    ((weights, states),) = found
    after = training_state(twin)
    assert same(weights, after["weights"])
    assert all(same(states[key], value) for key, value in after["optimizer"].items())


def test_an_update_that_fails_while_it_is_written_says_that_the_weights_are_lost(cores, moments):
    """Only memory for some elements is made meanwhile; should even that be missing, nobody goes on by mistake."""
    executor = trainer()
    executor(rows(executor))
    pieces = moments.kinds.count("piece")
    kept = {name: value.clone() for name, value in executor.model.state_dict().items()}
    optimizer = copy.deepcopy(executor._optimizer.state_dict())

    def fail():
        raise MemoryError("no room")

    moments.then(fail, pieces + 2)
    with pytest.raises(
        UnrecoverableError, match=r"(?s)the weights are lost.*no room.*from a checkpoint"
    ) as first:
        executor(rows(executor))
    assert "call 2 of the run" in str(first.value)
    for later in (lambda: executor(rows(executor)), executor.copyWeightsToHost, executor.model.state_dict):
        with pytest.raises(UnrecoverableError, match="the weights are lost"):
            later()
    executor.model.load_state_dict(kept)
    executor._optimizer.load_state_dict(optimizer)
    executor(rows(executor))
    twin = trainer()
    for _ in range(2):
        twin(rows(twin))
    assert same(dict(executor.model.named_parameters()), dict(twin.model.named_parameters()))


@pytest.mark.parametrize("iterations", [1, 2])
def test_weights_and_states_keep_their_memory(iterations):
    options = poptorch.Options().deviceIterations(iterations).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(3)
    model = OnTwoIpus()
    executor = poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.1))
    batch = torch.randn(iterations * 3 * 2, 3)

    def places():
        states = [value for state in executor._optimizer.state.values() for value in state.values()]
        return [value.data_ptr() for value in (*model.parameters(), *states)]

    executor(batch)
    before = places()
    executor(batch)
    assert places() == before
    assert not any(executor._plans.engine.state.sums), "gradient sums are freed at the end of a step"
