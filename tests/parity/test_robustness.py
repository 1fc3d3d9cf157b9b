"""Executors beside each other: collected while another runs, taking turns, in other threads, after a failed forward."""

import gc
import threading
import weakref

import pytest
import torch
from parity_models import Digits, Transformer, annotated
from parity_runs import batches, made, options

import poptorch

UPDATES = 6


def executor_of(model, iterations=1):
    user = annotated(made(model))
    strategy = poptorch.PipelinedExecution(["a", "b"], ["c", "d"])
    optimizer = torch.optim.SGD(user.parameters(), lr=0.05, momentum=0.9)
    return poptorch.trainingModel(user, options(strategy, iterations=iterations), optimizer)


def losses(executor, rows):
    return [executor(*update)[1] for update in rows]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone():
    """What each model's training gives with nobody beside it."""
    return {model: losses(executor_of(model), batches(model, UPDATES)) for model in (Digits, Transformer)}


def test_two_executors_in_two_threads_train_as_alone(alone):
    given, failed = {}, []

    def train(model, executor, rows):
        try:
            given[model] = losses(executor, rows)
        except BaseException as error:
            failed.append(error)

    work = [(model, executor_of(model), batches(model, UPDATES)) for model in alone]
    threads = [threading.Thread(target=train, args=arguments) for arguments in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert failed == []
    assert (
        not torch.compiler.is_compiling()
    )  # two captures at once left torch's flag behind, and its optimizers astray
    assert all(same(given[model], alone[model]) for model in alone)


def test_an_executor_that_is_collected_while_another_runs_disturbs_nobody(alone):
    gone, rows = executor_of(Transformer), batches(Digits, UPDATES)
    gone(*batches(Transformer, 1)[0])
    watched = weakref.ref(gone)
    executor, given = executor_of(Digits), []
    executor.compile(*rows[0])
    thread = threading.Thread(target=lambda: given.extend(losses(executor, rows)))
    thread.start()
    del gone
    gc.collect()
    thread.join(240)
    assert watched() is None
    assert same(given, alone[Digits])


class Unsure(Digits):
    """Fails while it is captured, deep in a block, until told not to."""

    fails = True

    def forward(self, images, labels):
        images = self.b(self.a(images))
        if Unsure.fails:
            with poptorch.Block("c"):
                raise LookupError("no such thing")
        scores = self.d(self.c(images))
        return scores, self.loss(scores, labels)


def test_an_exception_in_forward_arrives_as_it_is_and_leaves_everything_usable(alone, monkeypatch):
    other, rows = executor_of(Digits), batches(Digits, UPDATES)
    before = losses(other, rows[:3])
    executor = executor_of(Unsure)
    weights = {name: value.clone() for name, value in executor.state_dict().items()}
    for _ in range(2):
        with pytest.raises(LookupError, match="no such thing"):
            executor(*rows[0])
        assert not executor.isCompiled()
    assert all(torch.equal(value, weights[name]) for name, value in executor.state_dict().items())
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert same(before + losses(other, rows[3:]), alone[Digits])
    monkeypatch.setattr(Unsure, "fails", False)
    assert same(losses(executor, rows), alone[Digits])


def test_two_threads_that_call_one_executor_wait_for_each_other():
    torch.manual_seed(0)
    user = annotated(made(Digits))
    executor = poptorch.inferenceModel(
        user, options(poptorch.PipelinedExecution(["a", "b"], ["c", "d"]), 1, 4)
    )
    calls = [Digits.data(8) for _ in range(2)]
    expected = [executor(*call)[0] for call in calls]
    wrong = []

    def ask(call, scores):
        wrong.extend(1 for _ in range(30) if not torch.equal(executor(*call)[0], scores))

    threads = [threading.Thread(target=ask, args=both) for both in zip(calls, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
