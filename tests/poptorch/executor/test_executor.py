"""The executor's life: compiling, attaching, detaching, destroying, and what it answers meanwhile."""

import subprocess
import sys
import weakref
from datetime import timedelta

import pytest
import torch
from executor_models import Dropping, Trained, batch, options, trainer
from torch import nn

import poptorch
from poptorch.executor.calls import LatestCall

NOT_COMPILED = r"has not been compiled or has been destroyed\."


@pytest.mark.parametrize(
    "use",
    [
        lambda e: e.attachToDevice(),
        lambda e: e.detachFromDevice(),
        lambda e: e.rng_state,
        lambda e: setattr(e, "rng_state", [1, 2]),
        lambda e: e.save("nowhere"),
    ],
)
def test_what_needs_a_compiled_model_says_so(use):
    executor, _ = trainer()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        use(executor)
    executor(*batch())
    executor.destroy()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        use(executor)


def test_compile_runs_nothing_and_happens_once(caplog):
    runs = []

    class Model(Trained):
        def forward(self, x, target=None):
            runs.append(poptorch.isRunningOnIpu())
            return super().forward(x, target)

    executor, model = trainer(Model())
    before = model.layer.weight.detach().clone()
    executor.compile(*batch())
    assert executor.isCompiled()
    assert executor.isAttachedToDevice()
    assert torch.equal(model.layer.weight, before)
    executor.compile(*batch())
    assert "Call to compile() ignored" in caplog.text
    for _ in range(3):
        executor(*batch())
    assert runs == [True]
    assert not poptorch.isRunningOnIpu()


def test_attach_and_detach_take_turns():
    executor, _ = trainer()
    assert not executor.isAttachedToDevice()
    executor(*batch())
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    assert executor.isCompiled()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()
    executor(*batch())
    assert executor.isAttachedToDevice()


def test_an_offline_model_compiles_and_never_runs():
    executor, _ = trainer(opts=options().useOfflineIpuTarget())
    with pytest.raises(AssertionError, match=r"offline device.*ConnectionType.Never") as error:
        executor(*batch())
    assert "compile" in str(error.value)
    executor.compile(*batch())
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match=r"ConnectionType.Never"):
        executor.attachToDevice()


def test_a_destroyed_executor_compiles_again_and_marks_its_model():
    executor, model = trainer()
    executor(*batch())
    executor.destroy()
    assert not hasattr(model, "destroy")
    executor(*batch())
    model.destroy()
    assert not executor.isCompiled()


def test_a_destroyed_executor_does_not_take_a_model_from_another():
    executor, model = trainer()
    executor(*batch())
    executor.destroy()
    other, _ = trainer(model)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        executor(*batch())
    other(*batch())


def test_hooks_run_in_order_around_a_compilation():
    order = []

    class Model(Trained):
        def forward(self, x, target=None):
            order.append("forward")
            return super().forward(x, target)

    handles = [
        poptorch.registerPreCompileHook(lambda: order.append("before 1")),
        poptorch.registerPostCompileHook(lambda: order.append("after")),
        poptorch.registerPreCompileHook(lambda: order.append("before 2")),
    ]
    executor, _ = trainer(Model())
    executor(*batch())
    executor(*batch())
    assert order == ["before 1", "before 2", "forward", "after"]
    for handle in handles:
        handle.remove()
    trainer(Model())[0](*batch())
    assert order[4:] == ["forward"]


@pytest.mark.parametrize(
    ("register", "name"),
    [(poptorch.registerPreCompileHook, "Pre"), (poptorch.registerPostCompileHook, "Post")],
)
def test_a_hook_must_be_callable(register, name):
    with pytest.raises(RuntimeError, match=f"{name}-compile hook must be callable"):
        register("text")


def test_the_random_state_can_be_read_and_put_back():
    model = Dropping()
    opts = options().randomSeed(7)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    executor = poptorch.trainingModel(model, opts, optimizer)
    executor(torch.ones(2, 4))
    state = executor.rng_state
    assert state[0] == 7
    first, second = executor(torch.ones(2, 4)), executor(torch.ones(2, 4))
    assert first != second
    executor.rng_state = state
    assert executor(torch.ones(2, 4)) == first
    executor.detachFromDevice()
    executor.rng_state = state
    assert executor(torch.ones(2, 4)) == first


@pytest.mark.parametrize("wrong", [[], [7], [7, 1.5], "ab", torch.tensor([1, 2])])
def test_a_list_that_is_no_random_state_changes_nothing(wrong):
    executor, _ = trainer()
    executor(*batch())
    state = executor.rng_state
    with pytest.raises(poptorch.Error, match="a random state is the list of two integers"):
        executor.rng_state = wrong
    assert executor.rng_state == state


def test_compilation_time_is_measured():
    opts = options().showCompilationProgressBar(True)
    executor = poptorch.inferenceModel(Trained(), opts)
    with pytest.raises(poptorch.Error, match="compile the model before obtaining compilation time"):
        executor.compilationTime()
    executor(batch()[0])
    assert timedelta(0) < executor.compilationTime() < timedelta(minutes=5)
    executor = poptorch.inferenceModel(Trained(), options())
    executor(batch()[0])
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        executor.compilationTime()


def test_cycles_are_refused_in_the_order_of_what_is_missing():
    executor = poptorch.inferenceModel(Trained(), options())
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled") as error:
        executor.cycleCount()
    assert "logCycleCount" in str(error.value)
    executor = poptorch.inferenceModel(Trained(), options().logCycleCount(True))
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        executor.cycleCount()
    executor(batch()[0])
    with pytest.raises(poptorch.Error, match="only supported on actual IPU hardware"):
        executor.cycleCount()


def test_an_inference_executor_takes_no_optimizer():
    model = Trained()
    executor = poptorch.inferenceModel(model, options())
    with pytest.raises(poptorch.Error, match=r"poptorch.trainingModel"):
        executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_default_optimizer_is_sgd():
    model = Trained()
    executor = poptorch.trainingModel(model, options())
    before = model.layer.weight.detach().clone()
    twin = Trained()
    twin.load_state_dict(model.state_dict())
    executor(*batch())
    twin(*batch())[1].backward()
    torch.testing.assert_close(model.layer.weight.detach(), before - 0.01 * twin.layer.weight.grad)


@pytest.mark.parametrize("wrong", ["sgd", torch.optim.SGD, None])
def test_what_is_no_optimizer_is_refused_with_the_types_that_are(wrong):
    executor, _ = trainer()
    with pytest.raises(
        AssertionError, match=r"Unsupported optimizer type\. Types supported: poptorch\.optim"
    ):
        executor.setOptimizer(wrong)
    if wrong is not None:  # which asks for the default
        with pytest.raises(AssertionError, match=r"Unsupported optimizer type"):
            poptorch.trainingModel(Trained(), options(), wrong)
    executor(*batch())


def test_rates_are_snapshots():
    model = Trained()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    executor = poptorch.trainingModel(model, options(), optimizer)
    before = model.layer.weight.detach().clone()
    executor(*batch())
    optimizer.param_groups[0]["lr"] = 0.5
    executor(*batch())
    assert torch.equal(model.layer.weight, before)
    executor.setOptimizer(optimizer)
    executor(*batch())
    assert not torch.equal(model.layer.weight, before)


def test_synthetic_data_has_the_compiled_shapes():
    seen = []
    for mode in (True, 1, 3):  # normal, zeros, uniform
        executor = poptorch.inferenceModel(
            lambda a, i: (a, i), options(iterations=2).enableSyntheticData(mode)
        )
        values, indices = executor(torch.full((4, 2), 99.0), torch.full((2,), 99))
        assert (values.shape, indices.shape) == ((4, 2), (2,))
        assert not (values == 99).any()
        assert (indices == 0).all()
        seen.append(float(values.abs().max()))
    assert seen[1] == 0.0
    assert seen[2] <= 1.0


def test_training_without_an_optimizer_logs_which_one_is_used(caplog):
    poptorch.trainingModel(Trained(), options())
    assert caplog.messages == [
        "poptorch.trainingModel: without an optimizer the model trains with SGD and lr=0.01"
    ]
    poptorch.trainingModel(model := Trained(), options(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("model", [lambda x: x.sum(), nn.ReLU()], ids=["function", "module"])
def test_training_a_model_without_parameters_names_the_cause(model):
    with pytest.raises(
        poptorch.Error, match=r"the model has no parameters to train\n  why: [^$]*\n  fix: wrap"
    ):
        poptorch.trainingModel(model, options())


def test_an_executor_that_lives_until_the_interpreter_exits_prints_nothing():
    code = (
        "import torch, poptorch\n"
        "options = poptorch.Options().showCompilationProgressBar(False)\n"
        "torch.keep = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)\n"
        "torch.keep(torch.zeros(1, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("", "")


# Performance counters: how many entries there are, and what the latencies make of them.


KEYS = ("input", "input_complete", "output", "output_complete")


def entries(executor):
    counters = executor.getPerfCounters()
    assert tuple(counters) == KEYS
    return [[len(times) for times in counters[key]] for key in KEYS]


def test_a_model_that_is_not_compiled_has_empty_counters():
    executor = poptorch.inferenceModel(Trained())
    assert executor.getPerfCounters() == {key: [[]] for key in KEYS}
    assert executor.getLatency() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("mode", "outputs"),
    [("All", 4 * 2 * 2), ("Final", 2), ("Sum", 2), ("EveryN", 4 // 2 * 2 * 2)],
)
def test_there_is_one_entry_a_micro_batch_and_one_a_kept_output(mode, outputs):
    opts = options(iterations=4, accumulation=2, replicas=2)
    opts.outputMode(poptorch.OutputMode[mode], 2 if mode == "EveryN" else None)
    executor, _ = trainer(opts=opts)
    executor(*batch(16))
    executor(*batch(16))  # the latest call only
    assert entries(executor) == [[16, 16], [16, 16], [outputs, outputs], [outputs, outputs]]
    for latency in (
        executor.getLatency(),
        executor.getComputeLatency(),
        executor.getHostIpuLatency(),
        executor.getIpuHostLatency(),
    ):
        low, high, mean = latency
        assert 0 <= low <= mean <= high


def test_the_round_trip_is_longer_than_its_parts():
    executor = poptorch.inferenceModel(Trained(), options(iterations=3))
    executor(batch(3)[0])
    parts = executor.getHostIpuLatency(), executor.getComputeLatency(), executor.getIpuHostLatency()
    assert executor.getLatency()[2] == pytest.approx(sum(mean for _, _, mean in parts), rel=1e-6)


def test_synthetic_data_is_not_measured():
    executor = poptorch.inferenceModel(Trained(), options(iterations=3).enableSyntheticData(True))
    assert executor(batch(3)[0]).shape == (3, 2)
    assert entries(executor) == [[0]] * 4
    assert executor.getLatency() == (0.0, 0.0, 0.0)
    executor = poptorch.inferenceModel(lambda x, y: (x, y, x + y), options().enableSyntheticData(True))
    executor(torch.ones(2), torch.ones(2))
    assert entries(executor) == [[0] * 2, [0] * 2, [0] * 3, [0] * 3]


def test_several_starts_lead_to_one_end():
    started, ended = [[0.0, 1.0, 4.0, 5.0], [0.5, 0.0, 6.0, 4.5]], [[3.0, 8.0]]
    # Starts are the earliest over the tensors, then over each group of two: 0 and 4.
    assert LatestCall([[started, [], [], ended]]).latency("input", min, "output_complete") == (3.0, 4.0, 3.5)


def test_destroy_forgets_the_times():
    executor, _ = trainer()
    executor(*batch())
    executor.destroy()
    assert entries(executor) == [[0]] * 4


def test_an_output_is_freed_when_the_program_drops_it():
    # The executor kept the outputs of its latest call until the next one.
    executor = poptorch.inferenceModel(Trained(), options())
    output = executor(batch()[0])
    output = weakref.ref(output[0] if isinstance(output, tuple) else output)
    assert output() is None
